"""Encode each distinct image of a batch once, and hand its features to the model at every place that shows it.

The tower is called apart from the text, so that nothing meant for the text (bounds of segments, shared prefixes, a cache of keys)
can reach it: a varlen kernel would read beyond its patches. What a model's family is must be known to the model itself, since its
forward runs below every wrapper: `set_family` keeps it on the innermost model, where a deep copy takes it along.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor, nn
from transformers import __version__ as installed_transformers

from posttrain.core.batch import BatchImages
from posttrain.core.vision import VisionFamily
from posttrain.models.attention.image_blocks import ImageBlocks
from posttrain.models.inference import body_of

OLDEST_TRANSFORMERS = "5.18"  # the first whose models take features instead of pixels (`mm_encoder_outputs`)
HOW_TO_INSTALL = 'pip install "posttrain[vision]"'
_FAMILY, _MADE, _FILLER = "_posttrain_vision", "_made_features", "_posttrain_filler"


@dataclass(frozen=True)
class Filler:
    """A small image that a pass without images encodes and multiplies by zero, in a run that has images.

    DDP waits for a gradient of every trained parameter, FSDP and ZeRO-3 for every process at each layer: a process whose rows are
    texts would be waited for forever. On one process, too, what is trained then has the gradient 0 of such a pass, not none, so
    that momentum and weight decay do not depend on how rows are dealt out; and a pass has a graph where the text is frozen.
    """

    images: BatchImages
    sharded: bool  # every pass calls the tower exactly once, also where nothing of it is trained


def set_filler(innermost: nn.Module, filler: Filler) -> None:
    setattr(innermost, _FILLER, filler)


def filler_zero(model: nn.Module) -> Tensor | None:
    """0 as a function of tower and projector, for a pass without images; None where it is not needed."""
    filler: Filler | None = getattr(model, _FILLER, None)
    if filler is None:
        return None
    family = family_of(model)
    trains = any(parameter.requires_grad for parameter in vision_parameters(model, family))
    if not filler.sharded and not (trains and torch.is_grad_enabled()):
        return None
    device = next(model.parameters()).device
    encoder = {name: value.to(device, non_blocking=True) for name, value in filler.images.encoder.items()}
    made = encoded(model, family, replace(filler.images, encoder=encoder), trains)
    features = [made.pooler_output, *(made.deepstack_features if family.deepstack else ())]
    tensors = [one for item in features for one in ([item] if isinstance(item, Tensor) else item)]
    return sum((tensor * 0).sum() for tensor in tensors)  # in this order: a sum in float16 may be infinite


def set_family(innermost: nn.Module, family: VisionFamily) -> None:
    """Let a model answer about batches with images. To be called at load, before anything wraps the model.

    `rope_deltas` is what M-RoPE models remember of the last batch with images; it is not used here, and it would move the positions
    of a later `generate` of texts.
    """
    if Version(installed_transformers) < Version(OLDEST_TRANSFORMERS):
        raise ImportError(
            f"Images need transformers {OLDEST_TRANSFORMERS} or newer, whose models take features of images; installed is "
            f"{installed_transformers}. Install it with: {HOW_TO_INSTALL}"
        )
    setattr(innermost, _FAMILY, family)
    for module in innermost.modules():
        if getattr(module, "rope_deltas", None) is not None:
            module.rope_deltas = None


def family_of(innermost: nn.Module) -> VisionFamily | None:
    return getattr(innermost, _FAMILY, None)


def forbidden_tokens(innermost: nn.Module, pixels: Any) -> list[int]:
    """Those that are never drawn where images are shown: a placeholder that is written would refer to no image, so that the next
    forward fails, or takes the features of another one."""
    family = family_of(innermost)
    if family is None or pixels is None:
        return []
    return [token for token in family.forbidden_ids if token < innermost.config.get_text_config().vocab_size]


def with_images(model: nn.Module, kwargs: dict[str, Any], asked: Tensor) -> dict[str, Any]:
    """Arguments of the body of a model that sees, with `images` (BatchImages or None) turned into features and masks.

    `asked` are the positions of the first question: those before the first of a row are the prompt, which a prefix-LM sees whole.
    """
    family, images = family_of(model), kwargs.pop("images", None)
    if family is None:
        raise ValueError(
            f"A batch has images, and this {type(model).__name__} was loaded for texts only. Load it with the family of its images "
            "(`LoadOptions.vision`), or leave the images out."
        )
    is_padded = "cu_seq_lens_q" not in kwargs
    if family.prefix_sees_itself_whole:
        if not is_padded:
            raise NotImplementedError(f"{type(model).__name__} sees its prompt whole: it must use the padded layout.")
        kwargs[family.token_types_key] = _suffixes(asked, kwargs["input_ids"].shape)
    if images is None:
        return kwargs
    if family.three_axis_positions and kwargs["position_ids"].dim() != 3:
        raise ValueError(
            f"{type(model).__name__} has positions of time, row and column, and a batch with images gives it positions of one "
            "axis: its images would have no rows. Make its samples with `Sample.positions`."
        )
    if images.blocks is not None and not is_padded:
        kwargs["image_blocks"] = ImageBlocks.of(images.blocks.flatten(), kwargs["cu_seq_lens_q"])
    elif family.token_types_key is not None and not family.prefix_sees_itself_whole:
        kwargs[family.token_types_key] = images.token_types
    return kwargs | {"mm_encoder_outputs": {"image": image_features(model, images)}}


def _suffixes(asked: Tensor, shape: torch.Size) -> Tensor:
    """(rows, width) 0 up to the first asked position of each row, 1 behind it; 0 in rows of which nothing is asked."""
    rows, width = shape
    first = asked.new_full((rows,), width).scatter_reduce(0, asked // width, asked % width, "amin")
    return (torch.arange(width, device=asked.device) > first[:, None]).long()


def image_features(model: nn.Module, images: BatchImages) -> Any:
    """What the body takes as `mm_encoder_outputs["image"]`: the features of every place, in the order of the places.

    Where neither tower nor projector is trained no graph is built, so that no activation of the tower is kept; and where no adapter
    lies on them, the features stay with the images for as long as these live: the same model without its adapters, which is the
    reference of the one with them, sees the same. Not where weights are sharded: each pass calls the tower then, as `Filler` does.
    """
    maker, made = getattr(images, _MADE, (None, None))
    if maker is not None and maker() is model:
        return made
    filler: Filler | None = getattr(model, _FILLER, None)
    is_sharded = filler is not None and filler.sharded
    family = family_of(model)
    trains = any(parameter.requires_grad for parameter in vision_parameters(model, family))
    made = encoded(model, family, images, trains)
    # What inference mode has made can never be part of a graph, which a later pass of the same batch may have.
    if not (trains or is_sharded or torch.is_inference_mode_enabled() or has_vision_adapter(model, family)):
        object.__setattr__(images, _MADE, (weakref.ref(model), made))
    return made


def encoded(model: nn.Module, family: VisionFamily, images: BatchImages, trains: bool) -> Any:
    body = body_of(model)
    with torch.set_grad_enabled(torch.is_grad_enabled() and trains):
        output = body.get_image_features(**images.encoder, return_dict=True)
    kept = {"pooler_output": pick(output.pooler_output, images, family)}
    if family.deepstack:
        kept["deepstack_features"] = [pick(features, images, family) for features in output.deepstack_features]
    return type(output)(**kept)  # without the tower's hidden states, which are not read


def vision_parameters(model: nn.Module, family: VisionFamily) -> Iterator[nn.Parameter]:
    """Those of tower and projectors."""
    for path in (family.tower, *family.projectors):
        part = attrgetter(path)(model)
        yield from (part,) if isinstance(part, nn.Parameter) else part.parameters()


def has_vision_adapter(model: nn.Module, family: VisionFamily) -> bool:
    """Whether PEFT has put a layer of its own around one of tower or projectors."""
    parts = (attrgetter(path)(model) for path in (family.tower, *family.projectors))
    modules = (module for part in parts if isinstance(part, nn.Module) for module in part.modules())
    return any(not {"base_layer", "original_module"}.isdisjoint(module._modules) for module in modules)


def pick(features: Any, images: BatchImages, family: VisionFamily) -> Any:
    """The features of the distinct images, repeated and ordered as they are shown; refused where a place has more or fewer
    placeholders: some families would silently give what is left over to the next image, or to the next row."""
    is_stacked = isinstance(features, Tensor)
    if is_stacked and features.dim() == 2:  # of a family that was found: a row for each feature
        per_image = _split_by_placeholders(features, images, family)
        sizes = [len(one) for one in per_image]
    elif is_stacked:
        _same(len(features), sum(images.tiles), "tiles were encoded, and the batch has", family)
        per_image = features.split(images.tiles)
        sizes = [tiles * features.shape[1] for tiles in images.tiles]
    else:
        _same(len(features), len(images.tiles), "images were encoded, and the batch has", family)
        per_image, sizes = features, [len(one) for one in features]
    for place, (number, placeholders) in enumerate(zip(images.shown, images.placeholders, strict=True)):
        what = f"features were made of the image at place {place}, whose placeholders are"
        _same(sizes[number], placeholders, what, family)
    if images.shown == tuple(range(len(images.tiles))):
        return features
    shown = [per_image[number] for number in images.shown]
    return torch.cat(shown) if is_stacked else shown


def _split_by_placeholders(features: Tensor, images: BatchImages, family: VisionFamily) -> tuple[Tensor, ...]:
    sizes = [images.placeholders[images.shown.index(number)] for number in range(len(images.tiles))]
    _same(len(features), sum(sizes), "features were made, and the placeholders of the images are", family)
    return features.split(sizes)


def _same(found: int, wanted: int, what: str, family: VisionFamily) -> None:
    if found != wanted:
        raise ValueError(
            f"{found} {what} {wanted} ({family.model_type}): an image was cut, or its processor is not the one that wrote the "
            "text. Prepare the data again with the processor of this model."
        )
