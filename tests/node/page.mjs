// The page `/ui` in headless Chromium: a token, models, chat, maps of weights, requests, settings,
// hostile text, a restart of the daemon, and an accessibility checker on each of its pages.
//
// usage: page.mjs URL TOKEN CHROMIUM SIGNALS [SHOTS]
// The daemon has the model `agent`, `endless` which never ends by itself and says markup, and 1,000
// others. SIGNALS is a directory: for each file `NAME.asked` in it somebody does NAME to the daemon
// (evict, stop, start) and writes `NAME.done`. SHOTS is where pictures of the page go.

import fs from "node:fs";
import { createRequire } from "node:module";
import path from "node:path";
import { chromium } from "playwright-core";
import { expect } from "./wire.mjs";

const [url, token, program, signals, shots] = process.argv.slice(2);
const axe = fs.readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");

// A call into the page has no time limit of its own.
setTimeout(() => process.exit(1), 10 * 60_000).unref();

const browser = await chromium.launch({
  executablePath: program,
  // Whoever ends this program ends it at once; the browser goes with its pipe.
  handleSIGTERM: false,
  args: ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-quic", "--disable-background-networking", "--disable-sync",
    "--disable-component-update", "--no-first-run"],
});

/** A window with the page, and everything that went wrong in it. */
async function open(options) {
  const context = await browser.newContext({ viewport: { width: 1100, height: 800 }, ...options });
  await context.addInitScript("window.hit = () => { window.wasHit = true; };");
  const page = await context.newPage();
  page.setDefaultTimeout(120_000);
  const faults = [];
  page.on("pageerror", (error) => faults.push(String(error)));
  page.on("dialog", (dialog) => dialog.accept());
  page.on("console", (line) => {
    // A daemon that is away, or wants a token, is an error of the network to the browser.
    if (line.type() === "error" && !line.text().startsWith("Failed to load resource")) faults.push(line.text());
  });
  await page.goto(`${url}/ui`);
  return { page, faults };
}

const tab = (page, name) => page.getByRole("tab", { name }).click();
const says = (page, text) => page.locator("#status", { hasText: text }).waitFor();

async function useToken(page) {
  await tab(page, "Settings");
  await page.getByLabel(/API token/).fill(token);
  await page.getByRole("button", { name: "Use", exact: true }).click();
  await says(page, "connected");
}

async function signal(name) {
  const began = Date.now();
  fs.writeFileSync(path.join(signals, `${name}.asked`), "");
  while (!fs.existsSync(path.join(signals, `${name}.done`))) {
    expect(Date.now() - began < 180_000, name, "was not done to the daemon");
    await new Promise((done) => setTimeout(done, 20));
  }
}

/** Sends a message, by the keyboard. */
async function say(page, model, text) {
  await page.locator("#model").selectOption(model);
  await page.locator("#message").fill(text);
  await page.locator("#message").press("Enter");
}

/** Waits for the end of an answer, the `n`th, which is one. */
async function isAnswered(page, n) {
  await page.locator("#send:not([disabled])").waitFor();
  const all = page.locator(".message.assistant");
  expect((await all.count()) === n, "answers:", await all.count(), "of", n);
  const text = (await all.last().innerText()).replace("assistant", "").trim();
  expect(text.length > 0 && (await all.last().locator(".error").count()) === 0, "no answer:", text);
}

async function picture(page, name) {
  if (shots) await page.screenshot({ path: path.join(shots, `page-${name}.png`) });
}

const { page, faults } = await open({ colorScheme: "light" });
const rowOf = (name) => page.locator("#list tr").filter({ has: page.getByRole("cell", { name, exact: true }) });
const answers = page.locator(".message.assistant");

// Without its token the page says so, and shows nothing of the daemon.
await says(page, /token/);
expect((await page.locator("#list tr").count()) === 0, "models are shown without a token");
await useToken(page);
await page.locator("#values tr").nth(20).waitFor();
console.log("token");

// All of 1,000 models.
await tab(page, "Models");
await rowOf("agent").waitFor();
expect((await page.locator("#list tr").count()) > 1000, "too few models are listed");
await page.getByLabel("Filter").fill("agent");
await page.locator("#list tr").nth(1).waitFor({ state: "detached" });
await rowOf("agent").waitFor();
await page.getByText("No weights are on the device").waitFor();
console.log("models");

// A chat by keyboard alone.
await tab(page, "Chat");
await say(page, "agent", "Tell me a story about a fox.");
await page.locator("#speed", { hasText: "first after" }).waitFor();
await isAnswered(page, 1);
await say(page, "agent", "Tell me a story.");
await isAnswered(page, 2);
await picture(page, "chat");
console.log("chat");

// Stopped by a button, and by Escape. What is said is text, whoever says it.
for (const stop of [() => page.getByRole("button", { name: "Stop" }).click(), () => page.keyboard.press("Escape")]) {
  await page.getByRole("button", { name: "New chat" }).click();
  await say(page, "endless", "<script>hit()</script> Tell me a story.");
  await answers.last().filter({ hasText: "<img>" }).waitFor();
  await stop();
  await page.locator("#send:not([disabled])").waitFor();
  const text = await answers.last().innerText();
  expect(text.endsWith("[stopped]"), "it was not stopped:", text);
}
const said = await page.locator("#messages").innerText();
expect(said.includes("<img>") && said.includes("<script>hit()"), "nothing hostile was said");
expect((await page.locator("#messages script, #messages img").count()) === 0, "a message became markup");
console.log("stopped");

// An image, to a model that reads some; the daemon says nothing of that of this one.
await page.route("**/models", async (route) => {
  const reply = await route.fetch();
  const models = await reply.json();
  for (const model of models.data) if (model.id === "agent") model.capabilities = ["completion", "vision"];
  await route.fulfill({ response: reply, json: models });
});
await page.getByRole("button", { name: "New chat" }).click();
await page.locator("#model").selectOption("agent");
const png = Buffer.from("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==", "base64");
await page.getByLabel(/Images/).setInputFiles({ name: "dot.png", mimeType: "image/png", buffer: png });
await page.locator("#attached", { hasText: "dot.png" }).waitFor();
const asked = page.waitForRequest("**/v1/chat/completions");
await say(page, "agent", "What is it?");
const [image, question] = (await asked).postDataJSON().messages[0].content;
expect(image.image_url.url === `data:image/png;base64,${png.toString("base64")}` && question.text === "What is it?", image, question);
await isAnswered(page, 1);
await page.unroute("**/models");
console.log("images");

// A model that calls two tools, and is told what they gave before it goes on.
await page.getByRole("button", { name: "New chat" }).click();
await page.getByText("Tools", { exact: true }).click();
await page.getByLabel(/Tools that the model may call/).fill("{");
await say(page, "agent", "How warm is it?");
await says(page, /no JSON list/);
await page.getByLabel(/Tools that the model may call/).fill('[{"type": "function", "function": {"name": "warmth"}}]');
const called = ["Bonn", "Rome"].map((place, index) => ({
  index, id: `call-${index}`, type: "function", function: { name: "warmth", arguments: JSON.stringify({ place }) },
}));
await page.route("**/v1/chat/completions", async (route) => {
  expect(route.request().postDataJSON().tools[0].function.name === "warmth", "no tool is offered");
  const choice = { index: 0, delta: { tool_calls: called }, finish_reason: "tool_calls" };
  await route.fulfill({ contentType: "text/event-stream", body: `data: ${JSON.stringify({ choices: [choice] })}\n\ndata: [DONE]\n\n` });
}, { times: 1 });
await page.locator("#message").press("Enter");
await answers.last().filter({ hasText: 'calls warmth({"place":"Bonn"})' }).waitFor();
await page.getByLabel("Result of warmth").fill("7 degrees");
await page.getByLabel("Result of warmth").press("Enter");
expect((await answers.count()) === 1, "it goes on without the second result");
// The template of this model has no form of calls, so that it takes results alone.
await page.getByLabel(/Tools that the model may call/).fill("");
const told = page.waitForRequest("**/v1/chat/completions");
await page.getByLabel("Result of warmth").fill("19 degrees");
await page.getByLabel("Result of warmth").press("Enter");
const results = (await told).postDataJSON().messages.slice(2).map((m) => [m.role, m.tool_call_id, m.content].join(" "));
expect(results.join() === "tool call-0 7 degrees,tool call-1 19 degrees", results);
await isAnswered(page, 2);
await page.getByLabel(/^Message \(/).waitFor();
await page.getByRole("button", { name: "New chat" }).click();
console.log("tools");

// What is on the device, until it is evicted and unloaded.
await tab(page, "Models");
const map = page.locator("#maps dt", { hasText: /^agent$/ }).locator("+ dd .map");
await map.waitFor();
expect((await map.getAttribute("aria-label")) === "19 of 19 segments resident", await map.getAttribute("aria-label"));
expect((await map.locator("i.resident").count()) === 19, "cells are missing");
await picture(page, "models");
await signal("evict");
await page.getByText("No weights are on the device").waitFor();
await rowOf("agent").getByRole("button", { name: "Unload agent", exact: true }).click();
await rowOf("agent").getByRole("button", { name: "Load agent", exact: true }).waitFor();
await rowOf("agent").getByRole("button", { name: "Load agent", exact: true }).click();
await rowOf("agent").getByRole("button", { name: "Unload agent", exact: true }).waitFor();
console.log("maps");

// Requests that have ended, and one that runs: the same number from its begin to the panel.
await tab(page, "Requests");
await page.locator("#parts tr").first().waitFor();
expect((await page.locator("#ended tr").count()) === 6, "six requests have ended");
await page.getByText("No request of yours waits or runs").waitFor();
await tab(page, "Chat");
await say(page, "endless", "Tell me a story.");
await answers.last().filter({ hasText: "<img>" }).waitFor();
await tab(page, "Requests");
const runs = page.locator("#running tr");
await runs.filter({ hasText: /decode.*endless.*\d+ \+ \d+.*\d\.\d.*own passes/ }).waitFor();
await runs.getByRole("button").press("Enter");
await page.locator("#why-of", { hasText: "Request 7 has not ended" }).waitFor();
await page.keyboard.press("Escape");
await page.locator("#why-of", { hasText: "Why request 7 took" }).waitFor();
expect((await runs.count()) === 0, "it still runs");
const last = page.locator("#ended tr").filter({ has: page.getByRole("button", { name: "Why request 7 took its time" }) });
expect((await last.innerText()).includes("Cancelled"), await last.innerText());
await page.locator("#advice li", { hasText: "longest gap between tokens" }).waitFor();
await page.getByRole("button", { name: "Why request 1 took its time" }).click();
await page.locator("#why-of", { hasText: "Why request 1 took" }).waitFor();
await picture(page, "requests");
console.log("requests");

// The daemon goes, and comes back on its address.
await signal("stop");
await says(page, /no answer/);
await signal("start");
await says(page, "connected");
await tab(page, "Chat");
await page.getByRole("button", { name: "New chat" }).click();
await say(page, "agent", "Tell me a story about a fox.");
await isAnswered(page, 1);
console.log("restarted");

// Drawing all of it again and again leaves nothing behind.
const elements = () => page.evaluate(() => document.querySelectorAll("*").length);
await tab(page, "Models");
await map.waitFor();
const draw = () => page.evaluate("listed = ''; residency.clear(); list(known); showResidency()");
await draw();
const before = await elements();
for (let n = 0; n < 100; n += 1) await draw();
const grown = (await elements()) - before;
expect(grown < 50, "the page grows:", grown, "elements in 100 looks");
await tab(page, "Requests");
await page.locator("#ended tr").first().waitFor();
const renew = (n) => page.evaluate(`take({ ended: ${n}, requests: [], downloads: [] }); showRequests()`);
await renew(0);
const shownBefore = await elements();
for (let n = 1; n <= 100; n += 1) await renew(n);
expect((await elements()) - shownBefore < 50, "the list of requests grows");
expect(!(await page.evaluate("window.wasHit")), "a script of a message ran");
expect(faults.length === 0, faults);
console.log("steady");

for (const colorScheme of ["light", "dark"]) {
  const { page: checked, faults: others } = await open({ colorScheme, bypassCSP: true });
  await useToken(checked);
  await checked.locator("#values tr").nth(20).waitFor();
  await tab(checked, "Chat");
  await say(checked, "agent", "Tell me a story about a fox.");
  await isAnswered(checked, 1);
  // One that runs, in the list of requests.
  await say(checked, "endless", "Tell me a story.");
  await checked.locator(".message.assistant").nth(1).filter({ hasText: "<img>" }).waitFor();
  for (const name of ["Chat", "Models", "Requests", "Settings"]) {
    await tab(checked, name);
    if (name === "Models") {
      // One row stands for all.
      await checked.getByLabel("Filter").fill("agent");
      await checked.locator("#list tr").nth(1).waitFor({ state: "detached" });
      await checked.locator("#maps .map").first().waitFor();
    }
    if (name === "Requests") {
      await checked.locator("#parts tr").first().waitFor();
      await checked.locator("#running tr").first().waitFor();
    }
    await checked.evaluate(axe);
    const { violations } = await checked.evaluate("axe.run({ runOnly: ['wcag2a', 'wcag2aa', 'best-practice'] })");
    const shown = violations.map((v) => `${v.id}: ${v.help}: ${v.nodes.map((n) => n.html).join(" ")}`);
    expect(shown.length === 0, colorScheme, name, shown);
  }
  expect(others.length === 0, others);
}
console.log("accessible");
await browser.close();
