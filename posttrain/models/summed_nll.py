"""Sum of negative log-likelihoods with its gradient computed in the forward pass.

A loss that is a plain sum of -log p needs no second pass over the head: d nll / d logits = softmax(logits) - onehot(target) is at
hand while the chunk of logits exists. Three products with the vocabulary instead of four (6VH instead of 8VH a token). The
gradients come back through an autograd Function, scaled by whatever the sum was multiplied with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn


class Head(Protocol):
    module: nn.Module
    scale: float
    softcap: float | None


def can_sum_in_forward(head: Head) -> bool:
    """Only for a plain, unsharded linear head: an adapter on it, a soft-cap or a shard needs autograd's own backward."""
    module = head.module
    return (
        type(module) is nn.Linear
        and head.softcap is None
        and not hasattr(module.weight, "placements")  # DTensor: FSDP2, tensor parallel
        and not hasattr(module.weight, "ds_id")  # ZeRO-3
        and not module._forward_hooks
        and not module._forward_pre_hooks
    )


def summed_nll(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    chunk_tokens: int,
    stats: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]],
    label_smoothing: float,
) -> dict[str, Tensor]:
    """{"nll_sum": differentiable, "logps": detached, and the detached statistics}."""
    linear = head.module
    nll_sum, logps, *values = _SummedNLL.apply(
        hidden, linear.weight, linear.bias, targets, head.scale, chunk_tokens, tuple(stats.values()), label_smoothing
    )
    return {"nll_sum": nll_sum, "logps": logps, **dict(zip(stats, values))}


class _SummedNLL(torch.autograd.Function):
    """(1 - e) * sum_t -log p(y_t) + e * sum_t mean_v -log p(v), with gradients for hidden states, weight and bias."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        scale: float,
        chunk_tokens: int,
        stats: tuple[Callable[[Tensor, Tensor, Tensor], Tensor], ...],
        smoothing: float,
    ) -> tuple[Tensor, ...]:
        accurate = torch.promote_types(hidden.dtype, torch.float32)
        total = torch.zeros((), dtype=accurate, device=hidden.device)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=accurate) if weight.requires_grad else None
        grad_bias = torch.zeros_like(bias, dtype=accurate) if bias is not None and bias.requires_grad else None
        logps = torch.empty(len(hidden), dtype=accurate, device=hidden.device)
        values = [torch.empty(len(hidden), dtype=accurate, device=hidden.device) for _ in stats]
        for start in range(0, len(hidden), chunk_tokens):
            part = slice(start, start + chunk_tokens)
            rows, goals = hidden[part], targets[part, None]
            logits = nn.functional.linear(rows, weight, bias)
            if scale != 1.0:
                logits = logits.to(accurate) * scale
            all_logps = torch.log_softmax(logits, -1, dtype=accurate)  # one kernel: reads `logits`, writes float32
            logps[part] = all_logps.gather(-1, goals).squeeze(-1)
            if stats:
                exact = logits.to(accurate)
                log_z = exact.gather(-1, goals).squeeze(-1) - logps[part]
                for value, stat in zip(values, stats):
                    value[part] = stat(exact, log_z, targets[part])
            total -= (1 - smoothing) * logps[part].sum()
            if smoothing:
                total -= smoothing * all_logps.mean(-1).sum()
            slope = all_logps.exp_()  # from here on d loss / d logits, in place
            if smoothing:
                slope.sub_(smoothing / slope.shape[-1])
            slope.scatter_add_(-1, goals, torch.full_like(goals, smoothing - 1, dtype=accurate))
            if scale != 1.0:
                slope *= scale
            gradient = slope.to(hidden.dtype)
            torch.mm(gradient, weight, out=grad_hidden[part])
            if grad_weight is not None:
                if accurate == hidden.dtype:
                    grad_weight.addmm_(gradient.T, rows)
                else:
                    grad_weight += gradient.T @ rows
            if grad_bias is not None:
                grad_bias += slope.sum(0)
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        ctx.weight_dtype = weight.dtype
        ctx.mark_non_differentiable(logps, *values)
        return total, logps, *values

    @staticmethod
    def backward(ctx: Any, grad_sum: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight, grad_bias = ctx.saved_tensors
        return (
            grad_hidden * grad_sum.to(grad_hidden.dtype),
            None if grad_weight is None else (grad_weight * grad_sum).to(ctx.weight_dtype),
            None if grad_bias is None else (grad_bias * grad_sum).to(ctx.weight_dtype),
            *[None] * 5,
        )
