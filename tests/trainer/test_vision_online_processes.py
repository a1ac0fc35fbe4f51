"""Online methods on two processes, of which one is shown no image where the other is, take the steps of one; whole and sharded."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from posttrain.rollout.store import read_rollouts
from tests.forked import start_group, wait_for_group
from tests.tiny_vision import model_alone
from tests.trainer import fsdp_on_cpu
from tests.trainer.resumable_run import KillAfter, RowOrder, checksum
from tests.trainer.vision_processes import train_and_save
from tests.trainer.vision_runs import chats, trainer_of
from tests.trust.runs import differences

ORDER = (1, 2, 2, 0, 0, 3, 2, 2)
"""Of the prompts: two make a step, one on each process. The third, which has no image, is where a process or both see none."""
ENDS = list(range(3, 120, 6))
"""Tokens that end a completion: processes train unlike numbers of tokens, so that a mean of their means would be noticed."""
SHARED = {
    "max_completion_length": 8, "generation_kwargs": {"stop_token_ids": ENDS},
    "per_device_train_batch_size": 4, "max_steps": 4, "optim": "sgd", "logging_steps": 1,
    "learning_rate": 0.1, "lr_scheduler_type": "constant", "shuffle_dataset": False, "reward_workers": 0,
    "ddp_find_unused_parameters": False,
}  # fmt: skip
FOUR, ONE = {"num_generations": 4}, {"per_device_train_batch_size": 1}
"""Batches are counted in completions, or in prompts where a method says how many it needs."""
COMPARED = ("loss", "grad_norm", "reward", "reward_std", "entropy", "kl", "num_tokens", "completions/mean_length")


@dataclass(frozen=True)
class Cell:
    method: str
    family: str = "smolvlm"
    options: dict[str, Any] = field(default_factory=dict)
    sharded: bool = False


PAPO = {**FOUR, "perception_loss_weight": 1.0, "mask_type": "patch"}  # both passes of a step are run by every process
AGAIN = {**FOUR, "steps_per_generation": 2, "num_iterations": 2, "beta": 0.1, "max_steps": 8}
QUICK = {
    "grpo": Cell("grpo", options=FOUR),
    "grpo-sharded": Cell("grpo", "qwen2_5_vl", FOUR, sharded=True),
    "papo": Cell("papo", options=PAPO),
}
SLOW = {
    "grpo-windows": Cell("grpo", "qwen2_5_vl", AGAIN),
    "grpo-windows-sharded": Cell("grpo", options=AGAIN, sharded=True),
    "rloo": Cell("rloo", "llava", FOUR),
    "online_dpo": Cell("online_dpo", "qwen2_5_vl", ONE),
    "ppo": Cell("ppo", options=ONE | {"num_ppo_epochs": 1}),
    "papo-sharded": Cell("papo", options=PAPO, sharded=True),
}
CELLS = QUICK | SLOW


def main(folder: Path, cell: Cell, kill_after: int | None = None, resume: bool = False, **more: Any) -> None:
    """In each process."""
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    options = SHARED | cell.options | more
    options["gradient_accumulation_steps"] = 2 // world
    options["steps_per_generation"] = options.get("steps_per_generation", 1) * 2 // world
    if cell.sharded and world > 1:
        fsdp_on_cpu.allow()
        options["fsdp"] = True
    prompts = [{"prompt": chats()[number][0]} for number in ORDER]
    order = RowOrder(folder / "run")
    options["callbacks"] = [order, *([KillAfter(kill_after)] if kill_after else [])]
    trainer = order.trainer = trainer_of(
        cell.method, cell.family, folder, torch.float32, train_dataset=prompts, reward_funcs=checksum, **options
    )
    train_and_save(trainer, folder, rank, resume)


def run(processes: int, folder: Path, cell: Cell, code: int = 0, **more: Any) -> None:
    folder.mkdir(exist_ok=True)
    children = start_group(processes, lambda rank: main(folder, cell, **more), folder / "rank")
    codes = wait_for_group(children)
    assert codes == [code] * processes, "\n".join(child.output()[-3000:] for child in children)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForImageTextToText.from_pretrained(folder / "final").state_dict()


def logged(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def rollouts(folder: Path) -> list[dict[str, Any]]:
    """What was trained, in the order of the run."""
    found = read_rollouts(folder / "run").to_pylist()
    return sorted(found, key=lambda rollout: (rollout["group"], rollout["sample"]))


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_two_processes_take_the_steps_of_one(name, tmp_path):
    cell = CELLS[name]
    folders = tmp_path / "one", tmp_path / "two"
    for count, folder in enumerate(folders, 1):
        run(count, folder, cell)
    seen = [json.loads((folders[1] / f"seen-{rank}.json").read_text()) for rank in (0, 1)]
    assert {(True, False), (False, True), (True, True), (False, False)} == {*zip(*seen, strict=True)}
    tokens = Counter(rollout["group"] for rollout in rollouts(folders[0]) for _ in rollout["completion_ids"])
    assert tokens[0] != tokens[1]
    for one, two in zip(*map(rollouts, folders), strict=True):
        for column in ("step", "row", "group", "sample", "prompt_ids", "completion_ids", "images", "reward"):
            assert one[column] == two[column], column
        assert two["advantage"] == pytest.approx(one["advantage"], rel=1e-4, abs=1e-6)
    for line, other in zip(*map(logged, folders), strict=True):
        for key in {*COMPARED} & line.keys():
            assert other[key] == pytest.approx(line[key], rel=1e-4, abs=1e-6), key
    one, two = map(weights, folders)
    before = model_alone(cell.family).state_dict()
    moved = max((one[key] - before[key]).abs().max() for key in one if "patch_embed" in key)
    assert moved > 1e-4
    assert one.keys() == two.keys()
    apart = max((one[key] - two[key]).abs().max() for key in one)
    assert apart < 1e-3 * moved


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo-windows", "grpo-windows-sharded", "online_dpo"])
def test_killed_and_resumed_two_processes_are_bit_identical(name, tmp_path):
    """Inside of a generation, where it feeds several steps: its images are found again on each process."""
    saves = {"save_strategy": "steps", "save_steps": 2, "save_in_background": False}
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run(2, whole, CELLS[name], **saves)
    run(2, killed, CELLS[name], -signal.SIGKILL, kill_after=3, **saves)
    assert (killed / "run" / "checkpoint-2").exists()
    run(2, killed, CELLS[name], resume=True, **saves)
    assert not differences(whole / "run", killed / "run")
