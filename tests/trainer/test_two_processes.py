"""Two processes take the steps that one takes, with rows that do not divide evenly; killed, they resume exactly."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from posttrain.core import faults
from posttrain.rollout.rollout_store import read_rollouts
from posttrain.trainer import checkpoint as files
from tests.trust.runs import differences

ROOT = Path(__file__).parents[2]
COMPARED = ("loss", "eval_loss", "num_tokens", "grad_norm", "entropy", "reward", "reward_std")


def is_extremum(name: str) -> bool:
    return any(part in ("min", "max") for part in re.split("[/_]", name))


def launch(processes: int, folder: Path, method: str, rows: int, *words: str, fault_of_last: str = "") -> list[int]:
    words = ("tests.trainer.two_process_run", str(folder), method, str(rows), *words)
    return launch_module(processes, folder, *words, fault_of_last=fault_of_last)


def launch_module(processes: int, folder: Path, *words: str, fault_of_last: str = "") -> list[int]:
    """`python -m` these words, in several processes that know of each other."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", *words]
    started = []
    for rank in range(processes):
        world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
        world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
        environment = {**os.environ, **({k: str(v) for k, v in world.items()} if processes > 1 else {})}
        if rank == processes - 1:
            environment[faults.VARIABLE] = fault_of_last
        log = open(folder.with_name(f"{folder.name}-{rank}.log"), "a")  # noqa: SIM115
        started.append(subprocess.Popen(command, env=environment, cwd=ROOT, stdout=log, stderr=log))
    return [process.wait(timeout=240) for process in started]


def final_state(folder: Path) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return load_file(files.checkpoints(folder)[0] / "model.safetensors"), [json.loads(line) for line in lines]


def each_sample(folder: Path) -> list[tuple[int, int, int]]:
    """(prompt of the run, its row, sample) of every rollout, in order; none of them twice."""
    kept = read_rollouts(folder)
    found = sorted(zip(*(kept[name].to_pylist() for name in ("group", "row", "sample"))))
    assert len(found) == len(set(found)) > 0
    return found


def logs(folder: Path) -> str:
    return "\n".join(path.read_text() for path in folder.parent.glob(f"{folder.name}-*.log"))


@pytest.mark.parametrize("method", ["sft", "dpo", "grpo", "grpo-stream"])
def test_two_processes_equal_one_and_resume_exactly(method, tmp_path):
    one, two, killed = tmp_path / "one", tmp_path / "two", tmp_path / "killed"
    assert launch(1, one, method, 4) == [0], logs(one)
    assert launch(2, two, method, 2) == [0, 0], logs(two)
    weights, metrics = final_state(one)
    weights_of_two, metrics_of_two = final_state(two)
    for name, tensor in weights.items():
        torch.testing.assert_close(weights_of_two[name], tensor, rtol=1e-4, atol=1e-6)
    for line, other in zip(metrics, metrics_of_two, strict=True):
        for key in {*COMPARED, *filter(is_extremum, line)} & line.keys():
            assert other[key] == pytest.approx(line[key], rel=1e-4, abs=1e-6), key
    if method.startswith("grpo"):
        assert each_sample(two) == each_sample(one)
        # means would differ: the most clipped completion lies on one process
        clipped = [(line["clip_ratio/high_mean"], line["clip_ratio/high_max"]) for line in metrics if "loss" in line]
        assert any(0 < mean < highest for mean, highest in clipped)
        assert sum(map(is_extremum, metrics[0])) >= 7
    if method != "dpo":
        assert launch(2, killed, method, 2, "--kill-after", "3") == [-signal.SIGKILL] * 2, logs(killed)
        assert launch(2, killed, method, 2, "--resume") == [0, 0], logs(killed)
        assert not differences(two, killed)


def test_a_disk_error_of_one_process_is_heard_by_all_and_the_next_save_succeeds(tmp_path):
    folder = tmp_path / "two"
    assert launch(2, folder, "sft", 2, fault_of_last="oserror:save.write:1") == [0, 0], logs(folder)
    assert logs(folder).count("step 2 was not saved") == 2
    assert [path.name for path in files.checkpoints(folder)] == ["checkpoint-6", "checkpoint-4"]
    assert not list(folder.glob("*.tmp-*"))
    files.verify(folder / "checkpoint-4")


@pytest.mark.parametrize("scenario", ["metric", "evaluation", "rloo", "entropy"])
def test_a_process_with_nothing_to_say_does_not_hold_up_the_other(scenario, tmp_path):
    """A reward that speaks of a metric on one process only, an evaluation with one prompt, a process without a trained token."""
    folder = tmp_path / scenario
    codes = launch_module(2, folder, "tests.trainer.uneven_run", scenario, str(folder))
    assert codes == [0, 0], logs(folder)
    assert logs(folder).count(f"{scenario}: as it should be") == 2
