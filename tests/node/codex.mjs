// The Codex command line against a running daemon, by `/v1/responses`: plain, tools, those of an
// MCP server, a JSON schema, reasoning, errors, cancellation. What the daemon sends is checked
// event by event beside what Codex makes of it.
//
// usage: codex.mjs URL TOKEN MESSAGE ANSWER
// The daemon has the models `agent` and `thinker`: ANSWER is what `agent` says to
// MESSAGE without sampling.

import { spawn } from "node:child_process";
import fs from "node:fs";
import os from "node:os";
import path from "node:path";
import { fileURLToPath } from "node:url";
import { aborted, events, expect, oneMoreAborted, wire } from "./wire.mjs";

const [target, token, message, answer] = process.argv.slice(2);
const program = path.join(path.dirname(fileURLToPath(import.meta.url)), "node_modules/@openai/codex/bin/codex.js");
const proxy = await wire(target);
const home = fs.mkdtempSync(path.join(os.tmpdir(), "codex-"));
fs.writeFileSync(
  path.join(home, "config.toml"),
  `model_provider = "local"
show_raw_agent_reasoning = true
check_for_update_on_startup = false
[analytics]
enabled = false
[model_providers.local]
name = "local"
base_url = "${proxy.url}/v1"
wire_api = "responses"
env_key = "LOCAL_TOKEN"
request_max_retries = 0
stream_max_retries = 0
`,
);

/** Codex itself takes no temperature. */
const greedy = (body) => ({ ...body, temperature: 0 });

function start(model, prompt, ...more) {
  // The only command that it can be told to run is the one in `tools`.
  const fixed = ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "--model", model];
  const env = { PATH: process.env.PATH, HOME: home, CODEX_HOME: home, LOCAL_TOKEN: token };
  return spawn(process.execPath, [program, ...fixed, ...more, prompt], { cwd: home, env, stdio: ["ignore", "pipe", "pipe"] });
}

/** Runs Codex to its end: its exit code, the items that it told of, what went over the wire. */
async function codex(model, prompt, ...more) {
  const before = proxy.exchanges.length;
  const child = start(model, prompt, "--json", ...more);
  let [stdout, stderr] = ["", ""];
  child.stdout.on("data", (piece) => (stdout += piece));
  child.stderr.on("data", (piece) => (stderr += piece));
  const code = await new Promise((done) => child.on("close", done));
  const told = stdout.split("\n").filter(Boolean).map((line) => JSON.parse(line));
  const items = told.filter((event) => event.type === "item.completed").map((event) => event.item);
  return { code, told, items, stderr, exchanges: proxy.exchanges.slice(before) };
}

const of = (items, type) => items.filter((item) => item.type === type);

/** The rules of a response's stream, event by event; gives the response that it ends in. */
function checkedStream({ status, text }, end = "response.completed") {
  expect(status === 200, "stream: status", status, text);
  const all = events(text);
  for (const [n, { name, data }] of all.entries()) {
    expect(data.type === name && data.sequence_number === n, "stream: event", n, name, data);
  }
  expect(all[0].name === "response.created" && all[0].data.response.status === "in_progress", "stream: begins", all[0]);
  const last = all.at(-1);
  expect(last.name === end && last.data.response.id === all[0].data.response.id, "stream: ends", last);
  const done = [];
  let open = null;
  for (const { name, data } of all) {
    if (name === "response.output_item.added") {
      expect(open === null && data.output_index === done.length, "stream: one item at a time", data);
      open = { id: data.item.id, text: "" };
    } else if (["response.output_text.delta", "response.reasoning_text.delta"].includes(name)) {
      expect(open?.id === data.item_id && data.content_index === 0, "stream: delta", data);
      open.text += data.delta;
    } else if (name === "response.output_item.done") {
      expect(open?.id === data.item.id, "stream: done", data);
      const text = data.item.content?.map((part) => part.text).join("") ?? open.text;
      expect(text === open.text, "stream: the whole item is not its deltas", data.item, open.text);
      done.push(data.item);
      open = null;
    }
  }
  const { output, usage } = last.data.response;
  expect(open === null && JSON.stringify(output) === JSON.stringify(done), "stream: output", output, done);
  if (end === "response.completed") {
    expect(usage.total_tokens === usage.input_tokens + usage.output_tokens, "stream: usage", usage);
    expect(Number.isInteger(usage.input_tokens_details.cached_tokens), "stream: usage", usage);
    expect(Number.isInteger(usage.output_tokens_details.reasoning_tokens), "stream: usage", usage);
  }
  return last.data.response;
}

async function plain() {
  proxy.edit = greedy;
  const { code, items, exchanges, told, stderr } = await codex("agent", message);
  expect(code === 0, "plain: ended with", code, stderr);
  expect(of(items, "agent_message").at(-1)?.text === answer, "plain: said", items);
  expect(exchanges.length === 1 && exchanges[0].path === "/v1/responses" && exchanges[0].asked.stream, "plain:", exchanges);
  const { usage } = checkedStream(exchanges[0]);
  const counted = told.find((event) => event.type === "turn.completed").usage;
  expect(counted.input_tokens === usage.input_tokens && counted.output_tokens === usage.output_tokens, "plain:", counted);
}

async function tools() {
  // A model of this size calls nothing by itself: the first request forces the call, and says to
  // what.
  const parameters = {
    type: "object",
    properties: { cmd: { enum: ["echo 40 + 2"] } },
    required: ["cmd"],
    additionalProperties: false,
  };
  let posted = 0;
  proxy.edit = (body) => {
    if (posted++ > 0) return greedy(body);
    const narrowed = body.tools.map((tool) => (tool.name === "exec_command" ? { ...tool, parameters } : tool));
    const tool_choice = { type: "function", name: "exec_command" };
    return greedy({ ...body, tools: narrowed, tool_choice });
  };
  const { code, items, exchanges, stderr } = await codex("agent", message);
  expect(code === 0 && exchanges.length === 2, "tools: ended with", code, stderr);
  const [ran] = of(items, "command_execution");
  expect(ran?.exit_code === 0 && ran.aggregated_output.includes("40 + 2"), "tools: ran", items);
  const [call] = checkedStream(exchanges[0]).output;
  expect(call.type === "function_call" && call.status === "completed", "tools: call", call);
  const said = exchanges[1].asked.input;
  expect(of(said, "function_call").at(-1)?.call_id === call.call_id, "tools: the call is sent back", said);
  expect(of(said, "function_call_output").at(-1)?.call_id === call.call_id, "tools: so is its result", said);
  checkedStream(exchanges[1]);
  expect(of(items, "agent_message").length === 1, "tools: said", items);
}

/** An MCP server with one tool, which says what it was asked. */
const MCP_SERVER = `
import readline from "node:readline";
const tool = { name: "lookup", description: "", inputSchema: { type: "object", properties: { q: { type: "string" } } } };
const answers = {
  initialize: (asked) => ({
    protocolVersion: asked.protocolVersion, capabilities: { tools: {} }, serverInfo: { name: "t", version: "1" },
  }),
  "tools/list": () => ({ tools: [tool] }),
  "tools/call": (asked) => ({ content: [{ type: "text", text: "looked up " + asked.arguments.q }] }),
};
for await (const line of readline.createInterface({ input: process.stdin })) {
  const { id, method, params } = JSON.parse(line);
  if (id === undefined) continue;
  const result = answers[method]?.(params) ?? {};
  console.log(JSON.stringify({ jsonrpc: "2.0", id, result }));
}
`;

async function servers() {
  const server = path.join(home, "server.mjs");
  fs.writeFileSync(server, MCP_SERVER);
  const config = `mcp_servers.t={command=${JSON.stringify(process.execPath)},args=[${JSON.stringify(server)}]}`;
  const parameters = {
    type: "object",
    properties: { q: { enum: ["whales"] } },
    required: ["q"],
    additionalProperties: false,
  };
  let posted = 0;
  proxy.edit = (body) => {
    if (posted++ > 0) return greedy(body);
    const narrowed = (tool) => (tool.name === "lookup" ? { ...tool, parameters } : tool);
    const tools = body.tools.map((tool) => (tool.tools ? { ...tool, tools: tool.tools.map(narrowed) } : tool));
    const tool_choice = { type: "function", namespace: "mcp__t", name: "lookup" };
    return greedy({ ...body, tools, tool_choice });
  };
  const { code, items, exchanges, stderr } = await codex("agent", message, "-c", config);
  expect(code === 0 && exchanges.length === 2, "servers: ended with", code, stderr);
  const [call] = checkedStream(exchanges[0]).output;
  expect(call.name === "lookup" && call.namespace === "mcp__t", "servers: call", call);
  const [called] = of(items, "mcp_tool_call");
  expect(called?.server === "t" && called.tool === "lookup", "servers: called", items);
  const result = of(exchanges[1].asked.input, "function_call_output").at(-1);
  expect(JSON.stringify(result).includes("looked up whales"), "servers: result", result);
  checkedStream(exchanges[1]);
}

async function held() {
  proxy.edit = greedy;
  const schema = {
    type: "object",
    properties: { right: { type: "boolean" }, why: { type: "string", enum: ["sum", "difference"] } },
    required: ["right", "why"],
    additionalProperties: false,
  };
  const file = path.join(home, "schema.json");
  fs.writeFileSync(file, JSON.stringify(schema));
  const { code, items, exchanges, stderr } = await codex("agent", message, "--output-schema", file);
  expect(code === 0, "schema: ended with", code, stderr);
  expect(exchanges[0].asked.text.format.type === "json_schema", "schema: asked", exchanges[0].asked.text);
  const said = JSON.parse(of(items, "agent_message").at(-1).text);
  expect(typeof said.right === "boolean" && ["sum", "difference"].includes(said.why), "schema: said", said);
}

async function reasoning() {
  proxy.edit = greedy;
  // Of what a model thinks it tells people, not programs.
  const child = start("thinker", message);
  let said = "";
  for (const stream of [child.stdout, child.stderr]) stream.on("data", (piece) => (said += piece));
  const code = await new Promise((done) => child.on("close", done));
  const response = checkedStream(proxy.exchanges.at(-1));
  expect(response.output[0].type === "reasoning", "reasoning:", response.output);
  expect(response.usage.output_tokens_details.reasoning_tokens > 0, "reasoning:", response.usage);
  expect(code === 0 && said.includes(response.output[0].content[0].text), "reasoning: Codex said", code, said);
  // As a rule it shows nothing but a summary.
  const { items, exchanges } = await codex("thinker", message, "-c", "show_raw_agent_reasoning=false");
  const summary = checkedStream(exchanges[0]).output[0].summary[0]?.text;
  const summed = events(exchanges[0].text).filter(({ name }) => name === "response.reasoning_summary_text.delta");
  expect(summed.map(({ data }) => data.delta).join("") === summary, "reasoning: summary", summary);
  const shown = of(items, "reasoning");
  expect(shown.length === 1 && shown[0].text.trim() === summary.trim(), "reasoning: shown", items);
}

async function errors() {
  proxy.edit = greedy;
  const missing = await codex("no-such-model", message);
  const said = JSON.stringify(missing.told.at(-1));
  expect(missing.code !== 0 && said.includes("no model 'no-such-model'"), "no such model:", missing.code, said);
  // Codex compacts a conversation that is too long, once; it knows by the code, inside of the
  // stream.
  const long = await codex("agent", "word ".repeat(6000));
  const failed = checkedStream(long.exchanges[0], "response.failed");
  expect(failed.error.code === "context_length_exceeded", "too long:", failed.error);
  expect(long.code !== 0 && JSON.stringify(long.told).includes("context window"), "too long:", long.told);
}

async function cancelled() {
  const before = await aborted(target, token);
  proxy.edit = (body) => ({ ...body, ignore_eos: true });
  let begun;
  const answering = new Promise((done) => (begun = done));
  proxy.onText = ({ text }) => text.includes("response.output_text.delta") && begun();
  const child = start("agent", message);
  const ended = new Promise((done) => child.on("close", done));
  await answering;
  child.kill("SIGTERM");
  await ended;
  await oneMoreAborted(target, token, before);
}

const scenarios = [plain, tools, servers, held, reasoning, errors, cancelled];
try {
  for (const scenario of scenarios) {
    await scenario();
    console.log(scenario.name);
  }
} finally {
  proxy.close();
  fs.rmSync(home, { recursive: true, force: true, maxRetries: 5 });
}
