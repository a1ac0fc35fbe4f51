"""What transformers' conventions say of a model that sees and is of no family that is known here: where its parts are."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn


def image_parts(innermost: nn.Module) -> tuple[dict[str, Any], frozenset[str]]:
    """Paths of VisionFamily (tower, projectors, language_models), and the arguments that the image encoder takes.

    The model may be on the meta device. ValueError: it does not follow the conventions, and why.
    """
    prefix = innermost.base_model_prefix
    body = getattr(innermost, prefix, None)
    if not isinstance(body, nn.Module) or not hasattr(body, "get_image_features"):
        raise ValueError(f"{type(innermost).__name__} has no body that makes features of images (`get_image_features`)")
    if "mm_encoder_outputs" not in inspect.signature(type(body).forward).parameters:
        raise ValueError(f"{type(body).__name__} takes no features in the place of pixels (`mm_encoder_outputs`)")
    if hasattr(body, "get_rope_index"):
        raise ValueError(f"positions of {type(body).__name__} have several axes (`get_rope_index`)")
    tower, text = body.get_encoder(modality="image"), body.get_decoder()
    names = [name for name, _ in (*body.named_children(), *body.named_parameters(recurse=False))]
    found = {part: name for name, child in body.named_children() for part in (tower, text) if child is part}
    if tower is text or set(found) != {tower, text}:
        raise ValueError(f"tower and language model of {type(body).__name__} do not lie side by side in it")
    others = [name for name in names if name not in found.values()]
    heads = [name for name, _ in innermost.named_children() if name != prefix]
    paths = {
        "tower": f"{prefix}.{found[tower]}",
        "projectors": tuple(f"{prefix}.{name}" for name in others),
        "language_models": (f"{prefix}.{found[text]}", *heads),
    }
    return paths, frozenset(inspect.signature(body.get_image_features).parameters)
