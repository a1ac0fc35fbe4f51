"""A model that is asked: its body, its state when it is not trained, and how long a text it may be asked about."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


def body_of(model: nn.Module) -> nn.Module:
    """What makes hidden states of tokens. Llama 4's text part names it as the model of texts and images does, where it is not."""
    named = getattr(model, model.base_model_prefix, None)
    return getattr(model, "model", model) if named is None else named


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode; every module is put back as it was."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def inference(device: torch.device) -> Iterator[None]:
    """No gradient and no autocast: the weights say in which dtype an engine computes."""
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


def context_length(innermost: nn.Module, wanted: int | None) -> int | None:
    """Tokens a sequence may have, prompt and completion together; None where the family sets no bound."""
    own = getattr(innermost.config.get_text_config(), "max_position_embeddings", None)
    return min(filter(None, (own, wanted)), default=None)
