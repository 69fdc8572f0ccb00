// Agents' libraries of npm against models whose answers are known word for word
// (tests/python/scripted.py): two turns, two tools at once and their results, reasoning, a call that
// is no JSON, a prompt that exceeds the context, and an answer that is left in the middle.
//
// usage: agent_libraries.mjs URL TOKEN SCRIPTS MODEL...
// Prints `LIBRARY MODEL` for each that was served well.

import { readFileSync } from "node:fs";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, setTracingDisabled, tool as agentTool } from "@openai/agents";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { createOllama } from "ai-sdk-ollama";
import OpenAI from "openai";
import { z } from "zod";
import { expect } from "./wire.mjs";

const [url, token, scriptsFile, ...models] = process.argv.slice(2);
const scripts = JSON.parse(readFileSync(scriptsFile, "utf8"));
// Past the context of the scripted models, in letters that are a token each.
const FLOOD = "x".repeat(40_000);
const CALLS = [
  ["weather", { city: "Paris", days: 2 }],
  ["clock", { zone: "CET" }],
];
const THOUGHT = "Three and four make seven.";
const say = (name) => ({ role: "user", content: `say:${name}` });

function same(what, found, expected) {
  expect(JSON.stringify(found) === JSON.stringify(expected), what, "is", JSON.stringify(found), "and not", JSON.stringify(expected));
}

/** What was left ends within moments, not at its end. */
async function nothingRuns(what) {
  for (let n = 0; n < 1000; n += 1) {
    const metrics = await (await fetch(`${url}/metrics`, { headers: { authorization: `Bearer ${token}` } })).text();
    const running = metrics.split("\n").find((line) => line.startsWith("vllm:num_requests_running"));
    if (Number(running.split(" ").at(-1)) === 0) return;
    await new Promise((done) => setTimeout(done, 20));
  }
  expect(false, what, "goes on after its client left");
}

/** The calls since the last look. */
let asked = [];
function called() {
  const calls = asked.sort(([a], [b]) => (a < b ? 1 : -1));
  asked = [];
  return calls;
}
const weatherInput = z.object({ city: z.string(), days: z.number().int() });
const clockInput = z.object({ zone: z.string() });
const answers = {
  weather: async (input) => (asked.push(["weather", input]), "21 degrees"),
  clock: async (input) => (asked.push(["clock", input]), "noon"),
};

/** The AI SDK over one of its providers. */
async function aiSdk(name, model, { hasThoughts = true, isHeld = false } = {}) {
  const tools = {
    weather: tool({ description: "The weather of a city", inputSchema: weatherInput, execute: answers.weather }),
    clock: tool({ description: "The time of a zone", inputSchema: clockInput, execute: answers.clock }),
  };
  const ask = { model, temperature: 0, maxRetries: 0, maxOutputTokens: 3000 };
  const first = await generateText({ ...ask, messages: [say("first")] });
  same(`${name}: the first answer`, first.text, scripts.first.text);
  same(`${name}: its tokens`, first.usage.outputTokens, scripts.first.tokens);
  const second = await generateText({ ...ask, messages: [say("first"), ...first.response.messages, say("second")] });
  same(`${name}: the second answer`, second.text, scripts.second.text);
  const withTools = { ...ask, tools, stopWhen: stepCountIs(3) };
  const whole = await generateText({ ...withTools, messages: [say("tools")] });
  same(`${name}: the calls`, called(), CALLS);
  same(`${name}: the answer behind them`, whole.text, scripts.results.text);
  const stream = streamText({ ...withTools, messages: [say("tools")] });
  let text = "";
  for await (const piece of stream.textStream) text += piece;
  same(`${name}: the streamed calls`, called(), CALLS);
  same(`${name}: the streamed answer behind them`, text, scripts.results.text);
  const thought = await generateText({ ...ask, messages: [say("thought")] });
  same(`${name}: the answer behind a thought`, thought.text.trim(), "Seven.");
  if (hasThoughts) same(`${name}: the thought`, (thought.reasoningText ?? "").trim(), THOUGHT);
  if (!isHeld) {
    const broken = await generateText({ ...ask, tools, messages: [say("broken")] });
    const call = broken.toolCalls.at(0);
    expect(call === undefined || call.invalid === true, `${name}: a broken call is taken`, broken.toolCalls);
    same(`${name}: calls of a broken one`, called(), []);
  }
  let refused;
  await generateText({ ...ask, messages: [{ role: "user", content: FLOOD }] }).catch((error) => (refused = error));
  expect(/context|too long/.test(refused?.message ?? ""), `${name}: an overflow is told`, String(refused));
  if (refused.statusCode !== undefined) same(`${name}: its status`, refused.statusCode, 400);
  const abort = new AbortController();
  const left = streamText({ ...ask, messages: [say("long")], abortSignal: abort.signal, onError: () => {} });
  for await (const piece of left.textStream) if (piece) break;
  abort.abort();
  await nothingRuns(name);
}

async function agents(kind, model) {
  setTracingDisabled(true);
  const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: token, maxRetries: 0 });
  const make = (strict) => [
    agentTool({ name: "weather", description: "The weather of a city", parameters: weatherInput, execute: answers.weather, strict }),
    agentTool({ name: "clock", description: "The time of a zone", parameters: clockInput, execute: answers.clock, strict }),
  ];
  const agent = new Agent({ name: "a", model: new kind(client, model), modelSettings: { temperature: 0 }, tools: make(true) });
  const runner = new Runner({ tracingDisabled: true });
  const first = await runner.run(agent, "say:first");
  same(`${kind.name}: the first answer`, first.finalOutput, scripts.first.text);
  const second = await runner.run(agent, [...first.history, say("second")]);
  same(`${kind.name}: the second answer`, second.finalOutput, scripts.second.text);
  const whole = await runner.run(agent, "say:tools");
  same(`${kind.name}: the calls`, called(), CALLS);
  same(`${kind.name}: the answer behind them`, whole.finalOutput, scripts.results.text);
  const stream = await runner.run(agent, "say:tools", { stream: true });
  for await (const _ of stream);
  same(`${kind.name}: the streamed calls`, called(), CALLS);
  same(`${kind.name}: the streamed answer`, stream.finalOutput, scripts.results.text);
  same(`${kind.name}: the answer behind a thought`, (await runner.run(agent, "say:thought")).finalOutput, "Seven.");
  // Of tools that are not strict a broken call comes as the model writes it. The library tells the
  // model, and the model goes on.
  const loosely = (name, properties) =>
    agentTool({
      name,
      description: name,
      strict: false,
      parameters: { type: "object", properties, required: [], additionalProperties: true },
      execute: answers[name],
    });
  const loose = agent.clone({ tools: [loosely("weather", { city: { type: "string" } }), loosely("clock", { zone: { type: "string" } })] });
  const broken = await runner.run(loose, "say:broken");
  same(`${kind.name}: the answer behind a broken call`, broken.finalOutput, scripts.results.text);
  same(`${kind.name}: calls of a broken one`, called(), []);
  let refused;
  await runner.run(agent, FLOOD).catch((error) => (refused = error));
  same(`${kind.name}: the code of an overflow`, refused?.code, "context_length_exceeded");
  const abort = new AbortController();
  const left = await runner.run(agent, "say:long", { stream: true, signal: abort.signal });
  for await (const event of left) if (event.type === "raw_model_stream_event" && event.data.type === "output_text_delta") break;
  abort.abort();
  await nothingRuns(kind.name);
}

for (const model of models) {
  const openai = createOpenAI({ baseURL: `${url}/v1`, apiKey: token });
  const compatible = createOpenAICompatible({ name: "local", baseURL: `${url}/v1`, apiKey: token, includeUsage: true });
  const anthropic = createAnthropic({ baseURL: `${url}/v1`, apiKey: token });
  const ollama = createOllama({ baseURL: url, headers: { authorization: `Bearer ${token}` } });
  const tries = {
    "ai-sdk/openai": () => aiSdk("openai", openai(model), { hasThoughts: false }),
    "ai-sdk/openai-chat": () => aiSdk("openai chat", openai.chat(model), { hasThoughts: false }),
    "ai-sdk/openai-compatible": () => aiSdk("openai-compatible", compatible(model)),
    "ai-sdk/anthropic": () => aiSdk("anthropic", anthropic(model)),
    "ai-sdk/ollama": () => aiSdk("ollama", ollama(model)),
    "openai-agents/chat": () => agents(OpenAIChatCompletionsModel, model),
    "openai-agents/responses": () => agents(OpenAIResponsesModel, model),
  };
  for (const [name, one] of Object.entries(tries)) {
    await one();
    console.log(`${name} ${model}`);
  }
}
// Connections that are kept open are no reason to stay.
process.exit(0);
