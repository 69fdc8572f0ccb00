#!/usr/bin/env python3
"""What the compiler made of every kernel, for each AMD target: registers, spills,
LDS, occupancy, instructions.

Reads the code objects that check_targets.sh writes, or has it write them first:

    kernels/gpu/hip/isa_report.py                                  # the usual six targets
    kernels/gpu/hip/isa_report.py --objects DIR gfx1100 gfx942     # objects that are there
    kernels/gpu/hip/isa_report.py --check     # exit 1 where a kernel spills that is not known to

Needs llvm-readelf and llvm-objdump of LLVM 22 or newer (LLVM_BIN names their folder). Columns:
registers of a lane (v, and a for accumulators), of a wave (s); spilled registers of a lane and
of a wave (those of a wave go to lanes of vector registers, not to memory, so they cost a move
and are told, not refused); bytes of scratch memory a lane; bytes of LDS that the kernel
declares (what a launch adds is not known here); waves a SIMD that fit; instructions in all; dot
products, matrix instructions; loads from memory by their width (16, 8, 4 and fewer bytes a
lane); packed f16 or f32.
"""

import argparse
import concurrent.futures
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
TARGETS = ["gfx906", "gfx90a", "gfx942", "gfx1100", "gfx1151", "gfx1201"]

# Vector registers of a SIMD for a lane, what they are given out by, most waves, LDS of what shares
# it, SIMDs that share it. gfx1100, 1101 and 1151 have half as many again as the rest of their
# family.
SIMD = {
    "gfx906": (256, 4, 10, 64 << 10, 4),
    "gfx908": (512, 8, 8, 64 << 10, 4),
    "gfx90a": (512, 8, 8, 64 << 10, 4),
    "gfx942": (512, 8, 8, 64 << 10, 4),
    "gfx950": (512, 8, 8, 160 << 10, 4),
    "gfx1030": (1024, 16, 16, 128 << 10, 4),
    "gfx1100": (1536, 24, 16, 128 << 10, 4),
    "gfx1101": (1536, 24, 16, 128 << 10, 4),
    "gfx1151": (1536, 24, 16, 128 << 10, 4),
    "gfx1200": (1536, 24, 16, 128 << 10, 4),
    "gfx1201": (1536, 24, 16, 128 << 10, 4),
}

# Kernels that --check lets keep registers in memory, and why: none at present. A change that makes
# one fit takes its line away.
KNOWN_SPILLS = {}

DOT = re.compile(r"^v_(dot|dot2c|dot4c)\w*")
MATRIX = re.compile(r"^v_(wmma|mfma|smfmac)\w*")
PACKED = re.compile(r"^v_pk_\w+")
LOAD = re.compile(r"^(?:global|flat|buffer)_load_(\w+)")
SCRATCH = re.compile(r"^scratch_(load|store)\w*")
WIDTH = {"dwordx4": 16, "b128": 16, "dwordx3": 12, "b96": 12, "dwordx2": 8, "b64": 8}


def tool(name):
    """The newest of LLVM's tools of this name."""
    folder = os.environ.get("LLVM_BIN")
    names = [f"{folder}/{name}"] if folder else [f"{name}-{n}" for n in (24, 23, 22)]
    names.append(f"{os.environ.get('ROCM_PATH', '/opt/rocm')}/llvm/bin/{name}")
    for candidate in names:
        if shutil.which(candidate):
            return candidate
    sys.exit(f"isa_report: no {name} of LLVM 22 or newer: install llvm-22, or set LLVM_BIN")


def output(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def metadata(path):
    """The kernels' own notes, by kernel."""
    kernels, current = {}, None
    inside = False
    for line in output(tool("llvm-readelf"), "--notes", str(path)).splitlines():
        if line.strip() == "amdhsa.kernels:":
            inside = True
        elif inside and re.match(r"^amdhsa\.|^\.\.\.", line.strip()):
            inside = False
        elif inside:
            # A kernel begins with a dash at the least indent; arguments are deeper.
            if re.match(r"^  - ", line):
                current = {}
            match = re.match(r"^(?:  - |    )(\.\w+): +(\S+)", line)
            if match and current is not None:
                current[match[1]] = match[2]
                if match[1] == ".name":
                    kernels[match[2].strip("'\"")] = current
    return kernels


def instructions(path):
    """Mnemonics of each kernel."""
    found, current = {}, None
    for line in output(tool("llvm-objdump"), "-d", "--no-show-raw-insn", str(path)).splitlines():
        match = re.match(r"^[0-9a-f]+ <(\w+)>:", line)
        if match:
            current = found.setdefault(match[1], [])
        elif current is not None and line.startswith(("\t", " ")):
            words = line.split()
            if words and re.match(r"^[a-z]\w+$", words[0]):
                current.append(words[0])
    return found


def occupancy(target, note):
    """Waves of a kernel that a SIMD holds at a time."""
    if target not in SIMD:
        return 0
    registers, grain, most, lds, simds = SIMD[target]
    wave = int(note.get(".wavefront_size", 32))
    vector, accumulators = int(note.get(".vgpr_count", 0)), int(note.get(".agpr_count", 0))
    if accumulators and target == "gfx908":
        vector = max(vector, accumulators)
    used = max(grain, -(-vector // grain) * grain)
    waves = min(most, registers // used)
    block_waves = -(-int(note.get(".max_flat_workgroup_size", wave)) // wave)
    declared = int(note.get(".group_segment_fixed_size", 0))
    if declared:
        waves = min(waves, max(1, lds // declared * block_waves // simds))
    return waves


def look(path):
    """A row for each kernel of an object, named <unit>.<target>.hsaco."""
    unit, target = path.name.removesuffix(".hsaco").rsplit(".", 1)
    notes, code = metadata(path), instructions(path)
    rows = []
    for kernel, note in sorted(notes.items()):
        if kernel not in code:
            sys.exit(f"isa_report: {path}: no instructions of {kernel} were found")
        names = code[kernel]
        loads = [LOAD.match(n) for n in names]
        widths = [WIDTH.get(m[1].removeprefix("lds_"), 4) for m in loads if m]
        count = lambda pattern: sum(1 for n in names if pattern.match(n))
        rows.append({
            "target": target,
            "unit": unit,
            "kernel": kernel,
            "v": int(note.get(".vgpr_count", 0)),
            "a": int(note.get(".agpr_count", 0)),
            "s": int(note.get(".sgpr_count", 0)),
            "v_spills": int(note.get(".vgpr_spill_count", 0)),
            "s_spills": int(note.get(".sgpr_spill_count", 0)),
            "scratch": int(note.get(".private_segment_fixed_size", 0)),
            "scratch_code": count(SCRATCH),
            "lds": int(note.get(".group_segment_fixed_size", 0)),
            "waves": occupancy(target, note),
            "code": len(names),
            "dot": count(DOT),
            "matrix": count(MATRIX),
            "packed": count(PACKED),
            "l16": sum(1 for w in widths if w >= 12),
            "l8": sum(1 for w in widths if w == 8),
            "l4": sum(1 for w in widths if w < 8),
        })
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("targets", nargs="*", help=f"in place of {' '.join(TARGETS)}")
    parser.add_argument("--objects", type=pathlib.Path, help="a folder that check_targets.sh wrote")
    parser.add_argument("--check", action="store_true", help="exit 1 where a kernel spills vector registers or uses scratch memory, but for KNOWN_SPILLS")
    parser.add_argument("--only", default="", help="units whose name has this")
    options = parser.parse_args()
    targets = options.targets or TARGETS
    with tempfile.TemporaryDirectory() as made:
        folder = options.objects or pathlib.Path(made)
        if not options.objects:
            subprocess.run([str(HERE / "check_targets.sh"), made, *targets], check=True, stdout=sys.stderr)
        paths = [p for p in sorted(folder.glob("*.hsaco")) if p.name.split(".")[-2] in targets and options.only in p.name]
        if not paths:
            sys.exit(f"isa_report: no objects for {' '.join(targets)} in {folder}")
        with concurrent.futures.ThreadPoolExecutor() as pool:
            rows = [row for rows in pool.map(look, paths) for row in rows]
    rows.sort(key=lambda r: (targets.index(r["target"]), r["unit"], r["kernel"]))
    print(f"{'target':8} {'kernel':44} {'v':>3} {'a':>3} {'s':>3} {'spills':>7} {'scratch':>7} {'LDS':>6} {'waves':>5} "
          f"{'code':>5} {'dot':>4} {'matrix':>6} {'packed':>6} {'16B':>4} {'8B':>4} {'<=4B':>4}")
    for r in rows:
        name = r["kernel"] if r["kernel"].startswith(r["unit"]) else f"{r['unit']}.{r['kernel']}"
        print(f"{r['target']:8} {name:44} {r['v']:3} {r['a']:3} {r['s']:3} {r['v_spills']:3}+{r['s_spills']:<3} "
              f"{r['scratch']:7} {r['lds']:6} {r['waves']:5} {r['code']:5} {r['dot']:4} {r['matrix']:6} {r['packed']:6} "
              f"{r['l16']:4} {r['l8']:4} {r['l4']:4}")
    for kind, names, told in [
        ("spill vector registers or use scratch memory", ("v_spills", "scratch", "scratch_code"), True),
        ("keep scalar registers in lanes", ("s_spills",), False),
    ]:
        found = [r for r in rows if any(r[name] for name in names)]
        print(f"isa_report: {len(rows)} kernels of {len(targets)} targets, {len(found)} of them {kind}")
        for r in found:
            known = f" (known: {KNOWN_SPILLS[r['kernel']]})" if told and r["kernel"] in KNOWN_SPILLS else ""
            print(f"  {r['target']} {r['unit']}.{r['kernel']}: {', '.join(f'{name} {r[name]}' for name in names)}{known}")
        if options.check and told and any(r["kernel"] not in KNOWN_SPILLS for r in found):
            sys.exit(1)


if __name__ == "__main__":
    main()
