"""Talks to rocmforged with the applications' own libraries: openai, anthropic and ollama, as
their users install them.

Nothing is loaded beforehand: the first request of all does it. Each library is used plain and
streamed, counts and models are asked for, an error is provoked whose type the library has to
recognise, and a stream is left in the middle. The greedy answer of each goes to stdout, one a line;
what is done goes to stderr. Exit 0 only if all was as it should be.

usage: http_clients.py --url http://127.0.0.1:PORT --token TOKEN --model NAME --message TEXT
"""

import argparse
import json
import sys
from typing import Literal

import anthropic
import httpx
import ollama
import openai
import pydantic

NO_SUCH_MODEL = "no-such-model"


def say(*words):
    print(*words, file=sys.stderr, flush=True)


def expect(condition, *words):
    if not condition:
        raise SystemExit("http_clients: " + " ".join(map(str, words)))


def with_openai(url, token, model, message):
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=token, max_retries=0)
    expect(model in [m.id for m in client.models.list()], "openai: the model is not listed")
    asked = {"model": model, "messages": [{"role": "user", "content": message}], "temperature": 0, "max_tokens": 32}
    whole = client.chat.completions.create(**asked)
    answer = whole.choices[0].message.content
    expect(whole.choices[0].finish_reason == "stop", "openai: ended with", whole.choices[0].finish_reason)
    expect(whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens, "openai:", whole.usage)

    text, reasons, usage = "", [], None
    for chunk in client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        if chunk.usage:
            usage = chunk.usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reasons += [choice.finish_reason] if choice.finish_reason else []
    expect(text == answer, "openai: streamed", repr(text), "but whole", repr(answer))
    expect(reasons == ["stop"], "openai: reasons", reasons)
    expect(usage == whole.usage, "openai: usage", usage, whole.usage)

    with client.chat.completions.stream(**asked) as stream:
        final = stream.get_final_completion()
    expect(final.choices[0].message.content == answer, "openai: the helper has", final)

    asked_response = {"model": model, "input": message, "temperature": 0, "max_output_tokens": 32}
    response = client.responses.create(**asked_response)
    expect(response.output_text == answer and response.status == "completed", "openai: response", response)
    with client.responses.stream(**asked_response) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    expect(kinds[0] == "response.created" and kinds[-1] == "response.completed", "openai: events", kinds)
    expect(final.output_text == answer, "openai: the streamed response", final)
    expect(final.usage.output_tokens == response.usage.output_tokens, "openai: usage", final.usage)

    completion = client.completions.create(model=model, prompt="Once upon a time", max_tokens=4, temperature=0)
    expect(completion.choices[0].finish_reason == "length", "openai: completion", completion)
    embedded = client.embeddings.create(model=model, input=[message, "Once upon a time"])
    expect(len(embedded.data) == 2, "openai: embeddings", embedded.usage)
    for one in embedded.data:
        expect(abs(sum(x * x for x in one.embedding) - 1) < 1e-3, "openai: the length of an embedding")
    several = client.chat.completions.create(**asked, n=2, logprobs=True, top_logprobs=2)
    expect([choice.message.content for choice in several.choices] == [answer] * 2, "openai: several", several)
    told = several.choices[1].logprobs.content
    expect("".join(token.token for token in told) == answer, "openai: logprobs", told)
    expect(all(len(token.top_logprobs) == 2 for token in told), "openai: top_logprobs", told)

    class Verdict(pydantic.BaseModel):
        right: bool
        why: Literal["sum", "difference"]

    parsed = client.chat.completions.parse(**asked, response_format=Verdict)
    expect(isinstance(parsed.choices[0].message.parsed, Verdict), "openai: parsed", parsed)
    parsed = client.responses.parse(**asked_response, text_format=Verdict)
    expect(isinstance(parsed.output_parsed, Verdict), "openai: parsed response", parsed)

    raw = client.models.with_raw_response.list(extra_headers={"x-request-id": "from-python"})
    expect(raw.headers["x-request-id"] == "from-python", "openai: request id", raw.headers)

    expect_raises(openai.NotFoundError, lambda: client.chat.completions.create(**{**asked, "model": NO_SUCH_MODEL}))
    refused = expect_raises(openai.BadRequestError, lambda: client.chat.completions.create(**asked, n=9))
    expect(refused.param == "n", "openai: param", refused.param)
    stranger = openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0)
    expect_raises(openai.AuthenticationError, stranger.models.list)

    with client.chat.completions.create(**asked, stream=True) as stream:
        next(iter(stream))
    say("openai", openai.__version__, "is content")
    return answer


def with_anthropic(url, token, model, message):
    client = anthropic.Anthropic(base_url=url, api_key=token, max_retries=0)
    expect(model in [m.id for m in client.models.list()], "anthropic: the model is not listed")
    asked = {"model": model, "messages": [{"role": "user", "content": message}], "max_tokens": 32}
    # The library has no argument for it any more, the route has.
    asked["extra_body"] = {"temperature": 0}
    whole = client.messages.create(**asked)
    answer = "".join(block.text for block in whole.content if block.type == "text")
    expect(whole.stop_reason == "end_turn", "anthropic: ended with", whole.stop_reason)
    expect(whole._request_id, "anthropic: the answer has no request id")

    with client.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    expect(text == answer, "anthropic: streamed", repr(text), "but whole", repr(answer))
    expect(final.stop_reason == "end_turn" and final.usage.output_tokens == whole.usage.output_tokens, "anthropic:", final)

    counted = client.messages.count_tokens(model=model, messages=asked["messages"])
    read = whole.usage.cache_read_input_tokens
    expect(counted.input_tokens == whole.usage.input_tokens + read, "anthropic: counted", counted, whole.usage)

    expect_raises(anthropic.NotFoundError, lambda: client.messages.create(**{**asked, "model": NO_SUCH_MODEL}))
    expect_raises(anthropic.BadRequestError, lambda: client.messages.create(**{**asked, "extra_body": {"temperature": -1}}))
    stranger = anthropic.Anthropic(base_url=url, api_key="wrong", max_retries=0)
    expect_raises(anthropic.AuthenticationError, lambda: stranger.messages.create(**asked))
    say("anthropic", anthropic.__version__, "is content")
    return answer


def with_ollama(url, token, model, message):
    client = ollama.Client(host=url, headers={"authorization": f"Bearer {token}"})
    expect(model in [m.model for m in client.list().models], "ollama: the model is not listed")
    options = {"temperature": 0, "num_predict": 32, "num_ctx": 256}
    asked = {"model": model, "messages": [{"role": "user", "content": message}], "options": options, "keep_alive": "5m"}
    whole = client.chat(**asked)
    answer = whole.message.content
    expect(whole.done and whole.done_reason == "stop" and whole.eval_count > 0, "ollama:", whole)

    parts = list(client.chat(**asked, stream=True))
    text = "".join(part.message.content or "" for part in parts)
    expect(text == answer, "ollama: streamed", repr(text), "but whole", repr(answer))
    expect([part.done for part in parts] == [False] * (len(parts) - 1) + [True], "ollama: done comes last")

    generated = client.generate(model=model, prompt=message, options=options)
    expect(generated.response == answer, "ollama: generated", repr(generated.response))
    scored = client.chat(**asked, logprobs=True, top_logprobs=2)
    expect("".join(token.token for token in scored.logprobs) == answer, "ollama: logprobs", scored.logprobs)
    # It is greedy: the likeliest is the one.
    likeliest = [(token.token, token.logprob) for token in scored.logprobs]
    tops = [[(top.token, top.logprob) for top in token.top_logprobs] for token in scored.logprobs]
    expect([top[0] for top in tops] == likeliest and all(len(top) == 2 for top in tops), "ollama: top_logprobs", tops)
    parts = client.chat(**asked, logprobs=True, top_logprobs=2, stream=True)
    streamed = [token for part in parts for token in part.logprobs or []]
    expect(streamed == list(scored.logprobs), "ollama: streamed logprobs", streamed)
    generated = client.generate(model=model, prompt=message, options=options, logprobs=True, top_logprobs=2)
    expect(generated.logprobs == scored.logprobs, "ollama: logprobs of a text", generated.logprobs)
    expect(model in [m.model for m in client.ps().models], "ollama: it is not among the loaded ones")
    # Open to further members, a small model would add them without end.
    schema = {
        "type": "object",
        "properties": {"right": {"type": "boolean"}},
        "required": ["right"],
        "additionalProperties": False,
    }
    held = client.chat(**{**asked, "format": schema})
    expect(isinstance(json.loads(held.message.content)["right"], bool), "ollama: held to a schema", held)
    embedded = client.embed(model=model, input=[message, "Once upon a time"])
    expect(len(embedded.embeddings) == 2, "ollama: embeddings")
    shown = client.show(model)
    expect(shown.modelinfo["general.architecture"] == "llama", "ollama: shown", shown.modelinfo)

    refused = expect_raises(ollama.ResponseError, lambda: client.chat(**{**asked, "model": NO_SUCH_MODEL}))
    expect(refused.status_code == 404, "ollama: status", refused.status_code)
    refused = expect_raises(ollama.ResponseError, lambda: client.chat(**{**asked, "options": {"temperature": -1}}))
    expect("options.temperature" in refused.error, "ollama: error", refused.error)
    say("ollama is content")
    return answer


def expect_raises(kind, call):
    try:
        call()
    except kind as error:
        return error
    raise SystemExit(f"http_clients: {kind.__name__} was expected")


def nothing_runs(url, token):
    """The streams that were left are ended, not run to their end."""
    metrics = httpx.get(f"{url}/metrics", headers={"authorization": f"Bearer {token}"}).text
    values = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if not line.startswith("#"))
    expect(float(values["vllm:num_requests_waiting"]) == 0, "metrics: requests wait")
    say("metrics:", values["vllm:num_requests_running"], "run")


def main():
    parser = argparse.ArgumentParser()
    for name in ("url", "token", "model", "message"):
        parser.add_argument(f"--{name}", required=True)
    options = parser.parse_args()
    for client in (with_openai, with_anthropic, with_ollama):
        print(client(options.url, options.token, options.model, options.message), flush=True)
    nothing_runs(options.url, options.token)


if __name__ == "__main__":
    main()
