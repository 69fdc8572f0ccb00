"""Writes a small GGUF model with random weights, for parity tests of one corner of the format at a
time.

The vocabulary is another file's (a fixture's), so ids mean the same there. Types that PyPI's gguf
can quantize are real quantizations of normal noise; the others get random valid blocks whose scales
are set so that the values have the mean and the deviation wanted. Where a row is no multiple of a
type's block the type falls back as llama.cpp's quantizer does (Q4_K to Q5_0 and so on), and to F16
where even 32 does not divide it.

usage: make_random_model.py OUT.gguf --vocab FIXTURE.gguf [--arch llama|qwen2|qwen3]
                            [--types Q4_K,Q6_K] [--seed N] ...
  --types        dealt out in turn to the matrices: one type makes a uniform model, several a mix
  --rope         none | linear | llama3 (a rope_freqs tensor) | yarn
The seed fixes everything.
"""

import argparse

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

FALLBACK = {
    Type.Q2_K: Type.Q4_0, Type.Q3_K: Type.Q4_0, Type.Q4_K: Type.Q5_0, Type.Q5_K: Type.Q5_1, Type.Q6_K: Type.Q8_0,
    **dict.fromkeys([Type.IQ4_XS, Type.IQ3_S, Type.IQ3_XXS, Type.IQ2_S, Type.IQ2_XS, Type.IQ2_XXS, Type.IQ1_S, Type.IQ1_M,
                     Type.TQ1_0, Type.TQ2_0], Type.IQ4_NL),
}

# Where each of these types keeps its f16 scale and its f16 minimum in a block, and the minimum
# per scale that centres the values when every other bit is random (mean quant times mean
# sub-scale over mean sub-minimum).
BLOCK_SCALES = {
    Type.Q2_K: (80, 82, 1.5),
    Type.Q3_K: (108, None, 0.0),
    Type.Q4_K: (0, 2, 7.5),
    Type.Q5_K: (0, 2, 15.5),
    Type.Q6_K: (208, None, 0.0),
    **dict.fromkeys([Type.IQ4_NL, Type.IQ4_XS, Type.IQ3_S, Type.IQ3_XXS, Type.IQ2_S, Type.IQ2_XS, Type.IQ2_XXS, Type.IQ1_S],
                    (0, None, 0.0)),
    # In the upper nibbles of four 16-bit words.
    Type.IQ1_M: (48, None, 0.0),
    # Four bytes, E4M3.
    Type.NVFP4: (0, None, 0.0),
}


def random_blocks(rng, kind, rows, cols, std):
    """[rows, bytes] of random blocks, each block with a scale of its own, the
    values' deviation `std`."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    scale_at, min_at, centre = BLOCK_SCALES[kind]
    n = rows * cols // block
    raw = rng.integers(0, 256, (n, size), dtype=np.uint8)
    spread = rng.uniform(0.5, 1.5, (n, 1)).astype(np.float32)

    def write(scale):
        if kind == Type.IQ1_M:
            bits = (spread * scale).astype(np.float16).view(np.uint16)
            words = raw[:, 48:].copy().view(np.uint16) & 0x0FFF | bits >> np.array([0, 4, 8, 12], np.uint16) << 12
            raw[:, 48:] = words.astype(np.uint16).view(np.uint8)
            return
        if kind == Type.NVFP4:
            raw[:, :4] = gguf.quants.NVFP4.fp32_to_ue4m3(spread * scale)
            return
        raw[:, scale_at:scale_at + 2] = (spread * scale).astype(np.float16).view(np.uint8)
        if min_at is not None:
            raw[:, min_at:min_at + 2] = (spread * scale * centre).astype(np.float16).view(np.uint8)

    trial = 2.0 ** -6
    write(trial)
    write(trial * std / gguf.dequantize(raw, kind).std())
    return raw.reshape(rows, -1)


def fitting(kind, cols):
    """The type itself, or what stands in for it where its block does not divide a row of `cols`."""
    for candidate in (kind, FALLBACK.get(kind, Type.F16), Type.F16):
        if cols % gguf.GGML_QUANT_SIZES[candidate][0] == 0:
            return candidate
    raise AssertionError("F16 divides everything")


class Generator:
    """Collects tensors for a writer; every matrix takes the next type of the mix."""

    def __init__(self, writer, rng, types):
        self.writer, self.rng, self.types, self.n = writer, rng, types, 0

    def matrix(self, name, rows, cols, gain=1.0):
        kind = fitting(self.types[self.n % len(self.types)], cols)
        self.n += 1
        std = gain * cols ** -0.5
        if kind in BLOCK_SCALES:
            data = random_blocks(self.rng, kind, rows, cols, std)
        else:
            data = gguf.quantize(self.rng.standard_normal((rows, cols), dtype=np.float32) * np.float32(std), kind)
        raw = None if kind in (Type.F32, Type.F16) else kind
        self.writer.add_tensor(name, np.ascontiguousarray(data), raw_dtype=raw)

    def vector(self, name, n, mean, std):
        values = mean + std * self.rng.standard_normal(n, dtype=np.float32)
        self.writer.add_tensor(name, values.astype(np.float32))


def copy_vocabulary(writer, path):
    """Copies every tokenizer key; the number of tokens comes back."""
    fields = gguf.GGUFReader(path).fields
    for field in fields.values():
        if not field.name.startswith("tokenizer."):
            continue
        if field.types[0] == gguf.GGUFValueType.ARRAY:
            writer.add_array(field.name, field.contents())
        else:
            writer.add_key_value(field.name, field.contents(), field.types[0])
    return len(fields["tokenizer.ggml.tokens"].contents())


def write_model(o):
    rng = np.random.default_rng(o.seed)
    w = gguf.GGUFWriter(o.out, o.arch)
    w.add_name(f"random-{o.arch}-{o.seed}")
    w.add_context_length(o.ctx)
    w.add_embedding_length(o.embd)
    w.add_block_count(o.layers)
    w.add_feed_forward_length(o.ffn)
    w.add_head_count(o.heads)
    w.add_head_count_kv(o.kv_heads)
    w.add_key_length(o.head_dim)
    w.add_value_length(o.head_dim)
    w.add_rope_dimension_count(o.head_dim)
    w.add_rope_freq_base(o.rope_base)
    w.add_layer_norm_rms_eps(o.eps)
    if o.rope in ("linear", "yarn"):
        w.add_rope_scaling_type(gguf.RopeScalingType(o.rope))
        w.add_rope_scaling_factor(4.0)
    if o.rope == "yarn":
        w.add_rope_scaling_orig_ctx_len(o.ctx // 4)
    n_vocab = copy_vocabulary(w, o.vocab)
    w.add_vocab_size(n_vocab)

    types = [Type[t.strip().upper()] for t in o.types.split(",")]
    g = Generator(w, rng, types)
    if o.rope == "llama3":
        w.add_tensor("rope_freqs.weight", np.geomspace(1, 8, o.head_dim // 2).astype(np.float32))
    g.matrix("token_embd.weight", n_vocab, o.embd, gain=o.logit_gain if o.tied else 1.0)
    q, kv = o.heads * o.head_dim, o.kv_heads * o.head_dim
    for i in range(o.layers):
        b = f"blk.{i}."
        g.vector(b + "attn_norm.weight", o.embd, 1.0, 0.2)
        g.matrix(b + "attn_q.weight", q, o.embd)
        g.matrix(b + "attn_k.weight", kv, o.embd)
        g.matrix(b + "attn_v.weight", kv, o.embd)
        if o.bias:
            g.vector(b + "attn_q.bias", q, 0.0, 0.5)
            g.vector(b + "attn_k.bias", kv, 0.0, 0.5)
            g.vector(b + "attn_v.bias", kv, 0.0, 0.5)
        if o.arch == "qwen3":
            g.vector(b + "attn_q_norm.weight", o.head_dim, 1.0, 0.2)
            g.vector(b + "attn_k_norm.weight", o.head_dim, 1.0, 0.2)
        g.matrix(b + "attn_output.weight", o.embd, q)
        g.vector(b + "ffn_norm.weight", o.embd, 1.0, 0.2)
        g.matrix(b + "ffn_gate.weight", o.ffn, o.embd)
        g.matrix(b + "ffn_up.weight", o.ffn, o.embd)
        g.matrix(b + "ffn_down.weight", o.embd, o.ffn)
    g.vector("output_norm.weight", o.embd, 1.0, 0.2)
    if not o.tied:
        g.matrix("output.weight", n_vocab, o.embd, gain=o.logit_gain)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def main():
    ap = argparse.ArgumentParser(description="write a small random-weight GGUF model")
    ap.add_argument("out")
    ap.add_argument("--vocab", required=True, help="a GGUF file whose tokenizer is copied")
    ap.add_argument("--arch", choices=("llama", "qwen2", "qwen3"), default="llama")
    ap.add_argument("--types", default="F32")
    ap.add_argument("--layers", type=int, default=2)
    ap.add_argument("--embd", type=int, default=256)
    ap.add_argument("--ffn", type=int, default=512)
    ap.add_argument("--heads", type=int, default=4)
    ap.add_argument("--kv-heads", type=int, default=2)
    ap.add_argument("--head-dim", type=int, default=64)
    ap.add_argument("--ctx", type=int, default=2048)
    ap.add_argument("--rope", choices=("none", "linear", "llama3", "yarn"), default="none")
    ap.add_argument("--rope-base", type=float, default=10000.0)
    ap.add_argument("--eps", type=float, default=1e-5)
    ap.add_argument("--logit-gain", type=float, default=3.0, help="deviation of the logits, about")
    ap.add_argument("--tied", action=argparse.BooleanOptionalAction, default=True)
    ap.add_argument("--bias", action=argparse.BooleanOptionalAction, default=None, help="q, k and v biases (qwen2 has them)")
    ap.add_argument("--seed", type=int, default=1)
    o = ap.parse_args()
    if o.heads % o.kv_heads:
        ap.error(f"--heads {o.heads} is no multiple of --kv-heads {o.kv_heads}")
    if o.bias is None:
        o.bias = o.arch == "qwen2"
    write_model(o)


if __name__ == "__main__":
    main()
