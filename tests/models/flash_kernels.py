"""Stand-ins for flash kernels, by the formula: torch's (`forward`, `backward`), FlashAttention 3 (`operators`) and 4 (`module`)."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


def parts(cu_q: Tensor, cu_k: Tensor) -> Any:
    """Queries and keys that belong together."""
    return zip(itertools.pairwise(cu_q.tolist()), itertools.pairwise(cu_k.tolist()), strict=True)


def scores_of(
    q: Tensor, k: Tensor, causal: bool, scale: float, window: tuple[int, int], softcap: float
) -> tuple[Tensor, Tensor]:
    """(heads, queries, keys) scores, and their derivative by what the cap is put on; aligned at the bottom right, as FlashAttention
    documents."""
    scores = scale * q.transpose(0, 1) @ _wide(k.transpose(0, 1), q).transpose(1, 2)
    slope = torch.ones_like(scores)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
        slope = 1 - (scores / softcap) ** 2
    distance = (torch.arange(len(q), device=q.device) + len(k) - len(q))[:, None] - torch.arange(
        len(k), device=q.device
    )
    left, right = window
    seen = (distance >= 0) if causal else torch.ones_like(distance, dtype=torch.bool)
    seen &= (distance <= left) | (left < 0)
    seen &= (-distance <= right) | (right < 0)
    return scores.masked_fill(~seen, -torch.inf), slope


def _wide(keys: Tensor, q: Tensor) -> Tensor:
    return keys.repeat_interleave(q.shape[1] // len(keys), 0)


def attended(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, *how: Any) -> tuple[Tensor, Tensor]:
    out, sums = torch.empty_like(q), q.new_empty(q.shape[1], len(q))
    for (a, b), (c, d) in parts(cu_q, cu_k):
        scores, _ = scores_of(q[a:b], k[c:d], *how)
        out[a:b] = (scores.softmax(-1) @ _wide(v[c:d].transpose(0, 1), q)).transpose(0, 1)
        sums[:, a:b] = scores.logsumexp(-1)
    return out, sums


def gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, cu_q: Tensor, cu_k: Tensor, *how: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """With the probabilities exp(score - sum) of whatever sums it is handed, as the kernels have."""
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    scale = how[1]
    for (a, b), (c, d) in parts(cu_q, cu_k):
        scores, slope = scores_of(q[a:b], k[c:d], *how)
        weights, do = (scores - sums[:, a:b, None]).exp(), grad[a:b].transpose(0, 1)
        wide_k, wide_v = (_wide(x[c:d].transpose(0, 1), q) for x in (k, v))
        inner = (grad[a:b] * out[a:b]).sum(-1).T[..., None]
        ds = scale * slope * weights * (do @ wide_v.transpose(1, 2) - inner)
        dq[a:b] += (ds @ wide_k).transpose(0, 1)
        dk[c:d] += _folded(ds.transpose(1, 2) @ q[a:b].transpose(0, 1), k)
        dv[c:d] += _folded(weights.transpose(1, 2) @ do, k)
    return dq, dk, dv


def _folded(of_heads: Tensor, k: Tensor) -> Tensor:
    return of_heads.unflatten(0, (k.shape[1], -1)).sum(1).transpose(0, 1)


# ---- with the arguments of torch's operators ---------------------------------------------------------------------------


def forward(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, dropout: float, causal: bool,
    debug: bool, *, scale: float, window_size_left: int = -1, window_size_right: int = -1,
) -> tuple[Tensor, ...]:  # fmt: skip
    found = attended(q, k, v, cu_q, cu_k, causal, scale, (window_size_left, window_size_right), 0.0)
    return *found, torch.zeros(1), torch.zeros(1), None


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int,
    max_k: int, dropout: float, causal: bool, seed: Tensor, offset: Tensor, *, scale: float, window_size_left: int = -1,
    window_size_right: int = -1,
) -> tuple[Tensor, ...]:  # fmt: skip
    window = (window_size_left, window_size_right)
    return gradients(grad, q, k, v, out, sums, cu_q, cu_k, causal, scale, window, 0.0)


# ---- with those of FlashAttention 3 and 4 ------------------------------------------------------------------------------


def _checked(how: dict[str, Any]) -> tuple[Tensor, Tensor]:
    bounds = how["cu_seqlens_q"], how["cu_seqlens_k"]
    assert all(x.dtype == torch.int32 for x in bounds)
    assert [int(x.diff().max()) for x in bounds] == [how["max_seqlen_q"], how["max_seqlen_k"]]
    return bounds


def operators(calls: list[str]) -> Any:
    """As `torch.ops.flash_attn_3`; what is called is noted."""

    def given(how: dict[str, Any]) -> tuple[Any, ...]:
        window = how["window_size_left"], how["window_size_right"]
        return *_checked(how), how["is_causal"], how["softmax_scale"], window, how["softcap"]

    def fwd(q: Tensor, k: Tensor, v: Tensor, *, out: Tensor, num_splits: int, **how: Any) -> tuple[Any, ...]:
        assert all(x.stride(-1) == 1 for x in (q, k, v, out))
        calls.append("forward")
        found, sums = attended(q, k, v, *given(how))
        return out.copy_(found), sums, torch.empty(0), torch.empty(0)

    def bwd(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
        **how: Any,
    ) -> None:  # fmt: skip
        assert all(x.stride(-1) == 1 for x in (dout, q, k, v, out, dq, dk, dv))
        calls.append("backward")
        for gradient, found in zip((dq, dk, dv), gradients(dout, q, k, v, out, softmax_lse, *given(how))):
            gradient.copy_(found)

    return SimpleNamespace(fwd=fwd, bwd=bwd)


def module(calls: list[str]) -> Any:
    """As `flash_attn.cute.interface`; what is called is noted."""

    def window(how: dict[str, Any]) -> tuple[int, int]:
        left, right = how["window_size_left"], how["window_size_right"]
        return -1 if left is None else left, -1 if right is None else right

    def given(how: dict[str, Any]) -> tuple[Any, ...]:
        return *_checked(how), how["causal"], how["softmax_scale"], window(how), how["softcap"]

    def _flash_attn_fwd(q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, **how: Any) -> tuple[Any, ...]:
        calls.append("forward")
        return *attended(q, k, v, *given(how)), None, None, None

    def _flash_attn_bwd(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, **how: Any
    ) -> tuple[Tensor, ...]:
        calls.append("backward")
        return gradients(dout, q, k, v, out, lse, *given(how))

    return SimpleNamespace(_flash_attn_fwd=_flash_attn_fwd, _flash_attn_bwd=_flash_attn_bwd)
