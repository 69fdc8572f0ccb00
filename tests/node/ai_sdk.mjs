// The AI SDK with its provider for servers that speak OpenAI's dialect, against a running daemon:
// plain, streamed, tools, a JSON schema, reasoning, errors, cancellation. The wire is checked chunk
// by chunk beside what the library makes of it.
//
// usage: ai_sdk.mjs URL TOKEN MESSAGE ANSWER
// The daemon has the models `agent` and `thinker`: ANSWER is what `agent` says to
// MESSAGE without sampling.

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";
import { aborted, events, expect, oneMoreAborted, wire } from "./wire.mjs";

const [target, token, message, answer] = process.argv.slice(2);
const proxy = await wire(target);
const provider = (apiKey) =>
  createOpenAICompatible({ name: "local", baseURL: `${proxy.url}/v1`, apiKey, includeUsage: true, supportsStructuredOutputs: true });
const models = provider(token);
const asked = { model: models("agent"), prompt: message, temperature: 0, maxOutputTokens: 300, maxRetries: 0 };
const schema = jsonSchema({
  type: "object",
  properties: { city: { type: "string", enum: ["Bern", "Graz"] }, days: { type: "integer", minimum: 1, maximum: 9 } },
  required: ["city", "days"],
  additionalProperties: false,
});

/** The rules of a stream of chat completions, chunk by chunk; gives what the chunks add up to. */
function checkedStream({ status, text, asked }) {
  expect(status === 200, "stream: status", status);
  const all = events(text).map((event) => event.data);
  expect(all.at(-1) === "[DONE]", "stream: ends with", all.at(-1));
  const chunks = all.slice(0, -1);
  const whole = { content: "", reasoning: "", calls: [], finish: null };
  expect(new Set(chunks.map((chunk) => `${chunk.id} ${chunk.created} ${chunk.object}`)).size === 1, "stream: ids", chunks);
  expect(chunks[0].object === "chat.completion.chunk", chunks[0]);
  const usage = chunks.pop();
  expect(asked.stream_options.include_usage && usage.choices.length === 0, "stream: the last chunk has usage alone", usage);
  expect(usage.usage.total_tokens === usage.usage.prompt_tokens + usage.usage.completion_tokens, usage);
  expect(Number.isInteger(usage.usage.prompt_tokens_details.cached_tokens), usage);
  for (const [n, chunk] of chunks.entries()) {
    expect(chunk.choices.length === 1 && whole.finish === null, "stream: chunk", chunk);
    const { delta, finish_reason } = chunk.choices[0];
    expect((delta.role === "assistant") === (n === 0), "stream: the role is in the first chunk only", chunk);
    if (finish_reason !== null) {
      expect(Object.keys(delta).length === 0, "stream: the reason to end has a chunk of its own", chunk);
      whole.finish = finish_reason;
    }
    whole.content += delta.content ?? "";
    whole.reasoning += delta.reasoning_content ?? "";
    for (const { index, id, type, function: called } of delta.tool_calls ?? []) {
      const begun = whole.calls[index];
      expect((id !== undefined) === (begun === undefined), "stream: id and name come once", chunk);
      if (begun) begun.arguments += called.arguments;
      else {
        expect(type === "function" && called.name && index === whole.calls.length, "stream: call", chunk);
        whole.calls.push({ id, name: called.name, arguments: called.arguments });
      }
    }
  }
  expect(whole.finish !== null, "stream: no reason to end", text);
  return whole;
}

async function plain() {
  const whole = await generateText(asked);
  expect(whole.text === answer && whole.finishReason === "stop", "plain:", whole.text, whole.finishReason);
  const { inputTokens, outputTokens, totalTokens } = whole.usage;
  expect(inputTokens > 0 && outputTokens > 0 && totalTokens === inputTokens + outputTokens, "plain:", whole.usage);
  const cut = await generateText({ ...asked, maxOutputTokens: 2 });
  expect(cut.finishReason === "length" && cut.usage.outputTokens === 2, "plain: cut", cut.finishReason, cut.usage);
}

async function streamed() {
  const stream = streamText(asked);
  let text = "";
  for await (const delta of stream.textStream) text += delta;
  expect(text === answer && (await stream.finishReason) === "stop", "streamed:", text, await stream.finishReason);
  expect((await stream.usage).outputTokens > 0, "streamed:", await stream.usage);
  const sent = checkedStream(proxy.exchanges.at(-1));
  expect(sent.content === answer && sent.finish === "stop", "streamed: on the wire", sent);
}

async function tools() {
  const asks = [];
  const weather = tool({
    description: "The weather of a city",
    inputSchema: schema,
    execute: async (input) => {
      asks.push(input);
      return message;
    },
  });
  // A model of this size calls nothing by itself: the first step is forced, the second one is free.
  let posted = 0;
  proxy.edit = (body) => ({ ...body, tool_choice: posted++ % 2 === 0 ? "required" : "auto" });
  const withTools = { ...asked, tools: { weather }, stopWhen: stepCountIs(2), providerOptions: { local: { parallel_tool_calls: false } } };
  const whole = await generateText(withTools);
  expect(whole.steps.length === 2 && whole.steps[0].finishReason === "tool-calls", "tools:", whole.steps);
  expect(asks.length === 1 && ["Bern", "Graz"].includes(asks[0].city) && asks[0].days >= 1, "tools: asked", asks);
  expect(whole.text === answer, "tools: the answer after the tool's", whole.text);
  const turns = proxy.exchanges.at(-1).asked.messages;
  expect(turns.at(-1).role === "tool" && turns.at(-1).tool_call_id === turns.at(-2).tool_calls[0].id, "tools: turns", turns);

  const stream = streamText(withTools);
  const calls = [];
  for await (const part of stream.fullStream) if (part.type === "tool-call") calls.push(part);
  expect(calls.length === 1 && calls[0].toolName === "weather" && !calls[0].invalid, "tools: streamed", calls);
  expect((await stream.text) === answer, "tools: streamed answer", await stream.text);
  const sent = checkedStream(proxy.exchanges.at(-2));
  expect(sent.finish === "tool_calls" && sent.calls.length === 1, "tools: on the wire", sent);
  expect(JSON.stringify(JSON.parse(sent.calls[0].arguments)) === JSON.stringify(calls[0].input), "tools: arguments", sent);
  proxy.edit = (body) => body;
}

async function held() {
  const output = Output.object({ schema });
  const whole = await generateText({ ...asked, output });
  expect(["Bern", "Graz"].includes(whole.output.city) && Number.isInteger(whole.output.days), "schema:", whole.output);
  const format = proxy.exchanges.at(-1).asked.response_format;
  expect(format.type === "json_schema" && format.json_schema.schema.required.length === 2, "schema: asked", format);
  const stream = streamText({ ...asked, output });
  let last;
  for await (const part of stream.partialOutputStream) last = part;
  expect(JSON.stringify(last) === JSON.stringify(whole.output), "schema: streamed", last, whole.output);
}

async function reasoning() {
  const thinking = { ...asked, model: models("thinker"), providerOptions: { local: { reasoningEffort: "low" } } };
  const whole = await generateText(thinking);
  expect(whole.reasoningText?.length > 0 && whole.text === "", "reasoning:", whole.reasoningText, whole.text);
  expect(proxy.exchanges.at(-1).asked.reasoning_effort === "low", "reasoning: asked", proxy.exchanges.at(-1).asked);
  const stream = streamText(thinking);
  let text = "";
  for await (const part of stream.fullStream) if (part.type === "reasoning-delta") text += part.text;
  expect(text === whole.reasoningText, "reasoning: streamed", text, "whole", whole.reasoningText);
  expect(checkedStream(proxy.exchanges.at(-1)).reasoning === text, "reasoning: on the wire");
  expect((await stream.usage).outputTokenDetails.reasoningTokens > 0, "reasoning:", await stream.usage);
}

async function refused(what, status, words, more) {
  let error;
  try {
    await generateText({ ...asked, ...more });
  } catch (caught) {
    error = caught;
  }
  expect(error?.statusCode === status && error.message.includes(words), what, error?.statusCode, error?.message);
}

async function errors() {
  await refused("no such model:", 404, "no-such-model", { model: models("no-such-model") });
  await refused("wrong token:", 401, "", { model: provider("wrong")("agent") });
  await refused("bad value:", 400, "temperature", { temperature: -1 });
  await refused("too long:", 400, "4096", { prompt: "word ".repeat(6000) });
}

async function cancelled() {
  const before = await aborted(target, token);
  const leave = new AbortController();
  proxy.edit = (body) => ({ ...body, ignore_eos: true });
  const stream = streamText({ ...asked, maxOutputTokens: 4000, abortSignal: leave.signal, onError: () => {} });
  let parts = 0;
  for await (const part of stream.fullStream) {
    if (part.type === "text-delta" && ++parts === 3) leave.abort();
  }
  expect(parts < 1000, "cancelled: the text ran on for", parts);
  await oneMoreAborted(target, token, before);
  proxy.edit = (body) => body;
}

for (const scenario of [plain, streamed, tools, held, reasoning, errors, cancelled]) {
  await scenario();
  console.log(scenario.name);
}
proxy.close();
