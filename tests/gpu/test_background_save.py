"""Checkpoints in the background on CUDA: copies are queued on the stream, so steps taken meanwhile do not show in them."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from transformers import TrainerCallback

from posttrain import SFTConfig, SFTTrainer
from posttrain.core import faults
from posttrain.trainer.checkpoints import checkpoint as files
from tests import tiny

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

WIDE = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4, "vocab_size": 32000}


class Keep(TrainerCallback):
    """The weights and masters of each step, read after everything before them was done."""

    def __init__(self):
        self.trainer, self.weights, self.masters = None, {}, {}

    def on_step_end(self, args, state, control, model=None, **kwargs):
        torch.cuda.synchronize()
        self.weights[state.global_step] = {name: p.detach().cpu() for name, p in model.named_parameters()}
        self.masters[state.global_step] = [master.detach().cpu() for _, master in self.trainer.guard.masters.pairs]


def test_a_slowly_written_checkpoint_is_bit_for_bit_that_of_its_step(tmp_path, monkeypatch):
    monkeypatch.setattr(faults, "SLOW_SECONDS", 0.05)
    faults.arm("slow:save.file:*")
    args = SFTConfig(
        output_dir=str(tmp_path), max_steps=12, save_steps=4, logging_steps=100, per_device_train_batch_size=4, report_to="none",
        learning_rate=1e-2, bf16=True,
    )  # fmt: skip
    keep = Keep()
    trainer = SFTTrainer(
        tiny.causal_lm(dtype=torch.bfloat16, **WIDE), args, train_dataset=Dataset.from_list(tiny.chats(40)),
        processing_class=tiny.tokenizer(), callbacks=[keep],
    )  # fmt: skip
    keep.trainer = trainer
    try:
        trainer.train()
    finally:
        faults.arm(None)
    assert trainer.checkpoints.writer.arena.page_locked
    assert trainer.checkpoints.writer.statistics.saves == 3
    for step in (4, 8, 12):
        folder = tmp_path / f"checkpoint-{step}"
        files.verify(folder)
        saved = load_file(folder / "model.safetensors")
        assert all(torch.equal(keep.weights[step][name], tensor) for name, tensor in saved.items())
        tree = files.load_tree(folder / "optimizer")
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(keep.masters[step], tree["masters"], strict=True))
    assert any(not torch.equal(keep.weights[4][name], keep.weights[8][name]) for name in keep.weights[4])
