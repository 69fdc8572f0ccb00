"""An endpoint picker for Envoy: sends a request to the daemon that is expected
to begin its answer first.

Envoy asks over ext_proc (gRPC) and shows each request's headers and body; the picker names the
daemon in the header `x-gateway-destination-endpoint`, as gateways of Kubernetes' inference
extension do, and Envoy's cluster goes there. What is known of a daemon comes from its
`/metrics`, read every REFRESH_S:

    seconds = rocmforge_model_expected_first_token_seconds of the model,
              or UNKNOWN_S where it is not loaded there
            + WAITING_S for each request that waits there (vllm:num_requests_waiting)
            + RUNNING_S for each one that runs there (vllm:num_requests_running)

The least wins, of equals the one that was chosen longest ago. A daemon that drains, or whose
metrics have not been read for STALE_S, is not chosen. A client may narrow the choice by the header
`x-gateway-destination-endpoint-subset`.

usage: endpoint_picker.py --listen HOST:PORT --endpoint HOST:PORT ...
"""

import argparse
import json
import re
import threading
import time
import urllib.request
from concurrent import futures

import grpc
from envoy.config.core.v3 import base_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as messages
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc as service
from envoy.type.v3 import http_status_pb2

REFRESH_S = 0.2
TIMEOUT_S = 2.0
STALE_S = 5.0
# What is assumed of a model of which a daemon has measured nothing, most often
# since it is not loaded there.
UNKNOWN_S = 10.0
WAITING_S = 5.0
RUNNING_S = 0.05
STREAMS_MAX = 64
METRICS_BYTES_MAX = 4 << 20

CHOSEN = "x-gateway-destination-endpoint"
SUBSET = "x-gateway-destination-endpoint-subset"
LINE = re.compile(r'^(?P<name>[\w:]+)(?:\{(?P<labels>.*)\})? (?P<value>\S+)$')
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
ESCAPED = {"\\\\": "\\", '\\"': '"', "\\n": "\n"}


class State:
    """What one reading of a daemon's metrics says."""

    def __init__(self, text):
        self.read_at = time.monotonic()
        self.first_token_s, self.residency, plain = {}, {}, {}
        for line in text.splitlines():
            found = LINE.match(line)
            if found is None:
                continue
            labels = {name: re.sub(r"\\.", lambda e: ESCAPED.get(e[0], e[0]), value)
                      for name, value in LABEL.findall(found["labels"] or "")}
            value = float(found["value"])
            match found["name"]:
                case "rocmforge_model_expected_first_token_seconds":
                    self.first_token_s[labels["model"]] = value
                case "rocmforge_model_residency_ratio":
                    self.residency[labels["model"]] = value
                case name if not labels:
                    plain[name] = value
        self.waiting = plain["vllm:num_requests_waiting"]
        self.running = plain["vllm:num_requests_running"]
        self.draining = plain["rocmforge_draining"] > 0

    def seconds(self, model):
        """Until a request for `model` that comes now would have its first token."""
        expected = self.first_token_s.get(model)
        if expected is None:
            # Loaded, and nothing was measured yet: what is resident need not be uploaded.
            expected = UNKNOWN_S * (1 - 0.9 * self.residency.get(model, 0))
        return expected + WAITING_S * self.waiting + RUNNING_S * self.running


class Endpoints:
    """The daemons, and what they last said. Threads share it."""

    def __init__(self, addresses):
        self.lock = threading.Lock()
        self.states = dict.fromkeys(addresses)
        # The order of the last choices, the oldest first.
        self.turns = list(addresses)

    def read(self, address):
        try:
            with urllib.request.urlopen(f"http://{address}/metrics", timeout=TIMEOUT_S) as reply:
                state = State(reply.read(METRICS_BYTES_MAX).decode())
        except (OSError, ValueError, KeyError):
            # It becomes stale.
            return
        with self.lock:
            self.states[address] = state

    def follow(self):
        """Keeps reading, in a thread for each daemon: one that hangs delays no other."""
        def forever(address):
            while True:
                self.read(address)
                time.sleep(REFRESH_S)

        for address in self.turns:
            threading.Thread(target=forever, args=(address,), daemon=True).start()

    def choose(self, model, subset=None):
        """The address for a request, or None where no daemon can be asked."""
        with self.lock:
            now = time.monotonic()
            usable = [address for address in self.turns if self.usable(address, now) and (not subset or address in subset)]
            if not usable:
                return None
            # The first of equals is the one that was chosen longest ago.
            chosen = min(usable, key=lambda address: self.states[address].seconds(model))
            self.turns.remove(chosen)
            self.turns.append(chosen)
            return chosen

    def usable(self, address, now):
        state = self.states[address]
        return state is not None and not state.draining and now - state.read_at < STALE_S


def wanted(body):
    """The model that a request names, or an empty text."""
    try:
        model = json.loads(body).get("model")
    except (ValueError, AttributeError):
        return ""
    return model if isinstance(model, str) else ""


def refusal(code, words):
    status = http_status_pb2.HttpStatus(code=code)
    body = json.dumps({"error": {"message": words, "type": "server_error", "param": None, "code": code}}).encode()
    return messages.ProcessingResponse(immediate_response=messages.ImmediateResponse(status=status, body=body))


def sent_to(address):
    header = base_pb2.HeaderValue(key=CHOSEN, raw_value=address.encode())
    replaced = base_pb2.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
    mutation = messages.HeaderMutation(set_headers=[base_pb2.HeaderValueOption(header=header, append_action=replaced)])
    return messages.CommonResponse(header_mutation=mutation)


class Picker(service.ExternalProcessorServicer):
    """One stream is one request that Envoy holds until it is answered."""

    def __init__(self, endpoints):
        self.endpoints = endpoints

    def Process(self, request_iterator, context):
        subset = None
        for message in request_iterator:
            match message.WhichOneof("request"):
                case "request_headers":
                    headers = {h.key: (h.raw_value.decode(errors="replace") or h.value)
                               for h in message.request_headers.headers.headers}
                    subset = [address.strip() for address in headers.get(SUBSET, "").split(",") if address.strip()]
                    if message.request_headers.end_of_stream:
                        # Without a body there is no model, and any daemon will do.
                        yield self.answer("", subset, "request_headers", messages.HeadersResponse)
                        return
                    yield messages.ProcessingResponse(request_headers=messages.HeadersResponse())
                case "request_body":
                    yield self.answer(wanted(message.request_body.body), subset, "request_body", messages.BodyResponse)
                    return
                case other:
                    context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"{other} is not to be sent here")

    def answer(self, model, subset, field, kind):
        address = self.endpoints.choose(model, subset)
        if address is None:
            return refusal(503, "no daemon can be asked now")
        return messages.ProcessingResponse(**{field: kind(response=sent_to(address))})


def serve(listen, addresses):
    """Starts the picker; gives its port, the endpoints and the server."""
    endpoints = Endpoints(addresses)
    endpoints.follow()
    server = grpc.server(futures.ThreadPoolExecutor(STREAMS_MAX))
    service.add_ExternalProcessorServicer_to_server(Picker(endpoints), server)
    port = server.add_insecure_port(listen)
    server.start()
    return port, endpoints, server


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--listen", required=True)
    parser.add_argument("--endpoint", action="append", required=True)
    options = parser.parse_args()
    _, _, server = serve(options.listen, options.endpoint)
    server.wait_for_termination()


if __name__ == "__main__":
    main()
