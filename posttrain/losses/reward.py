"""Losses of reward models. Chosen and rejected rewards are (U,), one for each pair; logits of steps are (N, 2)."""

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


def step_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """-log softmax(logits)[label] of each judged step (arXiv:2211.14275): label 1 is a good step, 0 a bad one."""
    return F.cross_entropy(logits, labels, reduction="none")


def step_metrics(logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Share of steps whose likelier class is their label, of all steps and of each class; a metric leaves NaN out."""
    right = (logits.detach().argmax(-1) == labels).to(logits.dtype)
    of_class = {name: right.masked_fill(labels != label, float("nan")) for label, name in enumerate(("bad", "good"))}
    return {"accuracy": right} | {f"accuracy/{name}": values for name, values in of_class.items()}
