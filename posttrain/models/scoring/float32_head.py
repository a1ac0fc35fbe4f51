"""A language head that computes in float32 where the weights around it are of a lower precision (ScaleRL, arXiv:2510.13786).

Rounding logits to bfloat16 moves a log-prob by up to 1%, differently in every program that computes it. The weights stay as they
are, shared with the embeddings where they are tied: only the product, and everything after it, is in float32.
"""

from __future__ import annotations

import types

import torch
from torch import Tensor, nn

MARK = "_computes_in_float32"


def compute_head_in_float32(causal_lm: nn.Module) -> None:
    """From here on every caller of the head, `generate` and engines included, gets float32 logits. Safe to call twice."""
    head = causal_lm.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise ValueError(
            f"The head of {type(causal_lm).__name__} is a {type(head).__name__}; `cast_lm_head_to_fp32` needs a plain linear "
            "layer, without an adapter and not quantised. Leave it out."
        )
    setattr(head, MARK, True)
    head.forward = types.MethodType(_float32_forward, head)  # a deep copy of the head computes with its own weights


def _float32_forward(self: nn.Linear, hidden: Tensor) -> Tensor:
    return nn.functional.linear(*head_operands(hidden, self))


def head_input(hidden: Tensor, head: nn.Module) -> Tensor:
    """Hidden states in the dtype that the head computes in."""
    return _raised(hidden) if getattr(head, MARK, False) else hidden


def head_operands(hidden: Tensor, linear: nn.Linear) -> tuple[Tensor, Tensor, Tensor | None]:
    """What a linear head multiplies and adds: hidden states, weight and bias. Gradients go through the change of dtype."""
    if not getattr(linear, MARK, False):
        is_finer = torch.promote_types(hidden.dtype, linear.weight.dtype) != linear.weight.dtype
        # Mamba's residuals are float32 whatever its weights are; its own head rounds them, too
        return hidden.to(linear.weight.dtype) if is_finer else hidden, linear.weight, linear.bias
    return _raised(hidden), _raised(linear.weight), None if linear.bias is None else _raised(linear.bias)


def _raised(tensor: Tensor) -> Tensor:
    """In float32, or in better where it is that already."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
