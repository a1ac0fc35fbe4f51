"""What each of several processes does that train on rows with images, one of them on texts only in some passes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from posttrain.core.batch import passes_of
from tests.trainer import fsdp_on_cpu
from tests.trainer.vision_runs import rows_of, trainer_of

STEPS = 3
ORDER = (
    0,
    3,
    2,
    2,
    2,
    2,
    1,
    4,
    2,
    2,
    0,
)  # of the rows: about images, and text only (2), in turns of two; the last is alone


def main(folder: Path, method: str, family: str, dtype: torch.dtype, sharded: bool, **options: Any) -> None:
    """Train, save the model, and leave a list of which passes of this process had images."""
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    shared = {
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2 // world,
        "train_sampling_strategy": "sequential",
        "shuffle_dataset": False,
        "optim": "sgd",  # of other ones a step hardly depends on the size of a gradient
        "learning_rate": 0.1,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "bf16": dtype == torch.bfloat16,
        "ddp_find_unused_parameters": False,  # as with gradient checkpointing, where DDP cannot look for them
    }
    if sharded and world > 1:
        fsdp_on_cpu.allow()
        shared["fsdp"] = True
    rows = rows_of(method)
    trainer = trainer_of(
        method, family, folder, dtype, train_dataset=[rows[number] for number in ORDER], **shared | options
    )
    train_and_save(trainer, folder, rank)


def train_and_save(trainer: Any, folder: Path, rank: int, resume: bool = False) -> None:
    """In each process: train, save the model, and leave a list of which passes had images."""
    seen: list[bool] = []
    step = trainer.training_step

    def training_step(model: Any, inputs: Any, *args: Any) -> Any:
        seen.extend(part.images is not None for part in passes_of(inputs))
        return step(model, inputs, *args)

    trainer.training_step = training_step
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(str(folder / "final"))
    (folder / f"seen-{rank}.json").write_text(json.dumps(seen))
    if dist.is_initialized():
        dist.destroy_process_group()
