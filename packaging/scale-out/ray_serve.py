"""A Ray Serve application whose every replica holds a GPU and one rocmforged on it.

Ray gives a replica its card (HIP_VISIBLE_DEVICES, CUDA_VISIBLE_DEVICES), which the daemon inherits.
The daemon serves HTTP on a Unix socket of its own, so that only its replica reaches it; the replica
hands requests on and answers back, streamed. A replica whose daemon has ended is unhealthy, and Ray
starts another. Ray shares requests by their number alone, and knows nothing of residency: give all
replicas the same models.

    pip install "ray[serve]" httpx
    cd packaging/scale-out
    serve run ray_serve:build program=/usr/bin/rocmforged \\
        model_dir=/srv/models replicas=2

Or in a Serve configuration file, with `import_path: ray_serve:build` and the same names as `args`.
"""

import asyncio
import os
import subprocess
import tempfile
import time

import httpx
from ray import serve
from starlette.requests import Request
from starlette.responses import StreamingResponse

START_S = 120
# What the daemon gives running requests, and a little for the end.
STOP_S = 30
# Of one hop only.
HOP_HEADERS = {"connection", "content-length", "host", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"}


def handed_on(headers):
    return [(name, value) for name, value in headers if name.lower() not in HOP_HEADERS]


@serve.deployment(ray_actor_options={"num_gpus": 1, "num_cpus": 1}, max_ongoing_requests=256, health_check_period_s=2,
                  graceful_shutdown_timeout_s=STOP_S + 5)
class Rocmforged:
    """Owns the daemon's process, from its own beginning to its own end."""

    def __init__(self, program, model_dir, arguments=()):
        self.dir = tempfile.TemporaryDirectory(prefix="rocmforged-")
        http = os.path.join(self.dir.name, "http")
        command = [program, "--socket", os.path.join(self.dir.name, "grpc"), "--http-socket", http, "--model-dir", model_dir]
        self.process = subprocess.Popen([*command, *arguments], stdin=subprocess.DEVNULL)
        try:
            self.wait(http)
        except BaseException:
            self.stop()
            raise
        transport = httpx.AsyncHTTPTransport(uds=http, limits=httpx.Limits(max_connections=None))
        # An answer may take longer than any usual limit.
        self.client = httpx.AsyncClient(transport=transport, base_url="http://rocmforged", timeout=httpx.Timeout(None))

    def wait(self, http):
        """Until the daemon serves."""
        end = time.monotonic() + START_S
        with httpx.Client(transport=httpx.HTTPTransport(uds=http), base_url="http://rocmforged") as client:
            while time.monotonic() < end:
                self.check_health()
                try:
                    if client.get("/health").status_code == 200:
                        return
                except httpx.TransportError:
                    pass
                time.sleep(0.05)
        raise RuntimeError(f"rocmforged did not serve within {START_S} s")

    def check_health(self):
        """Asked by Ray: a replica without its daemon is replaced."""
        code = self.process.poll()
        if code is not None:
            raise RuntimeError(f"rocmforged has ended with {code}")

    async def __call__(self, request: Request):
        target = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        sent = self.client.build_request(
            request.method, target, headers=handed_on(request.headers.items()), content=await request.body())
        answer = await self.client.send(sent, stream=True)

        async def body():
            # Left early, as by a client that goes, it closes the connection, and
            # the daemon ends the request.
            try:
                async for piece in answer.aiter_raw():
                    yield piece
            finally:
                await asyncio.shield(answer.aclose())

        return StreamingResponse(body(), answer.status_code, dict(handed_on(answer.headers.items())))

    def stop(self):
        self.process.terminate()
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.dir.cleanup()

    def __del__(self):
        if hasattr(self, "process"):
            self.stop()


def build(args):
    """The application: `program`, `model_dir`, `replicas`, and `arguments` for the
    daemon, separated by spaces."""
    replicas = int(args.get("replicas", 1))
    arguments = args.get("arguments", "").split()
    return Rocmforged.options(num_replicas=replicas).bind(args["program"], args["model_dir"], arguments)
