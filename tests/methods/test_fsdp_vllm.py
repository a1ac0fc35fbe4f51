"""GRPO under FSDP2 with a server: all processes gather, the first one sends, whole versions arrive, and an error stops all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from posttrain.rollout.engines.vllm.launcher import TOKEN_VARIABLE, free_port
from tests import tiny
from tests.forked import Child, start_group, wait_for_group
from tests.methods import fsdp_vllm_run, model_server, vllm_runs
from tests.methods.fsdp_vllm_run import KINDS
from tests.rollout.served import needs_uvicorn
from tests.with_vllm import needs_vllm, run_on_two_ranks

pytestmark = pytest.mark.slow  # whole runs of several processes, or with every fault

TOKEN = "a-token-of-this-test"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """(folder of the runs on one process, folder of those on two)."""
    home = tmp_path_factory.mktemp("fsdp_vllm")
    vllm_runs.model().save_pretrained(home / "model")
    tiny.tokenizer().save_pretrained(home / "model")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(TOKEN_VARIABLE, TOKEN)
        started = [_start(home, world) for world in (1, 2)]
    for _, server, group in started:
        wait_for_group(group)
        server.end()
    return [folder for folder, _, _ in started]


def _start(home: Path, world: int) -> tuple[Path, Child, list[Child]]:
    folder, port = home / str(world), free_port()
    (folder / "adapters").mkdir(parents=True)
    words = ("--model", str(home / "model"), "--port", str(port), "--adapter-folder", str(folder / "adapters"))
    server = Child(lambda: model_server.main(words), folder / "server.log")
    url = f"http://127.0.0.1:{port}"
    return folder, server, start_group(world, lambda rank: fsdp_vllm_run.main(folder, url), folder / "rank")


def told(folder: Path, rank: int) -> dict:
    file = folder / f"told-{rank}.json"
    assert file.exists(), (folder.parent / f"rank-{rank}.log").read_text()[-4000:]
    return json.loads(file.read_text())


def check_same_training(one: Path, two: Path) -> None:
    """Of a run on one process and of one on two: numbers, weights, and that every version arrived."""
    logs = [told(one, 0)["logs"], told(two, 0)["logs"]]
    assert len(logs[0]) == len(logs[1]) == vllm_runs.STEPS
    for line, other in zip(*logs):
        assert other["reward"] == pytest.approx(line["reward"], abs=1e-6)
        assert other["loss"] == pytest.approx(line["loss"], abs=1e-5)
        assert other["grad_norm"] == pytest.approx(line["grad_norm"], rel=1e-4)
        assert other["sync/logp_difference/mean"] < 1e-5
        assert other.get("sampling/sampling_logp_difference/max", 0.0) < 1e-4  # RLOO has none
    weights, of_two = (load_file(next((folder / "final").glob("*model.safetensors"))) for folder in (one, two))
    start = {name: tensor.detach() for name, tensor in vllm_runs.model().state_dict().items()}
    assert weights.keys() == of_two.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(of_two[name], tensor, rtol=1e-4, atol=1e-5)
    assert any(name not in start or not torch.equal(start[name], tensor) for name, tensor in of_two.items())


def check_errors_of_one_stop_all(folder: Path) -> None:
    first, second = (told(folder, rank) for rank in range(2))
    assert first["whole"]
    assert second["whole"]
    assert first["own_failed"].startswith("RuntimeError: Process 1 could not take version 8")
    assert second["own_failed"].startswith("MemoryError: no room for")
    assert first["unsent"] == "MemoryError: no room for a copy"
    assert second["unsent"].endswith("Process 0 could not send version 1000 of the weights: no room for a copy")
    assert first["differs"].startswith("WeightsDiffer:")
    assert "model.norm.weight" in first["differs"]
    assert second["differs"].startswith("RuntimeError: Process 0 could not confirm the weights")


@needs_uvicorn
@pytest.mark.parametrize("kind", KINDS)
def test_trains_as_one_process_does_and_every_version_arrives(kind, runs):
    check_same_training(*(folder / kind for folder in runs))


@needs_uvicorn
@pytest.mark.parametrize("kind", KINDS)
def test_an_error_of_one_process_stops_all(kind, runs):
    check_errors_of_one_stop_all(runs[1] / kind)


@pytest.mark.parametrize("kind", [KINDS[0], *(pytest.param(kind, marks=pytest.mark.trust) for kind in KINDS[1:])])
def test_colocated_with_a_real_vllm(kind, tmp_path):
    run_on_two_ranks("tests.methods.fsdp_colocated", str(tmp_path / "run"), kind)


for mark in needs_vllm:
    test_colocated_with_a_real_vllm = mark(test_colocated_with_a_real_vllm)
