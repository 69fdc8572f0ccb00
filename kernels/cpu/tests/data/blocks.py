#!/usr/bin/env python3
"""Writes blocks.txt: random blocks of each weight type and the values that PyPI's gguf gives them.
Q1_0 and Q2_0, which gguf 0.19 lacks, are computed here: an f16 scale times 2 b - 1 of 128 bits, or
times c - 1 of 64 codes of 2 bits.

A line is: type, the block's bytes in hex, the bits of each f32 value in hex.
"""
import sys

import numpy as np
from gguf import GGMLQuantizationType as T
from gguf import GGML_QUANT_SIZES
from gguf.quants import dequantize

# Offsets of the half floats in a block, which are kept finite.
HALVES = {
    T.Q4_0: [0], T.Q4_1: [0, 2], T.Q5_0: [0], T.Q5_1: [0, 2], T.Q8_0: [0], T.Q2_K: [80, 82],
    T.Q3_K: [108], T.Q4_K: [0, 2], T.Q5_K: [0, 2], T.Q6_K: [208], T.F16: [0], T.MXFP4: [],
    T.IQ4_NL: [0], T.IQ4_XS: [0],
    T.IQ3_S: [0], T.IQ3_XXS: [0], T.IQ2_S: [0], T.IQ2_XS: [0], T.IQ2_XXS: [0], T.IQ1_S: [0], T.IQ1_M: [],
    T.TQ1_0: [52], T.TQ2_0: [64], T.NVFP4: [],
}

rng = np.random.default_rng(20261121)
with open(sys.argv[1], "w") as out:
    for ty in [T.F32, T.F16, T.BF16, *[t for t in HALVES if t != T.F16]]:
        size, nbytes = GGML_QUANT_SIZES[ty]
        for _ in range(8 if size == 1 else 3):
            block = rng.integers(0, 256, nbytes, dtype=np.uint8)
            for at in HALVES.get(ty, []):
                block[at : at + 2] = np.frombuffer(np.float16(rng.normal()).tobytes(), np.uint8)
            if ty in (T.F32, T.BF16):
                block[-1] &= 0xBF
            if ty == T.MXFP4:
                block[0] = rng.choice([0, 1, 2, 100, 127, 130, 200])
            if ty == T.IQ1_M:
                block[55] &= 0xBF
            if ty == T.NVFP4:
                block[:4] &= 0x7F
                block[0] = rng.choice([0, 5, 0x7E, 0x7F])
            values = dequantize(block.reshape(1, -1), ty).astype(np.float32).reshape(-1)
            assert values.size == size and np.isfinite(values).all(), (ty, values)
            bits = " ".join(f"{b:08x}" for b in values.view(np.uint32))
            print(ty.name, block.tobytes().hex(), bits, file=out)
    for name, size, bits, factor in [("Q1_0", 128, 1, 2), ("Q2_0", 64, 2, 1)]:
        for _ in range(3):
            codes = rng.integers(0, 2**bits, size)
            scale = np.float16(rng.normal())
            fields = (codes[:, None] >> np.arange(bits)) & 1
            block = scale.tobytes() + np.packbits(fields.reshape(-1), bitorder="little").tobytes()
            values = np.float32(scale) * (factor * codes - 1).astype(np.float32)
            words = " ".join(f"{b:08x}" for b in values.view(np.uint32))
            print(name, block.hex(), words, file=out)
