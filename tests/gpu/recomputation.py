"""Log-probs and gradients of a model in bfloat16, and that recomputing layers changes neither."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from posttrain.models.layers.checkpointing import allow_selective_checkpointing
from posttrain.models.scoring.token_scores import score_tokens


def answers(model: nn.Module, given: Any) -> tuple[Tensor, Tensor]:
    """Log-probs, and the gradient of the mean of their squares."""
    model.zero_grad()
    logps = score_tokens(model, given).logps
    logps.float().square().mean().backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return logps.detach().float(), gradient.float()


def sine(one: Tensor, other: Tensor) -> float:
    """Of the angle between two gradients."""
    return (1 - torch.nn.functional.cosine_similarity(one, other, dim=0).item() ** 2) ** 0.5


def assert_recomputation_changes_nothing(model: nn.Module, given: Any, selective: bool) -> None:
    wanted = answers(model, given)
    allow_selective_checkpointing(model)
    kwargs = {"use_reentrant": False} | ({"selective": True} if selective else {})
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
    found = answers(model, given)
    assert torch.equal(found[0], wanted[0])
    assert sine(found[1], wanted[1]) < 1e-2  # the backward of attention adds in any order
