"""Talks to rocmforged with nothing but stock grpcio and the .proto files: what any other
language's client can do.

Stubs are generated at run time into a temporary directory. In order: health, reflection,
load, a greedy answer through the chat template, its counts, and the status code of a request
that must fail. The answer goes to stdout as it arrives, the rest to stderr; exit 0 only if
all of it was as it should be.

usage: grpc_client.py --socket PATH --model FILE.gguf [--message TEXT] [--max-tokens N]
"""

import argparse
import pathlib
import sys
import tempfile

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from grpc_tools import protoc

SERVICES = {f"rocmforge.v1.{name}" for name in ("Models", "Inference", "Cache", "Server")}


def generate_stubs(proto_dir, out):
    """Compiles every .proto below `proto_dir` and makes the result importable."""
    files = sorted(str(p) for p in proto_dir.rglob("*.proto"))
    if not files:
        raise SystemExit(f"no .proto files below {proto_dir}: pass --proto")
    arguments = ["protoc", f"--proto_path={proto_dir}", f"--python_out={out}", f"--grpc_python_out={out}", *files]
    if protoc.main(arguments) != 0:
        raise SystemExit("protoc failed: see above")
    sys.path.insert(0, str(out))


def say(*words):
    print(*words, file=sys.stderr)


def expect(condition, *words):
    if not condition:
        raise SystemExit("grpc_client: " + " ".join(map(str, words)))


def check_health(channel):
    reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    expect(reply.status == health_pb2.HealthCheckResponse.SERVING, "health is", reply.status)
    say("health: SERVING")


def check_reflection(channel):
    """Reflection v1 and v1alpha share their messages; the daemon has v1, so the stock v1alpha
    stub is pointed there."""
    listing = ProtoReflectionDescriptorDatabase(V1Channel(channel)).get_services()
    expect(SERVICES <= set(listing), "reflection lists", listing)
    say("reflection:", *sorted(listing))


class V1Channel:
    """A channel that calls grpc.reflection.v1 where the stub says v1alpha."""

    def __init__(self, channel):
        self.channel = channel

    def stream_stream(self, method, *args, **kwargs):
        return self.channel.stream_stream(method.replace(".v1alpha.", ".v1."), *args, **kwargs)


def load(models, pb, path):
    """Loads the file under a name of its own; the loaded model comes back."""
    loaded = None
    for event in models.Load(pb.LoadRequest(path=str(path), name="from-python")):
        if event.WhichOneof("event") == "loaded":
            loaded = event.loaded
    expect(loaded is not None, "Load ended without a loaded model")
    say("loaded:", loaded.name, loaded.architecture, loaded.n_layer, "layers")
    return loaded


def chat(inference, pb, model, message, max_tokens):
    """Streams the answer to stdout and checks that the counts agree with what arrived."""
    request = pb.ChatRequest(
        model=model.name,
        messages=[pb.ChatMessage(role="user", content=message)],
        sampling=pb.SamplingParams(temperature=0, max_tokens=max_tokens),
    )
    n_ids, done = 0, None
    for event in inference.Chat(request):
        expect(done is None, "an event after the last one")
        if event.WhichOneof("event") == "piece":
            n_ids += len(event.piece.token_ids)
            sys.stdout.write(event.piece.text)
            sys.stdout.flush()
        else:
            done = event.done
    print()
    expect(done is not None, "the stream ended without an outcome")
    expect(done.finish_reason != 0 and done.prompt_tokens > 0, "the outcome is empty:", done)
    expect(0 < done.generated_tokens <= max_tokens, done.generated_tokens, "tokens generated, at most", max_tokens)
    expect(abs(done.generated_tokens - n_ids) <= 1, n_ids, "ids arrived,", done.generated_tokens, "were generated")
    say("done:", done.generated_tokens, "tokens,", f"{done.ttft_ms:.1f} ms to the first")


def check_error(inference, pb):
    """A model that is not there: NOT_FOUND, with a message that names what is."""
    try:
        list(inference.Generate(pb.GenerateRequest(model="no-such-model", text="hello")))
    except grpc.RpcError as error:
        expect(error.code() == grpc.StatusCode.NOT_FOUND, "an unknown model gives", error.code(), error.details())
        expect("from-python" in error.details(), "the message does not name what is loaded:", error.details())
        say("unknown model:", error.code().name, error.details())
    else:
        expect(False, "an unknown model generated text")


def main():
    here = pathlib.Path(__file__).resolve().parent
    ap = argparse.ArgumentParser(description="load a model and chat with it, using stock grpcio")
    ap.add_argument("--socket", required=True)
    ap.add_argument("--model", required=True, type=lambda p: pathlib.Path(p).resolve())
    ap.add_argument("--message", default="42 - 30 = ?")
    ap.add_argument("--max-tokens", type=int, default=80)
    ap.add_argument("--proto", type=pathlib.Path, default=here.parent.parent / "proto")
    o = ap.parse_args()
    with tempfile.TemporaryDirectory() as out:
        generate_stubs(o.proto, pathlib.Path(out))
        from rocmforge.v1 import inference_pb2, inference_pb2_grpc, models_pb2, models_pb2_grpc

        # gRPC's core sends the socket's percent-encoded path as :authority, which HTTP/2
        # servers that check it refuse.
        options = [("grpc.default_authority", "localhost")]
        with grpc.insecure_channel(f"unix:{o.socket}", options=options) as channel:
            grpc.channel_ready_future(channel).result(timeout=10)
            check_health(channel)
            check_reflection(channel)
            models = models_pb2_grpc.ModelsStub(channel)
            inference = inference_pb2_grpc.InferenceStub(channel)
            model = load(models, models_pb2, o.model)
            chat(inference, inference_pb2, model, o.message, o.max_tokens)
            check_error(inference, inference_pb2)
            models.Unload(models_pb2.UnloadRequest(name=model.name))


if __name__ == "__main__":
    main()
