#!/usr/bin/env python3
"""Times completions one after another and all together, of any server with OpenAI's routes.

    requests.py URL MODEL [--token TOKEN] [--vocabulary N] [--requests N] [--in N] [--out N]

URL is http://HOST:PORT. Each request has its own random prompt of token ids, so that no server
finds it in a cache. An answer with fewer tokens than asked for, by the server's own count, ends the
measurement. Prints the seconds of both ways, their ratio, and the longest first token of those that
came together. Needs nothing but Python; it uses the machine that it measures, so small models show
the client's own cost too.
"""

import argparse
import http.client
import json
import random
import threading
import time
from urllib.parse import urlsplit


def complete(args, prompt, ended):
    """One streamed completion; adds the seconds to its first token to `ended`."""
    url = urlsplit(args.url)
    connection = http.client.HTTPConnection(url.hostname, url.port, timeout=600)
    body = {
        "model": args.model,
        "prompt": prompt,
        "max_tokens": args.out,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    headers = {"content-type": "application/json"}
    if args.token:
        headers["authorization"] = f"Bearer {args.token}"
    begin = time.monotonic()
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    answer = connection.getresponse()
    if answer.status != 200:
        raise SystemExit(f"{answer.status}: {answer.read().decode()}")
    first = usage = None
    for line in answer:
        if line.startswith(b"data:") and b"[DONE]" not in line:
            first = first or time.monotonic() - begin
            usage = json.loads(line[5:]).get("usage") or usage
    if not usage or usage["completion_tokens"] != args.out:
        raise SystemExit(f"{args.out} tokens were asked for, and the answer has {usage}")
    ended.append(first)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("url")
    parser.add_argument("model")
    parser.add_argument("--token")
    parser.add_argument("--vocabulary", type=int, default=30000, help="ids are below it")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--in", dest="prompt", type=int, default=64)
    parser.add_argument("--out", type=int, default=64)
    args = parser.parse_args()

    def prompts():
        ids = range(min(256, args.vocabulary // 2), args.vocabulary)
        return [random.choices(ids, k=args.prompt) for _ in range(args.requests)]

    begin = time.monotonic()
    for prompt in prompts():
        complete(args, prompt, [])
    alone = time.monotonic() - begin

    ended = []
    begin = time.monotonic()
    threads = [threading.Thread(target=complete, args=(args, p, ended)) for p in prompts()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    together = time.monotonic() - begin
    if len(ended) < args.requests:
        raise SystemExit("some requests failed")
    print(
        f"one after another {alone:.2f} s, together {together:.2f} s ({together / alone:.2f}), "
        f"longest first token {max(ended):.2f} s"
    )


if __name__ == "__main__":
    main()
