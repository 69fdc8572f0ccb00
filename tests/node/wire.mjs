// A proxy between a client and the daemon: it writes down what goes over the wire, and may
// change a request on its way.

import http from "node:http";

export function expect(condition, ...words) {
  if (!condition) {
    const shown = words.map((word) => (typeof word === "string" ? word : JSON.stringify(word)));
    throw new Error(shown.join(" "));
  }
}

/** Server-sent events of a whole body: `[{name, data}]`; comments are left out. */
export function events(text) {
  const found = [];
  for (const block of text.split("\n\n")) {
    const lines = block.split("\n").filter((line) => line !== "" && !line.startsWith(":"));
    const field = (name) => lines.filter((l) => l.startsWith(`${name}: `)).map((l) => l.slice(name.length + 2)).join("\n");
    if (lines.length > 0) {
      const data = field("data");
      found.push({ name: field("event"), data: data === "[DONE]" ? data : JSON.parse(data) });
    }
  }
  return found;
}

/** Serves at `url` what the daemon at `target` serves; `exchanges` has every POST that has ended. */
export async function wire(target) {
  const exchanges = [];
  const state = { exchanges, edit: (body) => body, onText: () => {} };
  const server = http.createServer(async (request, response) => {
    const pieces = [];
    for await (const piece of request) pieces.push(piece);
    let body = Buffer.concat(pieces);
    const exchange = { path: request.url, asked: null, status: 0, text: "", left: false };
    const headers = { ...request.headers };
    delete headers.host;
    delete headers["transfer-encoding"];
    if (request.method === "POST") {
      exchange.asked = state.edit(JSON.parse(body.toString()));
      body = Buffer.from(JSON.stringify(exchange.asked));
      headers["content-length"] = body.length;
    }
    const options = { method: request.method, headers };
    const upstream = http.request(target + request.url, options, (answer) => {
      exchange.status = answer.statusCode;
      response.writeHead(answer.statusCode, answer.headers);
      answer.on("data", (piece) => {
        exchange.text += piece;
        state.onText(exchange);
        response.write(piece);
      });
      answer.on("error", () => response.destroy());
      answer.on("end", () => {
        if (request.method === "POST") exchanges.push(exchange);
        response.end();
      });
    });
    upstream.on("error", () => response.destroy());
    // A client that goes before the end is to be noticed by the daemon.
    response.on("close", () => {
      if (!response.writableFinished) upstream.destroy();
    });
    upstream.end(body);
  });
  await new Promise((done) => server.listen(0, "127.0.0.1", done));
  state.url = `http://127.0.0.1:${server.address().port}`;
  state.close = () => {
    server.closeAllConnections();
    server.close();
  };
  return state;
}

/** How many requests have ended before their time. */
export async function aborted(target, token) {
  const text = await (await fetch(`${target}/metrics`, { headers: { authorization: `Bearer ${token}` } })).text();
  const counts = text.matchAll(/^vllm:request_success_total\{.*finished_reason="abort".*\} (\d+)$/gm);
  return [...counts].reduce((sum, [, count]) => sum + Number(count), 0);
}

/** Waits until one more than `before` has: its client went, and it did not run to its end. */
export async function oneMoreAborted(target, token, before) {
  for (let i = 0; i < 600; i++) {
    const now = await aborted(target, token);
    if (now > before) return expect(now === before + 1, "aborted:", now - before);
    await new Promise((done) => setTimeout(done, 50));
  }
  throw new Error("a request whose client has gone was not aborted");
}
