"""Park activations in host memory between the forward and the backward pass."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

SMALLEST_BYTES = 2**20  # moving less costs more time than it saves memory


def offloaded_activations(device: torch.device) -> AbstractContextManager:
    """Saved tensors of at least 1 MiB wait in page-locked host memory. Parameters and views of them stay where they are."""
    if device.type != "cuda":
        return nullcontext()  # they are in host memory already

    def pack(tensor: Tensor) -> tuple[torch.device | None, Tensor]:
        if not tensor.is_cuda or tensor.numel() * tensor.element_size() < SMALLEST_BYTES or _is_parameter(tensor):
            return None, tensor
        host = torch.empty(tensor.size(), dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        return tensor.device, host

    def unpack(packed: tuple[torch.device | None, Tensor]) -> Tensor:
        home, tensor = packed
        return tensor if home is None else tensor.to(home, non_blocking=True)

    return saved_tensors_hooks(pack, unpack)


def _is_parameter(tensor: Tensor) -> bool:
    return isinstance(tensor, torch.nn.Parameter) or isinstance(tensor._base, torch.nn.Parameter)
