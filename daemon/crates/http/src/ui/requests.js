// Requests that wait or run, those that have ended, and where the time of one went.

const ENDED_MAX = 50;

const milliseconds = (ms) => ms < 1000 ? ms.toFixed(1) + " ms" : (ms / 1000).toFixed(2) + " s";
const share = (part, whole) => whole > 0 ? Math.round(part / whole * 100) + " %" : "-";

// Names of causes and states, as people read them.
const plain = (name) => String(name || "").replaceAll("_", " ");

let runningNow = [];
let endedReports = [];
// The number of the request in the panel; 0 follows the latest.
let chosenRequest = 0;

function rowOf(first, ...cells) {
  const row = make("tr");
  const head = make("th");
  head.scope = "row";
  head.append(first);
  row.append(head, ...cells.map((cell) => make("td", cell)));
  return row;
}

const rateOf = (one) => one.tokens_per_s ? one.tokens_per_s.toFixed(1) : "-";
const gapOf = (one) => one.longest_gap_ms ? milliseconds(one.longest_gap_ms) + ", " + plain(one.longest_gap_cause) : "-";

function tokensOf(one) {
  if (one.generated_tokens || one.computed_tokens === undefined) return one.prompt_tokens + " + " + one.generated_tokens;
  return Math.min(one.computed_tokens, one.prompt_tokens) + " of " + one.prompt_tokens;
}

function requestButton(one) {
  const button = make("button", String(one.number));
  button.type = "button";
  button.title = one.id || "";
  button.dataset.key = "why " + one.number;
  button.setAttribute("aria-label", "Why request " + one.number + " took its time");
  button.addEventListener("click", () => {
    chosenRequest = one.number;
    showWhy();
    element("why-of").scrollIntoView({ block: "nearest" });
  });
  return button;
}

function requestRow(one, ...cells) {
  const row = rowOf(requestButton(one), ...cells);
  row.dataset.key = "request " + one.number;
  return row;
}

function runningRow(one) {
  return requestRow(one, plain(one.state), one.model, one.client, tokensOf(one), rateOf(one), gapOf(one),
    milliseconds(one.age_ms));
}

function endedRow(one) {
  const first = one.parts[0];
  const cause = first ? first.text + ", " + share(first.ms, one.total_ms) : "";
  return requestRow(one, "ended: " + one.code, one.model, one.client, tokensOf(one), rateOf(one), gapOf(one),
    milliseconds(one.total_ms), cause);
}

// The texts of a row that stays.
function renewRow(stays, row) {
  Array.from(row.cells).forEach((cell, at) => {
    const old = stays.cells[at];
    if (!cell.childElementCount && old.textContent !== cell.textContent) old.textContent = cell.textContent;
  });
}

// Shows these rows. One of the same key stays the element that it was, so that a button may be
// pressed while its row changes, and keeps the focus.
function fillRows(body, rows) {
  const focused = body.contains(document.activeElement) && document.activeElement.dataset.key;
  const old = new Map(Array.from(body.rows, (row) => [row.dataset.key, row]));
  // The answers of one request have one number.
  const times = new Map();
  for (const row of rows) {
    const { key } = row.dataset;
    times.set(key, (times.get(key) || 0) + 1);
    row.dataset.key = times.get(key) + " " + key;
  }
  const keys = new Set(rows.map((row) => row.dataset.key));
  for (const [key, row] of old) if (!keys.has(key)) row.remove();
  rows.forEach((row, at) => {
    const stays = old.get(row.dataset.key) || row;
    if (stays !== row) renewRow(stays, row);
    if (body.rows[at] !== stays) body.insertBefore(stays, body.rows[at] || null);
  });
  if (!focused || body.contains(document.activeElement)) return;
  for (const button of body.querySelectorAll("button")) if (button.dataset.key === focused) button.focus();
}

// What was shown to another token.
function forgetRequests() {
  runningNow = [];
  endedReports = [];
  chosenRequest = 0;
  for (const id of ["running", "ended", "parts", "advice"]) element(id).replaceChildren();
  element("why-of").textContent = "Why";
}

function showRunning() {
  if (element("requests").hidden) return;
  fillRows(element("running"), runningNow.map(runningRow));
  element("no-running").hidden = runningNow.length > 0;
}

// A gap, and what was promised.
function gapText(one) {
  if (!one.longest_gap_ms) return [];
  const promised = one.promised_gap_ms
    ? "; " + milliseconds(one.promised_gap_ms) + " were promised, " + one.broken_gaps + " gaps were longer" : "";
  return ["longest gap between tokens: " + gapOf(one) + promised];
}

function showParts(one) {
  element("why-of").textContent = "Why request " + one.number + " took " + milliseconds(one.total_ms);
  element("parts").replaceChildren(...one.parts.map((part) => {
    const behind = (part.behind || []).map((b) => b.model + " for " + b.client + ": " + milliseconds(b.ms));
    return rowOf(part.text, milliseconds(part.ms), share(part.ms, one.total_ms), behind.join("; "));
  }));
  const weights = (one.weights.displaced || []).map((d) => size(d.bytes) + " uploaded: " + plain(d.cause) +
    (d.by_model ? " " + d.by_model : ""));
  const without = (one.no_effect || []).map((text) => "no effect: " + text);
  const all = gapText(one).concat(weights, one.advice.map((text) => "would help: " + text), without);
  element("advice").replaceChildren(...all.map((text) => make("li", text)));
}

function showWhy() {
  const one = chosenRequest ? endedReports.find((report) => report.number === chosenRequest) : endedReports[0];
  if (one) {
    showParts(one);
  } else if (chosenRequest) {
    const runs = runningNow.some((other) => other.number === chosenRequest);
    element("why-of").textContent = runs ? "Request " + chosenRequest + " has not ended; where its time went is shown then"
      : "Request " + chosenRequest + " is no longer among the last ones";
    element("parts").replaceChildren();
    element("advice").replaceChildren();
  }
}

// Asks for those that have ended, if they are seen.
async function showRequests() {
  if (element("requests").hidden) return;
  showRunning();
  try {
    endedReports = (await (await ask("/why?latest=" + ENDED_MAX)).json()).requests;
    fillRows(element("ended"), endedReports.map(endedRow));
    showWhy();
  } catch (error) {
    say(error.message, true);
  }
}
