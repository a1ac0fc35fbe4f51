"""Selective checkpointing: keep what is dear to compute, recompute what is cheap.

Full checkpointing runs every layer twice. Here the results of matrix products and of attention are kept, and only norms, rotary
embeddings, activations and residuals are computed again in the backward: about half of the memory for a few per cent of time.
"""

from __future__ import annotations

import functools
import types
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from posttrain.models.lora_products import LORA_PRODUCT

SELECTIVE = "selective"
_NAMES = (
    "mm", "addmm", "bmm", "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention_for_cpu", "_flash_attention_forward",
)  # fmt: skip
KEPT = {getattr(torch.ops.aten, name).default for name in _NAMES if hasattr(torch.ops.aten, name)} | {LORA_PRODUCT}
"""Operations whose results are kept."""


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def allow_selective_checkpointing(model: nn.Module) -> None:
    """Let `gradient_checkpointing_enable` understand {"selective": True}, which Trainer passes on from the options."""
    if hasattr(model, "_gradient_checkpointing_enable"):
        return
    original = model.gradient_checkpointing_enable

    @functools.wraps(original)
    def enable(self: nn.Module, gradient_checkpointing_kwargs: dict | None = None, **kwargs: Any) -> None:
        chosen = dict(gradient_checkpointing_kwargs or {"use_reentrant": False})
        if chosen.pop(SELECTIVE, False):
            if chosen.get("use_reentrant"):
                raise ValueError(
                    "Selective checkpointing needs `use_reentrant=False` in `gradient_checkpointing_kwargs`."
                )
            chosen["use_reentrant"] = False
            chosen["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)
        self._gradient_checkpointing_enable(gradient_checkpointing_kwargs=chosen, **kwargs)

    model._gradient_checkpointing_enable = original
    model.gradient_checkpointing_enable = types.MethodType(enable, model)
