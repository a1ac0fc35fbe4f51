"""Rewards as a runtime: functions, async functions and models, judged beside generation, in processes that may die.

Nothing is imported here before it is asked for: `python -m posttrain.rewards.runtime.worker` starts by importing this package, and
must start at once.
"""

from typing import Any

BUILT_IN_REWARDS: dict[str, tuple[str, tuple[int, ...] | None]] = {
    "accuracy_reward": ("posttrain.rewards.builtin.accuracy", None),
    "reasoning_accuracy_reward": ("posttrain.rewards.builtin.accuracy", None),
    "think_format_reward": ("posttrain.rewards.builtin.format", None),
    "answer_format_reward": ("posttrain.rewards.builtin.format", None),
    "get_soft_overlong_punishment": ("posttrain.rewards.builtin.length", (1280, 256)),
    "get_cosine_scaled_reward": ("posttrain.rewards.builtin.length", (1000,)),
    "get_repetition_penalty_reward": ("posttrain.rewards.builtin.length", ()),
}
"""Name -> (module, arguments with which a command line calls a maker of rewards; None: it is the reward itself)."""


def __getattr__(name: str) -> Any:
    if name not in BUILT_IN_REWARDS:
        raise AttributeError(f"module 'posttrain.rewards' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(BUILT_IN_REWARDS[name][0]), name)
