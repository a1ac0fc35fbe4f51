"""Losses that couple the pairs of a whole step, split exactly over micro-batches and processes.

`aot` sorts the margins of all pairs of the step, so a micro-batch alone cannot know its loss. The trainer first
collects the log-probs of the whole step without gradient, asks `coupled_coefficients` for the derivative of the loss
with respect to each of them, and then gives every micro-batch a linear loss with that very value and gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from posttrain.losses.pair import Pair


@dataclass(frozen=True)
class Coupling:
    """The loss of each pair of the step, and how the summed loss changes with its log-probs. All (U,), detached."""

    shares: Tensor
    chosen: Tensor  # d sum(loss) / d chosen_logps
    rejected: Tensor  # d sum(loss) / d rejected_logps

    def units(self, start: int, stop: int) -> Coupling:
        """The part of the pairs `start` to `stop`."""
        return Coupling(self.shares[start:stop], self.chosen[start:stop], self.rejected[start:stop])


def coupled_coefficients(loss: Callable[[Pair], Tensor], pair: Pair) -> Coupling:
    """Evaluate a coupled loss, (U,) values in the order of the pairs, on the pairs of a whole step."""
    with torch.enable_grad():
        chosen = pair.chosen_logps.detach().requires_grad_()
        rejected = pair.rejected_logps.detach().requires_grad_()
        shares = loss(replace(pair, chosen_logps=chosen, rejected_logps=rejected))
        by_chosen, by_rejected = torch.autograd.grad(shares.sum(), (chosen, rejected))
    return Coupling(shares.detach(), by_chosen, by_rejected)


def linearised(pair: Pair, coupling: Coupling) -> Tensor:
    """(U,) values equal to the shares of these pairs, with the gradient that the loss of the whole step has there."""
    moved_chosen = pair.chosen_logps - pair.chosen_logps.detach()
    moved_rejected = pair.rejected_logps - pair.rejected_logps.detach()
    return coupling.shares + coupling.chosen * moved_chosen + coupling.rejected * moved_rejected
