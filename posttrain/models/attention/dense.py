"""Long segments, each by itself, through torch's dense attention: cuDNN's kernel is faster there than the varlen one, and takes
dense batches only.

Under a causal mask nothing that follows a token changes it. So a segment is filled up with zeros to the next of sixteen lengths
in each octave, which keeps few shapes (cuDNN makes a plan for each), and what belongs to the filling is cut off. Short segments
between two long ones attend together by the varlen kernel: a call for each would cost more than its kernel saves.

Whether it is faster is measured once for each shape of heads, on the device at hand; see `dense_gain`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

from posttrain.core.batch import LONG, LongSegments
from posttrain.models.attention.trial import NEAR, WORTH_IT, alone_in_a_thread, apart, heads_of, tried

Segments = Callable[[Tensor, Tensor, Tensor, Tensor, int, float | None], Tensor]
"""(1, heads, tokens, width) of queries, keys and values, bounds, tokens of the longest, scale -> (1, tokens, heads, width)."""
SHAPES_OF_AN_OCTAVE = 16
BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""In this order: a shape that cuDNN refuses is computed by the next."""
WIDTHS = range(64, 129, 8)
"""Of heads, that cuDNN's kernel is asked for; it ended the process with a segmentation fault at 16, on an H200."""


@dataclass(frozen=True)
class Gain:
    """Of dense attention over varlen attention, for one shape of heads."""

    times: float
    problem: str | None = None  # why it cannot be used at all

    @property
    def is_worth_it(self) -> bool:
        return self.problem is None and self.times >= WORTH_IT

    def __str__(self) -> str:
        if self.is_worth_it:
            return f"Segments from {LONG:,} tokens attend by cuDNN, {self.times:.2f} times as fast as by the varlen kernel."
        reason = self.problem or f"is {self.times:.2f} times as fast"
        return f"Long segments attend by the varlen kernel, like short ones: dense attention {reason}."


@torch.compiler.disable  # a compiled layer is split around it: its arguments are different numbers in every batch
def long_segment_attention(
    query: Tensor, key: Tensor, value: Tensor, long: LongSegments, scale: float | None, short: Segments
) -> Tensor:
    """(1, heads, tokens, width) -> (1, tokens, heads, width): each segment attends causally to itself."""
    heads = (x.split(long.tokens, dim=2) for x in (query, key, value))  # its backward is one `cat`
    parts = [
        alone(q, k, v, scale) if bounds is None else short(q, k, v, bounds, longest, scale)
        for q, k, v, bounds, longest in zip(*heads, long.bounds, long.longest)
    ]
    return torch.cat(parts, dim=1)


def alone(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """One segment."""
    tokens = query.shape[2]
    filling = (0, 0, 0, filled(tokens) - tokens)
    query, key, value = (pad(x, filling) if filling[-1] else x for x in (query, key, value))
    how = {"is_causal": True, "scale": scale, "enable_gqa": query.shape[1] != key.shape[1]}
    with sdpa_kernel(BACKENDS, set_priority=True):
        output = scaled_dot_product_attention(query, key, value, **how)
    return output[:, :, :tokens].transpose(1, 2).contiguous()  # some families view it


def filled(tokens: int) -> int:
    """The next length that has a shape: a multiple of a sixteenth of the power of two below."""
    step = max((1 << tokens.bit_length() - 1) // SHAPES_OF_AN_OCTAVE, 1)
    return -(-tokens // step) * step


# ---- which is faster ---------------------------------------------------------------------------------------------------


@functools.cache
def dense_gain(
    heads: int, key_heads: int, width: int, dtype: torch.dtype, device: torch.device, short: Segments
) -> Gain:
    """How many times as fast as `short` one segment attends by itself, forward and backward; measured once in a process."""
    if width not in WIDTHS:
        return Gain(0, f"is not asked for heads of {width}")
    try:
        with torch.random.fork_rng([device]):
            return alone_in_a_thread(lambda: _measured(heads, key_heads, width, dtype, device, short), device)
    except Exception as error:  # a driver may refuse in any way of its own; the varlen kernel runs
        return Gain(0, f"could not be run ({type(error).__name__}: {error})")


def _measured(
    heads: int, key_heads: int, width: int, dtype: torch.dtype, device: torch.device, short: Segments
) -> Gain:
    bounds = torch.tensor([0, LONG], dtype=torch.int32, device=device)
    given = heads_of(LONG, (heads, key_heads, key_heads), width, dtype, device)
    seconds, wanted = tried(lambda: short(*given, bounds, LONG, None), given)
    own_seconds, found = tried(lambda: alone(*given, None), given)
    distance = apart(wanted, found)
    if not distance < NEAR:
        return Gain(0, f"answers otherwise, by {distance:.2g} of the norm")
    return Gain(seconds / own_seconds)
