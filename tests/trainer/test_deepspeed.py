"""ZeRO-2 and ZeRO-3 on two CPU processes: trained, evaluated, saved whole, exported and resumed as without it.

Needs DeepSpeed, in this environment or in that of the interpreter which POSTTRAIN_DEEPSPEED_PYTHON names.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from posttrain.rollout.engines.vllm.launcher import free_port

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("POSTTRAIN_DEEPSPEED_PYTHON") or (
    sys.executable if importlib.util.find_spec("deepspeed") else None
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not PYTHON, reason="deepspeed is not installed and POSTTRAIN_DEEPSPEED_PYTHON is not set: not run"
    ),
]


def run(folder: Path, method: str, stage: int, processes: int) -> None:
    folder.mkdir()
    started, port = [], free_port()
    for rank in range(processes):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        environment |= {name: str(value) for name, value in place.items()} if processes > 1 else {}
        log = open(folder / f"{rank}.log", "w")  # noqa: SIM115
        command = [PYTHON, "-m", "tests.trainer.deepspeed_run", str(folder), str(stage), method]
        started.append(subprocess.Popen(command, env=environment, cwd=ROOT, stdout=log, stderr=log))
    for rank, process in enumerate(started):
        assert process.wait(timeout=250) == 0, (folder / f"{rank}.log").read_text()[-4000:]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """method -> the folder of a run of one process without DeepSpeed."""
    made = {}

    def of(method):
        if method not in made:
            made[method] = tmp_path_factory.mktemp("deepspeed") / "one"
            run(made[method], method, 0, 1)
        return made[method]

    return of


def losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line[key] for line in lines for key in ("loss", "grad_norm", "kl", "delta", "eval_loss") if key in line]


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("method", ["sft", "dpo", "orpo", "kto", "bco", "prm"])
def test_ends_where_one_process_does(method, stage, alone, tmp_path):
    one, folder = alone(method), tmp_path / "two"
    run(folder, method, stage, 2)
    assert losses(folder) == pytest.approx(losses(one), rel=1e-5, abs=1e-7)
    expected = load_file(one / "final" / "model.safetensors")
    for found in ("final/model.safetensors", "exported.safetensors", "resumed/final/model.safetensors"):
        weights = load_file(folder / found)
        assert weights.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(weights[name], tensor, rtol=1e-5, atol=1e-6)
