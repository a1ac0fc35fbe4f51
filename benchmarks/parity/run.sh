#!/usr/bin/env bash
# Trains the same tiny models with TRL 1.16.0 (BCO, PRM, MiniLLM and SSD: 1.10.0) and with posttrain, on the same rows, and compares every number.
#   benchmarks/parity/run.sh [--record] [CASE ...]        e.g. benchmarks/parity/run.sh 'dpo-*@2x2'; async-grpo is a case of its own
# TRL lives in an environment of its own (benchmarks/trl_environment.sh).
set -euo pipefail
cd "$(dirname "$0")/../.."

OURS=${PARITY_PYTHON:-.venv/bin/python}
THEIRS=${PARITY_TRL_PYTHON:-$(benchmarks/trl_environment.sh "$OURS")}
OLDER=$(benchmarks/trl_environment.sh "$THEIRS" 1.10.0)
WORK=${PARITY_WORK:-runs/parity}
export OMP_NUM_THREADS=1

record=no
if [ "${1:-}" = "--record" ]; then record=yes; shift; fi

mkdir -p "$WORK"
status=0
others=()
for case in "$@"; do [ "$case" = async-grpo ] || others+=("$case"); done
if [ ${#others[@]} -eq 0 ] || [ ${#others[@]} -lt $# ]; then  # all cases, or this one among them
    echo "Running async-grpo with both (logs: $WORK/async-grpo-*.log) ..."
    said=$WORK/async-grpo.json
    "$THEIRS" -m benchmarks.parity.async_grpo trl "$said" > "$WORK/async-grpo-trl.log" 2>&1
    "$OURS" -m benchmarks.parity.async_grpo posttrain "$said" > "$WORK/async-grpo-posttrain.log" 2>&1 || status=$?
    grep '^async-grpo' "$WORK/async-grpo-posttrain.log" || status=1  # nothing there: it failed before
    if [ "$record" = yes ]; then cp "$said" tests/methods/trl_async_recorded.json; fi
fi
if [ $# -gt 0 ] && [ ${#others[@]} -eq 0 ]; then exit $status; fi
set -- ${others[@]+"${others[@]}"}
rm -rf "$WORK/materials"
mkdir -p "$WORK/materials"
"$OURS" -m benchmarks.parity.materials "$WORK/materials" > "$WORK/materials.log" 2>&1
run() {  # SIDE PYTHON LOG [CASE ...]
    local side=$1 python=$2 log=$WORK/$3; shift 3
    echo "Running the cases with $side (log: $log) ..."
    "$python" -m benchmarks.parity.one_side "$side" "$WORK/materials" "$WORK/$side" "$@" > "$log" 2>&1
}
run trl "$THEIRS" trl.log "$@"
PYTHONPATH=$OLDER${PYTHONPATH:+:$PYTHONPATH} run trl "$THEIRS" trl-1.10.log "$@"
run posttrain "$OURS" posttrain.log "$@"
"$OURS" -m benchmarks.parity.compare "$WORK" "$@" || status=$?
if [ "$record" = yes ]; then "$OURS" -m benchmarks.parity.record "$WORK" tests/methods/trl_recorded.json; fi
exit $status
