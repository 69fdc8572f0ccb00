#!/usr/bin/env python3
"""Writes the seeds of the fuzz targets below corpus/: forged ones, and headers of
tests/fixtures without vocabularies."""

import json
import struct
import zlib
from pathlib import Path

HERE = Path(__file__).resolve().parent
FIXTURES = HERE.parent / "fixtures"
PART, ITEM = b"\xff", b"\xfe"
# Sizes of GGUF's scalar types by number; 8 is a string, 9 an array.
SCALARS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}


def put(target: str, name: str, data: bytes | str) -> None:
    folder = HERE / "corpus" / target
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(data.encode() if isinstance(data, str) else data)


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def value_end(data: bytes, at: int, kind: int) -> int:
    """Where the value of a kind ends that begins at a byte."""
    if kind == 8:
        return at + 8 + struct.unpack_from("<Q", data, at)[0]
    if kind == 9:
        kind, count = struct.unpack_from("<IQ", data, at)
        at += 12
        if kind in SCALARS:
            return at + count * SCALARS[kind]
        for _ in range(count):
            at = value_end(data, at, kind)
        return at
    return at + SCALARS[kind]


def without_vocabulary(data: bytes) -> bytes:
    """The header of a model, its keys of the tokenizer left out."""
    n_tensors, n_keys = struct.unpack_from("<QQ", data, 8)
    at, keys = 24, []
    for _ in range(n_keys):
        length = struct.unpack_from("<Q", data, at)[0]
        name = data[at + 8 : at + 8 + length]
        kind = struct.unpack_from("<I", data, at + 8 + length)[0]
        end = value_end(data, at + 12 + length, kind)
        if not name.startswith((b"tokenizer.", b"general.quant")):
            keys.append(data[at:end])
        at = end
    table = at
    for _ in range(n_tensors):
        at += 8 + struct.unpack_from("<Q", data, at)[0]
        at += 4 + 8 * struct.unpack_from("<I", data, at)[0] + 12
    head = data[:8] + struct.pack("<QQ", n_tensors, len(keys))
    return head + b"".join(keys) + data[table:at]


def key(name: str, kind: int, value: bytes) -> bytes:
    return string(name) + struct.pack("<I", kind) + value


def headers() -> None:
    keys = [
        key("general.architecture", 8, string("llama")),
        key("general.alignment", 4, struct.pack("<I", 64)),
        key("a.u8", 0, b"\x07"),
        key("a.bool", 7, b"\x01"),
        key("a.f64", 12, struct.pack("<d", 0.5)),
        key("a.i64s", 9, struct.pack("<IQ3q", 11, 3, 1, -2, 3)),
        key("a.texts", 9, struct.pack("<IQ", 8, 2) + string("one") + string("")),
        key("a.nested", 9, struct.pack("<IQ", 9, 1) + struct.pack("<IQ2H", 2, 2, 5, 6)),
    ]
    tensors = [
        string("a.weight") + struct.pack("<I2QIQ", 2, 8, 2, 0, 0),
        string("b.weight") + struct.pack("<IQIQ", 1, 32, 8, 64),
    ]
    whole = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys))
    whole += b"".join(keys) + b"".join(tensors)
    whole += bytes(-len(whole) % 64) + bytes(64 + 34)
    put("header", "whole", whole)
    put("header", "cut", whole[:150])
    put("header", "no_keys", b"GGUF" + struct.pack("<IQQ", 2, 0, 0))
    put("header", "many_keys", b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 40))
    split = [key("split.no", 2, b"\0\0"), key("split.count", 2, b"\2\0"), key("split.tensors.count", 5, b"\2\0\0\0")]
    put("header", "split", b"GGUF" + struct.pack("<IQQ", 3, 0, 3) + b"".join(split))
    for path in sorted(FIXTURES.glob("arch/*.gguf")):
        header = without_vocabulary(path.read_bytes())
        if len(header) < 14_000:
            put("tensors", path.stem, header)
    header = without_vocabulary((FIXTURES / "tiny-llama-Q4_K_M.gguf").read_bytes())
    put("tensors", "llama", header)
    put("header", "llama", header + bytes(64))


def vocabularies() -> None:
    def one(model, pre, tokens, types, scores, merges, ids, text) -> bytes:
        items = lambda texts: ITEM.join(t.encode() for t in texts)
        signed = lambda numbers: bytes(n & 0xFF for n in numbers)
        parts = [model.encode(), pre.encode(), items(tokens), bytes(types), signed(scores), items(merges), bytes(ids)]
        return PART.join([*parts, text.encode()])

    letters = list("abcdeinorst") + ["Ġ", "Ċ", "Ã", "©", "1", "!"]
    bpe = letters + ["Ġa", "in", "st", "Ġin", "<|im_start|>", "<|im_end|>", "<tool>"]
    types = [1] * (len(letters) + 4) + [3, 3, 4]
    merges = ["Ġ a", "i n", "s t", "Ġ in"]
    ids = [len(letters) + 4, len(letters) + 5]
    text = "a string is in <|im_start|>\n<tool> 1!é"
    for pre in ["llama-bpe", "gpt-2", "qwen2", "tekken", "deepseek-v3", "gpt-4o", "falcon", "superbpe", "kimi-k2"]:
        put("tokenizer", pre, one("gpt2", pre, bpe, types, [], merges, ids, text))
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in (0x0A, 0x20, 0xC3, 0xA9)), "▁", "a", "b", "▁a", "ab", "▁▁", "é"]
    kinds = [2, 3, 3, 6, 6, 6, 6] + [1] * 7
    scores = [0, 0, 0, 0, 0, 0, 0, -1, -5, -6, -2, -3, -4, -7]
    put("tokenizer", "spm", one("llama", "", tokens, kinds, scores, [], [1, 2, 0], "ab  a\nbé</s>x"))
    flags = [1, 2, 0, 255, 255, 255, 255, 1, 1, 0]
    put("tokenizer", "spm_flags", one("llama", "default", tokens, kinds, scores, [], flags, " ab"))
    put("tokenizer", "twice", one("gpt2", "gpt-2", ["a", "a"], [1, 1], [], ["a a"], [0], "aa"))


def templates() -> None:
    def one(template, messages, tool="", ending="") -> bytes:
        texts = ITEM.join(text.encode() for pair in messages for text in pair)
        return PART.join([template.encode(), texts, tool.encode(), ending.encode()])

    chat = [("system", "Be brief."), ("user", "Say <|im_end|>"), ("assistant", "yes")]
    chatml = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m.content + '<|im_end|>\\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    tool = json.dumps({"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}})
    put("template", "chatml", one(chatml, chat))
    put("template", "continued", one(chatml, chat, "", "c"))
    put("template", "closed", one(chatml, chat, "", "e"))
    pieces = {
        "tools": "{% if tools %}{{ tools[0]|tojson(indent=2) }}{% endif %}{{ bos_token }}{{ messages|length }}",
        "namespace": "{%- set ns = namespace(i=0) -%}{% for m in messages[::-1] %}{% set ns.i = ns.i + loop.index0 %}{% endfor %}{{ ns.i }}",
        "raise": "{{ raise_exception('roles ' ~ messages[0].role) }}",
        "percent": "{{ '%s %d %05.2f' % (messages[0].role, 3, 1.5) }}{{ '%r' % 'x' }}",
        "methods": "{{ ' aB '.strip().upper().split('B')|join(',') }}{{ 'abc'[1:] }}{{ {'a': 1}.items()|list }}{{ [1, 2].index(2) }}",
        "strings": "{{ 'a-b'.partition('-') }}{{ 'x'.center(9, '*') }}{{ 'ab'.removeprefix('a').ljust(4).zfill(7) }}",
        "macro": "{% macro f(x, y=2) %}[{{ x }}{{ y }}]{% endmacro %}{{ f(1) }}{% call f(3) %}{% endcall %}",
        "raw": "{% raw %}{{ x }}{% endraw %}{# c #}{% generation %}y{% endgeneration %}\r\n",
        "filters": "{{ messages|map(attribute='role')|unique|sort|first|default('x', true)|title }}{{ [3,1]|max }}",
        "time": "{{ strftime_now('%d %b %Y %j %U') }}{{ 1e20 }}{{ 7 // 2 }}{{ 2 ** 3 }}{{ none is iterable }}",
        "control": "{% for i in range(5) %}{% if i == 1 %}{% continue %}{% elif i == 3 %}{% break %}{% endif %}{{ i }}{% else %}-{% endfor %}",
    }
    for name, template in pieces.items():
        put("template", name, one(template, chat, tool))


def requests() -> None:
    """The first byte chooses the route: targets/http.rs and targets/grpc.rs have them."""

    def http(name: str, route: int, body) -> None:
        put("http", name, bytes([route]) + json.dumps(body).encode())

    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    function = {"name": "f", "description": "d", "parameters": schema}
    sampling = {"temperature": 0.7, "top_p": 0.9, "seed": 7, "stop": ["\n"], "max_tokens": 4, "stream": True}
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{\"a\": 1}"}}
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
    ]
    http("chat", 0, {"model": "m", "messages": messages, "tools": [{"type": "function", "function": function}],
                     "tool_choice": "auto", "logprobs": True, "top_logprobs": 2, "n": 2, **sampling})
    http("chat_schema", 0, {"model": "m", "messages": messages[:2], "logit_bias": {"5": -100}, "min_p": 0.1, "top_k": 4,
                            "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
                            "stream_options": {"include_usage": True}, "chat_template_kwargs": {"enable_thinking": False}})
    http("completion", 1, {"model": "m", "prompt": ["a", "b"], "echo": True, "logprobs": 3, "best_of": 1, **sampling})
    http("completion_ids", 1, {"model": "m", "prompt": [1, 2, 3], "suffix": None, "grammar": "root ::= \"a\""})
    http("embeddings", 2, {"model": "m", "input": ["a", "b"], "encoding_format": "base64", "dimensions": 8})
    http("responses", 3, {"model": "m", "input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
                                                  {"type": "function_call_output", "call_id": "c1", "output": "2"}],
                          "instructions": "i", "text": {"format": {"type": "json_object"}}, "max_output_tokens": 9})
    http("messages", 4, {"model": "m", "max_tokens": 5, "system": [{"type": "text", "text": "s"}],
                         "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]},
                                      {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}}]},
                                      {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "2"}]}],
                         "tools": [{"name": "f", "input_schema": schema}], "stop_sequences": ["x"], "thinking": {"type": "disabled"}})
    http("count", 5, {"model": "m", "messages": [{"role": "user", "content": "hi"}]})
    options = {"temperature": 0, "num_predict": 3, "num_ctx": 64, "stop": ["x"], "repeat_penalty": 1.1, "mirostat": 0}
    http("ollama_chat", 6, {"model": "m", "messages": [{"role": "user", "content": "hi", "images": []}], "think": True,
                            "format": schema, "options": options, "keep_alive": "5m", "stream": False})
    http("ollama_generate", 7, {"model": "m", "prompt": "a", "system": "s", "raw": True, "context": [1], "format": "json", "options": options})
    http("embed", 8, {"model": "m", "input": "a", "truncate": True, "options": options})
    http("embed_one", 9, {"model": "m", "prompt": "a"})
    http("show", 10, {"model": "m", "verbose": True})
    http("tokenize", 11, {"content": "a", "model": "m", "add_special": True, "with_pieces": True})
    http("load", 12, {"model": "/models/a.gguf"})
    http("unload", 13, {"model": "m"})
    samplers = {"samplers": ["dry", "top_k", "temperature"], "dry_multiplier": 0.8, "dry_sequence_breakers": ["\n", ":"],
                "dry_allowed_length": 2, "dry_penalty_last_n": -1, "xtc_probability": 0.5, "xtc_threshold": 0.1,
                "typical_p": 0.9, "top_n_sigma": 1.5, "dynatemp_range": 0.5, "min_keep": 1, "mirostat": 2, "mirostat_tau": 5.0,
                "mirostat_eta": 0.1, "logit_bias": [[1, False], ["a", -2.5]]}
    http("native", 15, {"model": "m", "prompt": ["a", 1], "n_predict": 2, "n_probs": 3, "post_sampling_probs": True, **samplers})
    http("input_tokens", 16, {"model": "m", "messages": messages, "samplers": "edskypmxt"})
    http("control", 17, {"id": "chatcmpl-1", "action": "reasoning_end"})
    put("http", "no_json", b"\0{\"model\": ")

    def field(number: int, value) -> bytes:
        if isinstance(value, float):
            return bytes([number << 3 | 5]) + struct.pack("<f", value)
        if isinstance(value, int):
            return bytes([number << 3, value])
        data = value.encode() if isinstance(value, str) else value
        return bytes([number << 3 | 2, len(data)]) + data

    message = field(1, "user") + field(2, "hi")
    settings = field(1, 0.5) + field(2, 40) + field(3, 0.9) + field(10, 4) + field(11, "stop")
    put("grpc", "generate", bytes([0]) + field(1, "m") + field(2, "a text") + field(6, settings) + field(7, 64))
    put("grpc", "chat", bytes([1]) + field(1, "m") + field(2, message) * 2 + field(3, settings) + field(4, 64))
    put("grpc", "tokenize", bytes([2]) + field(1, "m") + field(2, "a") + field(3, 1))
    put("grpc", "detokenize", bytes([3]) + field(1, "m") + field(2, bytes([1, 2, 3])))
    put("grpc", "score", bytes([4]) + field(1, "m") + field(3, field(1, bytes([1, 2]))) + field(4, 5))
    put("grpc", "load", bytes([5]) + field(1, "/m/a.gguf") + field(2, "a") + field(3, 1))
    for number, name in enumerate(["unload", "get", "preload", "pin", "unpin"]):
        put("grpc", name, bytes([6 + number]) + field(1, "m") + field(2, 1))


def configurations() -> None:
    put("config", "all", """socket = "/run/rocmforged/a.sock"
device = "hip:0"
vram_budget = "80%"
model_dir = ["/srv/models", "/opt/models"]
threads = 4
log = "info,rocmforge_engine=debug"
n_ctx_max = 4096
max_sequences = 8
queue_capacity = 16
drain_grace = 2.5
policy = "lru"
prefix_cache = "shared"
kv_type = "q8_0"
speculate = "auto"
watchdog = 10
use_by = ["*"]
manage_by = ["root", "@root"]
admin_by = ["0"]
http_socket = "/run/b.sock"
http_listen = "127.0.0.1:8080"

[[model]]
name = "a"
path = "/srv/models/a.gguf"
aliases = ["b", "gpt-4"]
preload = true
pin = false
""")
    put("config", "one", 'vram_budget = "1.5GiB"\nmodel_dir = "/srv"\nhttp_listen = ["[::1]:80", "localhost:8080"]\n')
    put("config", "wrong", 'buget = 1\n[[model]]\nname = "a b"\npath = "x"\n')


def grammars() -> None:
    """The first byte chooses the kind: targets/grammar.rs has them."""
    schemas = [
        {"type": "object", "properties": {"a": {"type": "integer", "minimum": 1, "maximum": 20}}, "required": ["a"]},
        {"type": "array", "items": {"enum": ["x", 1, None]}, "minItems": 1, "maxItems": 3},
        {"anyOf": [{"type": "string", "maxLength": 5, "pattern": "^a+b$"}, {"const": 3.5}, {"type": "null"}]},
        {"$defs": {"n": {"type": "object", "properties": {"l": {"$ref": "#/$defs/n"}}}}, "$ref": "#/$defs/n"},
        {"allOf": [{"type": "number", "multipleOf": 0.5}, {"exclusiveMaximum": 4}]},
        {"type": "string", "format": "date-time"},
        {"type": "object", "additionalProperties": {"type": "boolean"}, "minProperties": 1},
    ]
    for number, schema in enumerate(schemas):
        put("grammar", f"schema{number}", bytes([0, number]) + json.dumps(schema).encode())
    for number, regex in enumerate([r"[a-z]+\d{2,4}(x|y)?", r"(?i)true|\p{L}{1,3}", r"\"([^\"\\]|\\.)*\""]):
        put("grammar", f"regex{number}", bytes([2, number]) + regex.encode())
    larks = [
        'start: "a" b+\nb: /[0-9]{1,3}/ | "(" b ")"\n',
        'start: x ("," x)*\nx: %json {"type": "boolean"}\n',
        'start: A | B~2\nA: "x"i\nB[capture]: /y+/\n%ignore / /\n',
    ]
    for number, lark in enumerate(larks):
        put("grammar", f"lark{number}", bytes([3, number]) + lark.encode())


def images() -> None:
    """The first two bytes choose the tower: targets/image.rs has it."""
    def png(width: int, height: int, color: int, channels: int, depth: int = 8) -> bytes:
        chunk = lambda name, data: struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        line = (width * channels * depth + 7) // 8
        rows = b"".join(b"\0" + bytes((x * 7 + y * 13) & 255 for x in range(line)) for y in range(height))
        head = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0)
        return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")

    gif = b"GIF89a" + struct.pack("<HHBBB", 2, 2, 0x80, 0, 0) + bytes([0, 0, 0, 255, 255, 255])
    gif += b"!\xf9\x04\x01\0\0\0\0," + struct.pack("<HHHHB", 0, 0, 2, 2, 0) + b"\x02\x03\x44\x02\x05\0;"
    seeds = dict(
        rgb=png(9, 5, 2, 3), rgba=png(5, 9, 6, 4), gray=png(7, 7, 0, 1, 1), deep=png(3, 3, 2, 3, 16),
        huge=png(50_000, 50_000, 2, 0), gif=gif)
    for name, data in seeds.items():
        put("image", name, bytes([7, 1]) + data)


def segments() -> None:
    """Segment files of the KV cache on disk, each behind its number: kv-disk/src/format.rs."""

    def header(number: int, version: int = 1) -> bytes:
        head = b"RFKVDISK" + struct.pack("<IIQI", version, 0, number, 0)
        return head + struct.pack("<I", zlib.crc32(head))

    def segment(number: int, payloads: list[bytes]) -> bytes:
        data = header(number)
        for slot, payload in enumerate(payloads):
            head = b"KVRC" + struct.pack("<HBBI", slot, 1 + slot % 2, 0, len(payload))
            head += bytes([slot]) * 16 + b"s" * 16 + bytes([slot + 1]) * 32
            head += struct.pack("<II", zlib.crc32(payload), 0)
            place = struct.pack("<QQ", number, len(data))
            data += head + struct.pack("<I", zlib.crc32(place + head)) + payload
        return bytes([number]) + data

    whole = segment(1, [b"page" * 9, b"", b"state" * 20])
    put("kv_disk", "whole", whole)
    put("kv_disk", "torn", whole[:-7])
    put("kv_disk", "empty", segment(3, []))
    put("kv_disk", "other_version", bytes([1]) + header(1, 2) + b"later")
    put("kv_disk", "other_number", bytes([2]) + whole[1:])


if __name__ == "__main__":
    headers()
    vocabularies()
    templates()
    requests()
    configurations()
    grammars()
    images()
    segments()
