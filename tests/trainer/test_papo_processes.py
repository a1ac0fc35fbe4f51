"""PAPO on two processes takes the steps of one, whole and sharded: both passes of a step are run by every process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForImageTextToText

from tests.forked import start_group, wait_for_group
from tests.tiny_vision import model_alone
from tests.trainer import fsdp_on_cpu
from tests.trainer.resumable_run import checksum
from tests.trainer.vision_runs import chats, trainer_of

OPTIONS = {
    "num_generations": 4, "max_completion_length": 4, "per_device_train_batch_size": 4, "max_steps": 2, "optim": "sgd",
    "learning_rate": 0.1, "lr_scheduler_type": "constant", "shuffle_dataset": False, "reward_workers": 0,
    "perception_loss_weight": 1.0, "mask_type": "patch", "ddp_find_unused_parameters": False,
}  # fmt: skip


def main(folder: Path, sharded: bool) -> None:
    """Of the prompts of a step, one process has the one with two images, the other that of text alone."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    options = OPTIONS | {"gradient_accumulation_steps": 2 // world}
    if sharded and world > 1:
        fsdp_on_cpu.allow()
        options["fsdp"] = True
    prompts = [{"prompt": chats()[number][0]} for number in (1, 2, 0, 3)]
    trainer = trainer_of(
        "papo", "smolvlm", folder, torch.float32, train_dataset=prompts, reward_funcs=checksum, **options
    )
    trainer.train()
    trainer.save_model(str(folder / "final"))
    if dist.is_initialized():
        dist.destroy_process_group()


def weights_of(processes: int, folder: Path, sharded: bool) -> dict[str, torch.Tensor]:
    folder.mkdir()
    children = start_group(processes, lambda rank: main(folder, sharded), folder / "rank")
    codes = wait_for_group(children)
    assert codes == [0] * processes, "\n".join(child.output()[-3000:] for child in children)
    return AutoModelForImageTextToText.from_pretrained(folder / "final").state_dict()


@pytest.mark.parametrize("sharded", [False, True])
def test_two_processes_take_the_steps_of_one(sharded, tmp_path):
    one, two = (weights_of(count, tmp_path / str(count), sharded) for count in (1, 2))
    assert one.keys() == two.keys()
    before = model_alone("smolvlm").state_dict()
    moved = max((one[name] - before[name]).abs().max() for name in one if "patch_embed" in name)
    assert moved > 1e-4
    assert max((one[name] - two[name]).abs().max() for name in one) < 0.02 * moved
