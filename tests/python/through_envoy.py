"""Puts Envoy with our endpoint picker before two daemons, and asks through it.

The first daemon has used one model and the second one the other: a request goes to the daemon that
holds its model. Then both have the first model and the first daemon is full: what it would make
wait goes to the second one. Then that one is stopped, and the first one answers all. The daemons
run one request at a time. Each step that went well is a line of stdout.

usage: through_envoy.py --config FILE --endpoint HOST:PORT --endpoint HOST:PORT --stop PID --model
NAME --model NAME (PID is the second daemon's)
"""

import argparse
import contextlib
import importlib.util
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time

import httpx

import endpoint_picker
from through_smg import answered, expect, free_ports, wait_for

PATIENCE_S = 60


def program():
    """Envoy's executable in its Python package, whose directory other packages share."""
    package = importlib.util.find_spec("envoy").submodule_search_locations
    return next(path for path in (pathlib.Path(place, "_bin/envoy") for place in package) if path.is_file())


@contextlib.contextmanager
def kept_busy(url, body, clients):
    """`clients` ask for `body` (a stream) again and again, each behind the other,
    until the end of the block.

    However fast the daemon is: what one long answer takes would bound how long the block may.
    """
    over = threading.Event()

    def ask():
        while not over.is_set():
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE_S) as reply:
                for _ in reply.iter_raw():
                    if over.is_set():
                        return

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join(PATIENCE_S)


@contextlib.contextmanager
def envoy(config, picker_port):
    """Envoy with the example's configuration on other ports; gives its URL."""
    (port,) = free_ports(1)
    text = pathlib.Path(config).read_text()
    for shown, ours in (("port_value: 8080", port), ("port_value: 9002", picker_port)):
        expect(text.count(shown) == 1, config, "has not one", shown)
        text = text.replace(shown, f"port_value: {ours}")
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(text)
        file.flush()
        command = [program(), "-c", file.name, "--use-dynamic-base-id", "--concurrency", "1", "--log-level", "warn"]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, stderr=sys.stderr)
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(20)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True)
    parser.add_argument("--endpoint", action="append", required=True)
    parser.add_argument("--stop", type=int, required=True)
    parser.add_argument("--model", action="append", required=True)
    options = parser.parse_args()
    first, second = options.endpoint
    one, other = options.model

    def ask(url, model, **more):
        asked = {"model": model, "prompt": "Once upon a time", "max_tokens": 4, "temperature": 0, **more}
        reply = httpx.post(f"{url}/v1/completions", json=asked, timeout=PATIENCE_S)
        expect(reply.status_code == 200, reply.status_code, reply.text)

    def counts():
        return [[answered(f"http://{endpoint}", model) for model in options.model] for endpoint in options.endpoint]

    ask(f"http://{first}", one)
    ask(f"http://{second}", other)
    picker_port, endpoints, server = endpoint_picker.serve("127.0.0.1:0", options.endpoint)

    def known(condition):
        """The picker sees what its next choices are to rest on."""
        wait_for("what the picker was to see", lambda: all(endpoints.states.values()) and condition(*(
            endpoints.states[endpoint] for endpoint in options.endpoint)))

    with envoy(options.config, picker_port) as url:
        wait_for("envoy", lambda: httpx.get(f"{url}/health").status_code == 200)
        known(lambda a, b: a.residency.get(one) == 1 and b.residency.get(other) == 1)
        for model in (one, other, other, one, one, other):
            ask(url, model)
        expect(counts() == [[4, 0], [0, 4]], "each model is asked of the daemon that holds it, and not", counts())
        print("residency")

        ask(f"http://{second}", one)
        known(lambda a, b: b.residency.get(one) == 1 and one in a.first_token_s and one in b.first_token_s)
        before = counts()
        long = {"model": one, "prompt": "Once", "max_tokens": 4000, "ignore_eos": True, "stream": True}
        # The daemon runs one at a time, so that the others wait.
        with kept_busy(f"http://{first}", long, 6):
            known(lambda a, b: a.waiting > 1 and b.waiting == 0)
            for _ in range(3):
                ask(url, one)
        expect(counts()[1][0] == before[1][0] + 3, "a full daemon is passed over, and not", before, counts())
        print("queue")

        os.kill(options.stop, signal.SIGTERM)
        wait_for("the end of the second daemon's metrics", lambda: not endpoints.usable(second, time.monotonic()))
        ask(url, other)
        print("failure")
    server.stop(None)


if __name__ == "__main__":
    main()
