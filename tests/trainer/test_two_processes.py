"""Two processes take the steps that one takes, with rows that do not divide evenly; killed, they resume exactly."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from posttrain.core import faults
from posttrain.rollout.store import read_rollouts
from posttrain.trainer.checkpoints import checkpoint as files
from tests.forked import start_group, wait_for_group
from tests.trainer import resumable_run, uneven_run
from tests.trust.runs import differences

COMPARED = ("loss", "eval_loss", "num_tokens", "grad_norm", "entropy", "reward", "reward_std")


def is_extremum(name: str) -> bool:
    return any(part in ("min", "max") for part in re.split("[/_]", name))


def launch(processes: int, folder: Path, method: str, rows: int, fault_of_last: str = "", **options: Any) -> list[int]:
    """The return codes of processes that train together."""
    others: list[dict[str, str]] = [{}] * (processes - 1)
    return group(
        processes,
        lambda rank: train(folder, method, rows, **options),
        folder,
        [*others, {faults.VARIABLE: fault_of_last}],
    )


def group(
    processes: int, function: Callable[[int], object], folder: Path, environments: Sequence[Mapping[str, str]] = ()
) -> list[int]:
    return wait_for_group(start_group(processes, function, folder, environments))


def train(folder: Path, method: str, rows: int, kill_after: int | None = None, resume: bool = False) -> None:
    """In each process."""
    faults.arm(os.environ.get(faults.VARIABLE))
    resumable_run.main(
        method,
        folder,
        resume=resume,
        rows=11,  # 4 + 4 + 3: the last window is uneven over two processes
        callbacks=[resumable_run.KillAfter(kill_after)] if kill_after else None,
        per_device_train_batch_size=rows,
        dataset_cache_dir=str(folder) + "-cache",
        max_steps=6,
        logging_steps=1,
        disable_dropout=True,  # two processes draw other masks than one
        **({"epsilon": 2e-3} if method.startswith("grpo") else {}),  # so little that some tokens are clipped
    )
    if dist.is_initialized():
        dist.destroy_process_group()


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


@pytest.mark.parametrize("method", ["sft", "dpo", "grpo", "grpo-stream", "a2po", "gkd"])
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
        assert launch(2, killed, method, 2, kill_after=3) == [-signal.SIGKILL] * 2, logs(killed)
        assert launch(2, killed, method, 2, resume=True) == [0, 0], logs(killed)
        assert not differences(two, killed)


def test_a_disk_error_of_one_process_is_heard_by_all_and_the_next_save_succeeds(tmp_path):
    folder = tmp_path / "two"
    assert launch(2, folder, "sft", 2, fault_of_last="oserror:save.write:1") == [0, 0], logs(folder)
    assert logs(folder).count("step 2 was not saved") == 2
    assert [path.name for path in files.checkpoints(folder)] == ["checkpoint-6", "checkpoint-4"]
    assert not list(folder.glob("*.tmp-*"))
    files.verify(folder / "checkpoint-4")


@pytest.mark.parametrize("scenario", ["metric", "evaluation", "rloo", "entropy", "judges", "ppo", "authors"])
def test_a_process_with_nothing_to_say_does_not_hold_up_the_other(scenario, tmp_path):
    """A reward that speaks of a metric on one process only, an evaluation with one prompt, a process without a trained token."""
    folder = tmp_path / scenario
    assert group(2, lambda rank: uneven_run.main(scenario, str(folder)), folder) == [0, 0], logs(folder)
    assert logs(folder).count(f"{scenario}: as it should be") == 2
