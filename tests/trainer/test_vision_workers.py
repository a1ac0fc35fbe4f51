"""How many processes make batches with images, and that it changes nothing but the time that they take."""

from __future__ import annotations

import math
import shutil
from types import SimpleNamespace

import pytest
import torch

from posttrain import GRPOConfig, SFTConfig
from posttrain.trainer import vision
from posttrain.trainer.report.display import plan
from tests.trainer.vision_runs import trainer_of

GIB = 2**30
CHOICES = {
    (2, math.inf, 1e6): 0,
    (3, math.inf, 1e6): 0,
    (4, math.inf, 1e6): 2,
    (16, math.inf, 1e6): 8,
    (128, math.inf, 1e6): 8,
    (128, 64 << 20, 64 << 20): 0,  # the shared memory of a container
    (128, 8 * GIB, 256 << 20): 5,
}
"""(cores, bytes of shared memory, bytes of a batch) -> workers."""


@pytest.mark.parametrize(("given", "expected"), CHOICES.items())
def test_the_number_of_workers(given, expected):
    assert vision.num_workers(*given) == expected


def on_a_gpu(args, **changed):
    """What `choose_workers` reads of a config, on another device than the tests have."""
    names = ("chooses_workers", "train_batch_size", "dataloader_num_workers")
    return SimpleNamespace(**{name: getattr(args, name) for name in names} | {"device": torch.device("cuda")} | changed)


def test_what_is_set_wins_and_a_cpu_needs_its_cores(tmp_path, monkeypatch):
    monkeypatch.setattr(vision, "usable_cores", lambda: 32)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=GIB))
    trainer = trainer_of("sft", "qwen2_5_vl", tmp_path)
    chosen = {}
    for name, args in {
        "alone": on_a_gpu(trainer.args),
        "cpu": on_a_gpu(trainer.args, device=torch.device("cpu")),
        "set to none": on_a_gpu(SFTConfig(output_dir="x", use_cpu=True, bf16=False, dataloader_num_workers=0)),
        "set": on_a_gpu(SFTConfig(output_dir="x", use_cpu=True, bf16=False, dataloader_num_workers=3)),
        "online": on_a_gpu(GRPOConfig(output_dir="x", use_cpu=True, bf16=False, num_generations=8)),
    }.items():
        trainer.vision.choose_workers(args, trainer.train_dataset)
        chosen[name] = args.dataloader_num_workers, trainer.vision.pixels.cache.limit
    whole = vision.CACHED_BYTES
    assert chosen == {
        "alone": (8, whole // 8), "cpu": (0, whole), "set to none": (0, whole), "set": (3, whole // 3), "online": (0, whole),
    }  # fmt: skip
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")  # of 32 cores
    args = on_a_gpu(trainer.args)
    trainer.vision.choose_workers(args, trainer.train_dataset)
    assert args.dataloader_num_workers == 2


@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_weights_do_not_depend_on_workers(method, tmp_path):
    """With augmentation, over two epochs."""
    options = {"image_augmentation": "light", "max_steps": 6, "dtype": torch.float32, "learning_rate": 1e-3}
    ends = []
    for workers in (0, 1, 3):
        trainer = trainer_of(method, "qwen2_5_vl", tmp_path, dataloader_num_workers=workers, **options)
        trainer.train()
        made = f"; batches made by {workers}" if workers else "trained\n"
        assert made in "\n".join(plan(trainer, 0, 6))
        ends.append(trainer.model.state_dict())
    for name, value in ends[0].items():
        assert all(torch.equal(other[name], value) for other in ends[1:]), name
