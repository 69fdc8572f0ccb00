"""Writes models that say given texts, so that what a client makes of an answer is known word for
word: one layer of zeros, and an output matrix that makes each token of a script follow the one
before it. The chat template chooses the script by `say:NAME` in the last message of the user, or
`results` behind results of tools.

usage: scripted.py DIRECTORY VOCABULARY

Writes `fast.gguf`, `slow.gguf` (a wide layer of zeros costs time with every token) and `agent.gguf`
(of a long context) into the directory, with the vocabulary of another GGUF file, and prints as JSON
what each script says and of how many tokens it is.
"""

import json
import random
import re
import sys

import gguf
import numpy as np

from byte_bpe import _byte_table

WIDTH = 384
NORMAL, CONTROL = 1, 3
# What a token's row adds to the score of the one that follows it; others differ by less than 20.
STEP = 0.15


def calls(*named):
    """Calls behind each other, as the template says that they are written."""
    texts = (json.dumps({"name": name, "arguments": arguments}) for name, arguments in named)
    return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)


def marks(tool, **more):
    """Calls of the tool that runs a command, which write two marks."""
    return calls(*((tool, {"command": f"echo {mark} > {mark}.mark", **more}) for mark in ("left", "right")))


SCRIPTS = {
    "first": "The first answer, of seven words.",
    "second": "The second answer: naïve 漢字 😀.",
    "tools": calls(("weather", {"city": "Paris", "days": 2}), ("clock", {"zone": "CET"})),
    "claude": marks("Bash", description="mark"),
    "opencode": marks("bash", description="mark"),
    "cn": marks("Bash"),
    "qwen": marks("run_shell_command", is_background=False),
    "pi": marks("bash"),
    "city": calls(("City", {"city": "Paris", "days": 2})),
    "json": '{"city": "Paris", "days": 2}',
    "results": "It is 21 degrees at noon.",
    "thought": "<think>\nThree and four make seven.\n</think>\n\nSeven.",
    "broken": '<tool_call>\n{"name": "weather", "arguments": {"city": Paris}}\n</tool_call>',
    "long": " ".join(f"word{n}" for n in range(1500)),
}

TEMPLATE = """\
{%- if tools -%}{{- '<|im_start|>system\\n# Tools\\n<tools>' -}}{%- for t in tools -%}
{{- '\\n' + (t | tojson) -}}{%- endfor -%}
{{- '\\n</tools>\\nA call is <tool_call>\\n{"name": <name>, "arguments": <object>}\\n</tool_call><|im_end|>\\n' -}}
{%- endif -%}
{%- set ns = namespace(say='first') -%}
{%- for m in messages -%}
{%- set text = m.content if m.content is string else (m.content or []) | map(attribute='text') | join -%}
{{- '<|im_start|>' + m.role + '\\n' + text -}}
{%- if m.role == 'user' -%}{%- for name in [NAMES] -%}
{%- if 'say:' + name in text -%}{%- set ns.say = name -%}{%- endif -%}
{%- endfor -%}{%- endif -%}
{%- if m.reasoning_content -%}{{- '<think>' + m.reasoning_content + '</think>' -}}{%- endif -%}
{%- for c in m.tool_calls or [] -%}
{{- '\\n<tool_call>\\n' + ({"name": c.function.name, "arguments": c.function.arguments} | tojson) + '\\n</tool_call>' -}}
{%- endfor -%}{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if messages[-1].role == 'tool' -%}{%- set ns.say = 'results' -%}{%- endif -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n<|say:' + ns.say + '|>' -}}{%- endif -%}
"""


def pieces(text, taken, draw):
    """`text` in pieces that are no token yet: each is followed by one other."""
    whole = text.encode()
    # Where each piece begins, and the sizes that are still to be tried there.
    begun, found, used = 0, [], set(taken)
    untried = [sizes_of_pieces(draw)]
    while begun < len(whole):
        if not untried[-1]:
            # Whatever is tried here leads nowhere, so the piece before becomes another.
            untried.pop()
            piece = found.pop()
            used.remove(piece)
            begun -= len(piece)
            continue
        piece = whole[begun : begun + untried[-1].pop()]
        # A size past the end is tried as what is left there.
        if piece in used:
            continue
        found.append(piece)
        used.add(piece)
        begun += len(piece)
        untried.append(sizes_of_pieces(draw))
    taken.update(found)
    return found


def sizes_of_pieces(draw):
    """The bytes that a piece may have, those that are tried first at the end."""
    return list(range(23, 6, -1)) + draw.sample(range(2, 7), 5)


def write(path, vocabulary, wide, context):
    """Writes the model, and gives how many tokens each script has."""
    fields = gguf.GGUFReader(vocabulary).fields
    known = lambda key: list(fields[f"tokenizer.ggml.{key}"].contents())
    tokens, kinds = known("tokens"), known("token_type")
    table = _byte_table()
    shown = lambda piece: "".join(table[byte] for byte in piece)
    bytes_of = {shown: byte for byte, shown in table.items()}
    written = (token for token in tokens if all(letter in bytes_of for letter in token))
    taken = {bytes(bytes_of[letter] for letter in token) for token in written}
    tokens += [f"<|say:{name}|>" for name in SCRIPTS]
    kinds += [CONTROL] * len(SCRIPTS)
    draw, follows, counts = random.Random(7), {}, {}
    for name, text in SCRIPTS.items():
        last = tokens.index(f"<|say:{name}|>")
        # No token goes on behind a call's end: of a strict tool the call alone is held there.
        parts = re.split("(?<=</tool_call>)", text)
        found = [piece for part in parts for piece in pieces(part, taken, draw)]
        for piece in found:
            follows[last] = last = len(tokens)
            tokens.append(shown(piece))
        follows[last] = tokens.index("<|im_end|>")
        counts[name] = len(found)
    kinds += [NORMAL] * (len(tokens) - len(kinds))
    end = tokens.index("<|im_end|>")
    rows = np.random.default_rng(1).choice([-1.0, 1.0], size=(len(tokens), WIDTH)).astype(np.float32)
    output = np.zeros_like(rows)
    for token, following in follows.items():
        output[following] += STEP * rows[token]
    file = gguf.GGUFWriter(path, "llama")
    file.add_context_length(context)
    file.add_embedding_length(WIDTH)
    file.add_block_count(1)
    file.add_feed_forward_length(wide)
    file.add_head_count(1)
    file.add_head_count_kv(1)
    file.add_key_length(32)
    file.add_value_length(32)
    file.add_layer_norm_rms_eps(1e-5)
    file.add_rope_freq_base(10000.0)
    file.add_rope_dimension_count(32)
    file.add_vocab_size(len(tokens))
    file.add_tokenizer_model("gpt2")
    file.add_tokenizer_pre("qwen2")
    file.add_token_list(tokens)
    file.add_token_types(kinds)
    file.add_token_merges(known("merges"))
    file.add_bos_token_id(end)
    file.add_eos_token_id(end)
    file.add_add_bos_token(False)
    file.add_chat_template(TEMPLATE.replace("NAMES", ", ".join(f"'{name}'" for name in SCRIPTS)))
    zeros = lambda *shape: np.zeros(shape, np.float16)
    file.add_tensor("token_embd.weight", rows.astype(np.float16))
    file.add_tensor("output.weight", output.astype(np.float16))
    for norm in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        file.add_tensor(f"{norm}.weight", np.ones(WIDTH, np.float32))
    for part in "qkv":
        file.add_tensor(f"blk.0.attn_{part}.weight", zeros(32, WIDTH))
    file.add_tensor("blk.0.attn_output.weight", zeros(WIDTH, 32))
    for part in ("gate", "up"):
        file.add_tensor(f"blk.0.ffn_{part}.weight", zeros(wide, WIDTH))
    file.add_tensor("blk.0.ffn_down.weight", zeros(WIDTH, wide))
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    return counts


def main():
    directory, vocabulary = sys.argv[1:]
    counts = write(f"{directory}/fast.gguf", vocabulary, 64, 32768)
    write(f"{directory}/slow.gguf", vocabulary, 32768, 32768)
    write(f"{directory}/agent.gguf", vocabulary, 64, 131072)
    print(json.dumps({name: {"text": text, "tokens": counts[name]} for name, text in SCRIPTS.items()}))


if __name__ == "__main__":
    main()
