#!/usr/bin/env bash
# Speed and memory against TRL 1.16.0, which lives in an environment of its own (trl_environment.sh).
#   benchmarks/speed/run.sh [ROW ...] [OPTION ...]        e.g. benchmarks/speed/run.sh sft-0.5b --device cuda
set -euo pipefail
cd "$(dirname "$0")/../.."

OURS=${SPEED_PYTHON:-.venv/bin/python}
THEIRS=${SPEED_TRL_PYTHON:-$(benchmarks/trl_environment.sh "$OURS")}
exec "$OURS" -m benchmarks.speed "$@" --trl-python "$THEIRS"
