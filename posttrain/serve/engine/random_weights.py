"""A model that vLLM fills with random numbers, until its weights are sent, keeps what is no weight.

vLLM's loader of random numbers writes into buffers, too. No update brings those back: they are in no checkpoint. With 0.32.0 the
mean and deviation by which a tower normalises its pixels are such buffers; a model would be shown noise, and nothing would say so.
"""

from __future__ import annotations

import functools
from typing import Any

import torch


def keep_buffers() -> bool:
    """From now on, in this process. False: this vLLM has no such loader where it is known to be."""
    try:
        from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
    except ImportError:
        return False
    fill = DummyModelLoader.load_weights
    if not hasattr(fill, "__wrapped__"):
        DummyModelLoader.load_weights = _keeping_buffers(fill)
    return True


def _keeping_buffers(fill: Any) -> Any:
    @functools.wraps(fill)
    def load_weights(self: Any, model: torch.nn.Module, *args: Any, **options: Any) -> None:
        kept = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
        fill(self, model, *args, **options)
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(kept[name])

    return load_weights
