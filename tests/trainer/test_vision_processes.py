"""Two processes, of which one has no image where the other has some, take the steps of one; whole, with masters and sharded."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from tests.forked import start_group, wait_for_group
from tests.tiny_vision import model_alone
from tests.trainer import vision_processes


def train(
    processes: int, folder: Path, *given: Any, **options: Any
) -> tuple[dict[str, torch.Tensor], list[list[bool]]]:
    """The weights at the end, and for each process which of its passes had images."""
    folder.mkdir()
    children = start_group(processes, lambda rank: vision_processes.main(folder, *given, **options), folder / "rank")
    codes = wait_for_group(children)
    assert codes == [0] * processes, "\n".join(child.output()[-3000:] for child in children)
    seen = [json.loads((folder / f"seen-{rank}.json").read_text()) for rank in range(processes)]
    return AutoModelForImageTextToText.from_pretrained(folder / "final").state_dict(), seen


FAMILIES, METHODS, KINDS = ("qwen2_5_vl", "smolvlm"), ("sft", "dpo"), ("whole", "masters", "sharded")
QUICK = (("whole", "sft", "smolvlm"), ("masters", "dpo", "qwen2_5_vl"))
CELLS = [
    pytest.param(*cell, marks=() if cell in QUICK else pytest.mark.slow)
    for cell in (*itertools.product(KINDS, METHODS, FAMILIES), ("sharded", "sft", "llava"))
]


@pytest.mark.parametrize(("kind", "method", "family"), CELLS)
def test_a_process_without_images_takes_the_steps_of_the_others(kind, method, family, tmp_path):
    given = (method, family, torch.bfloat16 if kind == "masters" else torch.float32, kind == "sharded")
    weights, _ = train(1, tmp_path / "one", *given)
    of_two, seen = train(2, tmp_path / "two", *given)
    assert any(first != second for first, second in zip(*seen, strict=True)), seen
    before = model_alone(family, dtype=given[2]).state_dict()
    moved = max((weights[name] - before[name]).abs().max() for name in weights if "patch_embed" in name)
    assert moved > 1e-4
    assert weights.keys() == of_two.keys()
    for name, tensor in weights.items():
        assert (of_two[name] - tensor).abs().max() < 0.02 * moved, name


def test_two_processes_draw_what_one_draws(tmp_path):
    """Augmented images depend on their rows, not on who loads them."""
    given = ("sft", "smolvlm", torch.float32, False)
    plain, _ = train(1, tmp_path / "plain", *given)
    one, two = (train(count, tmp_path / str(count), *given, image_augmentation="document")[0] for count in (1, 2))
    changed = max((one[name] - plain[name]).abs().max() for name in one)
    assert changed > 1e-4
    assert max((one[name] - two[name]).abs().max() for name in one) < 0.01 * changed
