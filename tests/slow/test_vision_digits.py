"""A tiny LLaVA learns to read handwritten digits, from scratch, and reads the image of its row: shuffled or blank ones tell it nothing.

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
from transformers import AutoModelForImageTextToText, AutoProcessor, LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor

from posttrain import SFTConfig, SFTTrainer
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


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_tiny_model_learns_to_read_digits(seed, tmp_path):
    shown = digits(seed)
    held_out, trained = shown[:HELD_OUT], shown[HELD_OUT:]
    args = SFTConfig(
        output_dir=str(tmp_path / "run"),
        per_device_train_batch_size=64,
        learning_rate=3e-3,
        num_train_epochs=13,
        warmup_steps=20,
        logging_steps=50,
        save_strategy="no",
        report_to="none",
        seed=seed,
        use_cpu=True,
        dataset_cache_dir=str(tmp_path / "cache"),
    )
    rows = [{"images": [picture], "prompt": "<image>?", "completion": digit} for picture, digit in trained]
    trainer = SFTTrainer(model=llava(tmp_path / "model", seed), args=args, train_dataset=rows)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "saved").eval()
    processor = AutoProcessor.from_pretrained(tmp_path / "saved")
    pictures, answers = [picture for picture, _ in held_out], [digit for _, digit in held_out]
    shuffled = random.Random(1).sample(pictures, len(pictures))
    blank = [Image.new("RGB", (28, 28))] * len(pictures)
    right = {name: share_right(model, processor, some, answers) for name, some in
             (("own", pictures), ("shuffled", shuffled), ("blank", blank))}  # fmt: skip
    print(right)
    assert right["own"] >= 0.9, right
    assert max(right["shuffled"], right["blank"]) <= 0.15, right
