"""The families whose images are supported, as a literal table, and what one checkpoint's processor adds to its entry."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from posttrain.core.vision import VisionFamily

_TILES = tuple(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))


def _qwen(model_type: str, processor_class: str, **more: Any) -> VisionFamily:
    return VisionFamily(
        model_type=model_type,
        processor_class=processor_class,
        forward_keys=("pixel_values", "image_grid_thw"),
        grid_of="patches",
        features="per_image",
        tower="model.visual",
        language_models=("model.language_model", "lm_head"),
        markers=("<|vision_start|>", "<|vision_end|>", "<|video_pad|>"),
        three_axis_positions=True,
        **{"projectors": ("model.visual.merger",), **more},
    )


def _tiled(model_type: str, processor_class: str, **more: Any) -> VisionFamily:
    """The form that most families share: a tower, a projector and a language model side by side, and counted tiles."""
    shared: dict[str, Any] = {
        "forward_keys": ("pixel_values",),
        "grid_of": "tiles",
        "features": "per_tile",
        "tower": "model.vision_tower",
        "projectors": ("model.multi_modal_projector",),
        "language_models": ("model.language_model", "lm_head"),
        "markers": (),
    }
    return VisionFamily(model_type=model_type, processor_class=processor_class, **{**shared, **more})


def _idefics(model_type: str, processor_class: str) -> VisionFamily:
    return _tiled(
        model_type,
        processor_class,
        forward_keys=("pixel_values", "pixel_attention_mask"),
        grid_of="tile_rows",
        tower="model.vision_model",
        projectors=("model.connector",),
        language_models=("model.text_model", "lm_head"),
        markers=("<fake_token_around_image>", "<global-img>", "<video>", *_TILES),
        pixels_in_one_row=True,
    )


FAMILIES: dict[str, VisionFamily] = {
    family.model_type: family
    for family in (
        _qwen("qwen2_vl", "Qwen2VLProcessor"),
        _qwen("qwen2_5_vl", "Qwen2_5_VLProcessor"),
        _qwen(
            "qwen3_vl",
            "Qwen3VLProcessor",
            projectors=("model.visual.merger", "model.visual.deepstack_merger_list"),
            deepstack=True,
        ),
        _tiled("llava", "LlavaProcessor", features="per_image"),
        _tiled(
            "llava_next",
            "LlavaNextProcessor",
            forward_keys=("pixel_values", "image_sizes"),
            features="per_image",
            projectors=("model.multi_modal_projector", "model.image_newline"),
        ),
        _tiled(
            "gemma3",
            "Gemma3Processor",
            markers=("<start_of_image>", "<end_of_image>"),
            token_types_key="token_type_ids",
            images_see_themselves_whole=True,
        ),
        _idefics("idefics3", "Idefics3Processor"),
        _idefics("smolvlm", "SmolVLMProcessor"),
        _tiled("internvl", "InternVLProcessor", markers=("<img>", "</img>", "<video>")),
        _tiled("paligemma", "PaliGemmaProcessor", token_types_key="token_type_ids", prefix_sees_itself_whole=True),
    )
}


def vision_family(model_type: str, processor: Any) -> VisionFamily:
    """The family of a checkpoint, with the texts and ids of its tokenizer.

    ValueError: no family of that name is supported, or the processor is another one than the family's, which would write
    other texts and hand other arguments to the model.
    """
    family = FAMILIES.get(model_type)
    if family is None:
        raise ValueError(
            f"Images are not supported for models of type {model_type!r}. Supported: {', '.join(sorted(FAMILIES))}."
        )
    if family.processor_class not in {base.__name__ for base in type(processor).__mro__}:
        raise ValueError(
            f"A model of type {model_type!r} needs a {family.processor_class} for its images, and the processor at hand "
            f"is a {type(processor).__name__}. Load it with AutoProcessor from the folder of the model."
        )
    tokenizer = processor.tokenizer
    # Gemma's `processor.image_token` is the mark that a template writes; what stands for features is its tokenizer's.
    placeholder = tokenizer.image_token if model_type == "gemma3" else processor.image_token
    vocabulary = tokenizer.get_vocab()
    known = (vocabulary[text] for text in (placeholder, processor.image_token, *family.markers) if text in vocabulary)
    return replace(
        family,
        written=processor.image_token,
        written_id=vocabulary[processor.image_token],
        placeholder=placeholder,
        placeholder_id=vocabulary[placeholder],
        forbidden_ids=tuple(sorted(set(known))),
        merge_size=processor.image_processor.merge_size if family.grid_of == "patches" else 1,
    )
