"""Weights that FSDP2 (`torch.distributed.fsdp.fully_shard`) holds in pieces: what is here, what is whole, and when.

Outside of a forward a parameter is a DTensor of which this process has a part. A module that was sharded gathers its parameters
when it is called, through hooks on its forward, and they are ordinary tensors then. It is also of another class: FSDPLinear, say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

Result = TypeVar("Result")
Forward = Callable[[Tensor], Tensor]


def local_part(tensor: Tensor) -> Tensor:
    """This process's part of a tensor, sharing its memory; all of it where it is not sharded."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def part_of(like: Tensor, value: Any) -> Any:
    """This process's part of what is whole, cut as `like` is; all of it where that is not sharded, or is something else."""
    if not hasattr(like, "placements") or not isinstance(value, Tensor) or value.shape != like.shape:
        return value
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    return value[tuple(slice(start, start + size) for start, size in zip(offset, shape))]


def whole_size(tensor: Tensor) -> int:
    """Numbers in all of a tensor; of one that ZeRO-3 has taken apart torch sees none."""
    return getattr(tensor, "ds_numel", tensor.numel())


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor: gathered where it is sharded (FSDP2's DTensor; ZeRO-3).

    A collective then: every rank must ask for the same tensors in the same order.
    """
    if hasattr(tensor, "full_tensor"):
        return tensor.detach().full_tensor()
    if hasattr(tensor, "ds_id"):
        with gathered([tensor]):
            return tensor.detach().clone()
    return tensor.detach()


@contextmanager
def gathered_as_called(model: nn.Module) -> Iterator[None]:
    """For a model that was loaded under ZeRO-3, in pieces, while DeepSpeed's engine is not there yet: each module has its weights
    whole while it runs. Every process must run the same modules."""
    if not any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        yield
        return
    import deepspeed

    running: dict[nn.Module, Any] = {}

    def before(module: nn.Module, _: Any) -> None:
        running[module] = deepspeed.zero.GatheredParameters(list(module.parameters(recurse=False)))
        running[module].__enter__()

    def after(module: nn.Module, *_: Any) -> None:
        running.pop(module).__exit__(None, None, None)

    owners = [module for module in model.modules() if any(True for _ in module.parameters(recurse=False))]
    hooks = [module.register_forward_pre_hook(before) for module in owners]
    hooks += [module.register_forward_hook(after) for module in owners]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for context in running.values():  # of modules that failed
            context.__exit__(None, None, None)


@contextmanager
def loading_whole() -> Iterator[None]:
    """Under ZeRO-3 transformers takes every model apart that it loads, also those that DeepSpeed's engine will never gather. What
    is loaded here stays whole."""
    from transformers.integrations import deepspeed

    config = deepspeed._hf_deepspeed_config_weak_ref
    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = config


@contextmanager
def gathered(parameters: Iterable[Tensor]) -> Iterator[None]:
    """What ZeRO-3 has taken apart of these, whole at once on every process."""
    pieces = [parameter for parameter in parameters if hasattr(parameter, "ds_id")]
    if not pieces:
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(pieces):
        yield


def plain_class(module: nn.Module) -> type[nn.Module]:
    """The class that a module had before it was sharded."""
    kind = type(module)
    if not torch.distributed.is_available():
        return kind
    from torch.distributed.fsdp import FSDPModule

    return next(one for one in kind.__mro__ if not issubclass(one, FSDPModule))


def reshard(model: nn.Module) -> None:
    """Give back what is gathered: the outermost parameters stay whole after a forward, until a backward.

    To be called before parameters are handed to others: FSDP frees the memory of those that are gathered whenever it likes.
    """
    for module in model.modules():
        if is_sharded_module(module):
            module.reshard()


def is_sharded_module(module: nn.Module) -> bool:
    """Whether calling it gathers parameters."""
    return plain_class(module) is not type(module)


def keep_gathered(module: nn.Module, owner: nn.Module) -> Forward:
    """The forward of a frozen module of `owner`, as often as is needed and in a backward too, without further collectives.

    What is sharded is gathered once, which every process must ask for, and stays until `reshard`, or until its owner reshards it.
    """
    for one in (module, owner):
        if is_sharded_module(one) and any(hasattr(parameter, "placements") for parameter in module.parameters()):
            one.unshard()
    return module.forward if is_sharded_module(module) else module


def call_inside(module: nn.Module, hidden: Tensor, compute: Callable[[Tensor, Forward], Result]) -> Result:
    """`compute(hidden, the module's own forward)` in the place of that forward: parameters are gathered once for all of it.

    Calling the module chunk by chunk instead would gather, and reduce gradients, for each chunk.
    """
    replaced, forward = module.__dict__.get("forward"), module.forward
    module.forward = lambda given: compute(given, forward)
    try:
        return module(hidden)
    finally:
        del module.forward
        if replaced is not None:
            module.forward = replaced
