"""The smallest and the largest of some numbers, as metrics: one number, or none where there is nothing to choose from."""

from __future__ import annotations

from torch import Tensor


def lowest(values: Tensor) -> Tensor:
    """(1,) the smallest, or nothing of nothing."""
    return values.amin(0, keepdim=True) if len(values) else values


def highest(values: Tensor) -> Tensor:
    """(1,) the largest, or nothing of nothing."""
    return values.amax(0, keepdim=True) if len(values) else values
