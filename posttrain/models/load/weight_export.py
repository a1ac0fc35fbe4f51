"""A model's weights as (name, tensor), under the names that `save_pretrained` writes: what another engine loads.

No trace of DDP, torch.compile or PEFT; adapters added to copies (`merged_layers`); a tied tensor once, under the name that
transformers keeps; layers that transformers fused when it loaded them (experts) taken apart again. One tensor at a time: at no
moment is there a second copy of the model. Where weights are sharded every rank must walk through all of them.
"""

from __future__ import annotations

import copy
import json
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.models.load.adapters import is_peft_model, is_prompt_learning
from posttrain.models.load.merged_layers import TRANSPARENT, Source, sources_of
from posttrain.models.load.model import innermost_model
from posttrain.models.sharding import reshard, whole
from posttrain.serve.wire.payload import TensorSpec

Read = Callable[[Source], Tensor]
SOURCE_STRIDE = 1 << 40
"""More than any parameter has numbers."""


def exported_weights(model: nn.Module, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor), floating-point numbers in `dtype` (None: each in the model's own).

    Tensors are detached and may be the model's own memory: read them, do not write into them.
    """
    reshard(model)
    yield from _converted(model, lambda source: _cast(source.read(), source, dtype))


def weights_in_place(model: nn.Module) -> dict[str, Tensor | None]:
    """Every exported tensor as the part of a parameter that it is, so that what is written there is the model's; None: it is none.

    Layers that are taken apart may come as copies. Where the numbers of one come from is then seen by exporting places: number i of
    source k as k 2^40 + i. Parts that are cut and transposed, and nothing else, are evenly spaced.
    """
    storages = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    found: dict[str, Tensor | None] = {}
    for name, tensor in exported_weights(model):
        if tensor.untyped_storage().data_ptr() not in storages:
            break
        found[name] = tensor
    else:
        return found
    sources: list[Tensor] = []

    def places(source: Source) -> Tensor:
        sources.append(source.read())
        return torch.arange(sources[-1].numel()).view(source.shape) + (len(sources) - 1) * SOURCE_STRIDE

    return {name: _part(numbers, sources) for name, numbers in _converted(model, places)}


def _part(numbers: Tensor, sources: list[Tensor]) -> Tensor | None:
    """The view of a source whose number at each place `numbers` says."""
    if not numbers.numel():
        return None
    first = int(numbers.flatten()[0])
    source, start = sources[first // SOURCE_STRIDE], first % SOURCE_STRIDE
    strides = [
        int(numbers.select(d, 1).flatten()[0]) - first if size > 1 else 0 for d, size in enumerate(numbers.shape)
    ]
    even = torch.tensor(first)
    for dimension, (size, stride) in enumerate(zip(numbers.shape, strides)):
        shape = [size if d == dimension else 1 for d in range(numbers.dim())]
        even = even + (torch.arange(size) * stride).view(shape)
    if not source.is_contiguous() or not torch.equal(even.expand_as(numbers), numbers):
        return None
    return source.as_strided(numbers.shape, strides, source.storage_offset() + start)


def exported_specs(model: nn.Module, dtype: torch.dtype | None = None) -> list[TensorSpec]:
    """Names, dtypes and shapes of `exported_weights`, in its order, with nothing gathered or computed."""

    def shape_only(source: Source) -> Tensor:
        return _cast(torch.empty(source.shape, dtype=source.dtype, device="meta"), source, dtype)

    return [_spec(name, tensor) for name, tensor in _converted(model, shape_only)]


def _spec(name: str, tensor: Tensor) -> TensorSpec:
    return TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(getattr(tensor, "ds_shape", tensor.shape)))


def untied_weights(model: nn.Module) -> list[str]:
    """Names of exported tensors that the model's config says are another one's second name, and are not.

    An adapter on one of two tied layers does that. An engine that goes by the config would leave them out.
    """
    innermost = _unwrapped(model)
    tied = getattr(innermost, "all_tied_weights_keys", None) or {}
    names = {name for name, _ in _sources_once(model)}
    return sorted(name for name, kept in tied.items() if name in names and kept in names)


def active_adapters(model: nn.Module) -> list[str]:
    """Names of the adapters that the model computes with."""
    return list(_peft_model(model).active_adapters)


def exported_adapter(
    model: nn.Module, adapter: str | None = None
) -> tuple[dict[str, Any], Iterator[tuple[str, Tensor]]]:
    """(config, tensors) of one adapter as the files that PEFT's `save_pretrained` writes, less a name of code to import.

    None: the adapter that is active, of which there must be one.
    """
    model, adapter = _one_adapter(model, adapter)
    config = copy.copy(model.peft_config[adapter])
    config.inference_mode, config.auto_mapping = True, None
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        fields = json.loads((Path(folder) / "adapter_config.json").read_text())
    return fields, ((name, whole(tensor)) for name, tensor in _adapter_state(model, adapter).items())


def exported_adapter_specs(model: nn.Module, adapter: str | None = None) -> list[TensorSpec]:
    """Names, dtypes and shapes of the tensors of `exported_adapter`, in its order, with nothing gathered."""
    return [_spec(name, tensor) for name, tensor in _adapter_state(*_one_adapter(model, adapter)).items()]


def _one_adapter(model: nn.Module, adapter: str | None) -> tuple[nn.Module, str]:
    """(the PEFT model, the name of the adapter)."""
    model = _peft_model(model)
    reshard(model)
    if adapter is None:
        active = active_adapters(model)
        if len(active) != 1:
            raise ValueError(f"One adapter is exported, and {active} are active: name one, or activate one.")
        adapter = active[0]
    if adapter not in model.peft_config:
        raise ValueError(f"The model has no adapter '{adapter}'; it has {sorted(model.peft_config)}.")
    return model, adapter


def _adapter_state(model: nn.Module, adapter: str) -> dict[str, Tensor]:
    """Its tensors as they are, perhaps in pieces, under the names of PEFT's files."""
    from peft import get_peft_model_state_dict

    # The parameters themselves: what ZeRO-3 notes on them is how they are gathered.
    held = model.state_dict(keep_vars=True)
    state = get_peft_model_state_dict(model, held, adapter_name=adapter, save_embedding_layers=False)
    return {name.replace("_orig_mod.", ""): tensor for name, tensor in state.items()}


def _peft_model(model: nn.Module) -> nn.Module:
    for _ in range(3):  # DDP around torch.compile, say
        if is_peft_model(model):
            return model
        model = getattr(model, "module", None) or getattr(model, "_orig_mod", None) or model
    raise ValueError(f"{type(model).__name__} has no PEFT adapter to export.")


def _unwrapped(model: nn.Module) -> nn.Module:
    model = innermost_model(model)
    for child in TRANSPARENT:
        model = model._modules.get(child, model)
    return model


def _sources_once(model: nn.Module) -> list[tuple[str, Source]]:
    """Every tensor to be sent, tied ones under one name."""
    if is_prompt_learning(model):
        raise ValueError(
            "Prompt, prefix and p-tuning put virtual tokens in front of every row: there are no weights to export that would "
            "say so. Use LoRA, or generate with the native engine."
        )
    innermost = _unwrapped(model)
    ignored = [re.compile(pattern) for pattern in getattr(innermost, "_keys_to_ignore_on_save", None) or ()]
    found = [(name, one) for name, one in sources_of(innermost) if not any(p.search(name) for p in ignored)]
    second_names = getattr(innermost, "all_tied_weights_keys", None) or {}
    kept = {one.identity for name, one in found if name not in second_names}
    return [(name, one) for name, one in found if name not in second_names or one.identity not in kept]


def _cast(tensor: Tensor, source: Source, dtype: torch.dtype | None) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    return tensor.to(source.dtype if dtype is None else dtype)


def _converted(model: nn.Module, read: Read) -> Iterator[tuple[str, Tensor]]:
    """The tensors, read when their turn comes, with transformers' conversions at loading undone."""
    innermost = _unwrapped(model)
    with torch.no_grad():
        for name, converter in _conversions(innermost, _sources_once(model), read):
            for target, tensor in converter.convert(name, model=innermost, config=innermost.config).items():
                yield target, tensor[0] if isinstance(tensor, list) else tensor


def _conversions(model: nn.Module, sources: list[tuple[str, Source]], read: Read) -> list[tuple[str, Any]]:
    """(first name, transformers' converter filled with functions that read its tensors), in the order of the sources.

    transformers' own `revert_weight_conversion` does the same to a whole state dict at once, and keeps all of it.
    """
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    reverse = [conversion.reverse_transform() for conversion in _conversions_at_loading(model)]
    renamings = [one for one in reverse if isinstance(one, WeightRenaming)]
    converters = [one for one in reverse if isinstance(one, WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    planned: dict[str, Any] = {}
    for name, source in sources:
        target, pattern = rename_source_key(name, renamings, converters, reverse=True)
        if target not in planned:
            planned[target] = WeightRenaming(name, target) if pattern is None else copy.deepcopy(by_pattern[pattern])
        planned[target].add_tensor(target, name, pattern or name, lambda source=source: read(source))
    return list(planned.items())


def _conversions_at_loading(model: nn.Module) -> list[Any]:
    """What transformers did to the checkpoint's tensors, or would have done, last first."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    used = getattr(model, "_weight_conversions", None)
    if used is None:  # not from a checkpoint: the family's own conversions, without a prefix that no file asks for
        used = [c for c in get_model_conversion_mapping(model, add_legacy=False) if not isinstance(c, PrefixChange)]
    return used[::-1]
