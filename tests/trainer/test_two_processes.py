"""Two processes take the steps that one takes, with rows that do not divide evenly; killed, they resume exactly."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.trainer.test_resume import assert_identical, final_state

ROOT = Path(__file__).parents[2]


def launch(processes: int, folder: Path, method: str, rows: int, *words: str) -> list[int]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tests.trainer.two_process_run", str(folder), method, str(rows), *words]
    started = []
    for rank in range(processes):
        world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
        world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
        environment = {**os.environ, **({k: str(v) for k, v in world.items()} if processes > 1 else {})}
        log = open(folder.with_name(f"{folder.name}-{rank}.log"), "a")  # noqa: SIM115
        started.append(subprocess.Popen(command, env=environment, cwd=ROOT, stdout=log, stderr=log))
    return [process.wait(timeout=240) for process in started]


def logs(folder: Path) -> str:
    return "\n".join(path.read_text() for path in folder.parent.glob(f"{folder.name}-*.log"))


@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_two_processes_equal_one_and_resume_exactly(method, tmp_path):
    one, two, killed = tmp_path / "one", tmp_path / "two", tmp_path / "killed"
    assert launch(1, one, method, 4) == [0], logs(one)
    assert launch(2, two, method, 2) == [0, 0], logs(two)
    weights, _, metrics = final_state(one)
    weights_of_two, _, metrics_of_two = final_state(two)
    for name, tensor in weights.items():
        torch.testing.assert_close(weights_of_two[name], tensor, rtol=1e-4, atol=1e-6)
    for line, other in zip(metrics, metrics_of_two, strict=True):
        for key in ("loss", "eval_loss", "num_tokens", "grad_norm", "entropy"):
            if key in line:
                assert other[key] == pytest.approx(line[key], rel=1e-4), key
    if method == "sft":
        assert launch(2, killed, method, 2, "--kill-after", "3") == [-signal.SIGKILL] * 2, logs(killed)
        assert launch(2, killed, method, 2, "--resume") == [0, 0], logs(killed)
        assert_identical(two, killed)
