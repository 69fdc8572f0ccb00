#!/usr/bin/env python3
"""goldens.py GOLDEN.json NAME COMMAND...: a loaded model's log-probabilities beside those that its
authors' own code computed. COMMAND is rocmforgectl with the socket of the daemon.

Three tokens are generated behind the first sequence, a row a pass, which must have the
log-probabilities that they have where all is scored in one pass: the kernels of one row and of
several are not the same. SCORED sequences (1) are compared with the golden file, from the shortest
on. Prints the largest difference and the rows compared; the exit status is 1 beyond TOLERANCE."""

import json
import os
import subprocess
import sys

# As daemon/crates/engine/tests/architectures.rs has it: arithmetic in f16 differs by up to 0.012.
TOLERANCE = 0.02

golden, name, *command = sys.argv[1:]


def ask(what, ids, *arguments):
    ids = ",".join(map(str, ids))
    told = subprocess.run(
        [*command, "--json", what, name, "--ids", ids, *arguments], capture_output=True, text=True
    )
    if told.returncode != 0:
        sys.exit(f"{what}: {told.stderr.strip()}")
    return [json.loads(line) for line in told.stdout.splitlines()]


def scores(ids):
    (answer,) = ask("score", ids)
    return [token["logprob"] for token in answer["tokens"][1:]]


with open(golden) as file:
    cases = sorted(json.load(file)["cases"], key=lambda case: len(case["ids"]))
worst, rows = 0.0, 0
for number, case in enumerate(cases[: int(os.environ.get("SCORED", 1))]):
    ids, expected = list(case["ids"]), list(case["next_logprobs"])
    if number == 0:
        settings = ["--max-tokens", "3", "--temperature", "0", "--ignore-eos", "--logprobs", "0"]
        for event in ask("generate", ids, *settings):
            for token in event.get("logprobs", []):
                ids.append(token["id"])
                expected.append(token["logprob"])
    found = scores(ids)
    if len(found) != len(expected) or number == 0 and len(ids) != len(case["ids"]) + 3:
        sys.exit(f"{len(found)} scores of {len(ids)} tokens")
    for a, b in zip(found, expected):
        # A NaN is no difference of at most anything.
        if not abs(a - b) <= TOLERANCE:
            print(f"row {rows}: {a} in place of {b}", file=sys.stderr)
        worst = max(worst, abs(a - b)) if a == a else float("inf")
        rows += 1
print(f"{worst:.4f} in {rows} rows")
sys.exit(not worst <= TOLERANCE)
