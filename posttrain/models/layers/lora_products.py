"""Linears with a low-rank adapter, and the gated MLP made of three of them, as single autograd Functions.

One linear computes y = x W^T + b + s (x A^T) B^T with a frozen W (LoRA, arXiv:2106.09685). PEFT writes and reads y six times for
that: the base product, the adapter's product, its scaled copy, the sum. Here the adapter's part is written first and the base
product is added to it by the same matrix product, so no elementwise pass over y exists. With g = dL/dy and u = s g B:

    dx = g W + u A        dA = u^T x        dB = s g^T (x A^T)        and dW is never formed.

Saved for the backward: x, which is the caller's tensor, and x A^T, which is as narrow as the adapter's rank. Linears that read the
same x share one product with their stacked A and one dx. The gated MLP down(act(gate(x)) * up(x)) keeps x, gate and up, and
computes act(gate) * up again in the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

Activation = Callable[[Tensor], Tensor]
TENSORS_OF_A_LINEAR = 4  # weight, bias, A, B


class AdaptedLinear(NamedTuple):
    """What one linear multiplies with. `down` and `up` are LoRA's A and B; both are None where there is no adapter."""

    weight: Tensor  # (out, in), frozen
    bias: Tensor | None  # (out,)
    down: Tensor | None  # A: (rank, in)
    up: Tensor | None  # B: (out, rank)
    scale: float = 1.0

    @property
    def rank(self) -> int:
        return 0 if self.down is None else self.down.shape[0]


_library = torch.library.Library("posttrain", "DEF")
_library.define("lora_product(Tensor x, Tensor weight, Tensor? bias, Tensor low, Tensor up) -> Tensor")


def _lora_product(x: Tensor, weight: Tensor, bias: Tensor | None, low: Tensor, up: Tensor) -> Tensor:
    """x W^T + b + low B^T. The narrow product comes first: adding to it costs the wide product nothing, and it is rounded once."""
    y = torch.mm(low, up.T) if bias is None else torch.addmm(bias, low, up.T)
    return y.addmm_(x, weight.T)


_library.impl("lora_product", _lora_product, "CompositeExplicitAutograd")
LORA_PRODUCT = torch.ops.posttrain.lora_product.default


def _stacked(matrices: list[Tensor]) -> Tensor:
    return matrices[0] if len(matrices) == 1 else torch.cat(matrices)


def _low_of(x: Tensor, linears: Sequence[AdaptedLinear]) -> list[Tensor | None]:
    """s (x A^T) for each linear, from one product with all A: x is read once."""
    adapted = [linear for linear in linears if linear.down is not None]
    if not adapted:
        return [None] * len(linears)
    joint = torch.mm(x, _stacked([linear.down for linear in adapted]).T)
    one_scale = len({linear.scale for linear in adapted}) == 1
    if one_scale and adapted[0].scale != 1:
        joint = joint * adapted[0].scale  # not in place: selective checkpointing may keep the product itself
    parts = iter(joint.split([linear.rank for linear in adapted], dim=1))
    lows = [None if linear.down is None else next(parts) for linear in linears]
    if one_scale:
        return lows
    return [low if low is None else low * linear.scale for low, linear in zip(lows, linears)]


def _product(x: Tensor, linear: AdaptedLinear, low: Tensor | None) -> Tensor:
    if low is None:
        return nn.functional.linear(x, linear.weight, linear.bias)
    return LORA_PRODUCT(x, linear.weight, linear.bias, low, linear.up)


def _slopes_of_low(gradients: Sequence[Tensor], linears: Sequence[AdaptedLinear]) -> list[Tensor | None]:
    """u = s g B: what the loss changes by when x A^T does."""
    found: list[Tensor | None] = []
    for gradient, linear in zip(gradients, linears):
        slope = None if linear.up is None else torch.mm(gradient, linear.up)
        found.append(slope if slope is None or linear.scale == 1 else slope * linear.scale)
    return found


def _input_gradient(
    gradients: Sequence[Tensor], linears: Sequence[AdaptedLinear], slopes: Sequence[Tensor | None]
) -> Tensor:
    """dx = sum_i g_i W_i + u_i A_i, all added up in one buffer."""
    narrow = [slope for slope in slopes if slope is not None]
    wide = list(zip(gradients, (linear.weight for linear in linears)))
    if narrow:
        joint = narrow[0] if len(narrow) == 1 else torch.cat(narrow, dim=1)
        dx = torch.mm(joint, _stacked([linear.down for linear in linears if linear.down is not None]))
    else:
        dx = torch.mm(*wide.pop(0))
    for gradient, weight in wide:
        dx.addmm_(gradient, weight)
    return dx


def _adapter_gradients(
    x: Tensor | None,
    gradients: Sequence[Tensor],
    lows: Sequence[Tensor | None],
    slopes: Sequence[Tensor | None],
    needed: Sequence[bool],
) -> list[Tensor | None]:
    """(dW, db, dA, dB) of each linear, flat; `needed` is aligned with the result. dW is always None."""
    found: list[Tensor | None] = []
    wanted = [slope for index, slope in enumerate(slopes) if slope is not None and needed[4 * index + 2]]
    joint = iter(())
    if wanted:  # one product with x for all A
        stacked = torch.mm((wanted[0] if len(wanted) == 1 else torch.cat(wanted, dim=1)).T, x)
        joint = iter(stacked.split([slope.shape[1] for slope in wanted]))
    for index, (gradient, low) in enumerate(zip(gradients, lows)):
        _, wants_bias, wants_down, wants_up = needed[4 * index : 4 * index + 4]
        found += [
            None,
            gradient.sum(0) if wants_bias else None,
            next(joint) if wants_down else None,
            torch.mm(gradient.T, low) if wants_up else None,
        ]
    return found


def _flat(linears: Sequence[AdaptedLinear]) -> list[Tensor | None]:
    return [tensor for linear in linears for tensor in linear[:TENSORS_OF_A_LINEAR]]


def _from_flat(tensors: Sequence[Tensor | None], scales: Sequence[float]) -> list[AdaptedLinear]:
    step = TENSORS_OF_A_LINEAR
    return [AdaptedLinear(*tensors[step * i : step * (i + 1)], scale) for i, scale in enumerate(scales)]


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def linears_of_one_input(x: Tensor, linears: Sequence[AdaptedLinear]) -> tuple[Tensor, ...]:
    """What each of `linears` makes of x, (..., in) -> (..., out)."""
    return _LinearsOfOneInput.apply(x, tuple(linear.scale for linear in linears), *_flat(linears))


class _LinearsOfOneInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scales: tuple[float, ...], *tensors: Tensor | None) -> tuple[Tensor, ...]:
        linears, rows = _from_flat(tensors, scales), _rows(x)
        lows = _low_of(rows, linears)
        trains_down = any(ctx.needs_input_grad[2:][index] for index in range(2, len(tensors), TENSORS_OF_A_LINEAR))
        ctx.save_for_backward(x if trains_down else None, *lows, *tensors)
        ctx.scales, ctx.shape = scales, x.shape
        outputs = [_product(rows, linear, low) for linear, low in zip(linears, lows)]
        return tuple(output.view(*x.shape[:-1], output.shape[-1]) for output in outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, *saved = ctx.saved_tensors
        lows, linears = saved[: len(ctx.scales)], _from_flat(saved[len(ctx.scales) :], ctx.scales)
        gradients = [_rows(gradient) for gradient in gradients]
        slopes = _slopes_of_low(gradients, linears)
        dx = _input_gradient(gradients, linears, slopes).view(ctx.shape) if ctx.needs_input_grad[0] else None
        x = None if x is None else _rows(x)
        return dx, None, *_adapter_gradients(x, gradients, lows, slopes, ctx.needs_input_grad[2:])


def gated_mlp(x: Tensor, activation: Activation, gate: AdaptedLinear, up: AdaptedLinear, down: AdaptedLinear) -> Tensor:
    """down(activation(gate(x)) * up(x)); of its inner tensors only gate(x) and up(x) are kept."""
    linears = (gate, up, down)
    return _GatedMLP.apply(x, activation, tuple(linear.scale for linear in linears), *_flat(linears))


class _GatedMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, activation: Activation, scales: tuple[float, ...], *tensors: Tensor | None
    ) -> Tensor:
        (gate, up, down), rows = _from_flat(tensors, scales), _rows(x)
        gate_low, up_low = _low_of(rows, (gate, up))
        gate_out, up_out = _product(rows, gate, gate_low), _product(rows, up, up_low)
        inner = activate_and_multiply(activation, gate_out, up_out)
        (down_low,) = _low_of(inner, (down,))
        trains_down = ctx.needs_input_grad[3:][2] or ctx.needs_input_grad[3:][6]
        ctx.save_for_backward(x if trains_down else None, gate_out, up_out, gate_low, up_low, down_low, *tensors)
        ctx.activation, ctx.scales, ctx.shape = activation, scales, x.shape
        return _product(inner, down, down_low).view(*x.shape[:-1], down.weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, gate_out, up_out, gate_low, up_low, down_low, *tensors = ctx.saved_tensors
        gate, up, down = _from_flat(tensors, ctx.scales)
        needed = ctx.needs_input_grad[3:]
        gradient = _rows(gradient)
        down_slopes = _slopes_of_low([gradient], [down])
        inner_gradient = _input_gradient([gradient], [down], down_slopes)
        inner, *both = gradients_of_product(ctx.activation, gate_out, up_out, inner_gradient)
        of_down = _adapter_gradients(inner, [gradient], [down_low], down_slopes, needed[2 * TENSORS_OF_A_LINEAR :])
        del inner, inner_gradient  # as wide as the MLP: not needed beside what follows
        slopes = _slopes_of_low(both, (gate, up))
        dx = _input_gradient(both, (gate, up), slopes).view(ctx.shape) if ctx.needs_input_grad[0] else None
        x = None if x is None else _rows(x)
        return dx, None, None, *_adapter_gradients(x, both, [gate_low, up_low], slopes, needed), *of_down


def _kernels_for(activation: Activation, tensor: Tensor) -> Any:
    """The Triton kernels, where they apply: SiLU on a CUDA device, in a precision that float32 holds."""
    is_silu = isinstance(activation, nn.SiLU) or type(activation).__name__ == "SiLUActivation"
    if not tensor.is_cuda or tensor.dtype == torch.float64 or not is_silu:
        return None
    from posttrain.models.layers import silu_triton

    return silu_triton


def activate_and_multiply(activation: Activation, gate: Tensor, up: Tensor) -> Tensor:
    """activation(gate) * up."""
    kernels = _kernels_for(activation, gate)
    return activation(gate) * up if kernels is None else kernels.silu_times(gate, up)


def gradients_of_product(
    activation: Activation, gate: Tensor, up: Tensor, gradient: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(activation(gate) * up, its gradient by gate, by up). May overwrite `gradient`, which the caller made."""
    kernels = _kernels_for(activation, gate)
    if kernels is not None:
        return kernels.silu_times_backward(gate, up, gradient)
    with torch.enable_grad():
        leaf = gate.detach().requires_grad_()
        activated = activation(leaf)
    plain = activated.detach()
    (of_gate,) = torch.autograd.grad(activated, leaf, gradient * up)
    return plain * up, of_gate, gradient.mul_(plain)
