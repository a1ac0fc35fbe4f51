"""Selective checkpointing: keep what is expensive to compute, recompute what is cheap.

Full checkpointing runs every layer twice. Here the results of matrix products and of attention are kept, and only norms, rotary
embeddings, activations and residuals are computed again in the backward: about half of the memory for a few per cent of time.
"""

from __future__ import annotations

import functools
import types
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from posttrain.models.attention.flash_packages import PACKAGES
from posttrain.models.layers.lora_products import LORA_PRODUCT

SELECTIVE = "selective"
_NAMES = (
    "mm", "addmm", "bmm", "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention_for_cpu", "_flash_attention_forward",
)  # fmt: skip
_OURS = {LORA_PRODUCT, *(package.forward for package in PACKAGES)}
KEPT = {getattr(torch.ops.aten, name).default for name in _NAMES if hasattr(torch.ops.aten, name)} | _OURS
"""Operations whose results are kept."""


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in KEPT else CheckpointPolicy.PREFER_RECOMPUTE


_products_are_kept: ContextVar[bool] = ContextVar("products are kept", default=False)


def products_are_kept() -> bool:
    """Whether the current call runs under selective checkpointing: results of KEPT must not be overwritten then.

    torch notices an overwritten result by its version, which a Triton kernel does not change: the backward would read the
    overwritten one and silently compute a wrong gradient.
    """
    return _products_are_kept.get()


class _Keeping:
    """A mode of selective checkpointing that `products_are_kept` knows of. May be entered again, as checkpointing does."""

    def __init__(self, mode: Any) -> None:
        self._mode = mode
        self._tokens: list[Any] = []

    def __enter__(self) -> None:
        self._mode.__enter__()
        self._tokens.append(_products_are_kept.set(True))

    def __exit__(self, *error: Any) -> None:
        _products_are_kept.reset(self._tokens.pop())
        self._mode.__exit__(*error)


def _contexts() -> tuple[_Keeping, _Keeping]:
    forward, recomputation = create_selective_checkpoint_contexts(_policy)
    return _Keeping(forward), _Keeping(recomputation)


def allow_selective_checkpointing(model: nn.Module) -> None:
    """Let `gradient_checkpointing_enable` understand {"selective": True}, which Trainer passes on from the options."""
    if hasattr(model, "_gradient_checkpointing_enable"):
        return
    original = model.gradient_checkpointing_enable

    # Not of the method itself: it has this model, which a pickle of a copy would take along.
    @functools.wraps(getattr(original, "__func__", original))
    def enable(self: nn.Module, gradient_checkpointing_kwargs: dict | None = None, **kwargs: Any) -> None:
        chosen = dict(gradient_checkpointing_kwargs or {"use_reentrant": False})
        if chosen.pop(SELECTIVE, False):
            if chosen.get("use_reentrant"):
                raise ValueError(
                    "Selective checkpointing needs `use_reentrant=False` in `gradient_checkpointing_kwargs`."
                )
            chosen["use_reentrant"] = False
            chosen["context_fn"] = _contexts
        self._gradient_checkpointing_enable(gradient_checkpointing_kwargs=chosen, **kwargs)

    model._gradient_checkpointing_enable = original
    model.gradient_checkpointing_enable = types.MethodType(enable, model)
