"""Facts about a model's weights as they are now."""

from __future__ import annotations

import json
from typing import Any

import torch
import xxhash
from torch import nn

WRAPPERS = ("module.", "_orig_mod.", "base_model.model.", "base_layer.", "original_module.")
"""Parts of names by which DDP, torch.compile and PEFT say that they stand around something."""
VOLATILE = (
    "_name_or_path", "transformers_version", "architectures", "use_cache", "_attn_implementation", "dtype", "torch_dtype",
)  # fmt: skip


def weights_fingerprint(model: nn.Module) -> str:
    """xxh3-128 over names, dtypes, shapes and contents of all parameters and buffers that a forward would use right now, and over
    the configs that say how (rotary base, LoRA's alpha).

    Adapters that are off or not chosen do not count and wrappers leave no trace in the names: a base under an adapter that is
    switched off has the fingerprint of the plain model, whatever the adapter is.
    """
    digest = xxhash.xxh3_128()
    unused = _names_not_used(model)
    named = {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, torch.Tensor)}
    for shown, name in sorted((_without_wrappers(name), name) for name in named if not f"{name}.".startswith(unused)):
        tensor = named[name].detach()
        tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # of a shard, this process's part
        digest.update(f"{shown}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        digest.update(tensor.contiguous().cpu().view(-1).view(torch.uint8).numpy())
    for config in _configs_in_use(model):
        digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    return digest.hexdigest()


def _configs_in_use(model: nn.Module) -> list[dict[str, Any]]:
    """Of the model, without what says nothing about its answers, and of the adapters that are active."""
    config = getattr(model, "config", None)
    own = config.to_dict() if hasattr(config, "to_dict") else {}
    found = [{name: value for name, value in own.items() if name not in VOLATILE}]
    adapters = getattr(model, "peft_config", {})
    tuned = [module for module in model.modules() if hasattr(module, "disable_adapters")]
    if adapters and not any(module.disable_adapters for module in tuned):
        found += [adapters[name].to_dict() for name in model.active_adapters if name in adapters]
    return found


def _without_wrappers(name: str) -> str:
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _names_not_used(model: nn.Module) -> tuple[str, ...]:
    """Beginnings of names that belong to adapters which are switched off or not active."""
    if not hasattr(model, "peft_config"):
        return ()
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import AuxiliaryTrainingWrapper

    unused = []
    for name, module in model.named_modules():
        if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
            active = [] if module.disable_adapters else list(module.active_adapters)
            for table in module.adapter_layer_names:  # lora_A, modules_to_save, ...
                unused += [f"{name}.{table}.{one}." for one in getattr(module, table, {}) if one not in active]
    return tuple(unused)
