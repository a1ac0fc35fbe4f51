"""Weights that FSDP2 (`torch.distributed.fsdp.fully_shard`) holds in pieces: what is here, what is whole, and when.

Outside of a forward a parameter is a DTensor of which this process has a part. A module that was sharded gathers its parameters
when it is called, through hooks on its forward, and they are ordinary tensors then. It is also of another class: FSDPLinear, say.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

Result = TypeVar("Result")
Forward = Callable[[Tensor], Tensor]


def local_part(tensor: Tensor) -> Tensor:
    """This process's part of a tensor, sharing its memory; all of it where it is not sharded."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor: gathered where it is sharded (FSDP2's DTensor; ZeRO-3).

    A collective then: every rank must ask for the same tensors in the same order.
    """
    if hasattr(tensor, "full_tensor"):
        return tensor.detach().full_tensor()
    if hasattr(tensor, "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters([tensor]):
            return tensor.detach().clone()
    return tensor.detach()


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
