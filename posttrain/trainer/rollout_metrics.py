"""What is logged about a generation, under TRL's names: lengths, rewards, groups, time."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from posttrain.core.results import Extremum, Metrics
from posttrain.losses.advantages import zero_variance
from posttrain.losses.extrema import highest, lowest
from posttrain.rollout.collector import Collected
from posttrain.rollout.rollout import Rollout

Numbers = dict[str, float | Extremum]


def rollout_metrics(collected: Collected, names: list[str]) -> Numbers:
    """Numbers over the samples of all processes; each of them counts once in the mean that a log shows."""
    table = collected.table
    return {
        **length_metrics(table.lengths.double(), table.truncated),
        **reward_metrics(collected, names),
        **time_metrics(collected),
        "rollouts/masked": table.masked.double().mean().item(),
    }


def length_metrics(lengths: Tensor, truncated: Tensor) -> Numbers:
    """Trained tokens of a completion. A *terminated* one ended by itself; where none did, its lengths are 0."""
    found: Numbers = {}
    for name, values in (("length", lengths), ("terminated_length", lengths[~truncated])):
        values = values if len(values) else values.new_zeros(1)
        found |= {
            f"completions/mean_{name}": values.mean().item(),
            f"completions/min_{name}": lowest(values),
            f"completions/max_{name}": highest(values),
        }
    return found | {"completions/clipped_ratio": truncated.double().mean().item()}


def reward_metrics(collected: Collected, names: list[str]) -> dict[str, float]:
    table, totals = collected.table, collected.totals
    valid = ~table.masked
    found = {}
    for name, column in zip(names, table.rewards.unbind(1)):
        known = column[valid & ~column.isnan()]
        found[f"rewards/{name}/mean"] = known.mean().item() if len(known) else math.nan
        found[f"rewards/{name}/std"] = known.std().item() if len(known) > 1 else math.nan
    scored = totals[valid & ~totals.isnan()]
    found["reward"] = scored.mean().item() if len(scored) else math.nan
    found["reward_std"] = scored.std().item() if len(scored) > 1 else math.nan  # whatever their group
    # By advantages: RLOO compares more than rewards, and a group teaches nothing where these are all 0.
    found["frac_reward_zero_std"] = zero_variance(collected.advantages, table.groups).double().mean().item()
    for name, values in collected.results.metrics.items():
        found[name] = sum(values) / len(values)
    kinds = [failure.reward for failure in collected.results.failures]
    return found | {f"rewards/{name}/failed": kinds.count(name) / max(len(collected.rollouts), 1) for name in names}


def time_metrics(collected: Collected) -> dict[str, float]:
    """Seconds of each phase on this process, and the speed at which completions were written."""
    seconds = collected.seconds
    tokens = sum(len(rollout.completion_ids) for rollout in collected.rollouts)
    return {
        "rollouts/generate_s": seconds["generate"],
        "rollouts/reward_wait_s": seconds["reward_wait"],
        "rollouts/score_s": seconds["annotate"],
        "rollouts/generated_tokens_per_second": tokens / max(seconds["generate"], 1e-9),
    }


def tool_metrics(rollouts: list[Rollout], tools: list[str], has_environments: bool) -> dict[str, float]:
    """Calls of an episode, overall and of each tool, and failures of a call. The same names on every process."""
    calls = [call for rollout in rollouts for call in rollout.tool_calls]
    episodes, called = max(len(rollouts), 1), max(len(calls), 1)
    found = {
        "tools/call_frequency": len(calls) / episodes,
        "tools/failure_frequency": sum(call.error is not None for call in calls) / called,
        "tools/seconds_per_call": sum(call.seconds for call in calls) / called,
    }
    for name in tools:
        found[f"tools/{name}/call_frequency"] = sum(call.name == name for call in calls) / episodes
    if has_environments:
        found["env/reset_s"] = sum(rollout.seconds["reset"] for rollout in rollouts) / episodes
    return found


def as_tensors(metrics: Numbers) -> Metrics:
    """On the host, where they were counted: on their way to the device each would wait for all work that is queued there."""
    return {
        name: value if isinstance(value, Extremum) else torch.tensor([value], dtype=torch.float64)
        for name, value in metrics.items()
    }
