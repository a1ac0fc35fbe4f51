"""The smallest and the largest of some numbers, as metrics."""

from __future__ import annotations

from torch import Tensor

from posttrain.core.results import Extremum


def lowest(values: Tensor) -> Extremum:
    return Extremum(values, is_largest=False)


def highest(values: Tensor) -> Extremum:
    return Extremum(values, is_largest=True)
