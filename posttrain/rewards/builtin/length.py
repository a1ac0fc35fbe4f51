"""Rewards that shape the length of completions and punish repetition. All are made by factories and can be pickled."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class CosineScaled:
    """r(len) = low + (high - low) / 2 * (1 + cos(pi * min(len / max_len, 1))), from arXiv:2502.03373.

    A right answer falls from `max_value_correct` to `min_value_correct` as it grows, so short ones are liked best; a wrong one
    rises from `min_value_wrong` to `max_value_wrong`, so that the model keeps thinking where it is wrong.
    """

    max_len: int
    min_value_wrong: float = -1.0
    max_value_wrong: float = -0.5
    min_value_correct: float = 0.5
    max_value_correct: float = 1.0
    __name__ = "cosine_scaled_reward"

    def __post_init__(self) -> None:
        _check_positive("max_len", self.max_len)

    def __call__(
        self,
        completions: Sequence[Any],
        solution: Sequence[str],
        completion_ids: Sequence[Sequence[int]],
        **kwargs: Any,
    ) -> list[float | None]:
        from posttrain.rewards.builtin.accuracy import accuracy_reward  # sympy, for those who use it

        right = accuracy_reward(completions=completions, solution=solution, **kwargs)
        return [None if r is None else self.value(bool(r), len(ids)) for r, ids in zip(right, completion_ids)]

    def value(self, is_correct: bool, length: int) -> float:
        low, high = self.min_value_correct, self.max_value_correct
        if not is_correct:
            low, high = self.max_value_wrong, self.min_value_wrong
        return low + 0.5 * (high - low) * (1.0 + math.cos(math.pi * min(length / self.max_len, 1.0)))


@dataclass(frozen=True)
class RepetitionPenalty:
    """(1 - distinct n-grams / n-grams) * max_penalty over the token ids; 0 for completions shorter than n tokens."""

    ngram_size: int = 3
    max_penalty: float = -1.0
    __name__ = "repetition_penalty_reward"

    def __post_init__(self) -> None:
        _check_positive("ngram_size", self.ngram_size)
        if self.max_penalty > 0:
            raise ValueError(f"`max_penalty` is {self.max_penalty}; a penalty is 0 or negative.")

    def __call__(self, completion_ids: Sequence[Sequence[int]], **kwargs: Any) -> list[float]:
        return [self.value(list(ids)) for ids in completion_ids]

    def value(self, ids: list[int]) -> float:
        ngrams = list(zip(*(ids[start:] for start in range(self.ngram_size))))
        if not ngrams:
            return 0.0
        return (1.0 - len(set(ngrams)) / len(ngrams)) * self.max_penalty


@dataclass(frozen=True)
class SoftOverlongPunishment:
    """Equation 13 of DAPO (arXiv:2503.14476): 0 up to max_completion_len - soft_punish_cache tokens, then linearly to -1 at
    max_completion_len, and -1 beyond.
    """

    max_completion_len: int
    soft_punish_cache: int
    __name__ = "soft_overlong_punishment_reward"

    def __post_init__(self) -> None:
        _check_positive("max_completion_len", self.max_completion_len)
        _check_positive("soft_punish_cache", self.soft_punish_cache)
        if self.soft_punish_cache > self.max_completion_len:
            raise ValueError(
                f"`soft_punish_cache` ({self.soft_punish_cache}) is larger than `max_completion_len` ({self.max_completion_len})."
            )

    def __call__(self, completion_ids: Sequence[Sequence[int]], **kwargs: Any) -> list[float]:
        return [self.value(len(ids)) for ids in completion_ids]

    def value(self, length: int) -> float:
        free = self.max_completion_len - self.soft_punish_cache
        if length <= free:
            return 0.0
        return max((free - length) / self.soft_punish_cache, -1.0)


def get_cosine_scaled_reward(
    max_len: int,
    min_value_wrong: float = -1.0,
    max_value_wrong: float = -0.5,
    min_value_correct: float = 0.5,
    max_value_correct: float = 1.0,
) -> CosineScaled:
    """Accuracy scaled by length; needs the columns that `accuracy_reward` needs."""
    return CosineScaled(max_len, min_value_wrong, max_value_wrong, min_value_correct, max_value_correct)


def get_repetition_penalty_reward(ngram_size: int = 3, max_penalty: float = -1.0) -> RepetitionPenalty:
    """Punishes completions that repeat their n-grams."""
    return RepetitionPenalty(ngram_size, max_penalty)


def get_soft_overlong_punishment(max_completion_len: int, soft_punish_cache: int) -> SoftOverlongPunishment:
    """Punishes completions that come close to the longest allowed length."""
    return SoftOverlongPunishment(max_completion_len, soft_punish_cache)


def _check_positive(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"`{name}` is {value}; it must be at least 1.")
