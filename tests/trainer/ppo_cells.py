"""PPO in the gradient matrix: both critics, rows whose advantages differ by token, and the loss written from the formula."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import nn

from posttrain.core.sample import Sample, Unit
from posttrain.rollout.rollout import ADVANTAGES, OLD_LOGPS, RETURNS, VALUES
from tests import tiny

SHARED = {"kl_coef": 0.0, "temperature": 1.0, "vf_coef": 0.3, "cliprange": 0.15, "cliprange_value": 0.4}
OPTIONS: dict[str, dict[str, Any]] = {"value_head": SHARED, "value_model": SHARED}
"""Critic -> options of PPOConfig."""


@lru_cache
def critic(kind: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Its weights are not 0, and the same in every dtype."""
    if kind == "value_model":
        made = tiny.reward_model(5, dtype)
        return tiny.with_exact_norms(made) if dtype == torch.float64 else made
    torch.manual_seed(9)
    return nn.Linear(tiny.SHAPE["hidden_size"], 1, dtype=torch.float64).to(dtype)


def attach(policy: Any, kind: str) -> None:
    innermost(policy).critic = critic(kind).requires_grad_(True)


def innermost(policy: Any) -> Any:
    return policy.base_model.model if hasattr(policy, "peft_config") else policy


def with_values(groups: list[Unit]) -> list[Unit]:
    """Advantages, values and returns of each token: some values are clipped, some are not."""
    rng = np.random.default_rng(3)
    for unit in groups:
        for sample in unit:
            for name, scale in ((ADVANTAGES, 1.0), (VALUES, 0.6), (RETURNS, 1.0)):
                sample.write_trained(name, scale * rng.normal(size=sample.num_trained))
    return groups


def values_of(kind: str, policy: Any, sample: Sample) -> torch.Tensor:
    """Read before each token: at the position that predicts it."""
    ids = torch.from_numpy(sample.input_ids.astype(np.int64))[None]
    read = critic(kind) if kind == "value_model" else innermost(policy)
    hidden = read.model(input_ids=ids).last_hidden_state[0]
    at = torch.from_numpy(np.flatnonzero(sample.trained[1:]))
    head = read.score if kind == "value_model" else read.critic
    return head(hidden[at]).squeeze(-1)


def step_loss(kind: str, units: list[Unit], scored: Any, policy: Any) -> torch.Tensor:
    total, tokens, clipped = 0.0, 0, 0
    low, high, width = 1 - SHARED["cliprange"], 1 + SHARED["cliprange"], SHARED["cliprange_value"]
    for sample in (sample for unit in units for sample in unit):
        columns = {name: sample.read_trained(name) for name in (OLD_LOGPS, ADVANTAGES, VALUES, RETURNS)}
        values = values_of(kind, policy, sample)
        for t, (row, token) in enumerate(zip(*scored(sample))):
            old, gain, value, due = (float(columns[name][t]) for name in columns)
            ratio = torch.exp(row[token] - old)
            total = total + max(-gain * ratio, -gain * min(max(ratio, ratio * 0 + low), ratio * 0 + high))
            near = min(max(values[t], values[t] * 0 + value - width), values[t] * 0 + value + width)
            total = total + SHARED["vf_coef"] / 2 * max((values[t] - due) ** 2, (near - due) ** 2)
            tokens, clipped = tokens + 1, clipped + int(abs(values[t].item() - value) > width)
    assert 0.1 * tokens < clipped < 0.9 * tokens, (clipped, tokens)
    return total / tokens
