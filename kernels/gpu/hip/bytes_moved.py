#!/usr/bin/env python3
"""Bytes that kernels of decode load over bytes that they need, counted in an instruction emulator.

    kernels/gpu/hip/bytes_moved.py                               # gfx1100 and gfx942
    kernels/gpu/hip/bytes_moved.py --objects DIR gfx1100         # objects that check_targets.sh wrote

Weights are random blocks as in a file, repacked by repack.hip in the emulator; every load of device
memory is looked at, with the addresses of its active lanes. Needed are the bytes of the planes
(kernels/gpu/src/layout.rs) of the matrices, or of keys and values up to the position. Printed, of
these bytes: those that a lane asks for, added up over lanes, over those needed (what lanes ask for
together counts for each); and those that some lane asked for at least once, over those needed. What
comes out is compared with the weights as gguf-py reads them: exit 1 where it is wrong.

Needs LLVM 22, Python packages numpy, gguf, msgpack and pyelftools, and on PYTHONPATH a checkout of
tinygrad with test/mockgpu/amd/emu.py (tried: a9069c177a), which needs a `clang` on PATH.
"""

import argparse
import ctypes
import functools
import io
import mmap
import pathlib
import re
import struct
import subprocess
import sys
import tempfile

import msgpack
import numpy as np
from elftools.elf.elffile import ELFFile
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from test.mockgpu.amd import emu

HERE = pathlib.Path(__file__).resolve().parent
TARGETS = ["gfx1100", "gfx942"]
ARCH = {"gfx11": "rdna3", "gfx12": "rdna4", "gfx90": "cdna", "gfx94": "cdna", "gfx95": "cdna"}
# (bytes, weights that they serve) of each plane, as in layout.rs.
PLANES = {
    "F16": [(2, 1)], "Q8_0": [(32, 32), (2, 32)], "MXFP4": [(16, 32), (1, 32)],
    "Q4_K": [(16, 32), (16, 256)], "Q6_K": [(16, 32), (8, 32), (2, 32), (2, 256)],
    "IQ4_NL": [(16, 32), (2, 32)], "IQ4_XS": [(16, 32), (8, 256)],
    "IQ3_S": [(8, 32), (4, 32), (1, 32), (6, 256)], "IQ3_XXS": [(8, 32), (4, 32), (2, 256)],
    "IQ2_S": [(8, 32), (2, 32), (2, 256)], "IQ2_XS": [(8, 32), (1, 32), (2, 256)],
    "IQ2_XXS": [(8, 32), (2, 256)], "IQ1_S": [(4, 32), (2, 32), (2, 256)],
    "IQ1_M": [(4, 32), (2, 32), (8, 256)],
}
NO_TENSOR = (1 << 64) - 1
random = np.random.default_rng(1)


def room(n, dtype=np.uint8):
    """Memory at a multiple of 256."""
    size = n * np.dtype(dtype).itemsize
    raw = np.zeros(size + 256, np.uint8)
    at = -raw.ctypes.data % 256
    return raw[at:at + size].view(dtype)


def address(array):
    return array.ctypes.data


# ---- the emulator ----

class Loads:
    """What is asked for of one range."""

    def __init__(self, array):
        self.first, self.asked = address(array), 0
        self.touched = np.zeros(array.nbytes, bool)

    def note(self, at, width):
        at -= self.first
        if 0 <= at and at + width <= len(self.touched):
            self.asked += width
            self.touched[at:at + width] = True


watched = None
WIDTHS = [(r"(DWORDX4|B128)$", 16), (r"(DWORDX3|B96)$", 12), (r"(DWORDX2|B64)$", 8), (r"(DWORD|B32)$", 4),
          (r"(SHORT(_D16)?(_HI)?|[UI]16|B16)$", 2), (r"(BYTE(_D16)?(_HI)?|[UI]8)$", 1)]


def field(inst, name, signed=False):
    bits = getattr(type(inst), name)
    value = (inst._raw >> bits.lo) & bits.mask
    return value - (bits.mask + 1) if signed and value > bits.mask >> 1 else value


def lanes_of(inst, regs, lanes):
    """Active lanes and their addresses, of an instruction with a `saddr` or without."""
    scalar, vector = regs
    active = scalar[emu.EXEC_LO.offset] | (scalar[emu.EXEC_LO.offset + 1] << 32 if lanes == 64 else 0)
    later = hasattr(type(inst), "vaddr")
    v = (field(inst, "vaddr" if later else "addr") & 255) * lanes
    offset = field(inst, "ioffset" if later else "offset", True)
    s = field(inst, "saddr") if hasattr(type(inst), "saddr") else 127
    base = scalar[s] | scalar[s + 1] << 32 if s < 124 else None
    for lane in range(lanes):
        if active >> lane & 1:
            low = vector[v + lane]
            yield (base + low if base is not None else low | vector[v + lanes + lane] << 32) + offset


def decode(pc, arch, real=emu._decode_at):
    """The emulator's own, but loads are looked at."""
    (program, runtime), inst = real(pc, arch)
    kind, name, lanes = type(inst).__name__, emu._op_name(inst), emu._wave_size(arch)
    held = list(program.arg.globals)

    class Watching:
        @staticmethod
        def fxn(*buffers):
            scalar, vector = ((ctypes.c_uint32 * n).from_address(buffers[held.index(i)].value) if i in held else None
                              for i, n in ((0, 512), (1, 256 * lanes)))
            if kind.startswith(("GLOBAL", "VGLOBAL", "FLAT", "VFLAT")) and "LOAD" in name and watched:
                width = next(w for pattern, w in WIDTHS if re.search(pattern, name))
                for at in lanes_of(inst, (scalar, vector), lanes):
                    watched.note(at, width)
            if kind == "DS" and ("STORE" in name or "WRITE" in name):
                # Idle lanes' addresses are used, too: they are kept inside.
                active = scalar[emu.EXEC_LO.offset] | (scalar[emu.EXEC_LO.offset + 1] << 32 if lanes == 64 else 0)
                first = (field(inst, "addr") & 255) * lanes
                idle = [first + lane for lane in range(lanes) if not active >> lane & 1]
                kept = [vector[i] for i in idle]
                for i in idle:
                    vector[i] = 0
                runtime.fxn(*buffers)
                for i, value in zip(idle, kept):
                    vector[i] = value
                return
            runtime.fxn(*buffers)

    return (program, Watching), inst


def own_place(inst, ctx):
    """s_getpc_b64, which the emulator lacks."""
    low, high = emu._split64(ctx.rpc() + emu.UOp.const(4, emu.dtypes.uint64))
    to = ctx.inst_field(type(inst).sdst)
    return emu.UOp.sink(ctx.wsgpr_dyn(to, low), ctx.wsgpr_dyn(to + emu._c(1), high), *ctx.inc_pc())


def patch():
    emu._decode_at = decode
    for kind, handler in list(emu._INST_HANDLERS.items()):
        if kind.__name__ == "SOP1":
            emu._INST_HANDLERS[kind] = lambda inst, ctx, real=handler: \
                own_place(inst, ctx) if "GETPC" in emu._op_name(inst) else real(inst, ctx)


class Object:
    """A code object in memory."""

    def __init__(self, path):
        data = path.read_bytes()
        elf = ELFFile(io.BytesIO(data))
        loads = [s for s in elf.iter_segments() if s["p_type"] == "PT_LOAD"]
        self.bytes = max(s["p_vaddr"] + s["p_memsz"] for s in loads) + 0xFFF & ~0xFFF
        self.memory = mmap.mmap(-1, self.bytes + 0x1000)
        for s in loads:
            self.memory[s["p_vaddr"]:s["p_vaddr"] + s["p_filesz"]] = data[s["p_offset"]:s["p_offset"] + s["p_filesz"]]
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.symbols = {s.name: s["st_value"] for s in elf.get_section_by_name(".dynsym").iter_symbols()}
        self.target = path.name.split(".")[-2]
        # What the emulator does not know and does not need: invalidations of caches.
        text = elf.get_section_by_name(".text")
        for at in range(text["sh_addr"], text["sh_addr"] + text["sh_size"] - 8, 4):
            words = struct.unpack_from("<III", self.memory, at)
            if self.target.startswith("gfx11") and words[0] in (0xE0AC0000, 0xE0B00000) and words[1] in (0, 0x80000000):
                struct.pack_into("<II", self.memory, at, *[0xBF800000] * 2)
            if self.target.startswith("gfx12") and words[0] in (0xEE0AC07C, 0xEE0B007C, 0xEE13C07C) and words[2] == 0:
                struct.pack_into("<III", self.memory, at, *[0xBF800000] * 3)

    def run(self, kernel, grid, threads, args, shared=0):
        at = self.symbols[f"{kernel}.kd"]
        lds, scratch, size = struct.unpack_from("<III", self.memory, at)
        entry, = struct.unpack_from("<q", self.memory, at + 16)
        rsrc2, = struct.unpack_from("<I", self.memory, at + 52)
        properties, preload = struct.unpack_from("<HH", self.memory, at + 56)
        given = room(max(size, len(args)) + 256)
        given[:len(args)] = np.frombuffer(args, np.uint8)
        users = []
        if properties & 1:
            users += [0] * 4
        for bit in (2, 4, 8, 16, 32):
            if properties & bit:
                value = address(given) if bit == 8 else 0
                users += [value & 0xFFFFFFFF, value >> 32]
        if properties & 64:
            users += [scratch]
        users += given.view(np.uint32)[preload >> 7 & 0x1FF:][:preload & 0x7F].tolist()
        rsrc2 = rsrc2 & ~(0x1FF << 15) | -(-(lds + shared) // 512) << 15
        emu.run_asm(self.base + at + entry, self.bytes - at - entry, *grid, threads, 1, 1, address(given), rsrc2,
                    scratch, ARCH[self.target[:5]], users)


# ---- weights ----

def needed(ty, rows, cols):
    return sum(rows * cols * n // of for n, of in PLANES[ty])


def blocks(ty, rows, cols):
    """Random blocks as in a file, and the numbers in them."""
    size, width = GGML_QUANT_SIZES[GGMLQuantizationType[ty]]
    n = rows * cols // size
    data = random.integers(0, 256, (n, width), np.uint8)
    if ty == "F16":
        data = random.standard_normal((rows, cols)).astype(np.float16).view(np.uint8).reshape(n, width)
    scale = random.uniform(0.005, 0.02, n).astype(np.float16).view(np.uint8).reshape(n, 2)
    if ty == "MXFP4":
        data[:, 0] = random.integers(118, 126, n)
    elif ty == "IQ1_M":
        bits = scale.copy().view(np.uint16)[:, 0]
        for i in range(4):
            data[:, 49 + 2 * i] = data[:, 49 + 2 * i] & 15 | (bits >> 4 * i & 15) << 4
    elif ty != "F16":
        for at in {"Q4_K": (0, 2), "Q6_K": (208,)}.get(ty, (0,)):
            data[:, at:at + 2] = scale
    file = room(data.size)
    file[:] = data.reshape(-1)
    numbers = data.reshape(rows, -1).view(np.float16) if ty == "F16" else dequantize(data.reshape(rows, -1), GGMLQuantizationType[ty])
    return file, numbers.reshape(rows, cols).astype(np.float64)


def matrix(objects, ty, rows, cols):
    """As it lies on the device, and its numbers."""
    file, numbers = blocks(ty, rows, cols)
    there = room(sum(-(-rows * cols * n // of // 256) * 256 for n, of in PLANES[ty]))
    flag = room(1, np.uint32)
    args = struct.pack("<QQQIIII", address(file), address(there), address(flag), 0, rows, rows, cols)
    objects("repack").run(f"repack_{ty.lower()}", (-(-rows * cols // 8192), 1, 1), 256, args)
    return there, numbers


def eight_bits(x):
    """What quantized products make of their input."""
    parts = x.reshape(-1, 32)
    d = np.abs(parts).max(1, keepdims=True) / np.float32(127)
    return (np.rint(parts / d) * d.astype(np.float64)).reshape(x.shape)


# ---- kernels: each gives the bytes it needs, what was asked for, and how wrong it is ----

def one_row(objects, ty, rows=8, cols=4096):
    global watched
    there, numbers = matrix(objects, ty, rows, cols)
    x, out, name = room(cols, np.float32), room(rows, np.float32), f"matvec_{ty.lower()}"
    x[:] = random.standard_normal(cols)
    watched = loads = Loads(there)
    if ty == "F16":
        args = struct.pack("<QQQQIIIIII", address(there), address(x), address(out), 0, rows, cols, 1, 0, 1, cols)
        objects(name).run(name, (1, 1, 1), 256, args)
        wanted = numbers @ x
    else:
        args = struct.pack("<QQfIIIIIIffI", address(x), 0, 0.0, cols, 1, 0, 1, 0, 0, 0.0, 0.0, 0)
        args += struct.pack("<QQQII", address(there), address(out), 0, rows, 0)
        objects(name).run(name, (1, 1, 1), 512, args.ljust(184, b"\0"), 40 * cols // 32)
        wanted = numbers @ eight_bits(x)
    watched = None
    return needed(ty, rows, cols), loads, np.max(np.abs(out - wanted) / (np.abs(numbers) @ np.abs(x)))


def expert(objects, ty, rows=8, cols=2048):
    global watched
    matrices = [matrix(objects, ty, rows, cols) for _ in range(2)]
    width = len(matrices[0][0])
    there, table = room(2 * width), room(1, np.uint64)
    for i in range(2):
        there[i * width:(i + 1) * width] = matrices[i][0]
    table[0] = address(there)
    x, ids, out, name = room(cols, np.float32), room(1, np.float32), room(rows, np.float32), f"experts_{ty.lower()}"
    x[:] = random.standard_normal(cols)
    args = struct.pack("<QQQ", address(x), address(ids), address(out))
    args += struct.pack("<QQQQQQIIII", address(table), 0, width, NO_TENSOR, NO_TENSOR, NO_TENSOR, 1, rows, cols, 0)
    args += struct.pack("<IffIII", 1, 0.0, 0.0, 0, 1, 1)
    watched = loads = Loads(there)
    objects(name).run(name, (1, 1, 1), 256, args, 40 * cols // 32)
    watched = None
    gate, up = (numbers @ eight_bits(x) for _, numbers in matrices)
    size = [np.abs(numbers) @ np.abs(x) for _, numbers in matrices]
    wrong = np.abs(out - gate / (1 + np.exp(-gate)) * up) / (1 + size[0] * np.abs(up) + size[1] * np.abs(gate))
    return 2 * needed(ty, rows, cols), loads, np.max(wrong)


def attention(objects, dim=128, n_head_kv=2, group=4, position=1023):
    global watched
    n_head, pages = n_head_kv * group, position // 32 + 1
    k, v = (random.standard_normal((pages, n_head_kv, 32, dim)).astype(np.float16) for _ in range(2))
    there = room(pages * 2 * k[0].nbytes)
    there[:] = np.concatenate([k, v], axis=1).view(np.uint8).reshape(-1)
    table, positions = room(pages, np.uint64), room(1, np.uint32)
    table[:], positions[0] = np.arange(pages) * 2 * k[0].nbytes, position
    q, out, partials, counters = room(n_head * dim, np.float32), room(n_head * dim, np.float32), room(1 << 16, np.float32), room(64, np.uint32)
    q[:] = random.standard_normal(n_head * dim)
    args = struct.pack("<QQQQQQ", address(q), 0, 0, address(out), address(partials), address(counters))
    args += struct.pack("<QQQQIIIIQ", address(there), address(table), address(positions), 0, pages, n_head_kv, dim, dim, 0)
    args += struct.pack("<QQQQfIIIII", 0, 0, 0, 0, 0.0, 0, 0, 0, 0, 0)
    args += struct.pack("<QffIIIIII", 0, dim**-0.5, 0.0, 0, n_head, group, 1, 0, 0)
    name = f"attention_decode_{dim}_{group}"
    watched = loads = Loads(there)
    objects(name).run(name, (n_head // group, 1, 1), 256, args)
    watched = None
    keys, values = (of.transpose(1, 0, 2, 3).reshape(n_head_kv, -1, dim)[:, :position + 1].astype(np.float64) for of in (k, v))
    scores = np.einsum("hgd,hpd->hgp", q.reshape(n_head_kv, group, dim), keys) * dim**-0.5
    parts = np.exp(scores - scores.max(2, keepdims=True))
    wanted = np.einsum("hgp,hpd->hgd", parts / parts.sum(2, keepdims=True), values)
    return (position + 1) * n_head_kv * dim * 4, loads, np.max(np.abs(out.reshape(wanted.shape) - wanted))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("targets", nargs="*", help=f"in place of {' '.join(TARGETS)}")
    parser.add_argument("--objects", type=pathlib.Path, help="a folder that check_targets.sh wrote")
    options = parser.parse_args()
    targets = options.targets or TARGETS
    types = list(PLANES)
    units = ["repack", "attention_decode_128_4", *(f"matvec_{ty.lower()}" for ty in types), *(f"experts_{ty.lower()}" for ty in types[1:])]
    patch()
    failed = False
    with tempfile.TemporaryDirectory() as made:
        folder = options.objects or pathlib.Path(made)
        if not options.objects:
            subprocess.run(["env", f"UNITS={'|'.join(units)}", str(HERE / "check_targets.sh"), made, *targets], check=True, stdout=sys.stderr)
        for target in targets:
            objects = functools.cache(lambda unit: Object(folder / f"{unit}.{target}.hsaco"))
            for unit in units[1:]:
                if not (folder / f"{unit}.{target}.hsaco").exists():
                    continue
                kind, ty = unit.split("_", 1)
                run = {"matvec": one_row, "experts": expert, "attention": lambda objects, _: attention(objects)}[kind]
                need, loads, wrong = run(objects, ty.upper())
                bound = 2e-3 if kind == "attention" else 3e-6
                failed |= bool(wrong > bound)
                print(f"{target:8} {unit:24} needed {need:8}, asked for {loads.asked / need:.3f}, distinct {loads.touched.sum() / need:.3f}"
                      f"{' WRONG' if wrong > bound else ''} (off by {wrong:.1e})", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
