"""Recurrences and convolutions in ragged rows and with shared prompts, on a CUDA device with whatever kernels it has."""

from __future__ import annotations

import pytest
import torch

from posttrain.core.batch import PADDED, RAGGED, SHARED
from scripts.families import small_model
from tests.mixers import KINDS, answers, assert_alike, loaded

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("family", KINDS)
def test_gradients_are_equal_in_every_layout(family):
    model = small_model(family).train().cuda()
    wanted = answers(loaded(model, PADDED), PADDED)
    for layout in (RAGGED, SHARED):
        assert_alike(answers(loaded(model, layout), layout), wanted, tolerance=1e-3)


@pytest.mark.parametrize("family", ["stablelm", "qwen3_5_text", "falcon_h1"])
def test_flash_and_kernels_in_bfloat16_are_near(family):
    """Log-probs of the ragged layouts are as far from those in float32 as the padded ones are."""
    exact = answers(loaded(small_model(family).train().cuda(), PADDED), PADDED)[0]
    model = small_model(family).train().cuda().bfloat16()
    apart = {
        layout: (answers(loaded(model, layout), layout)[0].float() - exact).abs().mean().item()
        for layout in (PADDED, RAGGED, SHARED)
    }
    print(f"{family}: {apart}")
    assert max(apart[RAGGED], apart[SHARED]) < 1.5 * apart[PADDED] + 1e-3
