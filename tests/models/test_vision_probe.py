"""A probe with images: what text alone would not tell, and models that are blind."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from posttrain.core.batch import PADDED, RAGGED, SHARED
from posttrain.models.attention import ragged
from posttrain.models.load.model import LoadedModel, LoadOptions, load_model
from tests.tiny_vision import FAMILIES
from tests.vision_samples import RAGGED_FAMILIES, Shown, image_probe


def load(shown: Shown, **options: Any) -> LoadedModel:
    probe = options.pop("image_probe", None) or image_probe(shown)
    dtype = shown.tiny.model.dtype
    given = LoadOptions(dtype, vision=shown.family, image_probe=probe, share_prefixes=True, **options)
    return load_model(shown.tiny.model, given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_layouts_of_the_families(family: str, dtype: torch.dtype) -> None:
    layouts = dict.fromkeys(RAGGED_FAMILIES, SHARED) | {"gemma3": RAGGED, "paligemma": PADDED}
    found = load(Shown.of(family, dtype))
    assert found.layout == layouts[family], found.notes


@pytest.mark.parametrize("family", ["gemma3", "llava"])
def test_a_blind_model_is_refused(family: str) -> None:
    """A projector of zeros: every layout gives the same answers."""
    shown = Shown.of(family)
    with torch.no_grad():
        for parameter in shown.tiny.model.model.multi_modal_projector.parameters():
            parameter.zero_()
    with pytest.raises(ValueError, match="does not see its images: another image changes none"):
        load(shown)


def test_a_model_that_does_not_know_its_images_apart_is_refused() -> None:
    shown = Shown.of("llava")
    probe = image_probe(shown)
    with pytest.raises(ValueError, match="swapping two images changes none"):
        load(shown, image_probe=replace(probe, swapped=probe.two))


def test_images_that_are_causal_in_ragged_rows_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe with texts would say that all is well."""
    plain = ragged.segment_attention
    monkeypatch.setattr(ragged, "segment_attention", lambda *given: plain(*given[:8]))
    shown = Shown.of("gemma3")
    found = load(shown)
    assert found.layout == PADDED
    assert any("answers differently about images in ragged batches" in note for note in found.notes)
    assert shown.tiny.model.config.text_config._attn_implementation == "sdpa"
    with pytest.raises(ValueError, match="padding_free=True"):
        load(Shown.of("gemma3"), layout=RAGGED)


def test_positions_without_rows_are_noticed() -> None:
    """The same positions on all axes, as a plain count would give: the model's own forward knows better."""
    shown = Shown.of("qwen2_5_vl")
    probe = image_probe(shown)

    def flat(units: Any, layout: str) -> Any:
        batch = probe.collate(units, layout)
        if batch.images is None:
            return batch
        places = torch.arange(batch.input_ids.shape[1]).expand(len(batch.position_ids), *batch.input_ids.shape)
        return replace(batch, position_ids=places if layout == PADDED else batch.position_ids[:1].expand(4, -1, -1))

    with pytest.raises(ValueError, match="answers differently about images in padded batches"):
        load(shown, image_probe=replace(probe, collate=flat))


def test_a_prefix_whose_images_are_not_seen_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Shown.of("llava_next")
    probe = image_probe(shown)

    def other_order(units: Any, layout: str) -> Any:
        batch = probe.collate(units, layout)
        if layout != SHARED:
            return batch
        pixels = batch.images.encoder["pixel_values"]
        changed = replace(batch.images, encoder=batch.images.encoder | {"pixel_values": pixels.flip(0)})
        return replace(batch, images=changed)

    found = load(shown, image_probe=replace(probe, collate=other_order))
    assert found.layout == RAGGED
    assert any("answers differently about images in shared batches" in note for note in found.notes)
