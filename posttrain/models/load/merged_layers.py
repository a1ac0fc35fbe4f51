"""The tensors of a layer as its forward uses them: what an adapter adds is added to a copy, the layer itself is not touched.

    LoRA    W' = W + sum over active adapters of s B A          (Hu et al., arXiv:2106.09685); s = alpha / r or alpha / sqrt(r)
    DoRA    W' = m (W + s B A) / ||W + s B A||_row              (Liu et al., arXiv:2402.09353)

computed in float32 (or better) and rounded once, to the dtype that the caller asks for. Dropout plays no part. Merging in place and
back again, in bfloat16, would leave a little of every update behind in the frozen base.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.models.sharding import gathered, whole

TRANSPARENT = ("_orig_mod", "_checkpoint_wrapped_module")
"""Children by which torch.compile and activation checkpointing say that they stand around a module."""


@dataclass(frozen=True)
class Source:
    """A tensor of the plain model: what it will look like, and how to compute it."""

    shape: tuple[int, ...]
    dtype: torch.dtype  # of the base's numbers; of what a quantised layer computes in
    read: Callable[[], Tensor]  # whole, detached; may be the model's own memory
    identity: tuple[int, ...]  # equal for two names of one tensor


def sources_of(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, Source]]:
    """(name without any wrapper, source) of every parameter and persistent buffer below a module."""
    for kind, reader in _readers():
        if isinstance(module, kind):
            yield from reader(module, prefix)
            return
    for child in TRANSPARENT:
        if child in module._modules:
            yield from sources_of(module._modules[child], prefix)
            return
    yield from _own_tensors(module, prefix)
    for name, child in module.named_children():
        yield from sources_of(child, f"{prefix}{name}.")


def _readers() -> list[tuple[type, Callable[[Any, str], Iterator[tuple[str, Source]]]]]:
    """The kinds of PEFT's modules, special ones first; none where PEFT is not installed."""
    try:
        from peft.tuners.lora.layer import LoraLayer, ParamWrapper
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper
    except ImportError:
        return []
    return [
        (ModulesToSaveWrapper, _of_saved_module),
        (TrainableTokensWrapper, lambda module, prefix: _of_trained_tokens(module.token_adapter, prefix)),
        (ParamWrapper, _of_adapted_parameter),
        (LoraLayer, _of_lora),
        (BaseTunerLayer, _of_other_adapter),
    ]


def _own_tensors(module: nn.Module, prefix: str) -> Iterator[tuple[str, Source]]:
    buffers = {name: one for name, one in module._buffers.items() if name not in module._non_persistent_buffers_set}
    for name, tensor in [*module._parameters.items(), *buffers.items()]:  # DeepSpeed's dict of parameters knows no `|`
        if tensor is not None:
            yield f"{prefix}{name}", _source_of(module, name, tensor, f"{prefix}{name}")


def _source_of(module: nn.Module, name: str, tensor: Tensor, full_name: str) -> Source:
    if _is_quantised(tensor):
        state = getattr(tensor, "quant_state", None)
        shape = tuple(state.shape) if state is not None else tuple(tensor.shape)
        dtype = state.dtype if state is not None else torch.float16
        return Source(shape, dtype, lambda: _dequantised(module), (id(tensor),))
    if tensor.is_meta and not hasattr(tensor, "ds_id"):
        raise ValueError(
            f"The weights of {full_name} are not in memory (offloaded, or the model was built on the meta device): there "
            "is nothing to export. Load the model whole."
        )
    shape = tuple(getattr(tensor, "ds_shape", tensor.shape))
    return Source(shape, tensor.dtype, lambda: whole(tensor), (id(tensor),))


def _is_quantised(tensor: Tensor) -> bool:
    return type(tensor).__name__ in ("Params4bit", "Int8Params")


def _dequantised(module: nn.Module) -> Tensor:
    from peft.utils.integrations import dequantize_module_weight

    return dequantize_module_weight(module).detach()


def _active(layer: Any, table: Any) -> list[str]:
    """The adapters whose entries of `table` a forward of this layer would use now."""
    if layer.disable_adapters or getattr(layer, "merged", False):  # merged by the user: the base holds it already
        return []
    return [name for name in layer.active_adapters if name in table]


def _high(tensor: Tensor) -> Tensor:
    tensor = whole(tensor)
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _of_saved_module(wrapper: Any, prefix: str) -> Iterator[tuple[str, Source]]:
    active = _active(wrapper, wrapper.modules_to_save)
    return sources_of(wrapper.modules_to_save[active[0]] if active else wrapper.original_module, prefix)


def _of_trained_tokens(layer: Any, prefix: str) -> Iterator[tuple[str, Source]]:
    """Some rows of an embedding are replaced."""
    active = _active(layer, layer.trainable_tokens_delta)

    def merged(base: Source) -> Tensor:
        weight = base.read().clone()
        for name in active:
            rows = torch.tensor(layer.token_indices[name], device=weight.device)
            weight[rows] = whole(layer.trainable_tokens_delta[name]).to(weight)
        return weight

    parts = [layer.trainable_tokens_delta[name] for name in active]
    return _with_changes(layer.base_layer, prefix, {"weight": merged} if active else {}, parts)


def _of_adapted_parameter(layer: Any, prefix: str) -> Iterator[tuple[str, Source]]:
    """LoRA on a parameter that is not a layer's `weight`: the stacked experts of a mixture."""
    active = _active(layer, layer.lora_A)

    def merged(base: Source) -> Tensor:
        with gathered(_factors(layer, active)):
            difference = sum(_high(layer.get_delta_weight(name)) for name in active)
        return _high(base.read()) + difference

    changes = {layer.parameter_name: merged} if active else {}
    return _with_changes(layer.base_layer, prefix, changes, _factors(layer, active))


def _of_lora(layer: Any, prefix: str) -> Iterator[tuple[str, Source]]:
    embeds = bool(layer.lora_embedding_A)
    active = _active(layer, layer.lora_embedding_A if embeds else layer.lora_A)
    variants = [name for name in active if name in layer.lora_variant]
    dora = len(active) == 1 and "Dora" in type(layer.lora_variant.get(active[0])).__name__ and not embeds
    weight = getattr(layer.get_base_layer(), "weight", torch.empty(0))
    plain = len(getattr(weight, "ds_shape", weight.shape)) == 2
    if not active:
        return sources_of(layer.base_layer, prefix)
    if not plain or (variants and not dora):
        return _of_other_adapter(layer, prefix)

    def merged(base: Source) -> Tensor:
        weight = _high(base.read())
        weight = weight + sum(_lora_difference(layer, name, embeds).to(weight) for name in active)
        return _with_magnitude(weight, layer, active[0]) if dora else weight

    changes = {"weight": merged}
    if biases := [name for name in active if not embeds and layer.lora_B[name].bias is not None]:
        changes["bias"] = lambda base: base.read() + sum(layer.scaling[n] * _high(layer.lora_B[n].bias) for n in biases)
    return _with_changes(layer.base_layer, prefix, changes, _factors(layer, active))


def _lora_difference(layer: Any, name: str, embeds: bool) -> Tensor:
    """s B A in the orientation of the base's weight."""
    if embeds:
        return (_high(layer.lora_embedding_B[name]) @ _high(layer.lora_embedding_A[name])).T * layer.scaling[name]
    difference = _high(layer.lora_B[name].weight) @ _high(layer.lora_A[name].weight) * layer.scaling[name]
    return difference.T if layer.fan_in_fan_out else difference


def _with_magnitude(weight: Tensor, layer: Any, name: str) -> Tensor:
    """DoRA: rows (one per output) of the learned length, in the direction of `weight`."""
    outputs_first = weight.T if layer.fan_in_fan_out else weight
    length = _high(layer.lora_magnitude_vector[name].weight).to(weight)
    scaled = outputs_first * (length / outputs_first.norm(dim=1))[:, None]
    return scaled.T if layer.fan_in_fan_out else scaled


def _of_other_adapter(layer: Any, prefix: str) -> Iterator[tuple[str, Source]]:
    """Every other method (IA3, OFT, LoHa, LoRA of convolutions): PEFT merges it into a copy of this one layer."""
    tables = [getattr(layer, name, {}) for name in layer.adapter_layer_names]
    active = sorted({name for table in tables for name in _active(layer, table)})
    base_names = [name for name, tensor in layer.get_base_layer().named_parameters() if tensor is not None]

    def merged_into_copy(part: str) -> Tensor:
        if any(_is_quantised(parameter) for parameter in layer.get_base_layer().parameters()):
            raise ValueError(
                f"{prefix}{part} is quantised and has an adapter of the kind {type(layer).__name__}, which is merged by PEFT "
                "into the quantised numbers: the result would not be what the model computes. Use LoRA, or send the adapter."
            )
        if any(hasattr(parameter, "ds_id") for parameter in layer.parameters()):
            raise ValueError(
                f"{prefix}{part} has an adapter of the kind {type(layer).__name__}, which PEFT merges into whole weights, and "
                "ZeRO-3 holds them in pieces. Use LoRA, or FSDP (`fsdp=True`)."
            )
        twin = copy.deepcopy(layer)
        twin.merge(adapter_names=active)
        return twin.get_base_layer().get_parameter(part).detach()

    changes = {part: lambda base, part=part: merged_into_copy(part) for part in base_names} if active else {}
    return _with_changes(layer.get_base_layer(), prefix, changes, [layer.get_base_layer().weight, *layer.parameters()])


def _factors(layer: Any, active: list[str]) -> list[Tensor]:
    tables = [getattr(layer, name, {}) for name in layer.adapter_layer_names]
    found = [table[name] for table in tables for name in active if name in table]
    return [tensor for one in found for tensor in ([one] if isinstance(one, Tensor) else one.parameters())]


def _with_changes(
    base: nn.Module, prefix: str, changes: dict[str, Callable[[Source], Tensor]], parts: list[Tensor]
) -> Iterator[tuple[str, Source]]:
    """The sources of `base`, those named in `changes` computed by their function; `parts` make their identity."""
    left = set(changes)
    for name, source in sources_of(base, prefix):
        change = changes.get(name.removeprefix(prefix))
        if change is None:
            yield name, source
            continue
        left.discard(name.removeprefix(prefix))
        identity = (*source.identity, *(id(part) for part in parts))
        read = lambda change=change, source=source: change(source).detach()  # noqa: E731
        yield name, Source(source.shape, source.dtype, read, identity)
    if left:
        raise ValueError(
            f"The adapter of {prefix.rstrip('.')} changes its {sorted(left)[0]}, which the layer does not have: such weights "
            "cannot be written down for another engine."
        )
