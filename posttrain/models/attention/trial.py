"""Attention tried on the device at hand: how long a forward and a backward pass take, and what they give."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

REPEATS = 6  # the first of them may still be slow
NEAR = 0.02  # of the norm: four roundings to bfloat16
WORTH_IT = 1.15  # times as fast as what runs everywhere

Found = TypeVar("Found")


def heads_of(tokens: int, counts: Sequence[int], width: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """(1, heads, tokens, width) for each of the counts, laid out as by a layer's projections."""
    made = (torch.randn(1, tokens, count, width, dtype=dtype, device=device) for count in counts)
    return [x.transpose(1, 2).requires_grad_() for x in made]


def tried(attend: Callable[[], Tensor], given: Sequence[Tensor], repeats: int = REPEATS) -> tuple[float, list[Tensor]]:
    """Seconds of a forward and a backward pass, the fewest of `repeats`; and the result and its gradients, in float32."""
    output = attend()
    flows = flows_of(output)
    found = [output, *torch.autograd.grad(output, given, flows)]
    seconds = []
    for _ in range(repeats):
        _wait_for(output.device)
        began = time.perf_counter()
        torch.autograd.grad(attend(), given, flows)
        _wait_for(output.device)
        seconds.append(time.perf_counter() - began)
    return min(seconds, default=0.0), [x.detach().float() for x in found]


def flows_of(output: Tensor) -> Tensor:
    """What flows back into it, the same small integers on every call.

    Drawn, since those of a pattern may cancel: -3 to 3 in turn did in the values of seven heads to a key. What was left was the
    rounding of kernels that add up heads in bfloat16, 5 % of the norm, and told nothing about others.
    """
    draw = torch.Generator(output.device).manual_seed(0)
    return torch.randint(-3, 4, output.shape, generator=draw, device=output.device).to(output.dtype)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def alone_in_a_thread(function: Callable[[], Found], device: torch.device) -> Found:
    """What it returns, without the caller's autograd mode, hooks and modes of dispatch, all of which are its thread's: a trial may
    begin in the middle of a forward pass, and checkpointing would take its tensors for those of the layer."""

    def run() -> Found:
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            return function()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(run).result()


def apart(ones: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """The largest distance, as a share of the norm."""
    return max(float((one - other).norm() / one.norm()) for one, other in zip(ones, others, strict=True))
