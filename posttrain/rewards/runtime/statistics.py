"""RewardWatch: looks at the rewards of each round and says in words what a person would want to know."""

from __future__ import annotations

from collections import deque

import numpy as np

LARGEST_SANE = 1e4  # beyond this a reward is more often a mistake (a sum over tokens, a clock, an id) than a judgement
CONSTANT_ROUNDS = 20
WINDOW = 512  # samples over which the correlation with length is measured
ENOUGH = 128  # fewer than this and chance alone may pass the bound
LARGEST_CORRELATION = 0.7


class RewardWatch:
    """Remembers the last rounds of each reward. Each condition is reported once for each reward."""

    def __init__(self) -> None:
        self._said: set[tuple[str, str]] = set()
        self._ranges: dict[str, deque[tuple[float, float]]] = {}
        self._seen: dict[str, deque[tuple[float, float]]] = {}

    def look(self, names: list[str], values: np.ndarray, lengths: np.ndarray) -> list[str]:
        """Sentences about one round: values (N, K) with NaN for "no opinion", lengths (N,) of the completions in tokens."""
        sentences = []
        for column, name in enumerate(names):
            has = np.isfinite(values[:, column])
            if has.any():
                sentences += self._look_at(name, values[has, column], np.asarray(lengths)[has])
        return sentences

    def _look_at(self, name: str, rewards: np.ndarray, lengths: np.ndarray) -> list[str]:
        ranges = self._ranges.setdefault(name, deque(maxlen=CONSTANT_ROUNDS))
        ranges.append((float(rewards.min()), float(rewards.max())))
        seen = self._seen.setdefault(name, deque(maxlen=WINDOW))
        seen.extend(zip(rewards.tolist(), np.asarray(lengths, dtype=float).tolist()))
        found = {
            "range": _far_out(name, rewards),
            "constant": _constant(name, ranges),
            "length": _follows_length(name, np.array(seen)),
        }
        new = {what: said for what, said in found.items() if said and (what, name) not in self._said}
        self._said |= {(what, name) for what in new}
        return list(new.values())


def _far_out(name: str, rewards: np.ndarray) -> str | None:
    largest = rewards[np.abs(rewards).argmax()]
    if abs(largest) <= LARGEST_SANE:
        return None
    return (
        f"Reward {name} gave {largest:.4g}, far outside of the range of a judgement (|r| <= {LARGEST_SANE:g}): is it a sum that "
        "should be a mean?"
    )


def _constant(name: str, ranges: deque[tuple[float, float]]) -> str | None:
    value = ranges[0][0]
    if len(ranges) < CONSTANT_ROUNDS or any(low != value or high != value for low, high in ranges):
        return None
    return f"Reward {name} has been {value:g} for every sample of {CONSTANT_ROUNDS} rounds: nothing is learnt from it."


def _follows_length(name: str, seen: np.ndarray) -> str | None:
    """Pearson's correlation of the reward with the length of the completion over the last samples."""
    if len(seen) < ENOUGH or (seen.std(axis=0) == 0).any():
        return None
    rho = float(np.corrcoef(seen.T)[0, 1])
    if abs(rho) <= LARGEST_CORRELATION:
        return None
    kind = "longer" if rho > 0 else "shorter"
    return (
        f"Reward {name} follows the length of the completion (correlation {rho:.2f} over {len(seen)} samples): what is learnt may "
        f"be to write {kind} answers."
    )
