"""What a summary or a report of a run says: the metrics that people follow, rewards by step, the best and the worst rollouts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from posttrain.view.json_lines import Series, series_of
from posttrain.view.rollout_detail import rows_with_text
from posttrain.view.rollout_index import Snapshot
from posttrain.view.rollout_query import ordering
from posttrain.view.run_folder import RunFolder

FIRST = (
    "reward", "loss", "eval_loss", "eval_reward", "reward_std", "rewards/accuracies", "rewards/margins", "accuracy", "margin",
    "mean_token_accuracy", "kl", "entropy", "completions/mean_length", "completions/clipped_ratio", "frac_reward_zero_std",
    "sampling/sampling_logp_difference/mean", "grad_norm", "learning_rate",
)  # fmt: skip
"""Metrics that are shown first, and in a summary alone."""
MOST_BINS = 60


@dataclass
class StepRewards:
    """Rewards of stretches of steps: their first step, the mean, and how much lies between the 10th and the 90th of 100."""

    steps: list[int] = field(default_factory=list)
    means: list[float] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)


@dataclass
class RunNumbers:
    name: str
    path: str
    last_step: int
    series: Series
    alerts: list[dict[str, Any]]
    rollouts: int
    flags: dict[str, int]
    rewards: StepRewards
    best: list[dict[str, Any]]
    worst: list[dict[str, Any]]


def numbers_of_run(run: RunFolder, shown: int = 3) -> RunNumbers:
    run.metrics.refresh()
    run.alerts.refresh()
    run.rollouts.refresh(wait=None, mismatch=True)
    snapshot = run.rollouts.snapshot()
    series = series_of(run.metrics.entries)
    steps = [pair[0][-1] for pair in series.values()] + [int(s) for s in snapshot.numbers.get("step", [])[-1:]]
    best, worst = _extremes(snapshot, run, shown)
    counted = ("error", "failures", "tool_calls", "tool_errors", "truncated", "masked")
    return RunNumbers(
        name=run.name,
        path=str(run.path),
        last_step=max(steps, default=0),
        series=dict(sorted(series.items(), key=lambda pair: _place(pair[0]))),
        alerts=run.alerts.entries,
        rollouts=len(snapshot),
        flags={name: int((snapshot.numbers[name] > 0).sum()) for name in counted} if len(snapshot) else {},
        rewards=rewards_by_step(snapshot),
        best=best,
        worst=worst,
    )


def _place(name: str) -> tuple[int, str]:
    return (FIRST.index(name) if name in FIRST else len(FIRST), name)


def _extremes(snapshot: Snapshot, run: RunFolder, shown: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Of the last tenth of the steps: what the policy does now."""
    if not len(snapshot):
        return [], []
    steps, rewards = snapshot.numbers["step"], snapshot.numbers["reward"]
    recent = np.flatnonzero((steps >= np.quantile(np.unique(steps), 0.9)) & np.isfinite(rewards))
    falling = recent[ordering(snapshot, recent, "-reward")]
    best, worst = (_of_other_prompts(snapshot, order, shown) for order in (falling, falling[::-1]))
    return rows_with_text(snapshot, best, run.texts), rows_with_text(snapshot, worst, run.texts)


def _of_other_prompts(snapshot: Snapshot, order: np.ndarray, shown: int) -> np.ndarray:
    """The first ones, each of another prompt."""
    _, first = np.unique(snapshot.prompt[order], return_index=True)
    return order[np.sort(first)[:shown]]


def rewards_by_step(snapshot: Snapshot) -> StepRewards:
    found = StepRewards()
    if not len(snapshot):
        return found
    steps, rewards = snapshot.numbers["step"], snapshot.numbers["reward"]
    for part in np.array_split(np.unique(steps), min(MOST_BINS, len(np.unique(steps)))):
        mine = rewards[(steps >= part[0]) & (steps <= part[-1]) & np.isfinite(rewards)]
        if len(mine):
            found.steps.append(int(part[0]))
            found.means.append(float(mine.mean()))
            found.low.append(float(np.quantile(mine, 0.1)))
            found.high.append(float(np.quantile(mine, 0.9)))
    return found


def in_words(value: float | None) -> str:
    """Four significant digits."""
    if value is None:
        return "-"
    if value == 0 or 1e-3 <= abs(value) < 1e6:
        return f"{value:.4g}"
    return f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e+")
