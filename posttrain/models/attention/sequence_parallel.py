"""Attention over a row whose tokens lie on several processes (Ulysses, arXiv:2309.14509), and answers put together.

Each of p processes computes a p-th of a row's tokens through the whole model. Around attention they exchange: before, each has all
heads of its tokens; after, all tokens for a p-th of the heads, so that whatever runs on whole rows runs unchanged; then back. An
exchange is a transposition over the processes and its own inverse, hence the gradient of one is another.

What is said of the trained tokens is added up over the processes, each of which has zeros for the others' tokens. Every process
then has the whole answer and computes the whole loss: the derivative of the sum of their losses is p times that of one.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from posttrain.core.batch import RowPart

_groups: dict[int, tuple[Any, Any]] = {}  # size -> (all processes, those of them that share a row with this one)


def neighbours(size: int) -> Any:
    """The group of `size` processes that share a row with this one. Collective over all processes when it is asked for first."""
    every = dist.group.WORLD
    known = _groups.get(size)
    if known is None or known[0] is not every:
        starts = range(0, dist.get_world_size(), size)
        made = [dist.new_group(range(start, start + size)) for start in starts]  # all make all of them
        _groups[size] = known = (every, made[dist.get_rank() // size])
    return known[1]


class _Exchange(torch.autograd.Function):
    """(p, ...): part number j goes to process j, and what comes from it takes its place."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor) -> Tensor:
        received = torch.empty_like(parts, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, parts.contiguous(), group=neighbours(len(parts)))
        return received

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _Exchange.apply(grad)


def repeats(heads: int, key_heads: int, size: int) -> int:
    """How often key heads are repeated so that `size` processes can have equally many, each with the query heads that read them."""
    shared_by = heads // key_heads
    return next(r for r in range(1, shared_by + 1) if shared_by % r == 0 and key_heads * r % size == 0)


@torch.compiler.disable
def to_heads(query: Tensor, key: Tensor, value: Tensor, part: RowPart) -> tuple[Tensor, ...]:
    """(1, heads, tokens / p, dim) each -> (1, heads / p, tokens, dim)."""
    times = repeats(query.shape[1], key.shape[1], part.size)
    if times > 1:
        key, value = (x.repeat_interleave(times, dim=1) for x in (key, value))
    return tuple(_tokens_of_heads(x, part.size) for x in (query, key, value))


def _tokens_of_heads(x: Tensor, size: int) -> Tensor:
    _, heads, tokens, width = x.shape
    received = _Exchange.apply(x.reshape(size, heads // size, tokens, width))
    return received.transpose(0, 1).reshape(1, heads // size, size * tokens, width)


@torch.compiler.disable
def to_tokens(x: Tensor, part: RowPart) -> Tensor:
    """(1, tokens, heads / p, dim) -> (1, tokens / p, heads, dim)."""
    _, tokens, heads, width = x.shape
    received = _Exchange.apply(x.reshape(part.size, tokens // part.size, heads, width))
    return received.transpose(0, 1).reshape(1, tokens // part.size, part.size * heads, width)


class _Summed(torch.autograd.Function):
    """The sum over the processes that share a row; see the module's docstring for its gradient."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, size: int) -> Tensor:
        ctx.size = size
        total = values.clone()
        dist.all_reduce(total, group=neighbours(size))
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.size, None


def put_together(values: Tensor, part: RowPart, count: int) -> Tensor:
    """(n, ...) about the trained tokens of this process -> (count, ...) about all of them; () -> their sum."""
    if values.dim():
        values = values.new_zeros(count, *values.shape[1:]).index_copy(0, part.asked, values)
    return _Summed.apply(values, part.size)
