// The page of rocmforged. What comes from models, files and the daemon is set as text alone.
"use strict";

// The list of files; all else is said as it changes.
const LOOK_EVERY_MS = 5000;
const RETRY_MS_MAX = 15000;
const ROWS_MAX = 2000;
const MESSAGES_MAX = 400;
const PULLS_MAX = 64;
const IMAGES_MAX = 16;
const IMAGES_BYTES_MAX = 11 << 20;
const element = (id) => document.getElementById(id);

let token = sessionStorage.getItem("token") || "";
let messages = [];
let running = null;
// Images of the next message: name, size and data URL of each.
let attached = [];
// Models that read images.
let seeing = new Set();
let before = null;

function make(tag, text, className) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function headers(more) {
  const all = Object.assign({}, more);
  if (token) all.Authorization = "Bearer " + token;
  return all;
}

async function ask(path, options) {
  const given = options || {};
  const reply = await fetch(path, Object.assign({}, given, { headers: headers(given.headers) }));
  if (reply.ok) return reply;
  let message = reply.status + " " + reply.statusText;
  try {
    const body = await reply.json();
    message = (body.error && body.error.message) || body.error || message;
  } catch (_) {
    // The status says it.
  }
  throw new Error(String(message));
}

const post = (path, body, signal) => ask(path, {
  method: "POST", signal, body: JSON.stringify(body), headers: { "Content-Type": "application/json" },
});

function say(text, isError) {
  element("status").textContent = text;
  element("status").className = isError ? "error" : "";
}

function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  let value = bytes;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return value.toFixed(unit > 1 ? 2 : 0) + " " + units[unit];
}

// The data of server-sent events, one after the other.
async function* events(reply) {
  const reader = reply.body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    rest += value ? decoder.decode(value, { stream: true }) : "";
    const lines = rest.split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: ")) yield line.slice(6).trim();
    }
    if (done) return;
  }
}

// Pages.

const PAGES = ["chat", "models", "requests", "settings"];

function show(page) {
  for (const name of PAGES) {
    const isIt = name === page;
    element(name).hidden = !isIt;
    const tab = element("tab-" + name);
    tab.setAttribute("aria-selected", String(isIt));
    tab.tabIndex = isIt ? 0 : -1;
  }
  if (page === "models") {
    showResidency();
    look();
  }
  if (page === "settings") showSettings();
  if (page === "requests") showRequests();
}

PAGES.forEach((name, at) => {
  const tab = element("tab-" + name);
  tab.addEventListener("click", () => show(name));
  tab.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const next = PAGES[(at + step + PAGES.length) % PAGES.length];
    show(next);
    element("tab-" + next).focus();
  });
});

// Chat.

function shown(who, text) {
  const box = make("div", undefined, "message " + who);
  box.append(make("span", who, "who"));
  const body = make("span", text);
  box.append(body);
  const log = element("messages");
  log.append(box);
  while (log.childElementCount > MESSAGES_MAX) log.firstElementChild.remove();
  log.scrollTop = log.scrollHeight;
  return { box, body };
}

// An answer as it comes: reasoning, tool calls, text. Tokens come faster than a screen shows them, so
// it is drawn once a frame.
function answering() {
  const { box, body } = shown("assistant", "");
  const answer = { text: "", reasoning: "", calls: [] };
  const text = grows(body);
  let thought = null;
  const callBoxes = [];
  let frame = 0;

  function draw() {
    cancelAnimationFrame(frame);
    frame = 0;
    const log = element("messages");
    const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
    if (answer.reasoning && !thought) {
      const details = make("details");
      details.append(make("summary", "Reasoning"));
      const inside = make("span", "");
      details.append(inside);
      box.insertBefore(details, body);
      thought = grows(inside);
    }
    if (thought) thought(answer.reasoning);
    text(answer.text);
    answer.calls.forEach((call, at) => {
      if (!callBoxes[at]) {
        callBoxes[at] = make("div", "", "tool");
        box.append(callBoxes[at]);
      }
      callBoxes[at].textContent = "calls " + call.function.name + "(" + call.function.arguments + ")";
    });
    if (isAtEnd) log.scrollTop = log.scrollHeight;
  }

  return {
    answer,
    take(delta) {
      answer.reasoning += delta.reasoning_content || "";
      answer.text += delta.content || "";
      for (const piece of delta.tool_calls || []) {
        const at = piece.index || 0;
        if (!answer.calls[at]) answer.calls[at] = { id: "", type: "function", function: { name: "", arguments: "" } };
        const call = answer.calls[at];
        if (piece.id) call.id = piece.id;
        if (piece.function && piece.function.name) call.function.name += piece.function.name;
        if (piece.function && piece.function.arguments) call.function.arguments += piece.function.arguments;
      }
      if (!frame) frame = requestAnimationFrame(draw);
    },
    end(note, isError) {
      draw();
      if (note) box.append(make("div", note, isError ? "error" : ""));
    },
  };
}

// Shows a text that grows at its end: what is shown already is left as it is.
function grows(box) {
  const node = document.createTextNode("");
  box.append(node);
  return (text) => node.appendData(text.slice(node.length));
}

// Images.

function showAttached() {
  const model = element("model").value;
  element("attach").hidden = !seeing.has(model);
  element("attached").textContent = attached.map((image) => image.name + " (" + size(image.size) + ")").join(", ");
  element("detach").hidden = !attached.length;
}

function dataUrl(file) {
  return new Promise((done, failed) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => done(reader.result));
    reader.addEventListener("error", () => failed(reader.error));
    reader.readAsDataURL(file);
  });
}

async function attach(files) {
  for (const file of files) {
    const bytes = attached.reduce((all, image) => all + image.size, file.size);
    if (attached.length >= IMAGES_MAX || bytes > IMAGES_BYTES_MAX) {
      say("A message has at most " + IMAGES_MAX + " images, of " + size(IMAGES_BYTES_MAX) + " together", true);
      break;
    }
    const image = { name: file.name || "image", size: file.size, url: "" };
    attached.push(image);
    try {
      image.url = await dataUrl(file);
    } catch (error) {
      attached = attached.filter((other) => other !== image);
      say(image.name + " cannot be read: " + error.message, true);
    }
  }
  showAttached();
}

element("images").addEventListener("change", (event) => {
  attach(Array.from(event.target.files));
  event.target.value = "";
});
element("message").addEventListener("paste", (event) => {
  const files = Array.from(event.clipboardData.files).filter((file) => file.type.startsWith("image/"));
  if (!files.length || !seeing.has(element("model").value)) return;
  event.preventDefault();
  attach(files);
});
element("detach").addEventListener("click", () => {
  attached = [];
  showAttached();
});
element("model").addEventListener("change", showAttached);

// What the user says, with the images that were attached.
function said(text, images) {
  if (!images.length) return text;
  const parts = images.map((image) => ({ type: "image_url", image_url: { url: image.url } }));
  return parts.concat({ type: "text", text });
}

// The tools that are offered; throws where their text is no list.
function offered() {
  const text = element("tools").value.trim();
  if (!text) return [];
  let tools = null;
  try {
    tools = JSON.parse(text);
  } catch (_) {
    // What is no JSON is no list either.
  }
  if (Array.isArray(tools)) return tools;
  throw new Error("The tools are no JSON list: [{\"type\": \"function\", \"function\": {...}}]");
}

// Calls of the last answer that have no result yet.
function openCalls() {
  const last = messages.findLastIndex((message) => message.role === "assistant");
  const calls = (last >= 0 && messages[last].tool_calls) || [];
  return calls.slice(messages.length - last - 1);
}

function showAsked() {
  const [call] = openCalls();
  const what = call ? "Result of " + call.function.name : "Message";
  element("message-label").textContent = what + " (Enter sends, Shift+Enter makes a line, Escape stops)";
}

// A message that answers a call is its result; the model goes on when all have theirs.
function isResult(text) {
  const [call] = openCalls();
  if (!call) return false;
  messages.push({ role: "tool", tool_call_id: call.id, content: text });
  shown("tool", text);
  return true;
}

async function send() {
  const text = element("message").value;
  const model = element("model").value;
  if (running || !text.trim() || !model) return;
  let tools = [];
  try {
    tools = offered();
  } catch (error) {
    say(error.message, true);
    return;
  }
  const images = seeing.has(model) ? attached.filter((image) => image.url) : [];
  attached = [];
  showAttached();
  element("message").value = "";
  // A new chat has another list.
  const chat = messages;
  if (!isResult(text)) {
    chat.push({ role: "user", content: said(text, images) });
    shown("user", images.map((image) => "[" + image.name + "] ").join("") + text);
  }
  showAsked();
  if (openCalls().length) return;
  const system = element("system").value.trim();
  const all = system ? [{ role: "system", content: system }].concat(chat) : chat;
  const shownAnswer = answering();
  running = new AbortController();
  element("send").disabled = true;
  element("stop").disabled = false;
  element("speed").textContent = "waiting";
  const began = performance.now();
  let first = 0;
  let pieces = 0;
  let tokens = 0;
  try {
    const body = { model, messages: all, stream: true, stream_options: { include_usage: true } };
    if (tools.length) body.tools = tools;
    const reply = await post("/v1/chat/completions", body, running.signal);
    for await (const data of events(reply)) {
      if (data === "[DONE]") break;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message || "the generation failed");
      if (event.usage) tokens = event.usage.completion_tokens;
      const choice = event.choices && event.choices[0];
      if (!choice) continue;
      if (choice.delta) {
        if (!first && (choice.delta.content || choice.delta.reasoning_content)) first = performance.now();
        pieces += 1;
        shownAnswer.take(choice.delta);
      }
      if (choice.finish_reason === "length") shownAnswer.end("[cut: the limit of tokens is reached]");
      if (first) speed(tokens || pieces, began, first);
    }
    if (first) speed(tokens || pieces, began, first);
  } catch (error) {
    if (error.name === "AbortError") shownAnswer.end("[stopped]");
    else shownAnswer.end(error.message, true);
  }
  shownAnswer.end();
  const { answer } = shownAnswer;
  const answered = { role: "assistant", content: answer.text };
  if (answer.calls.length) answered.tool_calls = answer.calls.filter(Boolean);
  if (answer.text || answer.calls.length) chat.push(answered);
  else chat.pop();
  showAsked();
  running = null;
  element("send").disabled = false;
  element("stop").disabled = true;
  element("message").focus();
}

function speed(tokens, began, first) {
  const seconds = Math.max((performance.now() - first) / 1000, 0.001);
  const rate = tokens > 1 ? ((tokens - 1) / seconds).toFixed(1) + " tokens/s, " : "";
  element("speed").textContent = rate + "first after " + ((first - began) / 1000).toFixed(2) + " s";
}

element("send").addEventListener("click", send);
element("stop").addEventListener("click", () => running && running.abort());
element("clear").addEventListener("click", () => {
  if (running) running.abort();
  messages = [];
  element("messages").replaceChildren();
  showAsked();
});
element("message").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running) running.abort();
});

// Models and memory.

function memory(told) {
  const parts = ["weight", "in_flight", "kv", "prefix_cache", "scratch"];
  const values = parts.map((part) => told[part + "_bytes"]);
  const used = values.reduce((all, one) => all + one, 0);
  const bar = element("memory");
  bar.max = told.budget_bytes || 1;
  bar.value = used;
  bar.textContent = size(used) + " of " + size(told.budget_bytes);
  const now = { at: performance.now(), uploaded: told.uploaded_bytes };
  const seconds = before ? (now.at - before.at) / 1000 : 0;
  const rate = seconds > 0 ? size(Math.max(now.uploaded - before.uploaded, 0) / seconds) + "/s" : "-";
  before = now;
  const needed = told.hits + told.misses;
  const ratio = needed ? ((100 * told.hits) / needed).toFixed(1) + " %" : "-";
  element("figures").textContent = [
    size(used) + " of " + size(told.budget_bytes),
    parts.map((part, at) => plain(part) + " " + size(values[at])).join(", "),
    "uploads " + rate + ", hits " + ratio,
    told.running + " running, " + told.queued + " queued",
  ].join(" · ");
}

let listed = "";

function list(models) {
  const resident = new Map(toldMaps.maps.map((map) => [map.model, map.resident_bytes]));
  const filter = element("filter").value.toLowerCase();
  const wanted = models.filter((model) => model.id.toLowerCase().includes(filter)).slice(0, ROWS_MAX);
  const state = JSON.stringify([wanted.map((model) => [model.id, model.status.value, model.capabilities, resident.get(model.id)]), filter]);
  // A table that is the same keeps the focus where it is.
  if (state === listed) return;
  listed = state;
  const focused = document.activeElement && document.activeElement.dataset.key;
  const rows = wanted.map((model) => {
    const row = make("tr");
    const bytes = resident.get(model.id);
    row.append(make("td", model.id), make("td", model.status.value), make("td", bytes === undefined ? "-" : size(bytes)));
    const cell = make("td");
    const isLoaded = model.status.value === "loaded";
    cell.append(isLoaded ? action("Unload", model.id, () => post("/models/unload", { model: model.id }))
      : action("Load", model.id, () => post("/models/load", { model: model.id })));
    cell.append(action("Delete", model.id, () => remove(model.id)));
    row.append(cell);
    return row;
  });
  element("list").replaceChildren(...rows);
  for (const button of element("list").querySelectorAll("button")) {
    if (focused && button.dataset.key === focused) button.focus();
  }
  const select = element("model");
  seeing = new Set(models.filter((model) => (model.capabilities || []).includes("vision")).map((model) => model.id));
  const chosen = select.value;
  const names = models.slice(0, ROWS_MAX).map((model) => model.id);
  if (Array.from(select.options, (option) => option.value).join("\n") !== names.join("\n")) {
    select.replaceChildren(...names.map((name) => {
      const option = make("option", name);
      option.value = name;
      return option;
    }));
    if (names.includes(chosen)) select.value = chosen;
  }
  showAttached();
}

function action(label, name, work) {
  const button = make("button", label);
  button.type = "button";
  button.dataset.key = label + " " + name;
  button.setAttribute("aria-label", label + " " + name);
  button.addEventListener("click", async () => {
    button.disabled = true;
    try {
      await work();
      say(label + ": done");
    } catch (error) {
      say(error.message, true);
    }
    button.disabled = false;
    listed = "";
    look();
  });
  return button;
}

async function remove(name) {
  if (!window.confirm("Delete the file of " + name + "?")) return;
  await ask("/models?model=" + encodeURIComponent(name), { method: "DELETE" });
}

let known = [];
let looking = false;
let lookAgain = false;
let isAway = false;

async function look() {
  if (document.hidden) return;
  lookAgain = looking;
  if (looking) return;
  looking = true;
  try {
    known = (await (await ask("/models")).json()).data;
    list(known);
    if (isAway || element("status").textContent === "connecting") say("connected");
    isAway = false;
  } catch (error) {
    isAway = true;
    say(error.message === "Failed to fetch" ? "no answer; trying again" : error.message, true);
  }
  looking = false;
  if (lookAgain) look();
}

// Downloads.

const pulls = new Map();

function pulling(name, text) {
  let row = pulls.get(name);
  if (!row) {
    row = { item: make("li"), words: make("span", "") };
    const cancel = action("Cancel", name, () => post("/models/unload", { model: name }));
    row.item.append(row.words, cancel);
    element("pulls").append(row.item);
    pulls.set(name, row);
    for (const [oldest, old] of pulls) {
      if (pulls.size <= PULLS_MAX) break;
      old.item.remove();
      pulls.delete(oldest);
    }
  }
  row.words.textContent = name + ": " + text + " ";
}

const toldDownloads = new Map();

function downloads(all) {
  for (const { model, event, data } of all) {
    const now = JSON.stringify([event, data]);
    const was = toldDownloads.get(model);
    if (was === now) continue;
    toldDownloads.set(model, now);
    if (event === "download_progress") {
      const files = Object.values(data);
      const done = files.reduce((sum, file) => sum + file.done, 0);
      const total = files.reduce((sum, file) => sum + file.total, 0);
      pulling(model, total ? size(done) + " of " + size(total) : "asking the hub");
    } else if (event === "download_finished") {
      pulling(model, "done");
      look();
    } else {
      pulling(model, String(data.message));
    }
  }
  const names = new Set(all.map((one) => one.model));
  for (const name of toldDownloads.keys()) if (!names.has(name)) toldDownloads.delete(name);
}

// The parts of what the daemon says that have changed.
function take(told) {
  if (told.memory) memory(told.memory);
  if (told.models) {
    toldMaps = told.models;
    showResidency();
    if (known.length) list(known);
  }
  if (told.requests) {
    runningNow = told.requests;
    showRunning();
  }
  if (told.ended !== undefined) showRequests();
  if (told.loaded !== undefined) look();
  if (told.downloads) downloads(told.downloads);
}

// Follows what the daemon says, for as long as the page is open; a new token begins anew.
let following = null;
let wake = () => {};

async function follow() {
  let wait = 500;
  for (;;) {
    following = new AbortController();
    try {
      const reply = await ask("/ui/live", { signal: following.signal });
      wait = 500;
      for await (const data of events(reply)) take(JSON.parse(data));
      isAway = true;
    } catch (_) {
      // What is asked beside it says why.
    }
    if (!following.signal.aborted) {
      look();
      await new Promise((again) => {
        wake = again;
        setTimeout(again, wait);
      });
      wait = Math.min(wait * 2, RETRY_MS_MAX);
    }
  }
}

async function pull() {
  const name = element("source").value.trim();
  if (!name) return;
  try {
    await post("/models", { model: name });
    pulling(name, "asking the hub");
    element("source").value = "";
  } catch (error) {
    say(error.message, true);
  }
}

element("pull").addEventListener("click", pull);
element("source").addEventListener("keydown", (event) => event.key === "Enter" && pull());
element("filter").addEventListener("input", look);

// Settings.

async function showSettings() {
  try {
    const reply = await (await ask("/ui/settings")).json();
    const rows = reply.settings.map((setting) => {
      const row = make("tr");
      const value = setting.value === null ? "not set" : setting.value;
      const head = make("th", setting.key);
      head.scope = "row";
      row.append(head, make("td", value), make("td", setting.origin), make("td", setting.help));
      return row;
    });
    element("values").replaceChildren(...rows);
  } catch (error) {
    say(error.message, true);
  }
}

element("use-token").addEventListener("click", () => {
  token = element("token").value.trim();
  element("token").value = "";
  if (token) sessionStorage.setItem("token", token);
  else sessionStorage.removeItem("token");
  listed = "";
  residency.clear();
  element("maps").replaceChildren();
  following.abort();
  wake();
  look();
  showSettings();
});

document.addEventListener("visibilitychange", look);

show("chat");
look();
follow();
setInterval(look, LOOK_EVERY_MS);
