// The page of rocmforged. What comes from models, files and the daemon is set as text alone.

// The list of files; all else is said as it changes.
const LOOK_EVERY_MS = 5000;
const RETRY_MS_MAX = 15000;
const ROWS_MAX = 2000;
const PULLS_MAX = 64;
const element = (id) => document.getElementById(id);

let token = sessionStorage.getItem("token") || "";
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
  const rows = wanted.map((model) => {
    const row = make("tr");
    row.dataset.key = model.status.value + " " + model.id;
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
  fillRows(element("list"), rows);
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
  toldMaps = { maps: [], left_out: 0 };
  element("maps").replaceChildren();
  forgetRequests();
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
