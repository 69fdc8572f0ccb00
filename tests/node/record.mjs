// Writes the trace of a real program for `rocmforge-bench replay --trace`. Stands in for a server:
// it answers with calls of the program's own tools until so many turns are over, and in the middle
// with several calls for subagents at once where the program has them. No model is needed.
//
// usage: record.mjs FILE TURNS SUBAGENTS PROGRAM [ARGUMENT...]
// The program is started with its arguments, where {url} stands for this server's address, which
// is RECORD_URL of its environment, too. A trace has all that the program says, its own prompts
// included: such a file is not ours to publish.
//
//   claude:   ANTHROPIC_BASE_URL={url} ANTHROPIC_AUTH_TOKEN=none claude -p "Begin." --model m \
//             --allowedTools Bash,Agent
//   codex:    a config.toml with base_url = "{url}/v1" and wire_api = "responses"; codex exec "Begin."
//   opencode: a provider @ai-sdk/openai-compatible with baseURL "{url}/v1"; opencode run "Begin."

import { spawn } from "node:child_process";
import { createWriteStream } from "node:fs";
import http from "node:http";

const [file, turnsText, subagentsText, program, ...programArguments] = process.argv.slice(2);
const [turns, subagents] = [Number(turnsText), Number(subagentsText)];
const out = createWriteStream(file);

// What subagents are told, by which their requests are known.
const PART = "Look into part";
const COMMAND = (n) => `for i in $(seq ${20 + 9 * n}); do echo "step ${n}, line $i of what was found"; done`;

/** How each tool that runs a command, or a subagent, is called. */
const RUNS = {
  Bash: (n) => ({ command: COMMAND(n), description: "look" }),
  bash: (n) => ({ command: COMMAND(n), description: "look" }),
  exec_command: (n) => ({ cmd: COMMAND(n) }),
  shell: (n) => ({ command: ["bash", "-c", COMMAND(n)] }),
  run_shell_command: (n) => ({ command: COMMAND(n), is_background: false }),
};
const SENDS = {
  Task: (n) => ({ description: `part ${n}`, prompt: `${PART} ${n}.`, subagent_type: "general-purpose" }),
  Agent: (n) => ({ description: `part ${n}`, prompt: `${PART} ${n}.`, subagent_type: "general-purpose" }),
  task: (n) => ({ description: `part ${n}`, prompt: `${PART} ${n}.`, subagent_type: "general" }),
};

/** What is said next in a conversation: a text, and calls. */
function next(body) {
  const tools = (body.tools ?? []).map((tool) => tool.function?.name ?? tool.name);
  const said = body.messages ?? body.input ?? [];
  const calls = said.flatMap((m) => (m.type === "function_call" ? [m] : (m.tool_calls ?? (Array.isArray(m.content) ? m.content.filter((b) => b.type === "tool_use") : []))));
  const isCall = (m) => m.role === "assistant" || m.type === "function_call";
  const done = said.filter((m, n) => isCall(m) && !(n > 0 && isCall(said[n - 1]))).length;
  const users = said.filter((m) => m.role === "user").map((m) => JSON.stringify(m.content));
  const isPart = users.some((text) => text.includes(PART));
  const [runs] = tools.filter((name) => name in RUNS);
  const [sends] = tools.filter((name) => name in SENDS);
  if (runs === undefined || done >= (isPart ? 3 : turns)) return { text: `All ${calls.length} results were read, and this is what they say.`, calls: [] };
  if (!isPart && sends !== undefined && subagents > 0 && done === Math.floor(turns / 2)) {
    const all = Array.from({ length: subagents }, (_, n) => ({ name: sends, arguments: SENDS[sends](n) }));
    return { text: "Several look into it.", calls: all };
  }
  return { text: `Step ${done}: the next thing to look at.`, calls: [{ name: runs, arguments: RUNS[runs](done) }] };
}

let names = 0;
const fresh = (prefix) => `${prefix}_${String((names += 1)).padStart(8, "0")}`;

/** The events of an answer in a dialect. */
const DIALECTS = {
  "/v1/messages": ({ text, calls }) => {
    const usage = { input_tokens: 1, output_tokens: 1, cache_creation_input_tokens: 0, cache_read_input_tokens: 0 };
    const blocks = [
      [{ type: "text", text: "" }, { type: "text_delta", text }],
      ...calls.map((call) => [
        { type: "tool_use", id: fresh("toolu"), name: call.name, input: {} },
        { type: "input_json_delta", partial_json: JSON.stringify(call.arguments) },
      ]),
    ];
    const message = { id: fresh("msg"), type: "message", role: "assistant", model: "m", content: [], stop_reason: null, stop_sequence: null, usage };
    return [
      { type: "message_start", message },
      ...blocks.flatMap(([content_block, delta], index) => [
        { type: "content_block_start", index, content_block },
        { type: "content_block_delta", index, delta },
        { type: "content_block_stop", index },
      ]),
      { type: "message_delta", delta: { stop_reason: calls.length > 0 ? "tool_use" : "end_turn", stop_sequence: null }, usage },
      { type: "message_stop" },
    ].map((event) => `event: ${event.type}\ndata: ${JSON.stringify(event)}\n\n`);
  },
  "/v1/chat/completions": ({ text, calls }) => {
    const id = fresh("chatcmpl");
    const chunk = (delta, finish_reason = null) => ({ id, object: "chat.completion.chunk", created: 0, model: "m", choices: [{ index: 0, delta, finish_reason }] });
    const made = calls.map((call, index) => ({ index, id: fresh("call"), type: "function", function: { name: call.name, arguments: JSON.stringify(call.arguments) } }));
    const events = [chunk({ role: "assistant", content: text }), ...(made.length > 0 ? [chunk({ tool_calls: made })] : []), chunk({}, made.length > 0 ? "tool_calls" : "stop")];
    const usage = { prompt_tokens: 1, completion_tokens: 1, total_tokens: 2 };
    events.push({ ...chunk({}), choices: [], usage });
    return [...events.map((event) => `data: ${JSON.stringify(event)}\n\n`), "data: [DONE]\n\n"];
  },
  "/v1/responses": ({ text, calls }) => {
    const id = fresh("resp");
    const output = [
      { type: "message", id: fresh("msg"), role: "assistant", status: "completed", content: [{ type: "output_text", text, annotations: [] }] },
      ...calls.map((call) => ({ type: "function_call", id: fresh("fc"), call_id: fresh("call"), name: call.name, arguments: JSON.stringify(call.arguments), status: "completed" })),
    ];
    const usage = { input_tokens: 1, input_tokens_details: { cached_tokens: 0 }, output_tokens: 1, output_tokens_details: { reasoning_tokens: 0 }, total_tokens: 2 };
    const events = [
      { type: "response.created", response: { id, object: "response", status: "in_progress", output: [] } },
      ...output.flatMap((item, output_index) => [
        { type: "response.output_item.added", output_index, item },
        { type: "response.output_item.done", output_index, item },
      ]),
      { type: "response.completed", response: { id, object: "response", status: "completed", output, usage } },
    ];
    return events.map((event) => `event: ${event.type}\ndata: ${JSON.stringify(event)}\n\n`);
  },
};

// Ids of requests that have ended, without those that another of them comes after.
let ended = new Set();
const before = new Map();
let count = 0;

function answer(path, body, response) {
  count += 1;
  const id = `request-${count}`;
  before.set(id, [...ended]);
  const first = JSON.stringify((body.messages ?? body.input ?? []).find((m) => m.role === "user")?.content ?? "");
  const group = first.includes(PART) ? "subagents" : (body.tools ?? []).length > 0 ? "main" : "title";
  out.write(`${JSON.stringify({ id, after: before.get(id), delay_ms: 0, group, route: path, body })}\n`);
  const events = DIALECTS[path](next(body));
  response.writeHead(200, { "content-type": "text/event-stream" });
  response.write(events[0]);
  // Long enough for those that begin together to do so before one of them ends.
  setTimeout(() => {
    for (const event of events.slice(1)) response.write(event);
    response.end();
    ended = new Set([...ended].filter((other) => !before.get(id).includes(other)));
    ended.add(id);
  }, 300);
}

const server = http.createServer(async (request, response) => {
  const pieces = [];
  for await (const piece of request) pieces.push(piece);
  const path = request.url.split("?")[0];
  if (request.method === "POST" && path in DIALECTS) {
    const body = JSON.parse(Buffer.concat(pieces).toString());
    if (body.stream) return answer(path, body, response);
  }
  response.writeHead(path.endsWith("/models") ? 200 : 404, { "content-type": "application/json" });
  response.end(JSON.stringify({ object: "list", data: [{ id: "m", object: "model" }] }));
});
await new Promise((done) => server.listen(0, "127.0.0.1", done));
const url = `http://127.0.0.1:${server.address().port}`;
const filled = (text) => text.replaceAll("{url}", url);
const environment = Object.fromEntries(Object.entries(process.env).map(([name, value]) => [name, filled(value)]));
const child = spawn(filled(program), programArguments.map(filled), { env: { ...environment, RECORD_URL: url }, stdio: ["ignore", "inherit", "inherit"] });
const code = await new Promise((done) => child.on("close", done));
console.error(`${count} requests`);
await new Promise((done) => out.end(done));
server.closeAllConnections();
server.close();
process.exit(code ?? 1);
