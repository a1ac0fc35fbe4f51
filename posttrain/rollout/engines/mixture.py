"""Mixture: a second model that takes part in every draw, so that completions are those of a geometric mixture of the two."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from posttrain.models.load.model import innermost_model


@dataclass
class Mixture:
    """Next-token logits (1 - weight) z + weight z' of an engine's own model (z) and this one (z'), before temperature.

    softmax of that is p^(1 - weight) p'^weight, normalised: mixing logits and mixing log-probs are the same, mixing probabilities
    is not. `context` switches to this model where it is another state of the engine's own (an adapter that is off).
    """

    model: nn.Module
    weight: float | Callable[[], float]  # of this model; a function is asked when a session begins
    context: Callable[[], Any] = nullcontext

    @property
    def innermost(self) -> nn.Module:
        return innermost_model(self.model)

    def share(self) -> float:
        """The weight of now."""
        weight = float(self.weight() if callable(self.weight) else self.weight)
        if not 0 <= weight <= 1:
            raise ValueError(f"The weight of a mixture is {weight:g}; it must be between 0 (all policy) and 1.")
        return weight

    def check(self, innermost: nn.Module) -> None:
        """Raise where the two models do not choose among the same tokens."""
        sizes = [model.config.get_text_config().vocab_size for model in (innermost, self.innermost)]
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"A mixture adds the logits of two models token by token; the vocabulary of the policy has {sizes[0]} tokens, that "
                f"of the reference {sizes[1]}. Give a reference with the policy's tokenizer and vocabulary size."
            )


def mixed(logits: Tensor, others: Tensor, weight: Tensor) -> Tensor:
    """(n, V) of both models, and a number on their device -> (n, V) float32. One function, so that engines agree in every bit."""
    return (1 - weight) * logits.float() + weight * others.float()
