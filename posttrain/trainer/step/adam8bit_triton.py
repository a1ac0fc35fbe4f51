"""One step of AdamW8bit on one CUDA tensor: weights, gradient and codes are read once and written once."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 256
ROWS = 8  # blocks of one program


@triton.jit
def _place_on_grid(share, BITS: tl.constexpr):
    fraction = share
    parts = tl.full(share.shape, 2 ** (BITS - 1), tl.float32)
    for _ in tl.static_range(BITS - 1):
        below = fraction <= 0.1
        fraction = tl.where(below, fraction * 10, fraction)
        parts = tl.where(below, parts * 0.5, parts)
    within = parts - 1 + (fraction - 0.1) * (parts / 0.9)
    return tl.where(parts == 1, fraction, within)


@triton.jit
def _share(values, largest):
    return tl.abs(values) / tl.where(largest > 0, largest, 1.0)[:, None]


@triton.jit(do_not_specialize=["count", "blocks", "place"])
def _step(
    weights, gradient, m_codes, v_codes, m_largest, v_largest, m_grid, v_grid, steps, found_inf,
    count, blocks, place, lr, beta1, beta2, eps, decay,
    HAS_FLAG: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = rows[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = at < count
    present = rows < blocks
    if HAS_FLAG:
        take = tl.load(found_inf) == 0
        inside = inside & take
        present = present & take
    step = tl.load(steps)  # counted already; a step that is not taken was not counted

    g = tl.load(gradient + at, mask=inside, other=0).to(tl.float32)
    w = tl.load(weights + at, mask=inside, other=0).to(tl.float32)
    m_code = tl.load(m_codes + at, mask=inside, other=0).to(tl.int32)
    v_code = tl.load(v_codes + at, mask=inside, other=0).to(tl.int32)
    m_old = tl.load(m_grid + tl.abs(m_code)) * tl.load(m_largest + rows, mask=present, other=0)[:, None]
    m_old = tl.where(m_code < 0, -m_old, m_old)
    v_old = tl.load(v_grid + v_code) * tl.load(v_largest + rows, mask=present, other=0)[:, None]
    m = m_old + (g - m_old) * (1 - beta1)
    v = v_old * beta2 + g * g * (1 - beta2)
    m_unbiased = m / (1 - tl.exp(step * tl.log(beta1)))
    v_unbiased = v / (1 - tl.exp(step * tl.log(beta2)))
    w = w * (1 - lr * decay) - lr * m_unbiased / (tl.sqrt(v_unbiased) + eps)
    tl.store(weights + at, w.to(weights.dtype.element_ty), mask=inside)

    m_max = tl.max(tl.abs(m), axis=1)
    code = tl.floor(_place_on_grid(_share(m, m_max), 7) + 0.5)
    code = tl.minimum(code, 127.0)
    code = tl.where(m < 0, -code, code)
    tl.store(m_codes + at, code.to(tl.int8), mask=inside)
    tl.store(m_largest + rows, m_max, mask=present)

    v_max = tl.max(v, axis=1)
    share = _share(v, v_max)
    chance = tl.rand(place + step.to(tl.int32), at.to(tl.int32))
    code = tl.minimum(tl.floor(_place_on_grid(share, 8) + chance), 255.0)
    code = tl.where(share > 0, tl.maximum(code, 1.0), 0.0)
    tl.store(v_codes + at, code.to(tl.int32).to(tl.uint8), mask=inside)
    tl.store(v_largest + rows, v_max, mask=present)


def step_on_device(
    weights: Tensor,
    gradient: Tensor,
    state: dict[str, Tensor],
    group: dict[str, Any],
    grids: tuple[Tensor, Tensor],
    found_inf: Tensor | None,
    place: int,
) -> None:
    """Update `weights` and `state` in place, or nothing at all where `found_inf` is not 0. The host never waits."""
    state["step"] += 1 if found_inf is None else 1 - found_inf.view(())
    blocks = len(state["m_largest"])
    beta1, beta2 = group["betas"]
    with torch.cuda.device(weights.device):
        _step[(triton.cdiv(blocks, ROWS),)](
            weights, gradient, state["m"], state["v"], state["m_largest"], state["v_largest"], *grids, state["step"],
            state["step"] if found_inf is None else found_inf, weights.numel(), blocks, place * 1_000_003, group["lr"], beta1,
            beta2, group["eps"], group["weight_decay"], HAS_FLAG=found_inf is not None, BLOCK=BLOCK, ROWS=ROWS,
        )  # fmt: skip
