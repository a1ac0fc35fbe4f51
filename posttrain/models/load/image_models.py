"""Loading models that see: their class, their processor, and what is set up once they and their adapters are there."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import util
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    AutoModelForImageTextToText,
)

from posttrain.core.batch import PADDED
from posttrain.core.vision import LANGUAGE_MODEL, PROJECTOR, TOWER, VisionFamily
from posttrain.models.layers.tower_layers import fuse_tower_layers
from posttrain.models.scoring.heads import HEAD_NAMES
from posttrain.models.scoring.probe import ImageProbe
from posttrain.models.vision.features import HOW_TO_INSTALL, Filler, set_family, set_filler
from posttrain.models.vision.parts import (
    PARTS,
    adapters_by_part,
    freeze_parts,
    keep_frozen_vision_in_eval,
    require_gradients_of_text_only,
    unreachable_parameters,
)
from posttrain.models.vision.tower import install_tower_attention

CROSS_ATTENTION = ("mllama",)
"""Families that look at images through layers of their own, beside the tokens."""
NEEDED_BY_PROCESSORS = ("torchvision", "num2words")


def sees_images(config: Mapping[str, Any]) -> bool:
    """Whether a checkpoint of this config.json is a model of images and text. `AutoModelForCausalLM` would refuse most of them, and
    load the text part alone of others, whose saved model would have lost its tower."""
    model_type, architectures = config.get("model_type"), config.get("architectures")
    known = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(model_type)
    if known is None:
        return False
    if not architectures:
        return model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return architectures[0] == known


class WithHead:
    """Auto class of reward models for families without a classifier of their own, which are nearly all: the model of images and
    text, and a linear head `score` beside its language head, which is kept for saving and is not trained.

    Classes are made under the name of the family's own, so that a saved model is one of that family to other programs;
    `score.weight` lies in its file, and loading it for another task leaves it there.
    """

    @classmethod
    def from_pretrained(cls, path: str, num_labels: int, **kwargs: Any) -> nn.Module:
        files = {name: kwargs[name] for name in ("revision", "subfolder", "cache_dir") if name in kwargs}
        config = AutoConfig.from_pretrained(path, trust_remote_code=kwargs.pop("trust_remote_code", False), **files)
        config.num_labels = num_labels
        made = _with_head(AutoModelForImageTextToText._model_mapping[type(config)])
        return _untrained_language_head(made.from_pretrained(path, config=config, **kwargs))

    @classmethod
    def from_config(cls, config: Any, **kwargs: Any) -> nn.Module:
        kwargs.pop("trust_remote_code", None)
        made = _with_head(AutoModelForImageTextToText._model_mapping[type(config)])
        return _untrained_language_head(made._from_config(config, **kwargs))


@cache
def _with_head(family_class: Any) -> Any:
    def init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        family_class.__init__(self, config, *args, **kwargs)
        self.score = nn.Linear(config.get_text_config().hidden_size, config.num_labels, bias=False)
        self.post_init()

    return type(family_class.__name__, (family_class,), {"__init__": init, "__module__": family_class.__module__})


def _untrained_language_head(model: Any) -> nn.Module:
    """Where it is not the embedding as well: it would never get a gradient."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is not None and head.weight is not embedding.weight:
        head.requires_grad_(False)
    return model


def has_classifier(config: Mapping[str, Any]) -> bool:
    return config.get("model_type") in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES


def refuse_by_name(config: Mapping[str, Any]) -> None:
    """Models that see in a way that this library does not train."""
    model_type = config["model_type"]
    if model_type in CROSS_ATTENTION:
        raise ValueError(
            f"Models of type {model_type!r} look at images through cross-attention layers beside the tokens, which posttrain does "
            "not train. Take a model that has its images among its tokens, such as qwen2_5_vl, llava_next, smolvlm or gemma3."
        )
    if AutoConfig.for_model(model_type).is_encoder_decoder:
        raise ValueError(
            f"Models of type {model_type!r} are encoder-decoders, and posttrain trains decoders only. Take a model such as "
            "qwen2_5_vl, llava_next, smolvlm or gemma3."
        )


def load_processor(source: str, trust_remote_code: bool, **files: Any) -> Any:
    """The processor of a model that sees; `processor.tokenizer` is its only tokenizer, so that what is changed there is saved."""
    from transformers import AutoProcessor  # with all of its image processors, which models of texts do not need

    try:
        return AutoProcessor.from_pretrained(source, trust_remote_code=trust_remote_code, **files)
    except Exception as error:  # what a processor says without torchvision differs by family, and rarely names it
        missing = [name for name in NEEDED_BY_PROCESSORS if util.find_spec(name) is None]
        if not missing:
            raise
        raise ImportError(
            f"The processor of {source} cannot be built without {' and '.join(missing)}, which processors of images need. "
            f"Install with: {HOW_TO_INSTALL}"
        ) from error


def prepare_to_see(innermost: nn.Module, family: VisionFamily) -> None:
    """Before adapters: the family, the tower's attention and layers, and hooks that leave the tower alone."""
    set_family(innermost, family)
    install_tower_attention(innermost, family)
    fuse_tower_layers(innermost, family)
    require_gradients_of_text_only(innermost)


def settle_parts(
    innermost: nn.Module,
    family: VisionFamily,
    probe: ImageProbe | None,
    frozen: tuple[str, ...],
    *,
    has_adapter: bool,
    sharded: bool,
) -> list[str]:
    """After adapters: what is trained, and eval mode for what is not. Sentences about it."""
    notes = []
    if has_adapter:
        counts = adapters_by_part(innermost, family)
        notes.append(f"Adapters: {', '.join(f'{counts[part]} on the {_IN_WORDS[part]}' for part in PARTS)}.")
    if frozen:
        freeze_parts(innermost, family, frozen, HEAD_NAMES)
        notes.append(f"Frozen: {', '.join(_IN_WORDS[part] for part in frozen)}.")
    if probe is not None and (left_out := _unreachable(innermost, family, probe, sharded)):
        for name in left_out:
            innermost.get_parameter(name).requires_grad_(False)
        notes.append(
            f"{len(left_out)} parameters of the tower are not trained: no feature depends on them ({left_out[0]}, ...)."
        )
    if probe is not None:
        set_filler(innermost, Filler(probe.collate([(probe.one,)], PADDED).images, sharded))
    keep_frozen_vision_in_eval(innermost, family)
    return notes


_IN_WORDS = {TOWER: "vision tower", PROJECTOR: "projector", LANGUAGE_MODEL: "language model"}


def _unreachable(innermost: nn.Module, family: VisionFamily, probe: ImageProbe, sharded: bool) -> list[str]:
    """Where weights will be sharded, the first process alone may have read them."""
    together = sharded and torch.distributed.is_initialized()
    found: list[list[str]] = [[]]
    if not together or torch.distributed.get_rank() == 0:
        batch = probe.collate([(probe.one,)], PADDED).to(next(innermost.parameters()).device)
        found = [unreachable_parameters(innermost, family, batch.images)]
    if together:
        torch.distributed.broadcast_object_list(found, src=0)
    return found[0]
