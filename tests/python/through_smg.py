"""Puts SMG (a router) before two daemons, and asks through it: both answer, and when one of them
is stopped the other does.

SMG knows one model of each worker, the first that it lists: the daemons serve this one alone. The
greedy answer goes to stdout, what is done to stderr. Exit 0 only if all was as it should be.

usage: through_smg.py --worker URL --worker URL --stop PID --model NAME --message TEXT
(PID is the first worker's)
"""

import argparse
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time

import httpx

PATIENCE_S = 60
ROUNDS = 8


def say(*words):
    print(*words, file=sys.stderr, flush=True)


def expect(condition, *words):
    if not condition:
        raise SystemExit("through_smg: " + " ".join(map(str, words)))


def wait_for(what, condition):
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        with contextlib.suppress(httpx.HTTPError):
            if condition():
                return
        time.sleep(0.1)
    raise SystemExit(f"through_smg: {what} did not come in {PATIENCE_S} s")


def free_ports(n):
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(n)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


@contextlib.contextmanager
def router(workers):
    """SMG before `workers`; gives its URL."""
    port, metrics = free_ports(2)
    command = [sys.executable, "-c", "from smg.cli import main; main()", "launch", "--host", "127.0.0.1", "--port", str(port),
               "--prometheus-port", str(metrics), "--policy", "round_robin", "--worker-urls", *workers]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, stderr=sys.stderr)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def answered(worker, model):
    """Requests that a daemon has answered."""
    lines = httpx.get(f"{worker}/metrics").text.splitlines()
    ours = re.compile(rf'vllm:request_success_total\{{.*model_name="{re.escape(model)}".*\}} (\S+)$')
    return sum(float(found[1]) for found in map(ours.match, lines) if found)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--worker", action="append", required=True)
    parser.add_argument("--stop", type=int, required=True)
    for name in ("model", "message"):
        parser.add_argument(f"--{name}", required=True)
    options = parser.parse_args()
    first, second = options.worker
    asked = {"model": options.model, "messages": [{"role": "user", "content": options.message}], "temperature": 0}

    with router(options.worker) as url:
        def ready():
            workers = httpx.get(f"{url}/workers").json()["workers"]
            return sum(worker["is_healthy"] and worker["status"] == "ready" for worker in workers) == 2

        def ask(**more):
            reply = httpx.post(f"{url}/v1/chat/completions", json={**asked, **more}, timeout=PATIENCE_S)
            expect(reply.status_code == 200, reply.status_code, reply.text)
            return reply

        wait_for("the router with both workers", ready)
        listed = [model["id"] for model in httpx.get(f"{url}/v1/models").json()["data"]]
        expect(listed == [options.model], "the router lists", listed)
        answers = {ask().json()["choices"][0]["message"]["content"] for _ in range(ROUNDS)}
        expect(len(answers) == 1, "several answers to one question:", answers)
        shares = [answered(worker, options.model) for worker in (first, second)]
        expect(sum(shares) == ROUNDS and min(shares) > 0, "answered by each:", shares)
        say("answered by each:", shares)
        streamed = ask(stream=True).text
        expect(streamed.startswith("data: ") and streamed.endswith("data: [DONE]\n\n"), "streamed:", streamed)

        os.kill(options.stop, signal.SIGTERM)
        before = answered(second, options.model)
        for _ in range(ROUNDS):
            expect({ask().json()["choices"][0]["message"]["content"]} == answers, "another answer from the other one")
        # One or the other may still have reached the daemon that drains.
        wait_for("the answers of the other one", lambda: answered(second, options.model) > before)
        say("answered by the other one:", answered(second, options.model) - before)
    print(answers.pop())


if __name__ == "__main__":
    main()
