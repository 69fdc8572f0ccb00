#!/usr/bin/env bash
# run.sh ROOT [part...]: the daemon under ROCm's own HIP runtime on a simulated card.
#
# ROOT is a root file system with libamdhip64, hiprtc and a simulator that answers the kernel
# driver; ROOT/rj.sh runs a program on the card that CFG names (/small.json is a gfx1100, the files
# beside this script are others: /gfx1151.json ...; cards.txt tells what they need). Needs root, for
# chroot; /proc is mounted in ROOT where it is not. Parts, all unless some are named:
#   devices   the card is listed by name and architecture
#   driver    the test of the driver's layer and of copies (gpu-driver/tests/gpu_card.rs)
#   generate  each model is loaded and gives the host's text
#   arch      the small models of tests/fixtures/arch have their authors' log-probabilities
#             (goldens.py)
#   evict     two models in a budget that does not hold both: segments are evicted, both give the
#             host's text
#   budget    the budget is halved and doubled between requests, models stay usable
#   rounds    models are loaded and unloaded in rounds; in the end nothing is held
#   hiprtc    the cache of kernels is emptied: every kernel is compiled anew
#   two       two daemons share the card
#   parity    the table of operations and types, card against host (quick form)
# Texts are the first TOKENS (4) of a greedy answer: later ones may part where two tokens are
# equally good. Environment: MODELS (folder, default tests/fixtures), ARCH (models of `arch`, by the
# names of their files in tests/fixtures/arch, default all), SCORED (how many of their 3 sequences,
# of 5, 33 and 150 tokens, 1), TOKENS, BIN (binaries; built if unset), CFG, WAIT (seconds that a
# request may take, 900), LOGS (folder for the daemons' logs where something failed), OPERATION
# (compare only operations whose name begins so), PARITY_KERNELS (a folder of code objects in place
# of the run-time compiler's, see check_targets.sh).
#
# The last line is "N passed, N failed"; the exit status is 1 where one failed. `known.txt` beside
# this script lists what fails because of the simulator, each with its reason: such a line is
# printed, and is not a failure. All parts take some hours of one core; parity and arch, which take
# most of it, print as they go.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
repository=$(cd "$here/../.." && pwd)
root=$(realpath "${1:?usage: run.sh ROOT [part...]}")
shift
parts=("$@")
[ ${#parts[@]} -gt 0 ] || parts=(devices driver generate arch evict budget rounds hiprtc two parity)
models=${MODELS:-$repository/tests/fixtures}
goldens=$repository/tests/fixtures/arch
tokens=${TOKENS:-4}
wait=${WAIT:-900}
prompt="Once upon a time"
passed=0
failed=0

ok() { echo "ok    $1"; passed=$((passed + 1)); }
bad() { echo "FAIL  $1: $2"; failed=$((failed + 1)); }
die() { echo "run.sh: $1" >&2; exit 2; }

[ -x "$root/rj.sh" ] || die "$root/rj.sh is not there: set the root up first"
[ "$(id -u)" = 0 ] || die "chroot needs root"
chroot=$(PATH=$PATH:/usr/sbin:/sbin command -v chroot) || die "no chroot"
# The daemon starts the compiler of kernels through /proc/self/exe.
[ -e "$root/proc/self" ] || mount -t proc proc "$root/proc" || die "/proc cannot be mounted in $root"
cp "$here"/*.json "$root/" || die "the cards cannot be copied"
[ -e "$root${CFG:-/small.json}" ] || die "no ${CFG:-/small.json} in $root"
if [ -z "${BIN:-}" ]; then
    (cd "$repository" && cargo build --release -p rocmforged -p rocmforgectl -p rocmforge-bench) || die "the build failed"
    BIN=${CARGO_TARGET_DIR:-$repository/target}/release
fi
mkdir -p "$root/rf" "$root/run/rf"
cp --remove-destination "$BIN/rocmforged" "$BIN/rocmforge-bench" "$root/rf/" || die "no binaries in $BIN"
rm -rf "$root/rf/models"
mkdir -p "$root/rf/models"
cp -L "$models"/*.gguf "$root/rf/models/" || die "no models in $models"
names=$(cd "$root/rf/models" && ls ./*.gguf | sed 's#^\./##; s#\.gguf$##')
work=$(mktemp -d)
started=()
finish() {
    for pid in "${started[@]}"; do kill -KILL "$pid" 2>/dev/null; done
    rm -rf "$work"
}
trap finish EXIT

# Runs a program on the card. Nothing of this shell's environment goes along.
on_card() {
    exec env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root CFG="${CFG:-/small.json}" \
        ${waits[@]+"${waits[@]}"} ${card_env[@]+"${card_env[@]}"} "$chroot" "$root" /rj.sh "$@"
}
card_env=()
# The simulator lets the packets pass by which a queue of CDNA waits for another (known.txt): ROCm's
# runtime waits itself instead.
waits=()
if grep -q '"arch": *"cdna' "$root${CFG:-/small.json}" 2>/dev/null; then waits=(ROC_CPU_WAIT_FOR_SIGNAL=1); fi

# The process that a shell's job became.
of_job() { started+=("$1"); daemon=$1; }

ctl() { timeout "$wait" "$BIN/rocmforgectl" --socket "$socket" "$@"; }

ready() {
    for _ in $(seq "$wait"); do
        ctl status >/dev/null 2>&1 && return 0
        kill -0 "$daemon" 2>/dev/null || return 1
        sleep 1
    done
    return 1
}

# start NAME ARGUMENTS...: a daemon on the card.
start() {
    socket=$root/run/rf/$1.sock
    rm -f "$socket"
    (on_card /rf/rocmforged --socket "/run/rf/$1.sock" --device hip --watchdog 3000 --model-dir /rf/models "${@:2}" \
        >"$work/$1.log" 2>&1) &
    of_job $!
    ready
}

stop() {
    kill -TERM "$1" 2>/dev/null
    wait "$1" 2>/dev/null
}

# Text of a model in the daemon that $socket names, or nothing.
text_of() { ctl --json generate "$1" "$prompt" --max-tokens "$tokens" --temperature 0 2>>"$work/ctl.log" | text_in; }
text_in() {
    python3 -c '
import json, sys
text = ""
for line in sys.stdin:
    try: event = json.loads(line)
    except ValueError: continue
    piece = event.get("text", event.get("piece", event.get("delta")))
    text += piece if isinstance(piece, str) else ""
print(json.dumps(text))'
}

# What the CPU says, model by model.
declare -A expected=()
asked=0
expect() {
    [ $asked = 0 ] || return 0
    asked=1
    socket=$work/host.sock
    "$BIN/rocmforged" --socket "$socket" --device host --model-dir "$root/rf/models" >"$work/host.log" 2>&1 &
    of_job $!
    local host=$daemon name
    ready || die "no daemon on the host: $(tail -n 3 "$work/host.log")"
    for name in $names; do
        if ctl load "$root/rf/models/$name.gguf" --name "$name" >/dev/null 2>"$work/load.log"; then
            expected[$name]=$(text_of "$name")
        else
            echo "note  $name: the host does not load it: $(tail -n 1 "$work/load.log")"
        fi
    done
    stop "$host"
}

known() { grep -v '^#' "$here/known.txt" 2>/dev/null | grep -F -- "$1" | head -n 1; }

# same PART MODEL: the card's text is the host's.
same() {
    local got why
    got=$(text_of "$2")
    if [ "$got" = "${expected[$2]}" ] && [ "$got" != '""' ]; then
        ok "$1 $2: $got"
    elif why=$(known "$1 $2") && [ -n "$why" ]; then
        echo "known $why"
    else
        bad "$1 $2" "$got, on the host ${expected[$2]}; $(tail -n 2 "$work/$1.log" | cut -c1-400)"
    fi
}

# load PART MODEL [FILE on the card]
load() { ctl load "${3:-/rf/models/$2.gguf}" --name "$2" >/dev/null 2>"$work/load.log" || { bad "$1 $2" "load: $(tail -n 1 "$work/load.log")"; return 1; }; }

part_devices() {
    local told
    told=$(on_card /rf/rocmforged --list-devices 2>&1)
    if grep -q '^hip:0 .*(gfx' <<<"$told"; then ok "devices: $(grep -o '^hip:0.*' <<<"$told")"; else bad devices "$told"; fi
}

# The test is built like the daemon: with BIN set it has to lie there too, as gpu_card.
part_driver() {
    local test=$BIN/gpu_card told
    if [ ! -x "$test" ]; then
        test=$(cd "$repository" && cargo test --release --no-run -p rocmforge-gpu-driver --test gpu_card --message-format=json \
            2>"$work/driver.log" | grep -o '"executable":"[^"]*gpu_card[^"]*"' | cut -d'"' -f4 | tail -n 1)
    fi
    [ -x "$test" ] || { bad driver "no test: $(tail -n 2 "$work/driver.log")"; return; }
    cp --remove-destination "$test" "$root/rf/gpu_card"
    told=$(on_card /rf/gpu_card 2>&1)
    # A run without a card passes too, with none.
    if grep -q 'test result: ok. [1-9]' <<<"$told"; then
        ok "driver: $(grep -o 'file mapping:.*\|skipped: registering.*' <<<"$told" | head -n 1)"
    else
        bad driver "$(tail -n 3 <<<"$told" | cut -c1-400)"
    fi
}

part_generate() {
    start generate --vram-budget 256MiB || { bad generate "no daemon: $(tail -n 3 "$work/generate.log")"; return; }
    for name in "${!expected[@]}"; do
        if load generate "$name"; then
            same generate "$name"
            ctl unload "$name" >/dev/null 2>&1 || bad "generate $name" "unload"
        fi
    done
    stop "$daemon"
}

part_arch() {
    local daemon names=${ARCH:-$(cd "$goldens" && ls ./*.gguf | sed 's#^\./##; s#\.gguf$##')} name told why
    rm -rf "$root/rf/arch"
    mkdir -p "$root/rf/arch"
    for name in $names; do
        # A simulator that crashes takes the daemon along, and not the models behind this one.
        if ! kill -0 "${daemon:-}" 2>/dev/null; then
            start arch --vram-budget 256MiB --model-dir /rf/arch || { bad arch "no daemon: $(tail -n 3 "$work/arch.log")"; return; }
        fi
        cp -L "$goldens/$name.gguf" "$root/rf/arch/" || { bad "arch $name" "no such model"; continue; }
        load arch "$name" "/rf/arch/$name.gguf" || continue
        if told=$(timeout "$wait" python3 "$here/goldens.py" "$goldens/$name.json" "$name" \
            "$BIN/rocmforgectl" --socket "$socket" 2>&1); then
            ok "arch $name: $told"
        elif why=$(known "arch $name:") && [ -n "$why" ]; then
            echo "known $why"
        else
            bad "arch $name" "$told; $(tail -n 2 "$work/arch.log" | cut -c1-400)"
        fi
        ctl unload "$name" >/dev/null 2>&1 || ! kill -0 "$daemon" 2>/dev/null || bad "arch $name" "unload"
    done
    stop "$daemon"
}

part_evict() {
    local chosen
    chosen=$(ls -S "$root/rf/models" | sed 's#\.gguf$##' | head -n 2)
    # The larger of the two fits, not both.
    local bytes budget
    bytes=$(stat -c %s "$root/rf/models/$(head -n 1 <<<"$chosen").gguf")
    budget=${EVICT_BUDGET:-$((bytes + bytes / 8 + (1 << 20)))}
    start evict --vram-budget "$budget" || { bad evict "no daemon: $(tail -n 3 "$work/evict.log")"; return; }
    for name in $chosen; do load evict "$name"; done
    for name in $chosen $chosen; do same evict "$name"; done
    local evictions
    evictions=$(ctl --json cache stats 2>/dev/null | grep -o '"evictions":[0-9]*' | head -n 1 | cut -d: -f2)
    if [ "${evictions:-0}" -gt 0 ]; then ok "evict: $evictions evictions"; else bad evict "nothing was evicted in $budget bytes"; fi
    stop "$daemon"
}

part_budget() {
    local name budget
    name=$(ls -S "$root/rf/models" | sed 's#\.gguf$##' | head -n 1)
    start budget --vram-budget 160MiB || { bad budget "no daemon: $(tail -n 3 "$work/budget.log")"; return; }
    load budget "$name"
    for budget in 80MiB 200MiB 96MiB; do
        ctl cache budget "$budget" >/dev/null 2>"$work/load.log" || bad "budget $name" "$(tail -n 1 "$work/load.log")"
        same budget "$name"
    done
    stop "$daemon"
}

# Bytes that the daemon in $socket holds on the card.
held() {
    ctl --json cache stats 2>/dev/null | grep -o '"total":{[^}]*' | grep -oE '"(resident|in_flight|kv|prefix|scratch)_bytes":[0-9]+' |
        cut -d: -f2 | awk '{ sum += $1 } END { if (NR) print sum }'
}

part_rounds() {
    local name round
    name=$(ls -Sr "$root/rf/models" | sed 's#\.gguf$##' | head -n 1)
    start rounds --vram-budget 128MiB || { bad rounds "no daemon: $(tail -n 3 "$work/rounds.log")"; return; }
    # The device's own block; an absent figure is no figure.
    local before after
    before=$(held)
    for round in 1 2 3; do
        load rounds "$name" || break
        same rounds "$name"
        ctl unload "$name" >/dev/null 2>&1 || bad "rounds $name" "unload in round $round"
    done
    after=$(held)
    if [ -n "$before" ] && [ "$after" = "$before" ]; then ok "rounds: $before bytes are held, as before"; else bad rounds "$before bytes held before, $after after"; fi
    stop "$daemon"
}

part_hiprtc() {
    local name
    name=$(ls -Sr "$root/rf/models" | sed 's#\.gguf$##' | head -n 1)
    card_env=(XDG_CACHE_HOME=/rf/empty-cache)
    rm -rf "$root/rf/empty-cache"
    start hiprtc --vram-budget 128MiB || bad hiprtc "no daemon: $(tail -n 3 "$work/hiprtc.log")"
    card_env=()
    load hiprtc "$name" && same hiprtc "$name"
    stop "$daemon"
    if [ -n "$(find "$root/rf/empty-cache" -name '*.kobj' 2>/dev/null | head -n 1)" ]; then
        ok "hiprtc: $(find "$root/rf/empty-cache" -name '*.kobj' | wc -l) units compiled"
    else
        bad hiprtc "nothing was compiled"
    fi
}

part_two() {
    local name first
    name=$(ls -Sr "$root/rf/models" | sed 's#\.gguf$##' | head -n 1)
    start one --vram-budget 96MiB || bad two "no first daemon: $(tail -n 3 "$work/one.log")"
    first=$daemon
    load two "$name"
    start two --vram-budget 96MiB || bad two "no second daemon: $(tail -n 3 "$work/two.log")"
    load two "$name" && same two "$name"
    socket=$root/run/rf/one.sock
    same two "$name"
    stop "$daemon"
    stop "$first"
}

part_parity() {
    [ -z "${PARITY_KERNELS:-}" ] || card_env=(ROCMFORGE_KERNELS="$PARITY_KERNELS")
    (on_card /rf/rocmforge-bench gpu --quick --device hip --parts parity --progress ${OPERATION:+--operation "$OPERATION"}) 2>&1 |
        tee "$work/parity.log" | awk '/(^|})(right|wrong) / { n++; if (/(^|})wrong / || n % 50 == 0) print "note  parity, " n ": " $0; fflush() }'
    local ended=${PIPESTATUS[0]} told=0 failed_before=$failed line why
    card_env=()
    while IFS= read -r line; do
        line=${line#- FAILED: }
        # What is known names operation and shape, not the error's size.
        if why=$(known "parity ${line%%:*}") && [ -n "$why" ]; then echo "known $why"; else bad parity "$line"; fi
        told=1
    done < <(grep '^- FAILED' "$work/parity.log" | sort -u)
    if [ "$ended" = 0 ] || { [ $told = 1 ] && [ "$failed" = "$failed_before" ]; }; then
        ok "parity: $(grep -o '[0-9]* comparisons' "$work/parity.log" | head -n 1)"
    elif [ $told = 0 ]; then
        bad parity "ended with $ended after $(grep -c '^right ' "$work/parity.log"): $(tail -n 2 "$work/parity.log" | cut -c1-400)"
    fi
}

for part in "${parts[@]}"; do
    case $part in
        devices | driver | parity | arch) ;;
        generate | evict | budget | rounds | hiprtc | two) expect ;;
        *) die "no part '$part'" ;;
    esac
    before=$((passed + failed))
    "part_$part"
    [ $((passed + failed)) -gt "$before" ] || bad "$part" "nothing was looked at"
done
[ $failed = 0 ] || cp "$work"/*.log "${LOGS:-/dev/null}" 2>/dev/null
echo "$passed passed, $failed failed"
[ $failed = 0 ]
