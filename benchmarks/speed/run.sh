#!/usr/bin/env bash
# Speed and memory against TRL 1.16.0, which lives in an environment of its own (.venv-trl, borrowing torch and the rest from .venv).
#   benchmarks/speed/run.sh [ROW ...] [OPTION ...]        e.g. benchmarks/speed/run.sh sft-0.5b --device cuda
set -euo pipefail
cd "$(dirname "$0")/../.."

OURS=${SPEED_PYTHON:-.venv/bin/python}
THEIRS=${SPEED_TRL_PYTHON:-.venv-trl/bin/python}
if [ ! -x "$THEIRS" ]; then
    echo "Making .venv-trl with TRL 1.16.0 ..."
    "$OURS" -m venv .venv-trl
    shared=$("$OURS" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
    echo "$shared" > "$(.venv-trl/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/shared.pth"
    .venv-trl/bin/python -m pip install --quiet --disable-pip-version-check --no-deps trl==1.16.0
    THEIRS=.venv-trl/bin/python
fi
exec "$OURS" -m benchmarks.speed "$@" --trl-python "$THEIRS"
