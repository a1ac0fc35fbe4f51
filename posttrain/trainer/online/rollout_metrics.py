"""What is logged about a generation, under TRL's names: lengths, rewards, groups, time."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from posttrain.core.results import Extremum, Metrics
from posttrain.losses.advantages import zero_variance
from posttrain.losses.extrema import highest, lowest
from posttrain.rollout.collector import Collected
from posttrain.rollout.engines.protocol import WROTE_PLACEHOLDER
from posttrain.rollout.rollout import Rollout

Numbers = dict[str, float | Tensor | list[float] | Extremum]
"""A number counts once in the mean that a log shows; of several numbers each does, those of all processes together."""


def rollout_metrics(collected: Collected, names: list[str]) -> Numbers:
    """What is known of the samples of this process, and of all of them where only together they say something."""
    table = collected.table
    return {
        **length_metrics(collected),
        **(reward_metrics(collected, names) if names else {}),
        **time_metrics(collected),
        "rollouts/masked": table.masked[table.mine],
        **collected.numbers,
    }


def length_metrics(collected: Collected) -> Numbers:
    """Trained tokens of a completion. A *terminated* one ended by itself. What could not be written has no length, and what the
    dataset brought was not written."""
    table = collected.table
    is_given = torch.tensor([rollout.is_given for rollout in collected.rollouts], dtype=torch.bool)
    mine = table.mine[~table.unwritten[table.mine] & ~is_given]
    lengths, truncated = table.lengths[mine], table.truncated[mine]
    found: Numbers = {"completions/clipped_ratio": truncated}
    for name, values in (("length", lengths), ("terminated_length", lengths[~truncated])):
        found |= {
            f"completions/mean_{name}": values,
            f"completions/min_{name}": lowest(values),
            f"completions/max_{name}": highest(values),
        }
    return found


def placeholder_metrics(collected: Collected) -> Numbers:
    """Completions that were ended because the model wrote what only an image may bring; engines of ours forbid it."""
    errors = [rollout.error or "" for rollout in collected.rollouts if not rollout.is_given]
    return {"completions/placeholder_ratio": [error.startswith(WROTE_PLACEHOLDER) for error in errors]}


def reward_metrics(collected: Collected, names: list[str]) -> Numbers:
    table, totals = collected.table, collected.totals
    mine = torch.zeros_like(table.masked).index_fill(0, table.mine, True)
    valid = ~table.masked
    found: Numbers = {}
    for name, column in zip(names, table.rewards.unbind(1)):
        known = valid & ~column.isnan()
        found[f"rewards/{name}/mean"] = column[known & mine]
        found[f"rewards/{name}/std"] = deviation(column[known])
    known = valid & ~totals.isnan()
    found |= {"reward": totals[known & mine], "reward_std": deviation(totals[known])}  # whatever their group
    # By advantages: RLOO compares more than rewards, and a group teaches nothing where these are all 0.
    found["frac_reward_zero_std"] = zero_variance(collected.advantages, table.groups).double().mean().item()
    found |= collected.results.metrics
    kinds = [failure.reward for failure in collected.results.failures]
    return found | {f"rewards/{name}/failed": kinds.count(name) / max(len(collected.rollouts), 1) for name in names}


def deviation(values: Tensor) -> float:
    """Of one generation or evaluation, over all processes."""
    return values.std().item() if len(values) > 1 else math.nan


def time_metrics(collected: Collected) -> Numbers:
    """Seconds of each phase on this process, and the speed at which completions were written."""
    seconds = collected.seconds
    tokens = sum(len(rollout.completion_ids) for rollout in collected.rollouts if not rollout.is_given)
    return {
        "rollouts/generate_s": seconds["generate"],
        "rollouts/reward_wait_s": seconds["reward_wait"],
        "rollouts/score_s": seconds["annotate"],
        "rollouts/generated_tokens_per_second": tokens / max(seconds["generate"], 1e-9),
    }


def tool_metrics(rollouts: list[Rollout], tools: list[str], has_environments: bool) -> Numbers:
    """Calls of an episode, overall and of each tool, and failures of a call."""
    calls = [call for rollout in rollouts for call in rollout.tool_calls]
    found: Numbers = {
        "tools/call_frequency": [len(rollout.tool_calls) for rollout in rollouts],
        "tools/failure_frequency": [call.error is not None for call in calls],
        "tools/seconds_per_call": [call.seconds for call in calls],
    }
    for name in tools:
        called = [sum(call.name == name for call in rollout.tool_calls) for rollout in rollouts]
        found[f"tools/{name}/call_frequency"] = called
    if has_environments:
        found["env/reset_s"] = [rollout.seconds["reset"] for rollout in rollouts]
    return found


def as_tensors(metrics: Numbers) -> Metrics:
    """On the host, where they were counted: on their way to the device each would wait for all work that is queued there."""
    return {
        name: value if isinstance(value, Extremum) else torch.as_tensor(value, dtype=torch.float64).flatten()
        for name, value in metrics.items()
    }
