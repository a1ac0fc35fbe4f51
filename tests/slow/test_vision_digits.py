"""A tiny LLaVA learns to read handwritten digits, and reads the image of its row: shuffled or blank ones tell it nothing.

The saved model is asked by transformers alone, with the processor that was saved beside it.
"""

from __future__ import annotations

import gzip
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
)

from posttrain import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer
from tests.tiny_vision import _image_class, template, tokenizer

pytestmark = pytest.mark.slow
HELD_OUT, WIDTH = 297, 64
DIGITS = Path(__file__).parent / "digits" / "digits.csv.gz"


def digits(seed: int) -> list[tuple[Image.Image, str]]:
    """1,797 pictures of 28 x 28, and what they show."""
    with gzip.open(DIGITS, "rt") as lines:
        table = np.loadtxt(lines, delimiter=",", dtype=np.uint8)
    pictures = [Image.fromarray(row[:64].reshape(8, 8) * 15).resize((28, 28)).convert("RGB") for row in table]
    shown = [(picture, str(row[64])) for picture, row in zip(pictures, table)]
    random.Random(seed).shuffle(shown)
    return shown


def llava(folder: Path, seed: int) -> str:
    """A model of random weights and its processor, as a folder."""
    torch.manual_seed(seed)
    words = tokenizer(image_token="<image>")
    shape = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_attention_heads": 4}
    ends = {"pad_token_id": words.pad_token_id, "eos_token_id": words.eos_token_id, "bos_token_id": words.bos_token_id}
    tower = {"model_type": "clip_vision_model", "num_hidden_layers": 3, "image_size": 28, "patch_size": 14}
    text = {"model_type": "llama", "num_hidden_layers": 2, "max_position_embeddings": 256, "vocab_size": len(words)}
    config = LlavaConfig(
        vision_config=shape | tower | {"projection_dim": 16},
        text_config=shape | text | ends,
        image_token_id=words.image_token_id,
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
    )
    processor = LlavaProcessor(
        _image_class("CLIP")(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}),
        words,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=template("<image>"),
    )
    LlavaForConditionalGeneration(config).save_pretrained(folder)
    processor.save_pretrained(folder)
    return str(folder)


@torch.no_grad()
def share_right(model: Any, processor: Any, pictures: list[Image.Image], answers: list[str]) -> float:
    inputs = processor(text=["<image>?"] * len(pictures), images=[[p] for p in pictures], return_tensors="pt")
    said = processor.tokenizer.batch_decode(model(**inputs).logits[:, -1].argmax(-1)[:, None])
    return sum(a == b for a, b in zip(said, answers)) / len(answers)


def trained_by_sft(shown: list[tuple[Image.Image, str]], folder: Path, seed: int, **options: Any) -> str:
    shared = {"per_device_train_batch_size": 64, "learning_rate": 3e-3, "warmup_steps": 20, "logging_steps": 50}
    shared |= {"save_strategy": "no", "report_to": "none", "seed": seed, "use_cpu": True}
    args = SFTConfig(output_dir=str(folder / "sft"), dataset_cache_dir=str(folder / "cache"), **shared | options)
    rows = [{"images": [picture], "prompt": "<image>?", "completion": digit} for picture, digit in shown]
    trainer = SFTTrainer(model=llava(folder / "model", seed), args=args, train_dataset=rows)
    trainer.train()
    trainer.save_model(str(folder / "saved"))
    return str(folder / "saved")


def held_out_share(folder: str, shown: list[tuple[Image.Image, str]]) -> float:
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    pictures, answers = zip(*shown)
    return share_right(model, AutoProcessor.from_pretrained(folder), list(pictures), list(answers))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_tiny_model_learns_to_read_digits(seed, tmp_path):
    shown = digits(seed)
    held_out, trained = shown[:HELD_OUT], shown[HELD_OUT:]
    saved = trained_by_sft(trained, tmp_path, seed, num_train_epochs=13)
    model = AutoModelForImageTextToText.from_pretrained(saved).eval()
    processor = AutoProcessor.from_pretrained(saved)
    pictures, answers = [picture for picture, _ in held_out], [digit for _, digit in held_out]
    shuffled = random.Random(1).sample(pictures, len(pictures))
    blank = [Image.new("RGB", (28, 28))] * len(pictures)
    right = {name: share_right(model, processor, some, answers) for name, some in
             (("own", pictures), ("shuffled", shuffled), ("blank", blank))}  # fmt: skip
    print(right)
    assert right["own"] >= 0.9, right
    assert max(right["shuffled"], right["blank"]) <= 0.15, right


def right_digit(
    completions: list[str], digit: list[str], images: list[list[Image.Image]], **columns: Any
) -> list[float]:
    assert all(isinstance(picture, Image.Image) and picture.size == (28, 28) for (picture,) in images)
    return [float(said == wanted) for said, wanted in zip(completions, digit)]


def rewarded(start: str, shown: list[tuple[Image.Image, str]], folder: Path, steps: int) -> tuple[Any, str]:
    args = GRPOConfig(
        output_dir=str(folder / "grpo"),
        dataset_cache_dir=str(folder / "cache"),
        per_device_train_batch_size=256,
        num_generations=8,
        max_completion_length=1,
        mask_truncated_completions=False,
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        max_steps=steps,
        beta=0.0,
        reward_workers=0,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
    )
    rows = [{"images": [picture], "prompt": "<image>?", "digit": digit} for picture, digit in shown]
    trainer = GRPOTrainer(model=start, reward_funcs=right_digit, args=args, train_dataset=rows)
    trainer.train()
    trainer.save_model(str(folder / "saved"))
    return trainer, str(folder / "saved")


@pytest.mark.trust
def test_rewards_teach_it_to_read_and_shuffled_images_teach_nothing(tmp_path):
    shown = digits(0)
    held_out, trained = shown[:HELD_OUT], shown[HELD_OUT:]
    start = trained_by_sft(trained, tmp_path / "start", 0, max_steps=50)
    before = held_out_share(start, held_out)
    assert 0.3 < before < 0.75, before
    _, after = rewarded(start, trained, tmp_path / "own", 300)
    found = held_out_share(after, held_out)
    pictures = random.Random(2).sample([picture for picture, _ in trained], len(trained))
    control, _ = rewarded(start, [(p, digit) for p, (_, digit) in zip(pictures, trained)], tmp_path / "shuffled", 100)
    rewards = [entry["reward"] for entry in control.state.log_history if "reward" in entry]
    print(before, found, rewards)
    assert found >= 0.8 > before + 0.1, (before, found)
    assert max(rewards[-3:]) < 0.15 + 0.05, rewards


@torch.no_grad()
def share_preferred(folder: str, pairs: list[tuple[Image.Image, str, str]]) -> float:
    """Of pictures whose own digit is likelier than the other."""
    model, processor = AutoModelForImageTextToText.from_pretrained(folder).eval(), AutoProcessor.from_pretrained(folder)
    pictures, right, wrong = zip(*pairs)
    inputs = processor(text=["<image>?"] * len(pictures), images=[[p] for p in pictures], return_tensors="pt")
    logits, rows = model(**inputs).logits[:, -1], torch.arange(len(pictures))
    better, worse = (processor.tokenizer.convert_tokens_to_ids(list(side)) for side in (right, wrong))
    return float((logits[rows, better] > logits[rows, worse]).float().mean())


def test_preferences_teach_the_digit_of_the_picture(tmp_path):
    """DPO from a model that has half learned to read: the right digit before three others, drawn for each picture."""
    shown, draw = digits(0), random.Random(2)
    others = [draw.sample([other for other in "0123456789" if other != digit], 3) for _, digit in shown]
    pairs = [(picture, digit, other) for (picture, digit), three in zip(shown, others) for other in three]
    held_out, trained = pairs[: 3 * HELD_OUT], pairs[3 * HELD_OUT :]
    start = trained_by_sft(shown[HELD_OUT:], tmp_path, 0, max_steps=40)
    sides = [{"images": [p], "prompt": "<image>?", "chosen": right, "rejected": wrong} for p, right, wrong in trained]
    args = DPOConfig(
        output_dir=str(tmp_path / "dpo"),
        dataset_cache_dir=str(tmp_path / "cache"),
        per_device_train_batch_size=64,
        learning_rate=2e-3,
        num_train_epochs=6,
        warmup_steps=30,
        lr_scheduler_type="cosine",
        beta=1.0,
        logging_steps=50,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
    )
    trainer = DPOTrainer(model=start, args=args, train_dataset=sides)
    trainer.train()
    trainer.save_model(str(tmp_path / "preferring"))
    before, after = share_preferred(start, held_out), share_preferred(str(tmp_path / "preferring"), held_out)
    print(f"right digit preferred: {before:.3f} -> {after:.3f}")
    assert before < 0.9
    assert after >= 0.95
