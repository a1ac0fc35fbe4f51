"""Renderers and rows with images for tests of preparation."""

from __future__ import annotations

from functools import cache
from typing import Any

from posttrain.data.images.limits import ImageLimits
from posttrain.data.options import PrepareOptions
from posttrain.data.render.renderer import Renderer
from posttrain.data.rows import formats
from posttrain.data.store.prepare import prepare_dataset
from posttrain.data.vision.families import vision_family
from posttrain.data.vision.layouts import ImageLayouts
from tests.tiny_vision import tiny_processor

SFT = (formats.LANGUAGE_MODELLING, formats.PROMPT_COMPLETION, formats.TOKENISED)
DPO = (formats.PREFERENCE, formats.TOKENISED_PREFERENCE)
REWARD = (formats.SCORED_PREFERENCE,)
KTO = (formats.UNPAIRED_PREFERENCE,)
GRPO = (formats.PROMPT_ONLY,)


@cache
def renderer(family: str = "llava") -> Renderer:
    processor = tiny_processor(family)
    return Renderer(processor, layouts=ImageLayouts(vision_family(family, processor), processor))


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def prepared(
    rows: Any,
    folder: Any,
    accepted: Any = SFT,
    family: str = "llava",
    limits: ImageLimits | None = None,
    **options: Any,
) -> Any:
    """The dataset, read for a tiny model of the family."""
    chosen = PrepareOptions(
        **{"max_length": None, "image_limits": limits or ImageLimits(), "cache_dir": folder, **options}
    )
    return prepare_dataset(rows, accepted, renderer(family), chosen)


def shown(sample: Any, family: str = "llava") -> str:
    """The text of a sample, each image as `{height x width}`."""
    decode, pieces, before = renderer(family).tokenizer.decode, [], 0
    for image in sample.images:
        pieces += [decode(sample.input_ids[before : image.start]), f"{{{image.size[0]} x {image.size[1]}}}"]
        before = image.stop
    return "".join([*pieces, decode(sample.input_ids[before:])])
