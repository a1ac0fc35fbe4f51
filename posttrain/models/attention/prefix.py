"""Attention of samples that share their beginning: the prefix is computed once, its continuations look back at it.

With q, k, v of one row laid out as in `SharedPrefixes`, a continuation's query attends to (a) its own segment, causally, and (b)
the whole prefix of its group. Softmax over the union of the two comes from the parts and their log-sum-exps L:

    out = exp(La - L) out_a + exp(Lb - L) out_b,        L = log(exp La + exp Lb)

The flash backward needs only out and L of the *whole* softmax, so it can be called for each part with the merged ones and its
gradients added: exact, no copy of the prefix's keys and values, no mask. (Prefix Grouper, arXiv:2506.05433, shows that shared and
repeated prefixes have one gradient; ring attention, arXiv:2310.01889, merges parts in this way.)

A sink is a score s without a value: one more part, with L = s and out = 0. So it is added to what the kernels return. Its own
gradient is -sum_t exp(s - L_t) out_t . grad_t.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from posttrain.core.batch import SharedPrefixes
from posttrain.models.attention.flash import FlashCall, as_narrow, as_wide, tokens_first
from posttrain.models.attention.softmax import attention
from posttrain.models.triton_support import runs_triton


@torch.compiler.disable  # a compiled layer is split around it: its arguments are different numbers in every batch
def shared_prefix_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    longest: int,
    prefixes: SharedPrefixes,
    scaling: float | None,
    dropout: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """(1, heads, tokens, dim) -> (1, tokens, heads, dim), with two flash calls where they can run."""
    q, k, v = tokens_first(query, key, as_wide(value, query))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    own = FlashCall.of_segments(bounds, longest, scale, dropout=dropout, softcap=softcap or 0.0)
    back = own._replace(
        bounds=prefixes.cu_continuations, key_bounds=prefixes.cu_prefixes, longest=prefixes.longest_continuations,
        longest_keys=prefixes.longest_prefix, causal=False,
    )  # fmt: skip
    if own.can_run(q, k) and back.can_run(q, k):
        return as_narrow(_SharedPrefixFlash.apply(q, k, v, sinks, own, back, prefixes), value).unsqueeze(0)
    return _shared_prefix_loop(query, key, value, bounds, prefixes, scale, dropout, softcap, sinks)


@torch.compiler.disable
def sink_flash(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, call: FlashCall) -> Tensor:
    """(tokens, heads, dim) -> same: segments apart, with a sink (heads,)."""
    return _SinkFlash.apply(q, k, v, sinks, call)


class _SinkFlash(torch.autograd.Function):
    """One flash call and a sink."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, call: FlashCall) -> Tensor:
        out, sums, seed = call.forward(q, k, v)
        out, sums = with_sinks(out, sums, sinks)
        ctx.save_for_backward(q, k, v, sinks, out, sums, *seed)
        ctx.call = call
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, sums, *seed = ctx.saved_tensors
        grad_out = grad_out.contiguous()
        gradients = ctx.call.backward(grad_out, q, k, v, out, sums, tuple(seed))
        return *gradients, sink_gradient(grad_out, out, sums, sinks), None


def with_sinks(out: Tensor, sums: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """(tokens, heads, dim) and log-sum-exps (heads, tokens) with a further score for each head, in new tensors."""
    scores = sinks.to(sums.dtype)[:, None]
    share = (sums - scores).sigmoid().T.unsqueeze(-1)
    return (out * share).to(out.dtype), torch.logaddexp(sums, scores)


def sink_gradient(grad_out: Tensor, out: Tensor, sums: Tensor, sinks: Tensor) -> Tensor:
    inner = (grad_out.to(sums.dtype) * out.to(sums.dtype)).sum(-1).T  # (heads, tokens)
    return -((sinks.to(sums.dtype)[:, None] - sums).exp() * inner).sum(1).to(sinks.dtype)


class _SharedPrefixFlash(torch.autograd.Function):
    """Two flash calls, merged; see the module's docstring."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        own: FlashCall,
        back: FlashCall,
        prefixes: SharedPrefixes,
    ) -> Tensor:
        looking, seen = slice(prefixes.start, prefixes.stop), slice(0, prefixes.num_prefix_tokens)
        out, sums, own_seed = own.forward(q, k, v)
        out_back, sums_back, back_seed = back.forward(q[looking], k[seen], v[seen])
        merge = merged_parts
        if runs_triton(q):
            from posttrain.models.attention.prefix_triton import merged_parts as merge
        out, sums = merge(out, sums, out_back, sums_back, prefixes.start)
        if sinks is not None:
            out, sums = with_sinks(out, sums, sinks)
        ctx.save_for_backward(q, k, v, sinks, out, sums, *own_seed, *back_seed)
        ctx.calls, ctx.parts, ctx.seeds = (own, back), (looking, seen), len(own_seed)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, sums, *seeds = ctx.saved_tensors
        (own, back), (looking, seen) = ctx.calls, ctx.parts
        own_seed, back_seed = tuple(seeds[: ctx.seeds]), tuple(seeds[ctx.seeds :])
        grad_out = grad_out.contiguous()
        grad_q, grad_k, grad_v = own.backward(grad_out, q, k, v, out, sums, own_seed)
        sums_back = sums[:, looking].contiguous()
        of_back = back.backward(grad_out[looking], q[looking], k[seen], v[seen], out[looking], sums_back, back_seed)
        for gradient, part, further in zip((grad_q, grad_k, grad_v), (looking, seen, seen), of_back, strict=True):
            gradient[part] += further
        grad_sinks = None if sinks is None else sink_gradient(grad_out, out, sums, sinks)
        return grad_q, grad_k, grad_v, grad_sinks, None, None, None


def merged_parts(own: Tensor, own_sums: Tensor, back: Tensor, back_sums: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """(out, log-sum-exps) of all tokens in new tensors: selective checkpointing keeps what the flash kernel returned.

    `own` is (tokens, heads, dim) and its sums (heads, tokens) in float32; `back`, of what lies at `start` and behind, likewise.
    """
    looking = slice(start, start + len(back))
    out, sums = own.clone(), own_sums.clone()
    # exp(La - L) = sigmoid(La - Lb), without rounding L first
    further = (own_sums[:, looking] - back_sums).T.unsqueeze(-1)
    own_share, back_share = further.sigmoid(), (-further).sigmoid()
    sums[:, looking] = torch.logaddexp(own_sums[:, looking], back_sums)
    out[looking] = (own[looking] * own_share + back * back_share).to(own.dtype)
    return out, sums


def _shared_prefix_loop(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    prefixes: SharedPrefixes,
    scale: float,
    dropout: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """The same with one call per segment; a continuation's keys are its prefix's and its own."""
    parts, segments = [], segments_with_prefixes(bounds, prefixes)
    # One split, whose backward is one `cat`: that of a slice fills the whole row with zeros, for every segment.
    lengths = [stop - start for start, stop, _ in segments]
    queries, keys, values = (x.split(lengths, dim=2) for x in (query, key, value))
    for place, (start, stop, prefix) in enumerate(segments):
        k, v, mask = keys[place], values[place], None
        if prefix is not None:
            k, v = (torch.cat([x[prefix], x[place]], dim=2) for x in (keys, values))
            mask = torch.ones(stop - start, k.shape[2], dtype=torch.bool, device=key.device)
            mask = mask.tril(k.shape[2] - (stop - start))
        part = attention(queries[place], k, v, mask, scale, dropout, softcap, sinks)
        parts.append(part.transpose(1, 2))
    return torch.cat(parts, dim=1)


def segments_with_prefixes(bounds: Tensor, prefixes: SharedPrefixes) -> list[tuple[int, int, int | None]]:
    """(start, stop, the prefix it continues or None) of every segment; the first segments are the prefixes."""
    group_ends = [prefixes.start + edge for edge in prefixes.cu_continuations.tolist()[1:]]
    found, group = [], 0
    for start, stop in itertools.pairwise(bounds.tolist()):
        if not prefixes.start <= start < prefixes.stop:
            found.append((start, stop, None))
            continue
        while start >= group_ends[group]:
            group += 1
        found.append((start, stop, group))
    return found
