"""Jina's second encoders, whose code transformers does not have: a formula of our own.

Günther et al. 2023 (arXiv 2310.19923); biases of attention by Press et al. 2021 (arXiv 2108.12409).
"""

import math

import torch
from torch import nn


def slopes(heads):
    """By what each head's scores fall a position, as the authors of ALiBi have them."""
    if math.log2(heads).is_integer():
        start = 2 ** (-(2 ** -(math.log2(heads) - 3)))
        return [start * start**i for i in range(heads)]
    near = 2 ** math.floor(math.log2(heads))
    return slopes(near) + slopes(2 * near)[0::2][: heads - near]


class Embeddings(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.words = nn.Embedding(config.vocab_size, config.hidden_size)
        self.types = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, ids):
        return self.norm(self.words(ids) + self.types.weight[0])


class Layer(nn.Module):
    """With `code` as in the model for programs: norms of queries and keys, and one more behind attention."""

    def __init__(self, config, code):
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        norm = lambda: nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.heads, self.inner, self.code = config.num_attention_heads, inner, code
        self.query, self.key, self.value = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, width)
        self.output, self.output_norm = nn.Linear(width, width), norm()
        self.up, self.down, self.last_norm = nn.Linear(width, 2 * inner, bias=False), nn.Linear(inner, width), norm()
        if code:
            self.query_norm, self.key_norm, self.second_norm = norm(), norm(), norm()

    def parts(self):
        names = [
            ("attn_q", self.query), ("attn_k", self.key), ("attn_v", self.value), ("attn_output", self.output),
            ("attn_output_norm", self.output_norm), ("ffn_up", self.up), ("ffn_down", self.down),
            ("layer_output_norm", self.last_norm),
        ]
        if self.code:
            names += [("attn_q_norm", self.query_norm), ("attn_k_norm", self.key_norm), ("attn_norm_2", self.second_norm)]
        return names

    def attend(self, x):
        q, k, v = self.query(x), self.key(x), self.value(x)
        if self.code:
            q, k = self.query_norm(q), self.key_norm(k)
        q, k, v = (t.reshape(len(x), self.heads, -1).transpose(0, 1) for t in (q, k, v))
        at = torch.arange(len(x))
        falls = torch.tensor(slopes(self.heads))[:, None, None] * (at[:, None] - at[None]).abs()
        weights = (q @ k.transpose(1, 2) / q.shape[-1] ** 0.5 - falls).softmax(-1)
        return self.output((weights @ v).transpose(0, 1).reshape(x.shape))

    def forward(self, x):
        attended = self.output_norm(self.attend(x) + x)
        if self.code:
            attended = self.second_norm(attended + x)
        first, last = self.up(attended).split(self.inner, -1)
        gate, up = (last, first) if self.code else (first, last)
        return self.last_norm(self.down(nn.functional.gelu(gate) * up) + attended)


class JinaBert(nn.Module):
    def __init__(self, config, code):
        super().__init__()
        self.embeddings = Embeddings(config)
        self.layers = nn.ModuleList(Layer(config, code) for _ in range(config.num_hidden_layers))

    def forward(self, ids):
        x = self.embeddings(ids)
        for layer in self.layers:
            x = layer(x)
        return x
