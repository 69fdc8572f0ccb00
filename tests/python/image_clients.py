"""Shows an image to rocmforged with the applications' own libraries: openai, anthropic and ollama,
as their users install them, and with the calls that Open WebUI makes.

The greedy answer of each goes to stdout, one a line. Exit 0 only if the image counts as tokens, a
second turn is answered, and a damaged image is refused with an error that the library recognises.

usage: image_clients.py --make DIR --fixtures DIR
       image_clients.py --url http://127.0.0.1:PORT --token TOKEN --model NAME
"""

import argparse
import base64
import json
import pathlib
import struct
import zlib

import anthropic
import httpx
import ollama
import openai

from http_clients import expect, expect_raises

QUESTION = "What is it?"
TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}<|image_pad|>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>{% endfor %}"
)
# The number of a vocabulary's token that becomes the placeholder.
PAD = 1195


def seeing(fixtures, into):
    """A model of the fixtures with a template and a placeholder for images, which it lacks, and its
    projector beside it."""
    data = bytearray((fixtures / "arch/qwen3vl.gguf").read_bytes())
    types = b"tokenizer.ggml.token_type"
    # A control token: behind the key, the type of the value, that of the elements, their number.
    at = data.index(types) + len(types) + 16 + 4 * PAD
    data[at : at + 4] = struct.pack("<I", 3)
    name, placeholder = b"[PAD%d]" % PAD, b"<|image_pad|>"
    at = data.index(name)
    data[at : at + len(name)] = placeholder
    data[at - 8 : at] = struct.pack("<Q", len(placeholder))
    # One more key, in front of the others, as long as leaves the tensors where they have to be.
    key = b"tokenizer.chat_template"
    fixed = 8 + len(key) + 4 + 8 + len(placeholder) - len(name)
    template = TEMPLATE.encode() + b"{#"
    template += b" " * (-(fixed + len(template) + 2) % 32) + b"#}"
    pair = struct.pack("<Q", len(key)) + key + struct.pack("<IQ", 8, len(template)) + template
    data[24:24] = pair
    data[16:24] = struct.pack("<Q", struct.unpack("<Q", data[16:24])[0] + 1)
    (into / "seeing.gguf").write_bytes(data)
    (into / "mmproj-F16.gguf").write_bytes((fixtures / "images/qwen3vl-mmproj.gguf").read_bytes())


def png(width, height):
    """A PNG file of a pattern."""
    rows = b"".join(
        b"\0" + bytes(c & 255 for x in range(width) for c in (x * 3, y * 5, x ^ y)) for y in range(height)
    )

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = [(b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(kind, data) for kind, data in parts)


IMAGE = png(64, 48)
# 64 x 48 pixels are 4 x 3 squares of two patches of 8 pixels.
IMAGE_TOKENS = 12


def encoded(image):
    return base64.b64encode(image).decode()


def url_of(image):
    return "data:image/png;base64," + encoded(image)


def with_openai(url, token, model):
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=token, max_retries=0)

    def ask(content, **more):
        messages = [{"role": "user", "content": content}]
        return client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=8, **more)

    text = {"type": "text", "text": QUESTION}
    image = {"type": "image_url", "image_url": {"url": url_of(IMAGE), "detail": "auto"}}
    seen = ask([image, text])
    tokens = seen.usage.prompt_tokens - ask([text]).usage.prompt_tokens
    expect(tokens == IMAGE_TOKENS, "openai: the image has", tokens, "tokens")
    answer = seen.choices[0].message.content
    streamed = "".join(c.choices[0].delta.content or "" for c in ask([image, text], stream=True) if c.choices)
    expect(streamed == answer, "openai: streamed", repr(streamed), "but whole", repr(answer))
    parts = [{"type": "input_image", "image_url": url_of(IMAGE)}, {"type": "input_text", "text": QUESTION}]
    asked = [{"role": "user", "content": parts}]
    response = client.responses.create(model=model, input=asked, temperature=0, max_output_tokens=8)
    expect(response.output_text == answer, "openai: the response has", repr(response.output_text))
    damaged = {"type": "image_url", "image_url": {"url": url_of(IMAGE[:60])}}
    error = expect_raises(openai.BadRequestError, lambda: ask([damaged]))
    expect("damaged" in str(error), "openai: the error is", error)
    return answer


def with_anthropic(url, token, model):
    client = anthropic.Anthropic(base_url=url, api_key=token, max_retries=0)

    def block(image):
        return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": encoded(image)}}

    def ask(content):
        messages = [{"role": "user", "content": content}]
        return client.messages.create(model=model, messages=messages, max_tokens=8, extra_body={"temperature": 0})

    text = {"type": "text", "text": QUESTION}
    seen = ask([block(IMAGE), text])
    error = expect_raises(anthropic.BadRequestError, lambda: ask([block(IMAGE[:60])]))
    expect("damaged" in str(error), "anthropic: the error is", error)
    counted = client.messages.count_tokens(model=model, messages=[{"role": "user", "content": [block(IMAGE), text]}])
    alone = client.messages.count_tokens(model=model, messages=[{"role": "user", "content": [text]}])
    tokens = counted.input_tokens - alone.input_tokens
    expect(tokens == IMAGE_TOKENS, "anthropic: the image has", tokens, "tokens")
    return seen.content[0].text


def with_ollama(url, token, model):
    client = ollama.Client(host=url, headers={"authorization": f"Bearer {token}"})
    options = {"temperature": 0, "num_predict": 8}
    message = {"role": "user", "content": QUESTION, "images": [IMAGE]}
    chat = client.chat(model=model, messages=[message], options=options)
    generated = client.generate(model=model, prompt=QUESTION, images=[IMAGE], options=options)
    answer = chat.message.content
    expect(generated.response == answer, "ollama: generated", repr(generated.response), "but", repr(answer))
    expect("vision" in client.show(model).capabilities, "ollama: the model does not see")
    broken = dict(message, images=[IMAGE[:60]])
    error = expect_raises(ollama.ResponseError, lambda: client.chat(model=model, messages=[broken]))
    expect("damaged" in str(error), "ollama: the error is", error)
    return answer


def with_open_webui(url, token, model):
    """Its calls, as it makes them for a user who attaches a picture and asks twice: the image stands
    behind the text, and comes again with the second turn."""
    client = httpx.Client(base_url=url, headers={"authorization": f"Bearer {token}"}, timeout=60)
    text = {"type": "text", "text": QUESTION}
    first = {"role": "user", "content": [text, {"type": "image_url", "image_url": {"url": url_of(IMAGE)}}]}

    def ask(messages):
        body = {"stream": True, "model": model, "messages": messages, "temperature": 0, "max_tokens": 8}
        said = ""
        with client.stream("POST", "/v1/chat/completions", json=body) as reply:
            expect(reply.status_code == 200, "open-webui: status", reply.status_code)
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        said += choice["delta"].get("content") or ""
        return said

    answer = ask([first])
    said = {"role": "assistant", "content": answer}
    ask([first, said, {"role": "user", "content": "And what else?"}])
    metrics = client.get("/metrics").text
    read = [line for line in metrics.splitlines() if line.startswith("rocmforge_images_read_total ")]
    expect(read[0].split()[1] == "1", "one image was shown to all, but", read)


def main():
    parser = argparse.ArgumentParser()
    for name in ("make", "fixtures", "url", "token", "model"):
        parser.add_argument(f"--{name}")
    options = parser.parse_args()
    if options.make:
        seeing(pathlib.Path(options.fixtures), pathlib.Path(options.make))
        return
    asked = (options.url, options.token, options.model)
    for client in (with_openai, with_anthropic, with_ollama):
        print(repr(client(*asked)), flush=True)
    with_open_webui(*asked)


if __name__ == "__main__":
    main()
