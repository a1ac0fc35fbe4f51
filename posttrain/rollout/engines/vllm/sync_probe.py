"""Did the weights arrive? A fixed batch of tokens is scored by the trainer's model and by the engine after every update.

Scores show what no checksum can: that both sides compute the same. They do not show small differences: a step at a learning
rate of 1e-6 moves log-probs by less than rounding does. Where both sides can be asked for their numbers (a colocated engine), every
tensor is therefore compared as well, to the bit, and that finds a single number of a single tensor left behind.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from posttrain.models.inference import evaluating, inference

log = logging.getLogger(__name__)

Score = Callable[[Sequence[np.ndarray]], Sequence[np.ndarray]]
"""Sequences of token ids -> log-probs of every token after the first, under softmax(logits)."""
Differing = Callable[[int], Sequence[str]]
"""The first N names of tensors that the engine does not hold as the trainer does."""

BOUNDS = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.1}
"""Mean difference of log-probs that is still rounding, by the dtype in which the engine computes."""


class WeightsDiffer(RuntimeError):
    """The engine does not hold the weights that it was sent. `tensor`: the first one that differs, where that is known."""

    def __init__(self, sentence: str, tensor: str | None = None) -> None:
        super().__init__(sentence)
        self.tensor = tensor


@dataclass(frozen=True)
class ProbeResult:
    mean: float  # |difference| of log-probs
    largest: float
    tensors_compared: bool


class SyncProbe:
    """The same tokens for the same vocabulary and seed, on every machine and in every run."""

    def __init__(
        self,
        vocabulary: int,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        sequences: int = 4,
        length: int = 48,
        bound: float | None = None,
    ) -> None:
        rng = np.random.default_rng((seed, vocabulary))
        # Not the control tokens at a vocabulary's ends: after those that were never trained, rounding alone moves log-probs by far.
        middle = (vocabulary // 10, max(9 * vocabulary // 10, 1))
        self.sequences = [rng.integers(*middle, length).astype(np.int32) for _ in range(sequences)]
        self.bound = BOUNDS[dtype] if bound is None else bound

    def check(
        self,
        score_here: Score,
        score_there: Score,
        version: int,
        version_there: int | None = None,
        differing: Differing | None = None,
    ) -> ProbeResult:
        """WeightsDiffer unless the engine (there) has the trainer's weights (here), which are `version`.

        `version_there` is the version that the engine says it serves; `differing` compares all tensors.
        """
        if version_there is not None and version_there != version:
            raise WeightsDiffer(
                f"The engine serves version {version_there} of the weights; the trainer sent version {version}."
            )
        if differing is not None and (names := differing(1)):
            raise WeightsDiffer(
                f"After the update to version {version} the engine holds other numbers than the trainer in {names[0]}.",
                names[0],
            )
        here, there = (np.concatenate([*score(self.sequences)]) for score in (score_here, score_there))
        if here.shape != there.shape:
            raise WeightsDiffer(f"The engine scored {there.size} tokens of the probe, the trainer {here.size}.")
        apart = np.abs(here.astype(np.float64) - there)
        result = ProbeResult(float(apart.mean()), float(apart.max()), differing is not None)
        log.info("Probe of version %d: log-probs differ by %.2g (at most %.2g).", version, result.mean, result.largest)
        if not result.mean <= self.bound:  # NaN is past every bound
            raise WeightsDiffer(
                f"After the update to version {version} the engine's log-probs differ from the trainer's by {result.mean:.3g} on "
                f"average and {result.largest:.3g} at most; {self.bound:g} would be rounding. "
                + ("All tensors are equal, so the two compute differently." if differing is not None else "")
            )
        return result


def scored_by(model: nn.Module) -> Score:
    """Scores of the trainer's model, sequence by sequence."""

    def score(sequences: Sequence[np.ndarray]) -> list[np.ndarray]:
        device = next(model.parameters()).device
        found = []
        with evaluating(model), inference(device):
            for ids in sequences:
                row = torch.from_numpy(ids.astype(np.int64))[None].to(device)
                logps = model(input_ids=row, use_cache=False).logits[0, :-1].float().log_softmax(-1)
                found.append(logps.gather(1, row[0, 1:, None])[:, 0].cpu().numpy())
        return found

    return score
