"""Offline methods on rows with images: one gradient in every layout, and what a run says, freezes, saves and refuses."""

from __future__ import annotations

import pytest

from posttrain.core.batch import PADDED, RAGGED, SHARED
from tests.trainer.vision_runs import METHODS_WITH_IMAGES, gradient, trainer_of

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
