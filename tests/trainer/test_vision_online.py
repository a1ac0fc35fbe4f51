"""Online methods on prompts with images."""

from __future__ import annotations

import re

import datasets
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset

from tests.data.picture_files import encoded, noise
from tests.tiny_vision import vision_model
from tests.trainer.vision_runs import chats, question, trainer_of


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


@pytest.mark.parametrize("name", ["max_length", "max_prompt_length"])
def test_a_length_that_is_set_holds_for_prompts_with_images(name, tmp_path):
    prompts = [{"prompt": prompt} for prompt, _, _ in (chats()[0], chats()[2])]  # one with an image, one without
    options = {name: 30, "num_generations": 2, "truncation_mode": "keep_end", "reward_funcs": lambda **_: [0.0]}
    trainer = trainer_of("grpo", "llava", tmp_path, torch.float32, train_dataset=prompts, **options)
    assert max(len(sample) for (sample,) in trainer.train_dataset.prepared) == 30


@pytest.mark.parametrize("method", ["gkd", "distillation"])
def test_a_teacher_may_come_with_its_processor(method, tmp_path):
    """As the student may: whether both read the same tokens is seen from the processor's tokenizer."""
    rows = [{"prompt": prompt, "completion": [said]} for prompt, said, _ in chats()[:4]]
    teacher = vision_model("qwen2_5_vl", dtype=torch.float32)
    given = {"teacher_model": teacher.model, "teacher_processing_class": teacher.processor, "train_dataset": rows}
    trainer = trainer_of(method, "qwen2_5_vl", tmp_path, torch.float32, max_completion_length=4, **given)
    trainer.train()
    assert np.isfinite(trainer.state.log_history[-1]["train_loss"])


def test_a_fingerprint_of_prompts_decodes_no_image(tmp_path, monkeypatch):
    """It changes with a picture, with a column of rewards, and not with the folder in which pictures lie."""
    rows = [
        {"prompt": [question("What?")], "image": encoded(noise(40, 40, seed=n)), "colour": f"{n}"} for n in range(3)
    ]
    shared = {
        "reward_funcs": lambda completions, **_: [0.0] * len(completions),
        "num_generations": 2,
        "max_completion_length": 4,
    }

    def fingerprint(changed, folder="a"):
        for number, row in enumerate(changed):
            path = tmp_path / folder / f"{number}.png"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(row["image"])
        stored = [row | {"image": {"bytes": row["image"], "path": str(tmp_path / folder / "x.png")}} for row in changed]
        made = Dataset.from_list(stored).cast_column("image", datasets.Image())
        return trainer_of("grpo", "llava", tmp_path / folder, torch.float32, train_dataset=made, **shared).train_dataset

    first = fingerprint(rows)
    with monkeypatch.context() as without:
        without.setattr(datasets.Image, "decode_example", None)
        known = first.fingerprint
    assert fingerprint(rows, "b").fingerprint.split("-")[1] == known.split("-")[1]
    assert fingerprint([rows[0] | {"colour": "red"}, *rows[1:]]).fingerprint != known
    assert fingerprint([rows[0] | {"image": rows[1]["image"]}, *rows[1:]]).fingerprint != known
