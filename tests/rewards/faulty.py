"""Reward functions that go wrong where the completion tells them to, and what a round of them looks like."""

from __future__ import annotations

from typing import Any

from posttrain.rewards.reward_set import Judged, RewardOptions, RewardResults, RewardSet


def group(*completions: str, **columns: Any) -> list[Judged]:
    """Samples of one prompt; a column that is a list has one entry a sample."""
    return [
        Judged("p", completion, list(range(len(completion))), {k: v[i] for k, v in columns.items()})
        for i, completion in enumerate(completions)
    ]


def judged(
    rewards: Any, *groups: list[Judged], state: Any = None, weights: Any = None, **options: Any
) -> tuple[RewardResults, RewardSet]:
    """One round with its workers ended after it."""
    options = {"workers": 2, "timeout": 5.0, "stop_above": 1.0, **options}
    made = RewardSet(rewards, weights, RewardOptions(**options), report=lambda sentence: None)
    with made, made.open(state) as round:
        for samples in groups:
            round.add(samples)
        return round.finish(), made


def acting(completions, **kwargs):
    """The length of the completion, or what it asks for."""
    import ctypes
    import os
    import time

    def raised():
        raise ValueError("as asked")

    acts = {
        "raise": raised,
        "hang": lambda: time.sleep(60),
        "nan": lambda: float("nan"),
        "exit": lambda: os._exit(3),
        "segfault": lambda: ctypes.string_at(0),
        "none": lambda: None,
        "text": lambda: "1.0",
        "leave": lambda: raise_system_exit(),
    }

    def raise_system_exit():
        raise SystemExit(1)

    return [acts[text]() if text in acts else float(len(text)) for text in completions]
