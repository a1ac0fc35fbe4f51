"""GRPO under FSDP2 with a server: all processes gather, the first one sends, whole versions arrive, and an error stops all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from posttrain.rollout.vllm_engine.launcher import TOKEN_VARIABLE, free_port
from tests import tiny
from tests.methods import vllm_runs
from tests.methods.fsdp_vllm_run import KINDS
from tests.rollout.served import needs_uvicorn
from tests.with_vllm import needs_vllm, run_on_two_ranks

ROOT = Path(__file__).parents[2]
TOKEN = "a-token-of-this-test"


def started(*words: str, log: Path, **environment: object) -> subprocess.Popen:
    variables = {name: str(value) for name, value in environment.items()}
    fixed = {"OMP_NUM_THREADS": "1", TOKEN_VARIABLE: TOKEN, "ACCELERATE_USE_CPU": "true"}
    with log.open("w") as output:
        return subprocess.Popen(
            [sys.executable, "-m", *words], env=os.environ | fixed | variables, cwd=ROOT, stdout=output, stderr=output
        )


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """(folder of the runs on one process, folder of those on two)."""
    home = tmp_path_factory.mktemp("fsdp_vllm")
    vllm_runs.model().save_pretrained(home / "model")
    tiny.tokenizer().save_pretrained(home / "model")
    servers, processes = [], []
    try:
        folders = [_start(home, world, servers, processes) for world in (1, 2)]
        for process in processes:
            process.wait(timeout=200)
        yield folders
    finally:
        for process in [*processes, *servers]:
            process.kill()


def _start(home: Path, world: int, servers: list, processes: list) -> Path:
    folder, port, group = home / str(world), free_port(), free_port()
    (folder / "adapters").mkdir(parents=True)
    words = ("--model", str(home / "model"), "--port", str(port), "--adapter-folder", str(folder / "adapters"))
    servers.append(started("tests.methods.model_server", *words, log=folder / "server.log"))
    for rank in range(world):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": group}
        run = ("tests.methods.fsdp_vllm_run", str(folder), f"http://127.0.0.1:{port}")
        processes.append(started(*run, log=folder / f"{rank}.log", **(place if world > 1 else {})))
    return folder


def told(folder: Path, rank: int) -> dict:
    file = folder / f"told-{rank}.json"
    assert file.exists(), (folder.parent / f"{rank}.log").read_text()[-4000:]
    return json.loads(file.read_text())


@needs_uvicorn
@pytest.mark.parametrize("kind", KINDS)
def test_trains_as_one_process_does_and_every_version_arrives(kind, runs):
    one, two = (folder / kind for folder in runs)
    logs = [told(one, 0)["logs"], told(two, 0)["logs"]]
    assert len(logs[0]) == len(logs[1]) == vllm_runs.STEPS
    for line, other in zip(*logs):
        assert other["reward"] == pytest.approx(line["reward"], abs=1e-6)
        assert other["loss"] == pytest.approx(line["loss"], abs=1e-5)
        assert other["grad_norm"] == pytest.approx(line["grad_norm"], rel=1e-4)
        assert other["sync/logp_difference/mean"] < 1e-5
        assert other["sampling/sampling_logp_difference/max"] < 1e-4
    weights, of_two = (load_file(next((folder / "final").glob("*model.safetensors"))) for folder in (one, two))
    start = {name: tensor.detach() for name, tensor in vllm_runs.model().state_dict().items()}
    assert weights.keys() == of_two.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(of_two[name], tensor, rtol=1e-4, atol=1e-5)
    assert any(name not in start or not torch.equal(start[name], tensor) for name, tensor in of_two.items())


@needs_uvicorn
@pytest.mark.parametrize("kind", KINDS)
def test_an_error_of_one_process_stops_all(kind, runs):
    first, second = (told(runs[1] / kind, rank) for rank in range(2))
    assert first["whole"]
    assert second["whole"]
    assert first["own_failed"].startswith("RuntimeError: Process 1 could not take version 8")
    assert second["own_failed"].startswith("MemoryError: no room for")
    assert first["unsent"] == "MemoryError: no room for a copy"
    assert second["unsent"].endswith("Process 0 could not send version 1000 of the weights: no room for a copy")
    assert first["differs"].startswith("WeightsDiffer:")
    assert "model.norm.weight" in first["differs"]
    assert second["differs"].startswith("RuntimeError: Process 0 could not confirm the weights")


@pytest.mark.parametrize("kind", KINDS)
def test_colocated_with_a_real_vllm(kind, tmp_path):
    run_on_two_ranks("tests.methods.fsdp_colocated", str(tmp_path / "run"), kind)


for mark in needs_vllm:
    test_colocated_with_a_real_vllm = mark(test_colocated_with_a_real_vllm)
