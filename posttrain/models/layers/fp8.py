"""Products of the decoder's linear layers in 8-bit floats, forward and backward.

    y = x W^T        dx = dy W        dW = dy^T x

Each operand is rounded to e4m3 (arXiv:2209.05433), with a scale for each row along which the product sums, so that a row's largest
value becomes 448. Sums, results, weights, gradients and masters stay in the precision that they have; what is kept for the
backward, too. A row's scale depends on that row alone, so that tokens change nothing in each other, in whatever layout they lie.
"""

from __future__ import annotations

import functools
import importlib
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.models.layers.kernels import decoder_layers
from posttrain.models.triton_support import runs_triton

E4M3 = torch.float8_e4m3fn
MULTIPLE = 16
"""The products' inner and outer sizes must be multiples of it; tokens are filled up."""
LEAST_CAPABILITY = (8, 9)
Scaled = tuple[Tensor, Tensor]
"""(m, k) numbers in e4m3, (m, 1) scales in float32."""
ROUTERS = {"gate", "router", "shared_expert_gate"}
"""Names of modules that choose experts: which one is chosen must not depend on the rounding of 8 bits."""


def why_not(device: torch.device) -> str | None:
    """None where 8-bit products can be computed; else the reason, as the end of a sentence."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        return f"{torch.cuda.get_device_name(device)} has no 8-bit products; Ada and Hopper GPUs, and newer ones, have"
    if device.type == "cpu" and not _host_scales_rows():
        return (
            f"torch {torch.__version__} computes 8-bit products on a CPU with one scale only, not with one for each row"
        )
    return None


@functools.cache
def _host_scales_rows() -> bool:
    """torch 2.13 does; 2.11 ends with an assertion about scales."""
    one = by_rows(torch.ones(MULTIPLE, MULTIPLE, dtype=torch.bfloat16))
    try:
        scaled_product(one, one, torch.bfloat16)
    except RuntimeError:
        return False
    return True


def use_fp8(innermost: nn.Module) -> int:
    """Compute the products of the decoder's linear layers in 8 bits from now on. Returns how many layers these are."""
    found = linears(innermost)
    for linear in found:
        linear.forward = types.MethodType(_forward, linear)  # a method: a deep copy computes with its own weights
    return len(found)


def linears(innermost: nn.Module) -> list[nn.Linear]:
    """Those of the decoder whose products can be computed in 8 bits."""
    return [
        part
        for layer in decoder_layers(innermost)
        for name, part in layer.named_modules()
        if type(part) is nn.Linear and ROUTERS.isdisjoint(name.split(".")) and _fits(part)
    ]


def _fits(linear: nn.Linear) -> bool:
    return linear.in_features % MULTIPLE == linear.out_features % MULTIPLE == 0


def _forward(linear: nn.Linear, hidden: Tensor) -> Tensor:
    output = _Products.apply(hidden.flatten(0, -2), linear.weight)
    output = output if linear.bias is None else output + linear.bias
    return output.view(*hidden.shape[:-1], linear.out_features)


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return scaled_product(by_rows(hidden), by_rows(weight), hidden.dtype)

    @staticmethod
    def backward(ctx: Any, flows: Tensor) -> tuple[Tensor | None, Tensor | None]:
        hidden, weight = ctx.saved_tensors
        *columns, rows, of_rows = BOTH(flows)
        of_hidden, of_weight = ctx.needs_input_grad
        return (
            scaled_product((rows, of_rows), by_columns(weight), flows.dtype) if of_hidden else None,
            scaled_product(columns, by_columns(hidden), flows.dtype) if of_weight else None,
        )


def scaled_product(a: Scaled, b: Scaled, dtype: torch.dtype) -> Tensor:
    """(m, k), (n, k) -> (m, n) = a b^T."""
    (rows, of_rows), (columns, of_columns) = a, b
    how = {"scale_a": of_rows, "scale_b": of_columns.t(), "out_dtype": dtype, "use_fast_accum": True}
    return torch._scaled_mm(rows, columns.t(), **how)


def scaled(x: Tensor) -> Scaled:
    """(m, k) -> the same in e4m3, and (m, 1) the scales: x = result * scale. Rows of zeros stay zeros."""
    end = torch.finfo(E4M3).max
    largest = x.abs().amax(-1, keepdim=True).to(torch.float32)
    scale = largest.clamp(min=torch.finfo(torch.float32).tiny * end) / end
    return (x / scale).to(E4M3).contiguous(), scale


def filled(tokens: int) -> int:
    """The next multiple of MULTIPLE: zeros add nothing to a sum over tokens."""
    return -(-tokens // MULTIPLE) * MULTIPLE


def _columns(x: Tensor) -> Scaled:
    return scaled(nn.functional.pad(x.t(), (0, filled(len(x)) - len(x))))


def _both(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return *_columns(x), *scaled(x)


# ---- as operators, with kernels of our own: with those of the compiler a layer of a 7B was no faster than in bfloat16 -------


def _kernels(name: str, formula: Callable[[Tensor], tuple[Tensor, ...]]) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """Where Triton runs, the kernel of this name."""

    def rounded(x: Tensor) -> tuple[Tensor, ...]:
        if not runs_triton(x):
            return formula(x)
        return getattr(importlib.import_module("posttrain.models.layers.fp8_triton"), name)(x)

    return rounded


def _shapes(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=E4M3), x.new_empty(len(x), 1, dtype=torch.float32)


def _shapes_of_columns(x: Tensor) -> tuple[Tensor, Tensor]:
    rows, width = x.shape
    return x.new_empty(width, filled(rows), dtype=E4M3), x.new_empty(width, 1, dtype=torch.float32)


_library = torch.library.Library("posttrain", "FRAGMENT")
for _name, _results, _kernel, _formula, _fake in (
    ("rows", 2, "scaled_triton", scaled, _shapes),
    ("columns", 2, "columns_triton", _columns, _shapes_of_columns),
    ("both", 4, "both_triton", _both, lambda x: (*_shapes_of_columns(x), *_shapes(x))),
):
    _library.define(f"e4m3_{_name}(Tensor x) -> ({', '.join(['Tensor'] * _results)})")
    _library.impl(f"e4m3_{_name}", _kernels(_kernel, _formula), "CompositeExplicitAutograd")
    torch.library.register_fake(f"posttrain::e4m3_{_name}", _fake, lib=_library)
by_rows = torch.ops.posttrain.e4m3_rows.default
"""(m, k) -> `scaled`."""
by_columns = torch.ops.posttrain.e4m3_columns.default
"""(m, k) -> `scaled` of the transpose, (k, `filled(m)`)."""
BOTH = torch.ops.posttrain.e4m3_both.default
