"""silu(gate) * up and its backward as one Triton kernel each. CUDA only; `lora_products` has the same in plain torch.

forward:   reads gate and up, writes one tensor                           (plain torch: 3 reads, 2 writes)
backward:  reads gate, up and the gradient, writes the product again and both gradients, one of them in place of the gradient
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _forward(gate, up, out, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    g = tl.load(gate + at, mask=inside).to(tl.float32)
    u = tl.load(up + at, mask=inside).to(tl.float32)
    tl.store(out + at, (g * tl.sigmoid(g) * u).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward(gate, up, gradient, product, of_gate, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    g = tl.load(gate + at, mask=inside).to(tl.float32)
    u = tl.load(up + at, mask=inside).to(tl.float32)
    d = tl.load(gradient + at, mask=inside).to(tl.float32)
    s = tl.sigmoid(g)
    a = g * s
    kind = product.dtype.element_ty
    tl.store(product + at, (a * u).to(kind), mask=inside)
    tl.store(of_gate + at, (d * u * s * (1 + g * (1 - s))).to(kind), mask=inside)
    tl.store(gradient + at, (d * a).to(kind), mask=inside)  # from here on the gradient of `up`


def _grid(tensor: Tensor) -> tuple[int]:
    return (triton.cdiv(tensor.numel(), BLOCK),)


def silu_times(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, computed in float32 and rounded once."""
    out = torch.empty_like(gate)
    if gate.numel():
        with torch.cuda.device(gate.device):
            _forward[_grid(gate)](gate, up, out, gate.numel(), BLOCK=BLOCK)
    return out


def silu_times_backward(gate: Tensor, up: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(silu(gate) * up, gradient by gate, gradient by up); `gradient` is overwritten and returned as the last."""
    product, of_gate = torch.empty_like(gate), torch.empty_like(gate)
    if gate.numel():
        with torch.cuda.device(gate.device):
            _backward[_grid(gate)](gate, up, gradient, product, of_gate, gate.numel(), BLOCK=BLOCK)
    return product, of_gate, gradient
