"""The folder that a colocated vLLM is started from: a config, the tokenizer if there is one, and weights only where
adapters are to be exchanged over them.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.models.load.adapters import adapter_in_use
from posttrain.models.load.model import innermost_model
from posttrain.models.load.weight_export import exported_weights, untied_weights

SHARD_BYTES = 4 << 30


def write_config(folder: Path, model: nn.Module, dtype: torch.dtype) -> None:
    """The config of the weights that `exported_weights` gives: not quantised, and tied only where they are."""
    innermost = innermost_model(model)
    config = copy.deepcopy(innermost.config)
    config.architectures = [type(innermost).__name__.removeprefix("FSDP")]
    config.dtype = dtype
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    if untied_weights(model):  # an adapter has made the two different: vLLM would use one of them for both
        config.tie_word_embeddings = False
        config.get_text_config().tie_word_embeddings = False
    config.save_pretrained(folder)
    if getattr(innermost, "generation_config", None) is not None:
        innermost.generation_config.save_pretrained(folder)


def write_base_weights(folder: Path, model: nn.Module, dtype: torch.dtype) -> None:
    """The model without its adapter, in safetensors files of at most 4 GiB or one tensor."""
    from safetensors.torch import save_file

    places: dict[str, str] = {}
    with adapter_in_use(model, None):
        for number, shard in enumerate(_shards(exported_weights(model, dtype))):
            file = f"model-{number:05d}.safetensors"
            save_file(shard, folder / file, metadata={"format": "pt"})
            places |= dict.fromkeys(shard, file)
    index: dict[str, Any] = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _shards(weights: Iterator[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in weights:
        if shard and size + tensor.nbytes > SHARD_BYTES:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor.cpu().contiguous().clone()
        size += tensor.nbytes
    yield shard
