"""The entry of a family that is in no table, found by looking at what its processor makes of blank pictures.

A model follows transformers' conventions where its processor writes for each picture a text in which a placeholder stands once for
every feature, and returns with it nothing but arguments of the image encoder. Whatever else a processor returns (types of tokens,
positions) decides something about the text's attention that is not known here, and is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from PIL import Image

from posttrain.core.vision import VisionFamily

LOOKED_AT = ((64, 48), (56, 112), (300, 40), (500, 500))  # height, width of the blank pictures
OF_TEXT = frozenset({"input_ids", "attention_mask", "text_replacement_offsets"})
PIXELS = "pixel_values"


def found_family(
    config: Mapping[str, Any], processor: Any, paths: dict[str, Any], encoder_arguments: frozenset[str]
) -> VisionFamily:
    """`config`: the model's; `paths`: of its parts. ValueError: the processor does not follow the conventions, and why."""
    written, tokenizer = getattr(processor, "image_token", None), processor.tokenizer
    placeholder_id = config.get("image_token_id", config.get("image_token_index"))
    if not isinstance(written, str) or placeholder_id is None:
        raise ValueError("processor and config name no token of images (`image_token`, `image_token_id`)")
    placeholder = tokenizer.convert_ids_to_tokens(placeholder_id)
    texts = [_replacement(processor, written, size) for size in LOOKED_AT]
    if not all(placeholder in text for text in texts):
        raise ValueError(f"{type(processor).__name__} writes an image without its placeholder {placeholder!r}")
    control = set(tokenizer.added_tokens_decoder)
    around = {number for text in texts for number in tokenizer(text, add_special_tokens=False)["input_ids"]} & control
    return VisionFamily(
        model_type=str(config["model_type"]),
        processor_class=type(processor).__name__,
        forward_keys=_forward_keys(processor, written, encoder_arguments),
        grid_of="tiles",
        features="found",
        markers=(),
        **paths,
        is_found=True,
        written=written,
        placeholder=placeholder,
        placeholder_id=placeholder_id,
        forbidden_ids=tuple(sorted({placeholder_id, tokenizer.convert_tokens_to_ids(written), *around})),
    )


def _blank(size: tuple[int, int]) -> Image.Image:
    return Image.new("RGB", size[::-1], (127, 127, 127))


def _replacement(processor: Any, written: str, size: tuple[int, int]) -> str:
    inputs = processor(text=[written], images=[[_blank(size)]], return_text_replacement_offsets=True)
    if "text_replacement_offsets" not in inputs:
        raise ValueError(f"{type(processor).__name__} does not say what it writes in the place of an image")
    return inputs["text_replacement_offsets"][0][0]["replacement"]


def _forward_keys(processor: Any, written: str, encoder_arguments: frozenset[str]) -> tuple[str, ...]:
    """What the model is given of an image; the pixels first."""
    returned = set(processor(text=[written], images=[[_blank(LOOKED_AT[0])]])) - OF_TEXT
    if unknown := sorted(returned - encoder_arguments):
        raise ValueError(
            f"{type(processor).__name__} also returns {', '.join(unknown)}, which its image encoder does not take"
        )
    alone = processor.image_processor([_blank(LOOKED_AT[0])], return_tensors="pt")
    if PIXELS not in returned or not returned <= set(alone):
        raise ValueError(f"{type(processor.image_processor).__name__} alone does not make all of {sorted(returned)}")
    return (PIXELS, *sorted(returned - {PIXELS}))
