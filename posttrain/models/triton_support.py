"""Where Triton kernels run; everywhere else their torch twins do."""

from __future__ import annotations

import functools
import importlib.util

import torch
from torch import Tensor


def runs_triton(tensor: Tensor) -> bool:
    """Whether kernels of ours take this tensor."""
    return tensor.is_cuda and tensor.dtype != torch.float64 and _has_triton()


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
