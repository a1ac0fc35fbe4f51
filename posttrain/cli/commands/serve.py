"""`posttrain vllm-serve`: a server that writes completions for trainers, in whichever environment has vLLM.

The server's folder (posttrain/serve) imports nothing else of posttrain, so that PYTHON may be that of another environment with
other versions of torch and transformers: `--python`, or the variable POSTTRAIN_VLLM_PYTHON. With `--engine native` it is our own
engine that writes, in this environment. All other words go to the server.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from posttrain.cli.errors import UsageError

PYTHON_VARIABLE = "POSTTRAIN_VLLM_PYTHON"


def main(words: list[str]) -> int:
    python, words = _taken(words, "--python", os.environ.get(PYTHON_VARIABLE) or sys.executable)
    engine, words = _taken(words, "--engine", "vllm")
    if any(word in ("-h", "--help") for word in words):
        return _help()
    if engine == "native":
        from posttrain.rollout.engines.native.serving import main as serve

        return serve(words)
    if engine != "vllm":
        raise UsageError(f"--engine is {engine!r}; there are vllm and native.")
    found = shutil.which(python)
    if found is None:
        raise UsageError(f"there is no interpreter {python!r} (--python or {PYTHON_VARIABLE}).")
    if not _has_vllm(found):
        raise UsageError(
            f"{found} has no vLLM. Make an environment with it (python -m venv vllm-env; vllm-env/bin/pip install vllm uvicorn) "
            f"and name its interpreter with --python or {PYTHON_VARIABLE}; or serve with posttrain's own engine (--engine native)."
        )
    sys.stdout.flush()
    os.execv(found, [found, str(server_folder()), *words])  # signals reach the server itself


def server_folder() -> Path:
    import posttrain.serve

    return Path(posttrain.serve.__file__).parent


def _taken(words: list[str], option: str, value: str) -> tuple[str, list[str]]:
    """(what the option says, or `value` where it is not given; the other words)."""
    rest, left = [], iter(words)
    for word in left:
        if word == option:
            value = next(left, "")
        elif word.startswith(f"{option}="):
            value = word.partition("=")[2]
        else:
            rest.append(word)
    return value, rest


def _has_vllm(python: str) -> bool:
    question = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    return subprocess.run([python, "-c", question], check=False, timeout=60).returncode == 0


def _help() -> int:
    from posttrain.serve.launch import parser

    made = parser()
    made.epilog = (
        f"--python PYTHON, or the variable {PYTHON_VARIABLE}: the interpreter of the environment that has vLLM. "
        "--engine native: posttrain's own engine, in this environment, instead of vLLM."
    )
    made.print_help()
    return 0
