"""Attention by torch's SDPA; by its formula where SDPA does not know it: soft-capped scores (Gemma 2), sinks (gpt-oss)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import dropout as dropped
from torch.nn.functional import scaled_dot_product_attention


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Tensor | None,
    scale: float | None,
    dropout: float = 0.0,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    is_causal: bool = True,
) -> Tensor:
    """(rows, heads, queries, width) -> same, of keys and values that may have fewer heads.

    `seen` (..., queries, keys) bool; None: causal, or everything. `sinks` (heads,).
    """
    if not softcap and sinks is None:
        how = {"attn_mask": seen, "is_causal": seen is None and is_causal, "enable_gqa": query.shape[1] != key.shape[1]}
        return scaled_dot_product_attention(query, key, value, dropout_p=dropout, scale=scale, **how)
    if seen is None and is_causal:
        seen = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    grouped = query.unflatten(1, (key.shape[1], -1))  # (rows, key heads, heads of each, queries, width)
    seen = seen.unsqueeze(1) if seen is not None and seen.dim() == 4 else seen
    sinks = None if sinks is None else sinks.view(*grouped.shape[1:3], 1, 1)
    return softmax_attention(grouped, key[:, :, None], value[:, :, None], seen, scale, softcap, sinks, dropout).flatten(
        1, 2
    )


def softmax_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Tensor | None,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """softmax(s) v with s = cap tanh(scale q k / cap), and a sink as one more score, of no value: exp s / (exp sink + sum exp s).

    (..., queries, width), (..., keys, width); `seen` (..., queries, keys), `sinks` (..., queries, 1). In float32 at least.
    """
    scores = query @ key.transpose(-1, -2)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if seen is not None:  # finite: a query that sees nothing, of padding, must not spread what is not a number
        scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)], dim=-1)
    weights = scores.softmax(-1)[..., : key.shape[-2]].to(value.dtype)
    return dropped(weights, dropout) @ value
