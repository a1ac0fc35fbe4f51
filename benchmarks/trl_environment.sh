#!/usr/bin/env bash
# benchmarks/trl_environment.sh PYTHON: the Python of an environment with TRL 1.16.0, made when it is missing.
# .venv-trl holds nothing but TRL and borrows torch and the rest from PYTHON's environment; posttrain never sees it.
set -euo pipefail
cd "$(dirname "$0")/.."
theirs=.venv-trl/bin/python
if [ ! -x "$theirs" ]; then
    echo "Making .venv-trl with TRL 1.16.0 ..." >&2
    trap 'rm -rf .venv-trl' ERR  # nobody should take half an environment for a whole one
    "$1" -m venv .venv-trl
    shared=$("$1" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
    echo "$shared" > "$("$theirs" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/shared.pth"
    "$theirs" -m pip install --quiet --disable-pip-version-check --retries 1 --timeout 20 --no-deps trl==1.16.0 >&2
fi
echo "$theirs"
