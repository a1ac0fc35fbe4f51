"""What a summary or a report of a run says: the metrics that people follow, rewards by step, the best and the worst rollouts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from posttrain.view.json_lines import Series, series_of
from posttrain.view.rollout_detail import rows_with_text
from posttrain.view.rollout_index import RolloutIndex
from posttrain.view.rollout_query import RolloutQuery, reward_names, with_ids
from posttrain.view.run_folder import RunFolder

FIRST = (
    "reward", "loss", "eval_loss", "eval_reward", "reward_std", "rewards/accuracies", "rewards/margins", "accuracy", "margin",
    "mean_token_accuracy", "kl", "entropy", "completions/mean_length", "completions/clipped_ratio", "frac_reward_zero_std",
    "sampling/sampling_logp_difference/mean", "grad_norm", "learning_rate",
)  # fmt: skip
"""Metrics that are shown first, and in a summary alone."""
MAX_BINS = 60


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
    index = run.rollouts
    series = series_of(run.metrics.entries)
    rewards = index.rows("SELECT step, coalesce(reward, 'nan') AS reward FROM rollouts ORDER BY step")
    steps = [pair[0][-1] for pair in series.values()] + [row["step"] for row in rewards[-1:]]
    best, worst = _extremes(index, shown)
    counted = ("error", "failures", "tool_calls", "tool_errors", "truncated", "masked")
    (flags,) = index.rows(f"SELECT {', '.join(f'count_if({name} > 0) AS {name}' for name in counted)} FROM rollouts")
    return RunNumbers(
        name=run.name,
        path=str(run.path),
        last_step=max(steps, default=0),
        series=dict(sorted(series.items(), key=lambda pair: _place(pair[0]))),
        alerts=run.alerts.entries,
        rollouts=len(rewards),
        flags=flags if rewards else {},
        rewards=rewards_by_step(rewards),
        best=best,
        worst=worst,
    )


def _place(name: str) -> tuple[int, str]:
    return (FIRST.index(name) if name in FIRST else len(FIRST), name)


def _extremes(index: RolloutIndex, shown: int) -> list[list[dict[str, Any]]]:
    """Of the last tenth of the steps: what the policy does now. The best and the worst, each of another prompt."""
    recent = "step >= (SELECT quantile_cont(DISTINCT step, 0.9) FROM rollouts) AND isfinite(reward)"
    query = RolloutQuery(recent)
    query.sort_by("-reward", index)
    falling, names = query.rows(index, "id, prompt_key"), reward_names(index)
    found = []
    for order in (falling, falling[::-1]):
        # the first of each prompt is the last to be set
        first = {row["prompt_key"]: row["id"] for row in reversed(order)}
        ids = [row["id"] for row in order if first[row["prompt_key"]] == row["id"]][:shown]
        found.append(rows_with_text(with_ids(index, ids), names))
    return found


def rewards_by_step(rows: list[dict[str, Any]]) -> StepRewards:
    found = StepRewards()
    steps, rewards = (np.array([row[name] for row in rows]) for name in ("step", "reward"))
    different = np.unique(steps)
    for part in np.array_split(different, min(MAX_BINS, len(different))) if rows else ():
        mine = rewards[(steps >= part[0]) & (steps <= part[-1]) & np.isfinite(rewards)]
        if len(mine):
            found.steps.append(int(part[0]))
            found.means.append(float(mine.mean()))
            found.low.append(float(np.quantile(mine, 0.1)))
            found.high.append(float(np.quantile(mine, 0.9)))
    return found


def format_number(value: float | None) -> str:
    """Four significant digits."""
    if value is None:
        return "-"
    if value == 0 or 1e-3 <= abs(value) < 1e6:
        return f"{value:.4g}"
    return f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e+")
