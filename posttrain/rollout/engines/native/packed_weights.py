"""Weights of the linear layers in the order in which the processor's product reads them, for the length of a session.

A product of few rows with a matrix takes about as long to bring the matrix into that order as to multiply; a decode step would do
so with every weight, every time. Here it is done once a session: on an Arm Neoverse N1 a product of 8 rows then takes 0.65 to
0.85 of the time, and gives the same bits. Only where torch has Arm's Compute Library; elsewhere layers are left as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

MIN_ELEMENTS = 2**14
"""Below it a call of the packed product takes longer than the product."""
PACKED_BYTES = 4 * 2**30
"""Of packed weights at most: a model with more is run as it is."""
ROWS = 8  # for which the order is chosen; it serves any number


class PackedWeights:
    """The packed weights of a model: made when a session first runs it, dropped when the session ends."""

    def __init__(self, innermost: nn.Module) -> None:
        self._innermost = innermost
        self._forwards: dict[nn.Linear, Callable[[Tensor], Tensor]] = {}
        self._version: int | None = None

    @contextmanager
    def in_use(self, version: int) -> Iterator[None]:
        """Inside of the block the model's linear layers multiply with their packed weights, which are those of `version`."""
        if self._version != version:
            self.free()
            self._forwards = {layer: packed_forward(layer) for layer in layers_to_pack(self._innermost)}
            self._version = version
        for layer, forward in self._forwards.items():
            layer.forward = forward
        try:
            yield
        finally:
            for layer in self._forwards:
                del layer.forward

    def free(self) -> None:
        self._forwards, self._version = {}, None


def layers_to_pack(model: nn.Module) -> list[nn.Linear]:
    """The layers whose products are worth it; none where they do not all fit, or a compiled layer has them inside."""
    if not _can_pack() or any(module._compiled_call_impl is not None for module in model.modules()):
        return []
    found = [module for module in model.modules() if _is_worth_it(module)]
    return found if sum(layer.weight.nbytes for layer in found) <= PACKED_BYTES else []


def packed_forward(layer: nn.Linear) -> Callable[[Tensor], Tensor]:
    """The layer's forward. It holds the weight's numbers of now."""
    packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), ROWS)

    def forward(rows: Tensor) -> Tensor:
        if rows.numel() == rows.shape[-1]:  # one row: nothing is brought into order for it
            return linear(rows, layer.weight, layer.bias)
        return torch.ops.mkldnn._linear_pointwise(rows, packed, layer.bias, "none", [], "")

    return forward


def _is_worth_it(module: nn.Module) -> bool:
    return (
        type(module) is nn.Linear
        and "forward" not in vars(module)
        and type(module.weight) is nn.Parameter
        and module.weight.device.type == "cpu"
        and module.weight.dtype == torch.float32
        and module.weight.numel() >= MIN_ELEMENTS
    )


@functools.cache
def _can_pack() -> bool:
    return torch.backends.mkldnn.is_available() and torch.backends.mkldnn.is_acl_available()
