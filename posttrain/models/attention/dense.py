"""Long segments one after the other through a kernel for dense batches, where that is faster than the one for ragged rows.

torch's varlen flash kernel is of the generation before Hopper; cuDNN's, which is not, knows dense batches only. Both are timed when
a model is loaded. A call and its copies cost about as much as it saves for 3,000 tokens. A segment is filled up to one of 16
lengths in each power of two, since cuDNN builds a plan for every shape: under a causal mask, tokens behind a segment change
nothing in it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

WORTH_A_CALL = 3072
"""Tokens that the segments of a row have on average, from which each gets a call of its own."""
STEPS = 16
SHORTEST_STEP = 64
PROBED, PROBED_SEGMENTS = 8192, (700, 1300)
FASTER = 1.15
"""A kernel that is not faster by so much is not worth a second way to compute the same."""
REPEATS = 3
TOLERANCE = 0.02
"""Largest difference of outputs and gradients in 16 bits, relative to the largest value."""

_chosen: set[tuple[int, int, int, torch.dtype]] = set()


def shape_of(query: Tensor, key: Tensor) -> tuple[int, int, int, torch.dtype]:
    """By which it was measured: heads of queries, heads of keys, width, dtype."""
    return query.shape[1], key.shape[1], query.shape[-1], query.dtype


def is_chosen(query: Tensor, key: Tensor, value: Tensor) -> bool:
    return value.shape[-1] == query.shape[-1] and shape_of(query, key) in _chosen


def forget() -> None:
    """All shapes attend by flash again."""
    _chosen.clear()


def long_segments(lengths: tuple[int, ...]) -> Tensor | None:
    """Lengths of segments, on the host, where they are long enough on average; a tensor, for which nothing is compiled anew."""
    if not _chosen or not lengths or torch.are_deterministic_algorithms_enabled():
        return None
    return torch.tensor(lengths) if sum(lengths) >= WORTH_A_CALL * len(lengths) else None


def filled_length(length: int) -> int:
    step = max((1 << (length.bit_length() - 1)) // STEPS, SHORTEST_STEP)
    return -(-length // step) * step


def cudnn(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """Causal; (1, heads, tokens, width). The operation by its name: `sdpa_kernel` would choose for all threads of the process."""
    given = (query, key, value, None, True, 0.0, True, False)
    return torch.ops.aten._scaled_dot_product_cudnn_attention(*given, scale=scale)[0]


@torch.compiler.disable  # a compiled layer is split around it: rows have other lengths in every batch
def attend(query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, scale: float | None) -> Tensor:
    """(1, heads, tokens, width) -> (1, tokens, heads, width), each segment causally to itself."""
    sizes = lengths.tolist()
    parts = []
    for q, k, v in zip(*(x.split(sizes, dim=2) for x in (query, key, value))):
        length = q.shape[2]
        missing = filled_length(length) - length
        whole = (nn.functional.pad(x, (0, 0, 0, missing)) if missing else x for x in (q, k, v))
        parts.append(cudnn(*whole, scale)[:, :, :length].transpose(1, 2))
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, dim=1)


def choose(
    heads: int, key_heads: int, width: int, dtype: torch.dtype, device: torch.device, flash: Callable[..., Tensor]
) -> str | None:
    """Measure both ways, and take the dense one for this shape from now on where it is faster and agrees with `flash`, which is
    `segment_attention`. Returns the sentence about it; None: it stays with flash."""
    shape = (heads, key_heads, width, dtype)
    _chosen.discard(shape)
    try:
        differs = _largest_difference(shape, device, flash)
        if differs > TOLERANCE:
            return None
        ways = (flash, lambda q, k, v, lengths: attend(q, k, v, lengths, None))
        before, after = (_milliseconds(way, shape, device) for way in ways)
    except RuntimeError:  # cuDNN has no plan for this shape, or the device none of its kernels
        return None
    if before < FASTER * after:
        return None
    _chosen.add(shape)
    return (
        f"Segments of {WORTH_A_CALL:,} tokens and more on average attend by cuDNN (one of {PROBED:,}, forward and backward: "
        f"{after:.2f} ms, flash {before:.2f} ms)."
    )


def _drawn(shape: tuple[int, int, int, torch.dtype], tokens: int, device: torch.device) -> list[Tensor]:
    """Queries, keys, values, and what flows back, as they lie in memory in a model."""
    heads, key_heads, width, dtype = shape
    generator = torch.Generator(device).manual_seed(0)
    drawn = (
        torch.randn(1, tokens, count, width, generator=generator, device=device, dtype=dtype)
        for count in (heads, key_heads, key_heads, heads)
    )
    query, key, value, flows = drawn
    return [*(x.transpose(1, 2).requires_grad_() for x in (query, key, value)), flows]


def _largest_difference(
    shape: tuple[int, int, int, torch.dtype], device: torch.device, flash: Callable[..., Tensor]
) -> float:
    lengths, answers = torch.tensor(PROBED_SEGMENTS), []
    for way in (flash, lambda q, k, v, sizes: attend(q, k, v, sizes, None)):
        *inputs, flows = _drawn(shape, sum(PROBED_SEGMENTS), device)
        output = way(*inputs, lengths)
        answers.append([output, *torch.autograd.grad(output, inputs, flows)])
    apart = [((one - other).abs().max() / one.abs().max()).item() for one, other in zip(*answers)]
    return max(apart)


def _milliseconds(way: Callable[..., Tensor], shape: tuple[int, int, int, torch.dtype], device: torch.device) -> float:
    *inputs, flows = _drawn(shape, PROBED, device)
    lengths, durations = torch.tensor([PROBED]), []
    for _ in range(REPEATS + 1):  # one to warm up: plans are built
        torch.cuda.synchronize()
        began = time.perf_counter()
        torch.autograd.grad(way(*inputs, lengths), inputs, flows)
        torch.cuda.synchronize()
        durations.append(1000 * (time.perf_counter() - began))
    return statistics.median(durations[1:])
