"""Runs the Ray Serve application of packaging/scale-out on this machine, as if it had two
cards, and asks through it.

Two replicas hold a daemon each, with a card of their own. A daemon that dies is replaced; at the
end none is left. Each step that went well is a line of stdout.

usage: through_ray.py --application DIR --program ROCMFORGED --model-dir DIR --model NAME
--message TEXT --answer TEXT
"""

import argparse
import os
import pathlib
import signal
import sys

import httpx
import ray
from ray import serve

from through_smg import expect, free_ports, wait_for

PATIENCE_S = 60


def daemons(program):
    """The environments of the running daemons, by process."""
    found = {}
    for process in pathlib.Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        try:
            if os.path.samefile(process / "exe", program) and b"--http-socket" in (process / "cmdline").read_bytes():
                lines = (process / "environ").read_bytes().split(b"\0")
                found[int(process.name)] = dict(line.split(b"=", 1) for line in lines if b"=" in line)
        except OSError:
            # It has just ended, or is not ours to look at.
            continue
    return found


def main():
    parser = argparse.ArgumentParser()
    for name in ("application", "program", "model-dir", "model", "message", "answer"):
        parser.add_argument(f"--{name}", required=True)
    options = parser.parse_args()
    sys.path.insert(0, options.application)
    os.environ["PYTHONPATH"] = options.application
    import ray_serve

    ray.init(num_cpus=4, num_gpus=2, include_dashboard=False, logging_level="warning", configure_logging=False)
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(ray_serve.build({
        "program": options.program, "model_dir": options.model_dir, "replicas": 2, "arguments": "--device host --threads 1",
    }))
    started = daemons(options.program)
    cards = {environment.get(b"CUDA_VISIBLE_DEVICES") for environment in started.values()}
    expect(len(started) == 2 and len(cards) == 2 and None not in cards, "a daemon a card, and not", cards)
    print("started")

    asked = {"model": options.model, "messages": [{"role": "user", "content": options.message}], "temperature": 0}

    def ask():
        return httpx.post(f"{url}/v1/chat/completions", json=asked, timeout=PATIENCE_S)

    for _ in range(4):
        reply = ask()
        expect(reply.status_code == 200, reply.status_code, reply.text)
        expect(reply.json()["choices"][0]["message"]["content"].strip() == options.answer, reply.text)
    refused = httpx.post(f"{url}/v1/chat/completions", json={**asked, "model": "no-such-model"})
    expect(refused.status_code == 404 and "no-such-model" in refused.json()["error"]["message"], refused.text)
    print("answered")

    with httpx.stream("POST", f"{url}/v1/chat/completions", json={**asked, "stream": True}, timeout=PATIENCE_S) as reply:
        expect(reply.headers["content-type"].startswith("text/event-stream"), reply.headers)
        text = "".join(reply.iter_text())
    expect(text.startswith("data: ") and text.endswith("data: [DONE]\n\n"), "streamed:", text)
    print("streamed")

    killed = min(started)
    os.kill(killed, signal.SIGKILL)
    wait_for("another daemon", lambda: len(set(daemons(options.program)) - set(started)) == 1)
    wait_for("its answers", lambda: all(ask().status_code == 200 for _ in range(4)))
    print("replaced")

    serve.shutdown()
    wait_for("the end of all daemons", lambda: not daemons(options.program))
    ray.shutdown()
    print("ended")


if __name__ == "__main__":
    main()
