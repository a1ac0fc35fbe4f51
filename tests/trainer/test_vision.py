"""Offline methods on rows with images: one gradient in every layout, and what a run says, freezes, saves and refuses."""

from __future__ import annotations

import re

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from posttrain.core.batch import PADDED, RAGGED, SHARED
from tests.trainer.vision_runs import METHODS_WITH_IMAGES, chats, gradient, trainer_of

FAMILIES = ("qwen2_5_vl", "llava_next", "smolvlm", "gemma3")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", METHODS_WITH_IMAGES)
def test_one_gradient_in_every_layout_and_split(method, family, tmp_path):
    """Rows of one image, of two, of none, the same image again, and an image inside of one answer only."""
    trainer = trainer_of(method, family, tmp_path)
    assert trainer.loaded.layout in (RAGGED, SHARED), trainer.loaded.notes
    alone = gradient(trainer, PADDED, 1)
    largest = max(grad.abs().max() for grad in alone.values())
    seen = [name for name in alone if trainer.vision.family.part_of(name) == "tower"]
    assert max(alone[name].abs().max() for name in seen) > 1e-6 * largest
    shared = (SHARED,) if trainer.loaded.layout == SHARED else ()
    for layout, split in [(layout, split) for layout in (PADDED, RAGGED, *shared) for split in (2, 5)]:
        found = gradient(trainer, layout, split)
        assert found.keys() == alone.keys()
        apart = max((found[name] - alone[name]).abs().max() for name in alone) / largest
        assert apart < 1e-6, (layout, split, float(apart))


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "llava_next", "smolvlm", "internvl"])
def test_what_grpo_writes_after_images_it_trains_on(family, tmp_path):
    """Log-probs of the engine are those of the trainer, and stored prompts name their images."""
    prompts = [{"prompt": prompt, "nth": nth} for nth, (prompt, _, _) in enumerate(chats()[:4])]

    def shown(completions, images=None, **columns):
        return [float(len(said[-1]["content"]) % 3) for said in completions]

    options = {"num_generations": 2, "max_completion_length": 5, "per_device_train_batch_size": 8, "beta": 0.1}
    options |= {"reward_workers": 0, "logging_steps": 1}
    trainer = trainer_of("grpo", family, tmp_path, torch.float32, train_dataset=prompts, reward_funcs=shown, **options)
    trainer.train()
    stored = pq.read_table(next((tmp_path / "run").glob("rollouts/**/*.parquet"))).to_pylist()
    keys = {key for row in stored for key in re.findall(r'"key": ?"([0-9a-f]{32})"', row["prompt"])}
    assert len(keys) == 3
    assert len(stored) == 8
    for (
        row
    ) in stored:  # before the first update the reference is the policy; drawn is from what is left without placeholders
        gap = np.subtract(row["sampling_logps"], row["reference_logps"])
        assert -1e-5 < gap.min() <= gap.max() < 0.2
