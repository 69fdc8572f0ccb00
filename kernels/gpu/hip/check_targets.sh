#!/usr/bin/env bash
# Compiles every unit of units.txt for every AMD target, warnings as errors. Needs clang 22 or newer
# with lld (or ROCm's, by ROCM_PATH or CLANG) and nothing else of ROCm. Usage: check_targets.sh
# [output directory] [target...]. UNITS is a regular expression of the units to compile, in place of
# all.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
out=${1:-}
shift $(($# > 0 ? 1 : 0))
targets=("$@")
asked=$#
[ ${#targets[@]} -gt 0 ] || targets=(gfx906 gfx908 gfx90a gfx942 gfx950 gfx1030 gfx1100 gfx1101 gfx1151 gfx1200 gfx1201 gfx9-generic gfx9-4-generic gfx10-1-generic gfx10-3-generic gfx11-generic gfx12-generic gfx1250)

clang=${CLANG:-}
if [ -z "$clang" ]; then
    for candidate in clang-24 clang-23 clang-22 "${ROCM_PATH:-/opt/rocm}/llvm/bin/clang"; do
        if command -v "$candidate" > /dev/null; then
            clang=$candidate
            break
        fi
    done
fi
[ -n "$clang" ] || { echo "check_targets: no clang 22 or newer: install clang-22 and lld-22, or set CLANG or ROCM_PATH" >&2; exit 1; }

# Chips that not every such compiler knows; a target that was asked for is never left out.
knows() { "$clang" --target=amdgcn-amd-amdhsa -mcpu="$1" -x c -fsyntax-only /dev/null 2> /dev/null; }
if [ $asked = 0 ] && ! knows gfx1250; then
    echo "check_targets: $clang does not know gfx1250, which is left out" >&2
    unset 'targets[-1]'
fi

keep=1
if [ -z "$out" ]; then
    out=$(mktemp -d)
    keep=0
fi
mkdir -p "$out"
trap '[ $keep = 1 ] || rm -rf "$out"' EXIT

units() { grep -v '^#' "$here/units.txt" | grep -E "^(${UNITS:-.*}) "; }

# One line a compilation, run in parallel; xargs stops at the first that returns 255.
jobs=0
while read -r name source definitions; do
    flags=()
    for definition in $definitions; do flags+=("-D$definition"); done
    for target in "${targets[@]}"; do
        # Generic targets need the newer form of code objects.
        version=5
        [[ $target != *-generic ]] || version=6
        printf '%s\0' "$clang -x hip --offload-device-only --no-gpu-bundle-output --offload-arch=$target -nogpuinc -nogpulib \
-mcode-object-version=$version -std=c++17 -O3 -Wall -Wextra -Werror ${flags[*]-} -o $out/$name.$target.hsaco $here/$source || \
{ echo 'check_targets: $name does not compile for $target' >&2; exit 255; }"
        jobs=$((jobs + 1))
    done
done < <(units) | xargs -0 -P "$(nproc)" -n 1 bash -c
echo "check_targets: $(units | wc -l) units for ${#targets[@]} targets: ${targets[*]}"
