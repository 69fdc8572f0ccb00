"""An independent forward pass of a GGUF language model in numpy: the yardstick for the daemon's
logits.

Nothing here comes from the code under test. PyPI's `gguf` reads the file and dequantizes every
tensor to float32; the rest is the published formulae, one function each:

  RMSNorm            Zhang and Sennrich 2019; epsilon inside the root, as in Llama
  RoPE               Su et al. 2021. llama files keep the interleaved pairs (2i, 2i+1): the converter
                     permutes q and k for it. qwen files keep the halves (i, i + n_rot/2), "NEOX"
                     order
  rope scaling       linear: Chen et al. 2023 (positions divided by the factor). llama3: the tensor
                     rope_freqs divides each frequency. YaRN: Peng et al. 2023, the ramp between
                     beta_fast and beta_slow and the magnitude 1 + 0.1 ln(factor), rounded as GGUF
                     implementations do it (floor and ceil of the two dimensions)
  grouped queries    Ainslie et al. 2023: query head h reads key head h // (n_head / n_head_kv)
  QK-norm            qwen3: RMSNorm over each head of q and k, before RoPE
  SwiGLU             Shazeer 2020: down(silu(gate(x)) * up(x))
  experts            softmax over all the experts, the best k, their weights renormalised to one
                     (Mixtral, Qwen3-MoE)

With --activations q8:N every input of a quantized product is rounded to 8 bits in blocks of N
first, with one float scale per block of max|x| / 127. That is the error that an integer kernel
makes by design, so it says how far from the float32 logits a correct implementation may be.

usage: reference.py MODEL.gguf (--ids 1,2,3 | --ids-file F | --text T | --chat MESSAGE)
                    [--score [--top N] | --greedy N | --out F.npy]
  default        JSON: for each position its logits
  --out F.npy    the logits as a float32 array [n_ids, n_vocab] instead
  --score        JSON: for each id its natural log-probability given those before it (null for the
                 first)
  --greedy N     JSON: up to N ids that continue the prompt, and their text
An --ids-file holds ids separated by commas or white space, or a JSON array.
"""

import argparse
import json
import re
import sys

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

from byte_bpe import ByteBpe

NEOX = {"qwen2": True, "qwen3": True, "qwen3moe": True, "llama": False}
EXACT = {Type.F32, Type.F16, Type.BF16}  # products with these weights keep float activations


def rms_norm(x, weight, eps):
    """x [..., n] scaled to unit mean square over n, times weight [n]."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def softmax(x):
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def log_softmax(x):
    x = x.astype(np.float64)
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def silu(x):
    return x / (1 + np.exp(-x))


def round_q8(x, block):
    """x [..., n] as 8-bit integers with one scale per `block` values, back in floats."""
    blocks = x.reshape(*x.shape[:-1], -1, min(block, x.shape[-1]))
    scale = np.abs(blocks).max(axis=-1, keepdims=True) / 127
    safe = np.where(scale == 0, 1, scale)
    return (np.rint(blocks / safe) * scale).reshape(x.shape).astype(x.dtype)


class Hparams:
    """The metadata that the forward pass needs, under GGUF's names without the
    architecture's prefix."""

    def __init__(self, reader):
        self.fields = reader.fields
        self.arch = reader.fields["general.architecture"].contents()
        if self.arch not in NEOX:
            raise SystemExit(f"architecture {self.arch!r} is not one of {', '.join(NEOX)}")
        self.n_layer = self.get("block_count")
        self.n_embd = self.get("embedding_length")
        self.n_head = self.get("attention.head_count")
        self.n_head_kv = self.get("attention.head_count_kv", self.n_head)
        self.head_k = self.get("attention.key_length", self.n_embd // self.n_head)
        self.head_v = self.get("attention.value_length", self.n_embd // self.n_head)
        self.eps = self.get("attention.layer_norm_rms_epsilon")
        self.n_expert_used = self.get("expert_used_count", 0)
        self.n_ctx = self.get("context_length")
        self.n_rot = self.get("rope.dimension_count", self.head_k)
        self.rope_base = self.get("rope.freq_base", 10000.0)
        self.rope_scaling = self.get("rope.scaling.type", "linear")
        factor = self.get("rope.scaling.factor", self.get("rope.scale_linear", 0.0))
        self.rope_factor = 1.0 if factor == 0.0 or self.rope_scaling == "none" else factor

    def get(self, key, default=None):
        field = self.fields.get(f"{self.arch}.{key}")
        if field is None and default is None:
            raise SystemExit(f"the file has no {self.arch}.{key}")
        return default if field is None else field.contents()


def rope_angles(hp, freq_factors, positions):
    """cos and sin, each [n_positions, n_rot / 2], the magnitude of YaRN included."""
    i = np.arange(hp.n_rot // 2)
    freq = float(hp.rope_base) ** (-2.0 * i / hp.n_rot)
    if freq_factors is not None:
        freq = freq / freq_factors.astype(np.float64)
    magnitude = 1.0
    if hp.rope_scaling == "yarn":
        original = hp.get("rope.scaling.original_context_length", hp.n_ctx)

        def dimension(rotations):
            return hp.n_rot * np.log(original / (rotations * 2 * np.pi)) / (2 * np.log(hp.rope_base))
        low = max(0.0, np.floor(dimension(hp.get("rope.scaling.yarn_beta_fast", 32.0))))
        high = min(hp.n_rot - 1.0, np.ceil(dimension(hp.get("rope.scaling.yarn_beta_slow", 1.0))))
        keep = 1 - np.clip((i - low) / max(0.001, high - low), 0, 1)
        freq = freq / hp.rope_factor * (1 - keep) + freq * keep
        magnitude = hp.get("rope.scaling.attn_factor", 1.0) * (1 + 0.1 * np.log(hp.rope_factor))
    else:
        freq = freq / hp.rope_factor
    theta = positions[:, None] * freq[None, :]
    return np.cos(theta) * magnitude, np.sin(theta) * magnitude


def rope(x, cos, sin, neox):
    """x [n, heads, head_dim]: the first n_rot values of each head turned in
    pairs, the rest as they are."""
    n_rot = 2 * cos.shape[1]
    cos, sin = cos[:, None, :].astype(x.dtype), sin[:, None, :].astype(x.dtype)
    out = x.copy()
    half = n_rot // 2
    first, second = (slice(0, half), slice(half, n_rot)) if neox else (slice(0, n_rot, 2), slice(1, n_rot, 2))
    a, b = x[..., first], x[..., second]
    out[..., first] = a * cos - b * sin
    out[..., second] = a * sin + b * cos
    return out


class Model:
    """A GGUF file's weights in floats, and their forward pass with a key-value cache."""

    def __init__(self, path, dtype=np.float32, q8_block=0):
        reader = gguf.GGUFReader(path)
        self.reader, self.hp, self.dtype, self.q8_block = reader, Hparams(reader), dtype, q8_block
        self.types = {t.name: t.tensor_type for t in reader.tensors}
        self.weights = {t.name: gguf.dequantize(t.data, t.tensor_type).astype(dtype) for t in reader.tensors}
        self.reset()

    def reset(self):
        """Forgets the sequence."""
        self.kv = [(None, None)] * self.hp.n_layer
        self.n_past = 0

    def mat_mul(self, x, name):
        """x [n, in] by the weight [out, in], plus the bias of the same name where there is one."""
        weight = f"{name}.weight"
        if self.q8_block and self.types[weight] not in EXACT:
            x = round_q8(x, self.q8_block)
        out = x @ self.weights[weight].T
        bias = self.weights.get(f"{name}.bias")
        return out if bias is None else out + bias

    def attention(self, layer, x, cos, sin):
        hp, b, n = self.hp, f"blk.{layer}.", len(x)
        q = self.mat_mul(x, b + "attn_q").reshape(n, hp.n_head, hp.head_k)
        k = self.mat_mul(x, b + "attn_k").reshape(n, hp.n_head_kv, hp.head_k)
        v = self.mat_mul(x, b + "attn_v").reshape(n, hp.n_head_kv, hp.head_v)
        if b + "attn_q_norm.weight" in self.weights:
            q = rms_norm(q, self.weights[b + "attn_q_norm.weight"], hp.eps)
            k = rms_norm(k, self.weights[b + "attn_k_norm.weight"], hp.eps)
        q, k = rope(q, cos, sin, NEOX[hp.arch]), rope(k, cos, sin, NEOX[hp.arch])
        past_k, past_v = self.kv[layer]
        if past_k is not None:
            k, v = np.concatenate([past_k, k]), np.concatenate([past_v, v])
        self.kv[layer] = (k, v)
        total, group = len(k), hp.n_head // hp.n_head_kv
        q = q.reshape(n, hp.n_head_kv, group, hp.head_k)
        scores = np.einsum("nhgd,mhd->hgnm", q, k, optimize=True) * self.dtype(hp.head_k ** -0.5)
        future = np.arange(total)[None, :] > (total - n + np.arange(n))[:, None]
        scores = np.where(future, self.dtype(-np.inf), scores)
        mixed = np.einsum("hgnm,mhd->nhgd", softmax(scores), v, optimize=True)
        return self.mat_mul(mixed.reshape(n, hp.n_head * hp.head_v), b + "attn_output")

    def feed_forward(self, layer, x):
        b = f"blk.{layer}."
        if b + "ffn_gate_inp.weight" in self.weights:
            return self.experts(b, x)
        return self.mat_mul(silu(self.mat_mul(x, b + "ffn_gate")) * self.mat_mul(x, b + "ffn_up"), b + "ffn_down")

    def experts(self, b, x):
        probs = softmax(self.mat_mul(x, b + "ffn_gate_inp"))
        chosen = np.argsort(-probs, axis=-1, kind="stable")[:, :self.hp.n_expert_used]
        gates = np.take_along_axis(probs, chosen, axis=-1)
        gates = gates / gates.sum(axis=-1, keepdims=True)
        gate_w, up_w, down_w = (self.weights[f"{b}ffn_{part}_exps.weight"] for part in ("gate", "up", "down"))
        q8 = self.q8_block and self.types[b + "ffn_gate_exps.weight"] not in EXACT
        out = np.zeros_like(x)
        for expert in np.unique(chosen):
            row, slot = np.nonzero(chosen == expert)
            h = round_q8(x[row], self.q8_block) if q8 else x[row]
            h = silu(h @ gate_w[expert].T) * (h @ up_w[expert].T)
            h = round_q8(h, self.q8_block) if q8 else h
            out[row] += gates[row, slot, None] * (h @ down_w[expert].T)
        return out

    def forward(self, ids):
        """Logits [n, n_vocab] after each of `ids`, which follow what was given since the last
        reset."""
        hp = self.hp
        positions = np.arange(self.n_past, self.n_past + len(ids))
        cos, sin = rope_angles(hp, self.weights.get("rope_freqs.weight"), positions)
        x = self.weights["token_embd.weight"][np.asarray(ids)]
        for layer in range(hp.n_layer):
            b = f"blk.{layer}."
            x = x + self.attention(layer, rms_norm(x, self.weights[b + "attn_norm.weight"], hp.eps), cos, sin)
            x = x + self.feed_forward(layer, rms_norm(x, self.weights[b + "ffn_norm.weight"], hp.eps))
        self.n_past += len(ids)
        x = rms_norm(x, self.weights["output_norm.weight"], hp.eps)
        return self.mat_mul(x, "output" if "output.weight" in self.weights else "token_embd")

    def greedy(self, ids, n_max, stop):
        """The most probable id, time after time, until one of `stop` (which is
        left out) or n_max ids."""
        out, logits = [], self.forward(ids)[-1]
        while len(out) < n_max:
            best = int(np.argmax(logits))
            if best in stop:
                break
            out.append(best)
            logits = self.forward([best])[-1]
        return out


def score(model, ids, top):
    """Natural log-probability of each id given those before it; with `top`, also the most
    probable ids at each position."""
    logp = log_softmax(model.forward(ids))
    tokens = [{"id": ids[0], "logprob": None}]
    tokens += [{"id": t, "logprob": float(logp[at, t])} for at, t in enumerate(ids[1:])]
    if top:
        for at, token in enumerate(tokens[1:]):
            best = np.argsort(-logp[at], kind="stable")[:top]
            token["top"] = [{"id": int(t), "logprob": float(logp[at, t])} for t in best]
    return {"tokens": tokens}


def chatml(message):
    return f"<|im_start|>user\n{message}<|im_end|>\n<|im_start|>assistant\n"


def main():
    ap = argparse.ArgumentParser(description="float32 reference logits of a GGUF model")
    ap.add_argument("model")
    source = ap.add_mutually_exclusive_group(required=True)
    source.add_argument("--ids", help="ids, separated by commas")
    source.add_argument("--ids-file", help="a file of ids: commas, white space or JSON")
    source.add_argument("--text", help="text, special tokens parsed, nothing added")
    source.add_argument("--chat", help="a user message, wrapped as ChatML")
    what = ap.add_mutually_exclusive_group()
    what.add_argument("--score", action="store_true")
    what.add_argument("--greedy", type=int, metavar="N")
    what.add_argument("--out", metavar="F.npy")
    ap.add_argument("--top", type=int, default=0)
    ap.add_argument("--activations", default="f32", metavar="f32|f64|q8:N")
    o = ap.parse_args()
    mode = re.fullmatch(r"(f32|f64)|q8:(\d+)", o.activations)
    if not mode:
        ap.error("--activations is f32, f64 or q8:N")
    model = Model(o.model, np.float64 if mode[1] == "f64" else np.float32, int(mode[2] or 0))
    if o.ids is not None or o.ids_file is not None:
        text = o.ids if o.ids is not None else open(o.ids_file, encoding="utf-8").read()
        ids = [int(t) for t in re.findall(r"\d+", text)]
    else:
        ids = ByteBpe.from_reader(model.reader).encode(o.text if o.text is not None else chatml(o.chat))
    if not ids:
        ap.error("no ids: nothing to compute")
    if o.score:
        result = score(model, ids, o.top)
    elif o.greedy is not None:
        stop = {model.reader.fields["tokenizer.ggml.eos_token_id"].contents()}
        out = model.greedy(ids, o.greedy, stop)
        result = {"ids": out, "text": ByteBpe.from_reader(model.reader).decode(out)}
    elif o.out:
        np.save(o.out, model.forward(ids).astype(np.float32))
        return
    else:
        result = {"logits": model.forward(ids).tolist()}
    json.dump(result, sys.stdout)
    print()


if __name__ == "__main__":
    main()
