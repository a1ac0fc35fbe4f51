"""Killed while loader workers augment images from files: the resumed run ends bit by bit as an unbroken one."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import get_worker_info
from transformers import TrainerCallback

from posttrain.core import faults
from posttrain.data.vision.augmentation import Augmentation, drawn_from
from posttrain.trainer.checkpoints import checkpoint as files
from tests.forked import Child
from tests.trainer.resumable_run import RowOrder
from tests.trainer.vision_runs import PICTURES, rows_of, trainer_of
from tests.trust.runs import differences

SHARED: dict[str, Any] = {
    "image_augmentation": "light", "dataloader_num_workers": 2, "per_device_train_batch_size": 1, "weight_decay": 0.1,
    "gradient_accumulation_steps": 2, "max_steps": 9, "save_strategy": "steps", "save_steps": 3, "logging_steps": 1,
    "learning_rate": 1e-3, "save_in_background": False,
}  # fmt: skip
"""Of ten rows, an epoch has five steps: the kill comes in the third step of the second one, two after checkpoint-6."""
STEP = 8
INSIDE_A_STEP = f"kill:backward:{2 * STEP}"  # a micro-batch of it is done
WITH_BATCHES_MADE = f"kill:data:{STEP}"
RUNS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "sft": ("sft", "qwen2_5_vl", {}),
    "sft-persistent": ("sft", "smolvlm", {"dataloader_persistent_workers": True, "image_augmentation": "document"}),
    "sft-bf16": ("sft", "llava_next", {"bf16": True, "vision_learning_rate": 1e-4}),
    "dpo": ("dpo", "qwen2_5_vl", {}),
}
"""Name -> (method, family, options)."""


class KillWorker(TrainerCallback):
    """SIGKILL of one of the loader's workers, as the kernel chooses one when memory is short."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == STEP - 1:
            os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)


def stored(rows: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """The rows with names of files in the place of pictures."""
    folder.mkdir(exist_ok=True)
    for number, picture in enumerate(PICTURES):
        if not (file := folder / f"{number}.png").exists():  # keys of images know when their files were written
            picture.save(file)

    def named(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: named(item) for key, item in value.items()}
        if isinstance(value, list):
            return [named(item) for item in value]
        return next((f"{number}.png" for number, picture in enumerate(PICTURES) if picture is value), value)

    return named(rows)


def train(
    name: str, folder: Path, *, fault: str = "", naive: str = "", callbacks: Any = (), resume: bool = False
) -> Child:
    """`fault`: see `faults.py`. `naive`: how the transform is seeded instead."""

    def run() -> None:
        # As in a run from a shell: a child of a fork server would start another.
        multiprocessing.set_start_method("fork", force=True)
        if naive:
            Augmentation.__call__ = NAIVE[naive]
        faults.arm(fault)
        method, family, options = RUNS[name]
        pictures = folder.parent / "pictures"
        options = SHARED | {"image_root": str(pictures)} | options
        dtype = torch.bfloat16 if options.get("bf16") else torch.float32
        order = RowOrder(folder / "run")
        rows = stored(2 * rows_of(method), pictures)
        trainer = order.trainer = trainer_of(
            method, family, folder, dtype, train_dataset=rows, callbacks=[order, *callbacks], **options
        )
        trainer.train(resume_from_checkpoint=resume)

    return Child(run, folder.with_name(f"{folder.name}.log"))


def resumed(name: str, folder: Path, naive: str = "") -> None:
    """At once: workers that have not noticed yet that their run was killed do not hold its folder."""
    ended(train(name, folder, naive=naive, resume=True), 0)


def ended(child: Child, code: int) -> str:
    assert child.wait() == code, child.output()
    return child.output()


def losses(folder: Path) -> list[float]:
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [line["loss"] for line in map(json.loads, lines) if "loss" in line]


def by_worker(self: Augmentation, picture: Any, draw: int) -> Any:
    """With the generator of whoever loads it, which torch seeds by the number of the worker."""
    return self.transform(picture.copy())


def by_image_of_the_worker(self: Augmentation, picture: Any, draw: int) -> Any:
    """By the number of the image among those that the worker has made."""
    COUNTED.append(draw)
    with drawn_from(1000 * get_worker_info().id + len(COUNTED)):
        return self.transform(picture.copy())


def by_time(self: Augmentation, picture: Any, draw: int) -> Any:
    with drawn_from(time.time_ns()):
        return self.transform(picture.copy())


COUNTED: list[int] = []
NAIVE: dict[str, Callable[[Augmentation, Any, int], Any]] = {
    "worker": by_worker,
    "image of the worker": by_image_of_the_worker,
    "time": by_time,
}


QUICK = [("sft", INSIDE_A_STEP), ("sft-persistent", WITH_BATCHES_MADE)]
SLOW = [("sft", WITH_BATCHES_MADE), ("sft-bf16", INSIDE_A_STEP), ("dpo", INSIDE_A_STEP)]


@pytest.mark.parametrize(("name", "fault"), [*QUICK, *(pytest.param(*one, marks=pytest.mark.slow) for one in SLOW)])
def test_killed_while_workers_augment_and_resumed_is_bit_identical(name, fault, tmp_path):
    """Weights, optimizer, generators, losses of every step, and the rows of each."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    ended(train(name, whole), 0)
    ended(train(name, killed, fault=fault), -signal.SIGKILL)
    assert [path.name for path in files.checkpoints(killed / "run")] == ["checkpoint-6", "checkpoint-3"]
    assert len(losses(killed)) == STEP - 1
    resumed(name, killed)
    assert len(losses(whole)) == len(set(losses(whole))) == SHARED["max_steps"]
    assert losses(whole) == losses(killed)
    assert not differences(whole / "run", killed / "run")


@pytest.mark.slow
def test_a_killed_worker_ends_the_run_which_is_resumed_exactly(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    ended(train("sft", whole), 0)
    said = ended(train("sft", killed, callbacks=[KillWorker()]), 1)
    assert "DataLoader worker (pid" in said
    resumed("sft", killed)
    assert not differences(whole / "run", killed / "run")


@pytest.mark.slow
@pytest.mark.parametrize("naive", NAIVE)
def test_seeds_that_a_resumed_run_does_not_find_again_are_noticed(naive, tmp_path):
    """What the tests above would say of other ways to seed a transform."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    ended(train("sft", whole, naive=naive), 0)
    ended(train("sft", killed, naive=naive, fault=INSIDE_A_STEP), -signal.SIGKILL)
    resumed("sft", killed, naive)
    assert losses(whole)[-2:] != losses(killed)[-2:]
    found = differences(whole / "run", killed / "run")
    assert {"model.safetensors differs", "optimizer.safetensors differs", "metrics.jsonl differs"} <= {*found}, found
