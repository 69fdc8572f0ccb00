#!/usr/bin/env python3
"""Times images and embeddings of any server with OpenAI's routes.

    inputs.py URL MODEL images [--side PIXELS] [--clients N] [--rounds N] [--token TOKEN]
    inputs.py URL MODEL texts [--texts N] [--tokens N] [--vocabulary N] [--rounds N] [--token TOKEN]

URL is http://HOST:PORT. `images` sends a new random PNG each time and prints the seconds to the
first token: of one client, of the same conversation's second turn, and of the last of N clients
that begin together. `texts` sends random token ids to /v1/embeddings and prints the seconds of one
request with N texts, of N requests at once with a text each, and of one short text (16 tokens),
over a new connection each time and over one that is kept, as clients of OpenAI's library do.
Medians of the rounds, after one round that does not count. Needs nothing but Python.
"""

import argparse
import base64
import http.client
import json
import random
import statistics
import struct
import threading
import time
import zlib
from urllib.parse import urlsplit

SHORT_TOKENS = 16


def png(side, rng):
    """A PNG of side x side pixels with random colours in blocks of 8 x 8."""
    rows = []
    for y in range(side):
        if y % 8 == 0:
            row = b"".join(rng.randbytes(3) * 8 for _ in range(-(-side // 8)))[: side * 3]
        rows.append(b"\0" + row)

    def chunk(kind, data):
        whole = kind + data
        return struct.pack(">I", len(data)) + whole + struct.pack(">I", zlib.crc32(whole))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    pixels = zlib.compress(b"".join(rows), 1)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def connect(args):
    """A connection to the server, which is made when it is used first."""
    url = urlsplit(args.url)
    return http.client.HTTPConnection(url.hostname, url.port, timeout=600)


def post(args, path, body, connection=None):
    """Sends a request, over a new connection if none is given. The reply's status is 200."""
    connection = connection or connect(args)
    headers = {"content-type": "application/json"}
    if args.token:
        headers["authorization"] = f"Bearer {args.token}"
    connection.request("POST", path, json.dumps(body), headers)
    reply = connection.getresponse()
    if reply.status != 200:
        raise SystemExit(f"{reply.status}: {reply.read().decode()}")
    return reply


def chat(args, messages):
    """Seconds to the first token, the text, and the prompt's tokens."""
    body = {
        "model": args.model,
        "messages": messages,
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    begin = time.monotonic()
    first, text, usage = None, "", None
    for line in post(args, "/v1/chat/completions", body):
        if not line.startswith(b"data:") or b"[DONE]" in line:
            continue
        event = json.loads(line[5:])
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            delta = choice["delta"]
            piece = delta.get("content") or delta.get("reasoning_content") or ""
            if piece:
                first = first or time.monotonic() - begin
                text += piece
    if first is None:
        raise SystemExit("a reply without text")
    return first, text, usage


def together(works):
    """Seconds until the last of these, begun at once, has ended; a failure ends the program."""
    failed = []

    def run(work):
        try:
            work()
        except BaseException as e:  # SystemExit of a thread would be lost
            failed.append(e)

    threads = [threading.Thread(target=run, args=[work]) for work in works]
    begin = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise SystemExit(failed[0])
    return time.monotonic() - begin


def images(args, rng):
    def message():
        data = base64.b64encode(png(args.side, rng)).decode()
        image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
        return {"role": "user", "content": [image, {"type": "text", "text": "What is this?"}]}

    one, second, last = [], [], []
    usage = None
    for _ in range(args.rounds + 1):
        messages = [message()]
        first, text, usage = chat(args, messages)
        one.append(first)
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "And now?"}]
        second.append(chat(args, messages)[0])
    for _ in range(args.rounds + 1):
        asked, firsts = [[message()] for _ in range(args.clients)], []
        together([lambda m=m: firsts.append(chat(args, m)[0]) for m in asked])
        last.append(max(firsts))
    return {
        "prompt_tokens": usage and usage["prompt_tokens"],
        "first_token_s": statistics.median(one[1:]),
        "second_turn_s": statistics.median(second[1:]),
        "last_of_clients_s": statistics.median(last[1:]),
    }


def texts(args, rng):
    def ids(n):
        return [rng.randrange(args.vocabulary // 2, args.vocabulary) for _ in range(n)]

    def embed(inputs, connection=None):
        body = {"model": args.model, "input": inputs}
        reply = json.loads(post(args, "/v1/embeddings", body, connection).read())
        if len(reply["data"]) != len(inputs):
            raise SystemExit(f"{len(inputs)} texts were sent, and {len(reply['data'])} came back")

    whole, each, short, over_one = [], [], [], []
    kept = connect(args)
    for _ in range(args.rounds + 1):
        batch = [ids(args.tokens) for _ in range(args.texts)]
        whole.append(together([lambda: embed(batch)]))
        batch = [ids(args.tokens) for _ in range(args.texts)]
        each.append(together([lambda t=t: embed([t]) for t in batch]))
    for _ in range(10 * (args.rounds + 1)):
        text = ids(SHORT_TOKENS)
        short.append(together([lambda: embed([text])]))
        text = ids(SHORT_TOKENS)
        over_one.append(together([lambda: embed([text], kept)]))
    rate = args.texts / statistics.median(whole[1:])
    return {
        "one_request_texts_per_s": rate,
        "requests_at_once_texts_per_s": args.texts / statistics.median(each[1:]),
        "short_text_s": statistics.median(short[10:]),
        "short_text_kept_connection_s": statistics.median(over_one[10:]),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("url")
    parser.add_argument("model")
    parser.add_argument("kind", choices=["images", "texts"])
    parser.add_argument("--token")
    parser.add_argument("--side", type=int, default=1024)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--texts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=200, help="ids are below it")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    measure = {"images": images, "texts": texts}[args.kind]
    print(json.dumps(measure(args, random.Random(args.seed))))


if __name__ == "__main__":
    main()
