"""Online methods on prompts with images."""

from __future__ import annotations

import re

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from tests.trainer.vision_runs import chats, trainer_of


@pytest.mark.parametrize(
    "family", ["qwen2_5_vl", "qwen3_vl", "llava_next", "smolvlm", "internvl", "gemma3", "paligemma"]
)
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
    # Before the first update the reference is the policy; what is drawn from leaves placeholders out.
    for row in stored:
        gap = np.subtract(row["sampling_logps"], row["reference_logps"])
        assert -1e-5 < gap.min() <= gap.max() < 0.2
