"""Pairs that the tests of losses share."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from posttrain.losses.pair import Pair


@pytest.fixture
def golden_pair() -> Pair:
    """Two pairs with simple numbers; test_preference_golden.py works every loss out on them."""

    def numbers(*values: float) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64)

    return Pair(
        chosen_logps=numbers(-2, -6).requires_grad_(),
        rejected_logps=numbers(-5, -3).requires_grad_(),
        reference_chosen_logps=numbers(-4, -4),
        reference_rejected_logps=numbers(-3, -4),
        chosen_lengths=torch.tensor([2, 1]),
        rejected_lengths=torch.tensor([4, 2]),
        chosen_nll=numbers(2, 6),
    )


@pytest.fixture
def random_pair() -> Callable[..., Pair]:
    """A maker of float64 pairs whose log-probs carry gradient and whose log-ratios are of the order of `spread`."""

    def make(seed: int, units: int = 7, spread: float = 2.0, **fields: object) -> Pair:
        generator = torch.Generator().manual_seed(seed)

        def draw() -> torch.Tensor:
            return spread * torch.randn(units, generator=generator, dtype=torch.float64) - 20

        chosen = draw().requires_grad_()
        return Pair(
            chosen_logps=chosen,
            rejected_logps=draw().requires_grad_(),
            reference_chosen_logps=draw(),
            reference_rejected_logps=draw(),
            chosen_lengths=torch.randint(1, 9, (units,), generator=generator),
            rejected_lengths=torch.randint(1, 9, (units,), generator=generator),
            chosen_nll=-chosen,
            **fields,
        )

    return make
