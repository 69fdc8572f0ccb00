// Chat: messages, images, tools.

const MESSAGES_MAX = 400;
const IMAGES_MAX = 16;
const IMAGES_BYTES_MAX = 11 << 20;

let messages = [];
let running = null;
// Images of the next message: name, size and data URL of each.
let attached = [];
// Models that read images.
let seeing = new Set();

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
