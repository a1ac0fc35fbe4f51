"""Losses and gradients of batches with images, tower included, are those of single samples through transformers' own forward."""

from __future__ import annotations

import types
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from posttrain.core.batch import PADDED, RAGGED, SHARED, TokenBatch
from posttrain.core.sample import Unit
from posttrain.models.load.model import LoadOptions, load_model
from posttrain.models.scoring.token_scores import score_tokens
from tests import tiny
from tests.tiny_vision import TOWERS, images
from tests.vision_samples import RAGGED_FAMILIES, Shown, repeated_images

CELLS = [
    *((family, layout) for family in (*RAGGED_FAMILIES, *TOWERS) for layout in (PADDED, RAGGED, SHARED)),
    *(("gemma3", layout) for layout in (PADDED, RAGGED)),
    ("paligemma", PADDED),
]
TOLERANCE = {"paligemma": 1e-7}  # counts positions from 1, and turns by them in float32


def exact(family: str) -> Shown:
    """In float64, norms included."""
    shown = Shown.of(family)
    if "gemma" not in family:
        tiny.with_exact_norms(shown.tiny.model)
        return shown

    def forward(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        return self._norm(hidden) * (1 + self.weight)

    for module in shown.tiny.model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = types.MethodType(forward, module)
    return shown


def weights_of(count: int) -> torch.Tensor:
    return torch.linspace(-1, 2, count, dtype=torch.float64)


def gradients(model: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def own_loss(shown: Shown, units: Sequence[Unit]) -> torch.Tensor:
    logps = torch.cat([shown.own_logps(sample) for unit in units for sample in unit])
    return (weights_of(len(logps)) * logps).sum()


def loss_of(model: Any, batch: TokenBatch) -> torch.Tensor:
    logps = score_tokens(model, batch).logps
    return (weights_of(len(logps)) * logps).sum()


def assert_same(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], tolerance: float) -> None:
    assert mine.keys() == theirs.keys()
    largest = max(gradient.abs().max() for gradient in theirs.values())
    for name, gradient in theirs.items():
        assert (mine[name] - gradient).abs().max() <= tolerance * largest, name


@pytest.mark.parametrize(("family", "layout"), CELLS)
def test_loss_and_gradients_are_those_of_single_samples(family: str, layout: str) -> None:
    shown = exact(family)
    model, units = shown.tiny.model, repeated_images(shown)
    loss = own_loss(shown, units)
    theirs = gradients(model, loss)
    asked = PADDED if layout == PADDED else RAGGED
    options = LoadOptions(torch.float64, vision=shown.family, layout=asked, share_prefixes=layout == SHARED)
    assert load_model(model, options).layout == layout
    batch = shown.batch(units, layout)
    assert len(batch.images.tiles) == 2  # shown six times, or four where a prompt is shared
    assert len(batch.images.shown) == (4 if layout == SHARED else 6)
    mine = loss_of(model, batch)
    tolerance = TOLERANCE.get(family, 1e-9)
    assert abs(mine - loss) <= tolerance * abs(loss)
    assert_same(gradients(model, mine), theirs, tolerance)
    assert any(name.startswith(shown.family.tower) for name in theirs)


@pytest.mark.parametrize("layout", [RAGGED, SHARED])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "llava_next", "smolvlm"])
def test_checkpointed_layers_have_the_same_gradients_and_encode_once(family: str, layout: str) -> None:
    shown = exact(family)
    model, units = shown.tiny.model, repeated_images(shown)
    load_model(model, LoadOptions(torch.float64, vision=shown.family))
    batch = shown.batch(units, layout)
    theirs = gradients(model, loss_of(model, batch))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    calls = []
    handle = model.get_submodule(shown.family.tower).register_forward_hook(lambda *_: calls.append(1))
    assert_same(gradients(model, loss_of(model, batch)), theirs, 1e-9)
    handle.remove()
    assert len(calls) == 1


@pytest.mark.parametrize("family", [*RAGGED_FAMILIES, "gemma3", "paligemma"])
def test_the_wrong_order_of_images_is_another_answer(family: str) -> None:
    """Of two images with equally many features: nothing but the order in which they are picked says which is which."""
    shown = Shown.of(family)
    first, second = images((60, 40), (60, 40))
    sample = shown.sample("a", first, "b", second, "c?")
    load_model(shown.tiny.model, LoadOptions(torch.float64, vision=shown.family, layout=PADDED))
    batch = shown.batch([(sample,)], PADDED)
    own = shown.own_logps(sample)
    assert (score_tokens(shown.tiny.model, batch).logps - own).abs().max() < 1e-6
    wrong = replace(batch, images=replace(batch.images, shown=(1, 0)))
    assert (score_tokens(shown.tiny.model, wrong).logps - own).abs().max() > 0.01
