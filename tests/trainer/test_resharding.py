"""A run that was saved by one number of processes continues on another, with the weights and moments of one that never changed."""

from __future__ import annotations

import os
import shutil
import traceback
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from tests.forked import start_group, wait_for_group
from tests.trainer import fsdp_on_cpu
from tests.trainer.fsdp_cells import CELLS, SAVED, STEPS, final, logged, trainer

ALLOWED = [
    "world_size",
    "gradient_accumulation_steps",
    "per_device_train_batch_size",
    "fsdp",
    "fsdp_config",
    "dp_replicate_size",
]
ALLOWED += ["parallelism_config"]
LAYOUTS = {
    "one": (1, {}),
    "two": (2, {}),
    "four": (4, {"dp_replicate_size": 1}),
    "copies": (4, {}),
    "plain": (2, {"fsdp": None}),
}
"""Name -> (processes, options): one process, two shards, four shards, two copies of two shards, two whole copies."""
QUICK = [("sft", "two", "one"), ("sft", "one", "two")]
ALL = [
    *((name, *pair) for name in ("sft", "sft-lora") for pair in
      [("two", "four"), ("four", "two"), ("two", "one"), ("one", "two"), ("two", "copies"), ("copies", "four"), ("plain", "two")]),
    ("dpo", "two", "four"),
]  # fmt: skip


def runs(home: Path, layout: str, jobs: list[tuple[str, str, Path | None]]) -> None:
    """(cell, run, checkpoint to continue from) in the processes of a layout."""
    processes, options = LAYOUTS[layout]
    is_sharded = processes > 1 and options.get("fsdp", True)

    def main(rank: int) -> None:
        before = dict(os.environ)
        for name, run, checkpoint in jobs:
            try:
                with fsdp_on_cpu.allowed() if is_sharded else nullcontext():
                    train(name, home / run, checkpoint, options)
            except Exception:
                (home / f"{run}-{rank}.error").write_text(traceback.format_exc())
                raise
            os.environ.clear()
            os.environ.update(before)
        if dist.is_initialized():
            dist.destroy_process_group()

    wait_for_group(start_group(processes, main, home / f"rank-{layout}"), 600)


def train(name: str, folder: Path, checkpoint: Path | None, options: dict[str, Any]) -> None:
    is_main = os.environ.get("RANK", "0") == "0"
    if checkpoint is not None and is_main:
        shutil.copytree(checkpoint, folder / checkpoint.name)
    changes = {"logging_steps": 3, "load_best_model_at_end": False, "resume_allow_changes": ALLOWED, **options}
    made = trainer(CELLS[name], folder, **changes)
    made.accelerator.wait_for_everyone()
    made.train(resume_from_checkpoint=checkpoint is not None)
    made.save_model(str(folder / "final"))


def moved(home: Path, table: list[tuple[str, str, str]]) -> Path:
    """Every first part by its own layout, then every second by the other."""
    home.mkdir(exist_ok=True)
    for layout in dict.fromkeys(before for _, before, _ in table):
        jobs = [
            (name, f"{name}-{layout}", None) for name in dict.fromkeys(n for n, before, _ in table if before == layout)
        ]
        runs(home, layout, jobs)
    for layout in dict.fromkeys(after for _, _, after in table):
        jobs = [
            (name, f"{name}-{before}-{layout}", home / f"{name}-{before}" / f"checkpoint-{SAVED}")
            for name, before, after in table
            if after == layout
        ]
        runs(home, layout, jobs)
    return home


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    return moved(tmp_path_factory.mktemp("resharding"), QUICK)


@pytest.fixture(scope="module")
def every(tmp_path_factory):
    return moved(tmp_path_factory.mktemp("resharding"), ALL)


def whole_state(folder: Path) -> dict[str, torch.Tensor]:
    """Moments of the optimizer, whole, by their names in the file."""
    shards = sorted(folder.glob("optimizer_*.safetensors")) or [folder / "optimizer.safetensors"]
    parts = [load_file(file) for file in shards]
    return {
        key: torch.cat([p[key] for p in parts]) if value.dim() else value
        for key, value in parts[0].items()
        if "exp_avg" in key
    }


def assert_continued(home: Path, name: str, before: str, after: str) -> None:
    whole, continued = final(home, f"{name}-{before}"), final(home, f"{name}-{before}-{after}")
    assert whole.keys() == continued.keys()
    for key, tensor in whole.items():
        torch.testing.assert_close(continued[key], tensor, rtol=1e-5, atol=1e-6, msg=lambda m, key=key: f"{key}: {m}")
    lines = [
        [line for line in logged(home, run) if "loss" in line][-1]
        for run in (f"{name}-{before}", f"{name}-{before}-{after}")
    ]
    for key in ("loss", "grad_norm", "num_tokens"):
        assert lines[1][key] == pytest.approx(lines[0][key], rel=1e-4), key
    if "copies" in (before, after):
        return
    moments = [
        whole_state(home / run / f"checkpoint-{STEPS}") for run in (f"{name}-{before}", f"{name}-{before}-{after}")
    ]
    assert moments[0].keys() == moments[1].keys()
    for key, tensor in moments[0].items():
        torch.testing.assert_close(moments[1][key], tensor, rtol=1e-4, atol=1e-8, msg=lambda m, key=key: f"{key}: {m}")


@pytest.mark.parametrize(("name", "before", "after"), QUICK)
def test_a_run_continues_with_and_without_shards(name, before, after, quick):
    assert_continued(quick, name, before, after)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "before", "after"), ALL)
def test_a_run_continues_on_another_number_of_processes(name, before, after, every):
    assert_continued(every, name, before, after)
