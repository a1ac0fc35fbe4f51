"""Losses of a reward model. Chosen and rejected rewards are (U,), one number for each pair."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def bradley_terry(chosen: Tensor, rejected: Tensor, margin: Tensor | None = None) -> Tensor:
    """-log sigmoid(r_c - r_r - m), arXiv:2307.09288 eq. 2: chosen should win by the margin that its annotator gave."""
    difference = chosen - rejected if margin is None else chosen - rejected - margin
    return -F.logsigmoid(difference)


def centring(chosen: Tensor, rejected: Tensor) -> Tensor:
    """(r_c + r_r)^2, arXiv:2312.09244: pins the free offset of Bradley-Terry, so that rewards are centred on 0."""
    return (chosen + rejected) ** 2


def reward_metrics(chosen: Tensor, rejected: Tensor) -> dict[str, Tensor]:
    """Accuracy and margin of each pair; mean, smallest and largest of all rewards of this batch."""
    chosen, rejected = chosen.detach(), rejected.detach()
    rewards = torch.cat([chosen, rejected])
    return {
        "min_reward": rewards.amin(0, keepdim=True) if len(rewards) else rewards,
        "mean_reward": rewards,
        "max_reward": rewards.amax(0, keepdim=True) if len(rewards) else rewards,
        "accuracy": (chosen > rejected).to(rewards.dtype),
        "margin": chosen - rejected,
    }
