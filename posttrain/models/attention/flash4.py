"""FlashAttention 4, where it is installed (`pip install 'posttrain[flash4]'`): made for Hopper and Blackwell, and faster there than
torch's varlen kernel.

Its two functions have the arguments and results of torch's kernel, ragged and with the log-sum-exp of each query's scores. They are
operators here, so that selective checkpointing keeps the result of the forward and compiled layers contain it. A variant (shape of
heads, causal or not, with a window, soft-capped) is used after its answers and gradients have been compared with the formula's on
this device. The plain causal variant of those heads is timed against torch's kernel, and all but soft-capped ones, which torch's
does not know, are used from the length of segments on at which it was faster.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from posttrain.models.attention.softmax import attention
from posttrain.models.attention.trial import NEAR, WORTH_IT, alone_in_a_thread, apart, heads_of, tried

logger = logging.getLogger(__name__)

PACKAGE, MODULE = "flash-attn-4", "flash_attn.cute.interface"
LENGTHS = (256, 1024, 4096)  # of segments, that it is measured at
TOKENS = 16_384  # in a row of them
NEVER = 1 << 62
PROBE_LENGTHS = (200, 77, 4096)  # the last in many tiles
PROBE_WINDOW = 50
PROBE_SPREAD = 1 / 8
"""Standard deviation of the scores on which a soft-cap is tried, as a share of the cap: scores around 1 do not feel one of 50."""


class Variant(NamedTuple):
    """What a kernel is compiled for."""

    heads: int
    key_heads: int
    width: int
    dtype: torch.dtype
    causal: bool = True
    windowed: bool = False
    softcap: float = 0.0


def _is_installed() -> bool:
    try:  # not by an import: it takes seconds, and what it imports may be absent on a CPU
        importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


is_installed = _is_installed()


# ---- its functions as operators ----------------------------------------------------------------------------------------


def _kernels() -> Any:
    """Its module, which keeps what it compiles (5 to 15 s a variant) for later processes, in a folder that only the user writes to:
    by itself it would compile in each process, and its own folder is in /tmp, where code of others could lie."""
    folder = Path.home() / ".cache" / "posttrain" / "flash4"
    with contextlib.suppress(OSError):  # a home that cannot be written to: each process compiles
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
        os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(folder))
    return importlib.import_module(MODULE)


def _arguments(
    bounds: Tensor, key_bounds: Tensor, longest: int, longest_keys: int,
    scale: float, causal: bool, left: int, right: int, softcap: float,
) -> dict[str, Any]:  # fmt: skip
    return {
        "cu_seqlens_q": bounds, "cu_seqlens_k": key_bounds, "max_seqlen_q": longest, "max_seqlen_k": longest_keys,
        "softmax_scale": scale, "causal": causal, "softcap": softcap,
        "window_size_left": None if left < 0 else left, "window_size_right": None if right < 0 else right,
    }  # fmt: skip


def _forward(q: Tensor, k: Tensor, v: Tensor, *how: Any) -> tuple[Tensor, Tensor]:
    # As they mostly are. It copies some other layouts and keeps the rest, and its results are laid out like what it made of them.
    q, k, v = (x.contiguous() for x in (q, k, v))
    return _kernels()._flash_attn_fwd(q, k, v, **_arguments(*how), return_lse=True)[:2]


def _backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, *how: Any
) -> tuple[Tensor, Tensor, Tensor]:
    given = (x.contiguous() for x in (q, k, v, out, grad_out, sums))
    return tuple(_kernels()._flash_attn_bwd(*given, **_arguments(*how))[:3])


_HOW = (
    "Tensor bounds, Tensor key_bounds, SymInt longest, SymInt longest_keys, "
    "float scale, bool causal, int left, int right, float softcap"
)
_library = torch.library.Library("posttrain", "FRAGMENT")
_library.define(f"flash4(Tensor q, Tensor k, Tensor v, {_HOW}) -> (Tensor, Tensor)")
_library.define(
    f"flash4_backward(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor sums, {_HOW}) -> (Tensor, Tensor, Tensor)"
)
_library.impl("flash4", _forward, "CompositeExplicitAutograd")
_library.impl("flash4_backward", _backward, "CompositeExplicitAutograd")
FLASH4 = torch.ops.posttrain.flash4.default
FLASH4_BACKWARD = torch.ops.posttrain.flash4_backward.default


@torch.library.register_fake("posttrain::flash4", lib=_library)
def _shapes(q: Tensor, k: Tensor, v: Tensor, *how: Any) -> tuple[Tensor, Tensor]:
    sums = q.new_empty(q.shape[1], q.shape[0], dtype=torch.promote_types(q.dtype, torch.float32))
    return q.new_empty(*q.shape[:-1], v.shape[-1]), sums


@torch.library.register_fake("posttrain::flash4_backward", lib=_library)
def _shapes_of_gradients(grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *how: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, bounds, key_bounds, *ctx.how = inputs
    ctx.save_for_backward(q, k, v, *output, bounds, key_bounds)


def _gradients(ctx: Any, grad_out: Tensor, grad_sums: Tensor) -> tuple[Tensor | None, ...]:
    return *FLASH4_BACKWARD(grad_out, *ctx.saved_tensors, *ctx.how), *(None,) * 9


torch.library.register_autograd("posttrain::flash4", _gradients, setup_context=_keep, lib=_library)


# ---- where it is used --------------------------------------------------------------------------------------------------

_least: dict[Variant, int] = {}
"""Tokens of the longest segment of a row from which on a variant is used."""


def pays(variant: Variant, longest: int, device: torch.device) -> bool:
    """Whether a call is computed by it. What must be deterministic stays with torch's kernel.

    Compiled code knows only what was decided before (`decide`).
    """
    if not is_installed or torch.are_deterministic_algorithms_enabled():
        return False
    if variant not in _least and not torch.compiler.is_compiling():
        decide(variant, device)
    return longest >= _least.get(variant, NEVER)


@dataclass(frozen=True)
class Decision:
    """About a variant on a device."""

    gains: dict[int, float]  # length of segments: times as fast as torch's kernel
    problem: str | None = None  # why it cannot be used at all
    is_capped: bool = False  # torch's kernel cannot: it is this one, or a loop

    @property
    def least(self) -> int:
        """The length from which on it is used."""
        found = 0 if self.is_capped and self.problem is None else NEVER
        for length, gain in sorted(self.gains.items(), reverse=True):
            if gain < WORTH_IT:
                break
            found = length
        return found

    def __str__(self) -> str:
        if self.problem is not None:
            return f"FlashAttention 4 is installed and not used: it {self.problem}."
        if self.is_capped:
            return "Rows with soft-capped scores attend by FlashAttention 4."
        times = ", ".join(f"{gain:.2f} times at {length:,}" for length, gain in self.gains.items())
        measured = f"it is {times} as fast as torch's kernel."
        if self.least == NEVER:
            return f"FlashAttention 4 is installed and not used: {measured}"
        return f"Rows attend by FlashAttention 4 from {self.least:,} tokens a segment on: {measured}"


def decide(variant: Variant, device: torch.device) -> Decision:
    """Try a variant once in a process, so that later calls know."""
    decision = _decision(variant, device)
    _least[variant] = decision.least
    return decision


@functools.cache
def _decision(variant: Variant, device: torch.device) -> Decision:
    try:
        with torch.random.fork_rng([device] * (device.type == "cuda")):
            problem, usual = alone_in_a_thread(lambda: _why_wrong(variant, device), device), Variant(*variant[:4])
            if problem is not None or variant.softcap:
                return Decision({}, problem, is_capped=bool(variant.softcap))
            if variant != usual:
                return _decision(usual, device)
            return Decision(alone_in_a_thread(lambda: _gains(variant, device), device))
    except Exception as error:  # kernels compiled at run time may fail in any way of their own; torch's runs
        logger.info(f"FlashAttention 4 failed for {variant}.", exc_info=True)  # the sentence is a note of the run
        return Decision({}, f"could not be run ({type(error).__name__}: {str(error).partition(chr(10))[0]})")


def _bounds(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)


def _by_flash4(given: list[Tensor], bounds: Tensor, longest: int, variant: Variant) -> Tensor:
    """(1, heads, tokens, width) -> (tokens, heads, width)."""
    q, k, v = (x[0].transpose(0, 1) for x in given)
    left, right = (PROBE_WINDOW - 1, 0) if variant.windowed else (-1, -1)
    how = (variant.width**-0.5, variant.causal, left, right, variant.softcap)
    return FLASH4(q, k, v, bounds, bounds, longest, longest, *how)[0]


def _why_wrong(variant: Variant, device: torch.device) -> str | None:
    """None when answers and gradients of a ragged row are those of the formula."""
    counts = (variant.heads, variant.key_heads, variant.key_heads)
    given = heads_of(sum(PROBE_LENGTHS), counts, variant.width, variant.dtype, device)
    given[0] = (max(1.0, variant.softcap * PROBE_SPREAD) * given[0].detach()).requires_grad_()
    bounds = _bounds(PROBE_LENGTHS, device)
    exact = [x.detach().float().requires_grad_() for x in given]
    _, wanted = tried(lambda: _by_formula(exact, variant), exact, 0)
    _, found = tried(lambda: _by_flash4(given, bounds, max(PROBE_LENGTHS), variant), given, 0)
    distance = apart(wanted, found)
    return None if distance < NEAR else f"answers otherwise than the formula, by {distance:.2g} of the norm"


def _by_formula(given: list[Tensor], variant: Variant) -> Tensor:
    """(1, heads, tokens, width) -> (tokens, heads, width)."""
    q, k, v = (x.split(PROBE_LENGTHS, dim=2) for x in given)
    return torch.cat([_head_by_head(*heads, variant) for heads in zip(q, k, v)])


def _head_by_head(q: Tensor, k: Tensor, v: Tensor, variant: Variant) -> Tensor:
    """Scores of one head at a time, backward too: those of all take gigabytes."""
    places = torch.arange(q.shape[2], device=q.device)
    distance = places[:, None] - places
    seen = distance >= (0 if variant.causal or variant.windowed else -len(places))
    seen &= distance < (PROBE_WINDOW if variant.windowed else len(places))
    k, v = (x.repeat_interleave(variant.heads // variant.key_heads, dim=1).split(1, dim=1) for x in (k, v))
    how = (seen, None, 0.0, variant.softcap or None)
    found = [checkpoint(attention, *heads, *how, use_reentrant=False) for heads in zip(q.split(1, dim=1), k, v)]
    return torch.cat(found, dim=1)[0].transpose(0, 1)


def _gains(variant: Variant, device: torch.device) -> dict[int, float]:
    """Of the usual variant, over torch's kernel."""
    counts = (variant.heads, variant.key_heads, variant.key_heads)
    given, gains = heads_of(TOKENS, counts, variant.width, variant.dtype, device), {}
    for length in LENGTHS:
        bounds = _bounds((length,) * (TOKENS // length), device)

        def by_torch(bounds: Tensor = bounds, length: int = length) -> Tensor:
            q, k, v = (x[0].transpose(0, 1) for x in given)
            return torch.ops.aten._flash_attention_forward(q, k, v, bounds, bounds, length, length, 0.0, True, False)[0]

        seconds = tried(by_torch, given)[0]
        mine = tried(lambda bounds=bounds, length=length: _by_flash4(given, bounds, length, variant), given)[0]
        gains[length] = seconds / mine
    return gains
