// Agents on the command line against a model whose answers are known word for word
// (tests/python/scripted.py): an answer and a second turn, two commands at once and the answer
// behind them, reasoning, a call that is no JSON, a prompt that exceeds the context, and an agent
// that is ended in the middle.
//
// usage: agent_programs.mjs URL TOKEN SCRIPTS DIRECTORY [PROGRAM...]
// The programs are those of node_modules/.bin, all without a name; DIRECTORY is their home. Prints
// the name of each that was served well.

import { spawn } from "node:child_process";
import { existsSync, mkdirSync, readFileSync, writeFileSync } from "node:fs";
import path from "node:path";
import { fileURLToPath } from "node:url";
import { expect, wire } from "./wire.mjs";

const [url, token, scriptsFile, home, ...named] = process.argv.slice(2);
const scripts = JSON.parse(readFileSync(scriptsFile, "utf8"));
const bin = path.join(path.dirname(fileURLToPath(import.meta.url)), "node_modules", ".bin");
const PATIENCE_MS = 300_000;
// The context of the model `fast`, and more than that in letters of a token each.
const CONTEXT = 32_768;
const FLOOD = "x".repeat(60_000);

// What the programs believe of both models, so that it is the daemon that refuses a prompt.
const BELIEVED = 200_000;
const models = ["agent", "fast"].map((name) => [name, { name, limit: { context: BELIEVED, output: 2048 } }]);
const opencodeConfig = (base) =>
  JSON.stringify({
    provider: {
      local: { npm: "@ai-sdk/openai-compatible", name: "local", options: { baseURL: `${base}/v1`, apiKey: token }, models: Object.fromEntries(models) },
    },
    permission: { bash: "allow" },
    autoupdate: false,
    share: "disabled",
  });

/** Each program: its arguments for a question to a model, and for a second one in the same session. */
const PROGRAMS = {
  claude: {
    env: (base) => ({
      ANTHROPIC_BASE_URL: base,
      ANTHROPIC_AUTH_TOKEN: token,
      DISABLE_AUTOUPDATER: "1",
      CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC: "1",
    }),
    ask: (model, text, goesOn) => ["-p", text, "--model", model, "--allowedTools", "Bash", ...(goesOn ? ["--continue"] : [])],
  },
  qwen: {
    env: (base) => ({ OPENAI_BASE_URL: `${base}/v1`, OPENAI_API_KEY: token, QWEN_CODE_SUPPRESS_YOLO_WARNING: "1" }),
    ask: (model, text, goesOn) => ["--auth-type", "openai", "--model", model, "--yolo", ...(goesOn ? ["--continue"] : []), "-p", text],
  },
  opencode: {
    env: (base) => ({ OPENCODE_CONFIG_CONTENT: opencodeConfig(base) }),
    ask: (model, text, goesOn) => ["run", "-m", `local/${model}`, ...(goesOn ? ["-c"] : []), text],
  },
  // Continue's.
  cn: {
    env: () => ({ CONTINUE_TELEMETRY_ENABLED: "0" }),
    ask: (model, text, goesOn) => ["-p", text, "--config", path.join(home, ".continue", `${model}.yaml`), "--allow", "Bash", ...(goesOn ? ["--resume"] : [])],
    configure: (base) => {
      mkdirSync(path.join(home, ".continue"), { recursive: true });
      for (const name of ["agent", "fast"]) {
        const model = { name, provider: "openai", model: name, apiBase: `${base}/v1`, apiKey: token, roles: ["chat", "edit", "apply"], contextLength: BELIEVED };
        const config = { name: "local", version: "1.0.0", schema: "v1", models: [model] };
        // JSON is YAML, too.
        writeFileSync(path.join(home, ".continue", `${name}.yaml`), JSON.stringify(config));
      }
    },
  },
  pi: {
    env: () => ({ PI_OFFLINE: "1" }),
    // It ends without a word of it otherwise.
    showsFaults: ["--mode", "json"],
    ask: (model, text, goesOn) => ["-p", "--provider", "local", "--model", model, ...(goesOn ? ["-c"] : []), text],
    configure: (base) => {
      const known = ["agent", "fast"].map((id) => ({ id, contextWindow: BELIEVED, maxTokens: 2048, reasoning: id === "agent" }));
      mkdirSync(path.join(home, ".pi", "agent"), { recursive: true });
      const provider = { baseUrl: `${base}/v1`, api: "openai-completions", apiKey: token, models: known };
      writeFileSync(path.join(home, ".pi", "agent", "models.json"), JSON.stringify({ providers: { local: provider } }));
    },
  },
};

function start(program, directory, model, text, { goesOn = false, more = [] } = {}) {
  const { env, ask } = PROGRAMS[program.name];
  const child = spawn(path.join(bin, program.name), [...more, ...ask(model, text, goesOn)], {
    cwd: directory,
    env: { PATH: process.env.PATH, HOME: home, NO_COLOR: "1", ...env(program.wire.url) },
    stdio: ["ignore", "pipe", "pipe"],
    detached: true,
  });
  child.said = "";
  child.told = "";
  child.stdout.on("data", (data) => (child.said += data));
  child.stderr.on("data", (data) => (child.told += data));
  child.ended = new Promise((done) => child.on("close", done));
  return child;
}

/** Ends a program with what it started. */
function end(child) {
  try {
    process.kill(-child.pid, "SIGKILL");
  } catch {
    // It has ended by itself.
  }
}

async function answer(program, directory, model, text, options) {
  const child = start(program, directory, model, text, options);
  const late = setTimeout(() => end(child), PATIENCE_MS);
  const code = await child.ended;
  clearTimeout(late);
  return { said: child.said.replace(/\u001b\[[0-9;]*m/g, "").trim(), told: child.told, code };
}

async function running() {
  const metrics = await (await fetch(`${url}/metrics`, { headers: { authorization: `Bearer ${token}` } })).text();
  const line = metrics.split("\n").find((line) => line.startsWith("vllm:num_requests_running"));
  return Number(line.split(" ").at(-1));
}

async function until(what, isSo) {
  for (let n = 0; n < PATIENCE_MS / 20; n += 1) {
    if (await isSo()) return;
    await new Promise((done) => setTimeout(done, 20));
  }
  expect(false, what);
}

async function served(name) {
  const program = { name, wire: await wire(url) };
  PROGRAMS[name].configure?.(program.wire.url);
  const directory = path.join(home, name);
  mkdirSync(directory);
  const says = async (script, expected, goesOn) => {
    const { said, told } = await answer(program, directory, "agent", `say:${script}`, { goesOn });
    const why = () => [told.slice(-600), program.wire.exchanges.slice(-2).map(({ path, status, text }) => [path, status, text.slice(0, 600)])];
    if (!said.endsWith(expected)) expect(false, `${name} of ${script} says`, JSON.stringify(said.slice(-600)), "and not", expected, ...why());
  };
  await says("first", scripts.first.text);
  await says("second", scripts.second.text, true);
  await says(name, scripts.results.text);
  for (const mark of ["left", "right"]) {
    const file = path.join(directory, `${mark}.mark`);
    expect(existsSync(file) && readFileSync(file, "utf8").trim() === mark, `${name}: the command of ${mark}`);
  }
  await says("thought", "Seven.");
  await says("broken", scripts.results.text);

  // What exceeds the context is refused in words that the program knows, and it ends.
  const before = program.wire.exchanges.length;
  const over = await answer(program, directory, "fast", `say:first ${FLOOD}`, { more: PROGRAMS[name].showsFaults });
  const refused = program.wire.exchanges.slice(before).filter((exchange) => exchange.status !== 200);
  expect(refused.length > 0, `${name}: nothing exceeds the context of ${CONTEXT}`, over.said.slice(-600));
  expect(refused.every(({ status, text }) => status === 400 && /context|too long/.test(text)), `${name}: an overflow`, refused[0]?.text);
  expect(refused.length <= 6 && over.code !== null, `${name} asks again and again`, String(refused.length));
  expect(/context|too long|exceed/i.test(over.said + over.told), `${name} of an overflow`, over.said.slice(-600), over.told.slice(-600));

  const left = start(program, directory, "agent", "say:long");
  await until(`${name} never asks`, async () => (await running()) > 0);
  end(left);
  await left.ended;
  await until(`${name} is gone, and its request goes on`, async () => (await running()) === 0);
  for (const { path: asked, status, text } of program.wire.exchanges) {
    expect(status < 500, `${name}: ${asked} is ${status}`, text.slice(0, 300));
  }
  program.wire.close();
}

// Some look for a repository around their directory.
writeFileSync(path.join(home, ".gitconfig"), "");
for (const name of named.length > 0 ? named : Object.keys(PROGRAMS)) {
  await served(name);
  console.log(name);
}
process.exit(0);
