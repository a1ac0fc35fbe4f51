"""Tests that need DeepSpeed: in this environment or in that of the interpreter which POSTTRAIN_DEEPSPEED_PYTHON names."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from posttrain.rollout.engines.vllm.launcher import free_port

ROOT = Path(__file__).parents[1]
PYTHON = os.environ.get("POSTTRAIN_DEEPSPEED_PYTHON") or (
    sys.executable if importlib.util.find_spec("deepspeed") else None
)
needs_deepspeed = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not PYTHON, reason="deepspeed is not installed and POSTTRAIN_DEEPSPEED_PYTHON is not set: not run"
    ),
]


def start_ranks(folder: Path, processes: int, module: str, *words: str) -> list[subprocess.Popen]:
    """`python -m module folder words` as the processes of one run; each writes its log into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    started, port = [], free_port()
    for rank in range(processes):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        environment |= {name: str(value) for name, value in place.items()} if processes > 1 else {}
        with (folder / f"{rank}.log").open("w") as log:
            command = [PYTHON, "-m", module, str(folder), *words]
            started.append(subprocess.Popen(command, env=environment, cwd=ROOT, stdout=log, stderr=log))
    return started


def wait_for_ranks(started: list[subprocess.Popen], folder: Path, seconds: float = 600) -> None:
    try:
        for rank, process in enumerate(started):
            assert process.wait(timeout=seconds) == 0, (folder / f"{rank}.log").read_text()[-4000:]
    finally:
        for process in started:
            process.kill()
