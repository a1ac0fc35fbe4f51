"""Two language heads and the divergence of their distributions as one autograd function, a chunk of rows at a time.

A loss is nearly always a sum of divergences with weights that are known beforehand, all equal or given. So slopes are computed
while both chunks of logits exist, and the gradient of the weighted sum is added up in the forward: four products with the
vocabulary (two logits, two gradients). The backward multiplies it by the factor that it is handed. Where it is handed something
else, a gradient that is not proportional to the weights or one for the log-probs, it computes both logits again, from the hidden
states and the normalisers: any function of divergences and log-probs has its exact gradient.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from posttrain.losses.distributions import Shares
from posttrain.models.scoring.fused_head import Asked, Gradients, Head, Reader, Statistic, operands, scaled
from posttrain.models.scoring.head_kernels import Rows, read_rows
from posttrain.models.scoring.pair_kernels import Compared, PairRows, compare_rows, pair_slopes


class Taught(NamedTuple):
    """The teacher's side: hidden states, weight and bias of its head, and the scale of its logits."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    scale: float

    @classmethod
    @torch.no_grad()
    def of(cls, hidden: Tensor, head: Head) -> Taught:
        return cls(*operands(hidden, head), head.scale)

    def logits(self, part: slice) -> Tensor:
        return nn.functional.linear(self.hidden[part], self.weight, self.bias)


def token_divergences(
    hidden: Tensor,
    head: Head,
    taught: Taught,
    shares: Shares,
    targets: Tensor,
    chunk_tokens: int,
    stats: dict[str, Statistic],
    weights: Tensor | None,
    gradient_in_forward: bool,
) -> dict[str, Tensor]:
    """{"divergences" and "logps": differentiable, and the detached statistics}."""
    asked = Asked(targets, head.scale, chunk_tokens, stats)
    compared = Compared(shares, head.scale, taught.scale)
    divergences, logps, *values = _TokenDivergences.apply(
        *operands(hidden, head), asked, taught, compared, weights, gradient_in_forward
    )
    return {"divergences": divergences, "logps": logps, **dict(zip(stats, values))}


class _TokenDivergences(torch.autograd.Function):
    """D_t and log p(y_t) of each row."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        asked: Asked,
        taught: Taught,
        compared: Compared,
        weights: Tensor | None,
        gradient_in_forward: bool,
    ) -> tuple[Tensor, ...]:
        reader = Reader(hidden, weight, bias, asked)
        reader.make_room()
        theirs = Rows(len(hidden), hidden.device, reader.accurate)
        pair = PairRows(reader.rows.log_z, theirs.log_z)
        wanted = ctx.needs_input_grad[:3]
        gradients = Gradients(reader, wanted) if gradient_in_forward and any(wanted) else None
        ctx.weights = None if weights is None else weights.to(reader.accurate).contiguous()
        factors = torch.ones_like(pair.log_z) if weights is None else ctx.weights

        def compare(part: slice, logits: Tensor, teacher_logits: Tensor) -> Tensor | None:
            """Slopes, if they are wanted now."""
            reader.read(part, logits)
            read_rows(teacher_logits, asked.targets[part], theirs, part, scale=taught.scale)
            now = None if gradients is None else factors[part]
            return compare_rows(logits, teacher_logits, pair, part, compared, now)

        for part in reader.parts():
            slopes = compare(part, reader.logits(part), taught.logits(part))
            if slopes is not None:
                gradients.add(part, slopes)
            del slopes  # before the next chunk is computed
        ctx.save_for_backward(hidden, weight, bias, pair.log_z, pair.teacher_log_z, pair.sums)
        ctx.asked, ctx.taught, ctx.compared = asked, taught, compared
        # Not among the saved tensors: they are given back as soon as they are used, or are of no use.
        ctx.gradients = None if gradients is None else (gradients.hidden, gradients.weight, gradients.bias)
        ctx.set_materialize_grads(False)
        answers = reader.answers()
        ctx.mark_non_differentiable(*answers)
        return pair.divergences, reader.rows.logps, *answers

    @staticmethod
    def backward(
        ctx: Any, grad_divergences: Tensor | None, grad_logps: Tensor | None, *_: Tensor
    ) -> tuple[Tensor | None, ...]:
        nothing = (None,) * 5
        if grad_divergences is None and grad_logps is None:
            return (None, None, None, *nothing)
        made = ctx.gradients
        ctx.gradients = None  # as large as the weight; another backward of this graph computes them
        if made is not None and grad_logps is None:
            factor = common_factor(grad_divergences, ctx.weights)
            if factor is not None:
                return (*scaled(made, factor, ctx.saved_tensors[1].dtype), *nothing)
        del made
        return (*_recomputed(ctx, grad_divergences, grad_logps).rounded(), *nothing)


def _recomputed(ctx: Any, grad_divergences: Tensor | None, grad_logps: Tensor | None) -> Gradients:
    """The gradients for any slopes, from both logits computed again."""
    hidden, weight, bias, *known = ctx.saved_tensors
    reader, pair = Reader(hidden, weight, bias, ctx.asked), PairRows(*known)
    gradients = Gradients(reader, ctx.needs_input_grad[:3])
    factors = torch.zeros_like(pair.log_z) if grad_divergences is None else grad_divergences.contiguous()
    for part in reader.parts():
        slopes = pair_slopes(
            reader.logits(part), ctx.taught.logits(part), pair, part, ctx.compared, factors[part],
            reader.targets[part], None if grad_logps is None else grad_logps[part].contiguous(),
        )  # fmt: skip
        gradients.add(part, slopes)
        del slopes
    return gradients


def common_factor(gradient: Tensor, weights: Tensor | None) -> Tensor | None:
    """() c with gradient = c * weights to rounding (weights None: all 1), or None where there is no such factor.

    The gradient of a plain sum is one number that is shown N times, which its strides tell; otherwise the numbers are compared,
    and the device has to be waited for.
    """
    if not len(gradient):
        return gradient.new_zeros(())
    if weights is None:
        if gradient.stride(0) == 0:
            return gradient[0]
        weights = torch.ones_like(gradient)
    largest = weights.abs().argmax()
    factor = gradient[largest] / weights[largest]
    expected = factor * weights
    is_common = ((gradient - expected).abs() <= 8 * torch.finfo(gradient.dtype).eps * expected.abs()).all()
    return factor if bool(is_common) else None
