#!/usr/bin/env bash
# benchmarks/trl_environment.sh PYTHON: the Python of an environment with TRL 1.16.0, made when it is missing.
# .venv-trl holds nothing but TRL and borrows torch and the rest from PYTHON's environment; posttrain never sees it.
# benchmarks/trl_environment.sh PYTHON VERSION: a folder with that version of TRL and nothing else, to be put first on PYTHONPATH.
set -euo pipefail
cd "$(dirname "$0")/.."
install="-m pip install --quiet --disable-pip-version-check --retries 1 --timeout 20 --no-deps"
if [ -n "${2:-}" ]; then
    folder=.venv-trl-$2
    if [ ! -d "$folder/trl" ]; then
        echo "Making $folder with TRL $2 ..." >&2
        trap 'rm -rf "$folder"' ERR  # nobody should take half a folder for a whole one
        "$1" $install --target "$folder" "trl==$2" >&2
    fi
    echo "$PWD/$folder"
    exit
fi
theirs=.venv-trl/bin/python
if [ ! -x "$theirs" ]; then
    echo "Making .venv-trl with TRL 1.16.0 ..." >&2
    trap 'rm -rf .venv-trl' ERR
    "$1" -m venv .venv-trl
    shared=$("$1" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
    echo "$shared" > "$("$theirs" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/shared.pth"
    "$theirs" $install trl==1.16.0 >&2
fi
"$theirs" -m tests.torchvision_on_cpu  # image processors need torchvision, which a CPU build of torch must be readied for
echo "$theirs"
