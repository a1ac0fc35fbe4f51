"""ZeRO-2 and ZeRO-3 on two CPU processes: trained, evaluated, saved whole, exported and resumed as without it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from posttrain.rollout.engines.vllm.launcher import free_port
from tests.trainer.deepspeed_run import zero
from tests.with_deepspeed import PYTHON, ROOT, needs_deepspeed, start_ranks, wait_for_ranks

pytestmark = needs_deepspeed


def run(folder: Path, method: str, stage: int, processes: int) -> None:
    wait_for_ranks(start_ranks(folder, processes, "tests.trainer.deepspeed_run", str(stage), method), folder)


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


def launch(folder: Path, method: str, stage: int) -> None:
    """The same by `accelerate launch` and a file."""
    folder.mkdir(parents=True)
    (folder / "zero.json").write_text(json.dumps(zero(stage)))
    words = ["--use_deepspeed", "--deepspeed_config_file", str(folder / "zero.json"), "--num_processes", "2"]
    words += ["--num_machines", "1", "--main_process_port", str(free_port()), "-m", "tests.trainer.deepspeed_run"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)}
    command = [PYTHON, "-m", "accelerate.commands.launch", *words, str(folder), str(stage), method]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


def losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line[key] for line in lines for key in ("loss", "grad_norm", "kl", "delta", "eval_loss") if key in line]


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("method", ["sft", "dpo", "reward", "cpo", "orpo", "tpo", "kto", "bco", "prm"])
def test_ends_where_one_process_does(method, stage, alone, tmp_path):
    run(tmp_path / "two", method, stage, 2)
    assert_ends_alike(alone(method), tmp_path / "two")


@pytest.mark.parametrize("stage", [2, 3])
def test_accelerate_s_launcher_and_its_file_mean_the_same(stage, alone, tmp_path):
    launch(tmp_path / "two", "dpo", stage)
    assert_ends_alike(alone("dpo"), tmp_path / "two")


def assert_ends_alike(one: Path, folder: Path) -> None:
    assert losses(folder) == pytest.approx(losses(one), rel=1e-5, abs=1e-7)
    expected = load_file(one / "final" / "model.safetensors")
    for found in ("final/model.safetensors", "exported.safetensors", "resumed/final/model.safetensors"):
        weights = load_file(folder / found)
        assert weights.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(weights[name], tensor, rtol=1e-5, atol=1e-6)
