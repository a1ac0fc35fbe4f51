"""What a judge is: TRL's base classes, verdicts, and what judges are shown.

A pairwise judge answers 0 (the first is better), 1 (the second), TIE or FAILED. A failure stays one: it is neither swapped back
into another number nor counted as a loss. What is shown first is a function of (seed, prompt, pair), so a run can be repeated.

Workers that run a judge of the user's import this module: it needs the standard library only.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from posttrain.rewards.runtime.invoke import INVALID

FAILED, TIE = -1, 0.5
"""Answers of a pairwise judge besides 0 and 1."""
WORKER, BESIDE, CALLER = "worker", "beside", "caller"
"""Where a judge runs as a reward: in worker processes, on threads beside generation, or on the trainer's own thread after it."""


# ---- what a judge is -------------------------------------------------------------------------------------------------------


class BaseJudge(ABC):
    """Judges texts, or conversations as lines of "Role: content". Subclass one of the three that follow."""

    runs: ClassVar[str] = WORKER
    reads_messages: ClassVar[bool] = False  # whether it is given conversations as they are

    @abstractmethod
    def judge(self, prompts: list[str], completions: list[Any], shuffle_order: bool = True) -> list[Any]:
        """One answer for each prompt."""


class BaseRankJudge(BaseJudge):
    """Puts any number of completions of a prompt into an order."""

    @abstractmethod
    def judge(self, prompts: list[str], completions: list[list[str]], shuffle_order: bool = True) -> list[list[int]]:
        """For each prompt the places of its completions, the best first: [2, 0, 1] where the third is the best."""


class BasePairwiseJudge(BaseJudge):
    """Compares two completions of a prompt."""

    @abstractmethod
    def judge(self, prompts: list[str], completions: list[list[str]], shuffle_order: bool = True) -> list[float]:
        """For each prompt 0 or 1, the place of the better completion; TIE (0.5); FAILED (-1)."""


class BaseBinaryJudge(BaseJudge):
    """Says of one completion whether it is good."""

    @abstractmethod
    def judge(
        self,
        prompts: list[str],
        completions: list[str],
        gold_completions: list[str] | None = None,
        shuffle_order: bool = True,
    ) -> list[int]:
        """1 where the completion is good, 0 where it is not, FAILED (-1)."""


@dataclass(frozen=True)
class Verdict:
    """What became of one comparison."""

    first_wins: float = math.nan  # the probability; 1, 0 or 0.5 (a tie) of a judge that decides; NaN: failed
    kind: str = INVALID  # of the failure
    reason: str = "the judge gave no usable answer."

    @property
    def is_failure(self) -> bool:
        return math.isnan(self.first_wins)

    @property
    def winner(self) -> float:
        if self.is_failure:
            return FAILED
        return TIE if self.first_wins == TIE else int(self.first_wins < TIE)

    def swapped(self) -> Verdict:
        """Of the same pair in the other order. A failure stays one: 1 - NaN is NaN."""
        return Verdict(1 - self.first_wins, self.kind, self.reason)


class ScoringJudge(BasePairwiseJudge):
    """A pairwise judge of ours: it gives probabilities as well, and the reason of each failure."""

    soft: bool = False  # whether, as a reward, it is asked for probabilities

    @abstractmethod
    def verdicts(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Sequence[Any]],
        shuffle_order: bool = True,
        soft: bool = False,
        temperature: float = 1.0,
        seconds: float | None = None,
    ) -> list[Verdict]:
        """One for each pair. `temperature` divides the logits; `seconds` may shorten the judge's own deadline."""

    def judge(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Sequence[Any]],
        shuffle_order: bool = True,
        return_scores: bool = False,
        temperature: float = 1.0,
    ) -> list[float]:
        """0, 1, TIE or FAILED; with `return_scores` the probability that the first is better, NaN where the judge failed."""
        found = self.verdicts(prompts, completions, shuffle_order, return_scores, temperature)
        return [verdict.first_wins if return_scores else verdict.winner for verdict in found]


def refuse_without_scores(judge: BaseJudge) -> None:
    """Where a judge is to give probabilities and cannot."""
    if "return_scores" not in inspect.signature(judge.judge).parameters:
        raise ValueError(f"{type(judge).__name__} gives no probabilities: its `judge` takes no `return_scores`.")


def checked_pairs(prompts: Sequence[Any], completions: Sequence[Sequence[Any]]) -> list[tuple[Any, Any, Any]]:
    """(prompt, first, second) of each; a sentence where they do not fit together."""
    if len(prompts) != len(completions):
        raise ValueError(f"There are {len(prompts)} prompts and {len(completions)} pairs of completions.")
    for place, pair in enumerate(completions):
        if isinstance(pair, str) or len(pair) != 2:
            size = "a text" if isinstance(pair, str) else len(pair)
            raise ValueError(f"A pairwise judge compares two completions; prompt {place} has {size}.")
    return [(prompt, *pair) for prompt, pair in zip(prompts, completions)]


def is_swapped(seed: int, prompt: str, first: str, second: str) -> bool:
    """A fair coin that falls the same way for the same seed, prompt and pair."""
    text = json.dumps([seed, prompt, first, second]).encode()
    return bool(hashlib.blake2b(text, digest_size=1).digest()[0] & 1)


def plain_lines(said: Any) -> str:
    """A text as it is; a conversation as lines of "Role: content"."""
    if isinstance(said, str):
        return said
    return "\n".join(f"{str(message.get('role', '')).capitalize()}: {_content(message)}" for message in said)


def _content(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "".join(part.get("text") or f"({part.get('type')})" for part in content)
    calls = [call.get("function", call) for call in message.get("tool_calls") or ()]
    return " ".join([content, *(f"(calls {json.dumps(call, default=str)})" for call in calls)]).strip()
