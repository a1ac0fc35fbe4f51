"""PEFT: adapters of every kind, put on a model once, with their quirks."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

REFERENCE_ADAPTER, TEACHER_ADAPTER = "ref", "teacher"


def is_peft_model(model: nn.Module) -> bool:
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def is_prompt_learning(model: nn.Module) -> bool:
    """Prompt, prefix and p-tuning change the length of rows; LoRA and its kin do not."""
    return is_peft_model(model) and model.active_peft_config.is_prompt_learning


def is_quantized(model: nn.Module) -> bool:
    return bool(getattr(model, "is_loaded_in_4bit", False) or getattr(model, "is_loaded_in_8bit", False))


def keep_trainable(quantized: nn.Module) -> None:
    """Keep bitsandbytes from repacking 4-bit weights at the first evaluation, as it does on CPUs with bfloat16 instructions: its
    kernels for repacked weights have no backward, and round to bfloat16, so that a policy would differ from its reference."""
    for module in quantized.modules():
        if getattr(module, "support_avx512bf16_for_cpu", False):
            module.support_avx512bf16_for_cpu = False


def quantization_of(model: nn.Module) -> dict[str, Any] | None:
    """How the weights of a model were quantised when it was loaded; None: they were not."""
    base = model.get_base_model() if is_peft_model(model) else model
    config = getattr(base.config, "quantization_config", None)
    return config.to_dict() if hasattr(config, "to_dict") else config


NOT_SETTINGS = ("base_model_name_or_path", "inference_mode", "revision", "peft_version", "auto_mapping")
"""Entries of a PeftConfig that say where it came from, not what it computes."""


def adapter_settings(model: nn.Module) -> dict[str, Any] | None:
    """Of each adapter by its name, what decides its tensors and its scale; None for a model without one."""
    if not is_peft_model(model):
        return None
    return {
        f"{name}.{key}" if name != "default" else key: value
        for name, config in model.peft_config.items()
        for key, value in config.to_dict().items()
        if key not in NOT_SETTINGS
    }


def add_adapter(model: nn.Module, peft_config: Any, dtype: torch.dtype) -> nn.Module:
    """Wrap `model` in a new adapter. Its weights take the compute dtype; float32 masters are the optimizer's business."""
    from peft import PeftConfig, get_peft_model

    if not isinstance(peft_config, PeftConfig):
        raise TypeError(
            f"`peft_config` is a {type(peft_config).__name__}; it must be a peft.PeftConfig such as LoraConfig."
        )
    if is_peft_model(model):
        raise ValueError(
            "This model has an adapter already. Train that one (leave `peft_config` out), or merge it first "
            "with merge_and_unload()."
        )
    peft_config = with_targets(peft_config)
    # Not peft's prepare_model_for_kbit_training: it turns norms, embedding and head into float32, and with them every
    # activation, which shuts out flash attention. The base is frozen by the next line; masters keep the adapters accurate.
    try:
        model = get_peft_model(model, peft_config, autocast_adapter_dtype=False)
    except ValueError as error:
        raise ValueError(f"The adapter does not fit {type(model).__name__}: {error}") from error
    for name, parameter in model.named_parameters():
        # DoRA's magnitude is a norm: PEFT computes with it in float32 whatever the rest is.
        if parameter.requires_grad and parameter.is_floating_point() and "lora_magnitude_vector" not in name:
            parameter.data = parameter.data.to(dtype)
    return model


def with_targets(peft_config: Any) -> Any:
    """A LoRA that names no layers adapts all linear ones but the head.

    PEFT's own default is a table of architectures, mostly queries and values alone, which learn less at the same cost; an
    architecture that it does not know is an error there.
    """
    is_lora = str(getattr(peft_config.peft_type, "value", peft_config.peft_type)) == "LORA"
    if not is_lora or peft_config.target_modules or getattr(peft_config, "target_parameters", None):
        return peft_config
    peft_config = copy.copy(peft_config)
    peft_config.target_modules = "all-linear"
    return peft_config


def freeze_copy_of_adapter(model: nn.Module, source: str = "default", name: str = REFERENCE_ADAPTER) -> str:
    """Keep the adapter as it is now under another name, frozen: the reference of a run that continues an adapter, or a teacher."""
    model.add_adapter(name, model.peft_config[source])
    state = dict(model.named_parameters())
    with torch.no_grad():
        for original, parameter in tensors_of_adapter(model, name, source).items():
            parameter.copy_(state[original])
            parameter.requires_grad_(False)
    model.set_adapter(source)
    return name


def tensors_of_adapter(model: nn.Module, name: str, source: str) -> dict[str, torch.Tensor]:
    """Those of the adapter `name`, each under the name of its counterpart in the adapter `source`."""
    return {
        full.replace(f".{name}", f".{source}"): parameter
        for full, parameter in model.named_parameters()
        if f".{name}." in full or full.endswith(f".{name}")
    }


@contextmanager
def adapter_in_use(model: nn.Module, name: str | None) -> Iterator[None]:
    """Run with another adapter, or with none at all (`name=None`); what was trainable stays trainable, inside as well.

    Inside, because FSDP decides when it first gathers a parameter whether it will ever have a gradient.
    """
    before = [(parameter, parameter.requires_grad) for parameter in model.parameters()]

    def as_before() -> None:
        for parameter, trains in before:
            parameter.requires_grad_(trains)

    if name is None:
        with model.disable_adapter():
            as_before()
            yield
    else:
        active = model.active_adapter
        model.set_adapter(name)
        as_before()
        try:
            yield
        finally:
            model.set_adapter(active)
    as_before()
