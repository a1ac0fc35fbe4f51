"""Recurrences and convolutions in ragged rows and with shared prompts, on a CUDA device with whatever kernels it has."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from posttrain.core.batch import PADDED, RAGGED, SHARED
from posttrain.models.load.model import LoadOptions, load_model
from posttrain.rollout.engines.native.engine import NativeEngine
from posttrain.rollout.engines.protocol import generate
from posttrain.rollout.engines.select import ENGINES
from posttrain.rollout.engines.transformers import TransformersEngine
from scripts.families import small_model
from tests.mixers import KINDS, answers, assert_alike, loaded
from tests.rollout.families import SEEDED, prompts

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


@pytest.mark.parametrize("family", ["stablelm", "qwen3_5_text", "falcon_h1", "lfm2_moe"])
def test_the_native_engine_writes_what_the_plain_one_does(family):
    model = small_model(family).cuda()
    load_model(model, LoadOptions())
    engine = ENGINES["native"](model, max_slots=5)
    assert isinstance(engine, NativeEngine)
    asked = prompts(8, samples=4, longest=40)
    found = generate(engine, asked, SEEDED)
    for one, other in zip(found, generate(TransformersEngine(model), asked, SEEDED), strict=True):
        same = min(len(one.ids), len(other.ids), 8)  # later a draw may fall on the other side of a rounded edge
        assert one.ids[:same].tolist() == other.ids[:same].tolist()
        assert np.abs(one.policy_logps[:same] - other.policy_logps[:same]).max() < 1e-3
