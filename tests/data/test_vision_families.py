"""The table of families, against the models and processors themselves."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from posttrain.core.vision import LANGUAGE_MODEL, PROJECTOR, TOWER
from posttrain.data.vision.families import FAMILIES as TABLE
from posttrain.data.vision.families import vision_family
from posttrain.data.vision.layouts import ImageLayouts
from tests.tiny_vision import (
    FAMILIES,
    SIZES,
    TinyVision,
    images,
    model_alone,
    refuse_blind,
    tiny_processor,
    vision_model,
)

OF_TEXT = {"input_ids", "attention_mask", "labels", "mm_token_type_ids", "token_type_ids"}
tiny = cache(vision_model)


def processed(made: TinyVision) -> Any:
    """Three images of unequal sizes in one text."""
    text = "a".join([made.processor.image_token] * len(SIZES))
    return made.processor(text=[text], images=[images(*SIZES)], return_tensors="pt")


def test_the_table_has_the_families_that_are_tested() -> None:
    assert set(TABLE) == set(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_forward_keys_are_what_the_processor_returns(family: str) -> None:
    entry, inputs = TABLE[family], processed(tiny(family))
    assert set(inputs) - OF_TEXT == set(entry.forward_keys)
    if entry.token_types_key:
        assert entry.token_types_key in inputs


@pytest.mark.parametrize("family", FAMILIES)
def test_features_come_as_the_table_says(family: str) -> None:
    """As many as there are placeholders, image after image or tile after tile."""
    made = tiny(family)
    entry, inputs = vision_family(family, made.processor), processed(made)
    by_size = ImageLayouts(entry, made.processor)
    layouts = [by_size.layout(*size) for size in SIZES]
    with torch.no_grad():
        answer = made.model.model.get_image_features(
            **{key: inputs[key] for key in entry.forward_keys}, return_dict=True
        )
    depths = getattr(answer, "deepstack_features", None)
    assert bool(depths) == entry.deepstack
    for features in (answer.pooler_output, *(depths or ())):
        if entry.features == "per_image":
            assert isinstance(features, list | tuple)
            assert [len(image) for image in features] == [layout.placeholders for layout in layouts]
        else:
            tiles = [entry.pixel_rows(layout.grid) for layout in layouts]
            assert features.shape[0] == sum(tiles)
            assert [features.shape[1] * count for count in tiles] == [layout.placeholders for layout in layouts]


@pytest.mark.parametrize("family", FAMILIES)
def test_texts_and_ids_are_the_checkpoints(family: str) -> None:
    processor = tiny_processor(family)
    entry = vision_family(family, processor)
    assert entry.written in processor.chat_template
    assert processor.tokenizer.convert_tokens_to_ids(entry.placeholder) == entry.placeholder_id
    assert entry.placeholder_id in entry.forbidden_ids
    for marker in entry.markers:
        if marker in processor.tokenizer.get_vocab():
            assert processor.tokenizer.convert_tokens_to_ids(marker) in entry.forbidden_ids
    written = set(entry.forbidden_ids) - {entry.placeholder_id}
    assert written.isdisjoint(processor.tokenizer("What is it?\n")["input_ids"])


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_belongs_to_the_part_that_computes_it(family: str) -> None:
    """Found by gradients, not by names: the text's do not depend on the tower, and the tower's features only on its own."""
    model, entry = model_alone(family), TABLE[family]
    parts = {name: entry.part_of(name) for name, _ in model.named_parameters()}
    assert set(parts.values()) == {TOWER, PROJECTOR, LANGUAGE_MODEL}
    model(input_ids=torch.tensor([[1, 2, 3]])).logits.sum().backward()
    reached = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert {parts[name] for name in reached} == {LANGUAGE_MODEL}
    assert {name for name, part in parts.items() if part == LANGUAGE_MODEL} == reached


def test_projectors_inside_of_the_tower_are_projectors() -> None:
    family = TABLE["qwen3_vl"]
    assert family.part_of("model.visual.blocks.0.norm1.weight") == TOWER
    assert family.part_of("model.visual.merger.norm.weight") == PROJECTOR
    assert family.part_of("model.visual.deepstack_merger_list.0.norm.weight") == PROJECTOR
    assert TABLE["llava_next"].part_of("model.image_newline") == PROJECTOR
    assert TABLE["idefics3"].part_of("lm_head.weight") == LANGUAGE_MODEL
    with pytest.raises(ValueError, match=r"'score.weight' belongs to no part of 'qwen3_vl' models"):
        family.part_of("score.weight")


def test_a_blind_model_is_no_fixture() -> None:
    made = tiny("gemma3")
    blind = TinyVision(model_alone("gemma3"), made.processor, made.mark)
    with torch.no_grad():
        blind.model.model.multi_modal_projector.mm_input_projection_weight.zero_()
    with pytest.raises(AssertionError, match="another image moves the logits"):
        refuse_blind(blind)


def test_other_models_and_other_processors_are_refused_in_words() -> None:
    processor = tiny_processor("llava")
    with pytest.raises(ValueError, match=r"not supported for models of type 'mllama'. Supported: gemma3, "):
        vision_family("mllama", processor)
    with pytest.raises(ValueError, match=r"needs a Qwen2_5_VLProcessor for its images, and .* is a LlavaProcessor"):
        vision_family("qwen2_5_vl", processor)
