"""Which kernel attends to ragged rows: torch's, or that of an installed package (`flash_packages`).

A variant (shape of heads, causal or not, with a window, soft-capped) of a package is used after its answers and gradients have been
compared with the formula's on this device. The plain causal variant of those heads is timed against torch's kernel at three lengths
of segments: from each of them on to the next the fastest serves. Soft-capped scores, which torch's kernel does not know, are
computed by the first package that is right.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from posttrain.models.attention.flash_packages import PACKAGES, Package
from posttrain.models.attention.softmax import attention
from posttrain.models.attention.trial import NEAR, WORTH_IT, alone_in_a_thread, apart, heads_of, tried

logger = logging.getLogger(__name__)

LENGTHS = (256, 1024, 4096)  # of segments, that packages are measured at
TOKENS = 16_384  # in a row of them
PROBE_LENGTHS = (200, 77, 4096)  # the last in many tiles
PROBE_WINDOW = 50
PROBE_SPREAD = 1 / 8
"""Standard deviation of the scores on which a soft-cap is tried, as a share of the cap: scores around 1 do not feel one of 50."""
TORCHS = "torch's kernel"
INSTALLED = tuple(package for package in PACKAGES if package.is_installed())


class Variant(NamedTuple):
    """What a kernel is compiled for."""

    heads: int
    key_heads: int
    width: int
    dtype: torch.dtype
    causal: bool = True
    windowed: bool = False
    softcap: float = 0.0


_chosen: dict[Variant, tuple[tuple[int, Package | None], ...]] = {}
"""Tokens of the longest segment of a row, and what serves from there on."""


def chosen(variant: Variant, longest: int, device: torch.device) -> Package | None:
    """None: torch's kernel, with which what must be deterministic stays.

    Compiled code knows only what was decided before (`decide`).
    """
    if not INSTALLED or torch.are_deterministic_algorithms_enabled():
        return None
    if variant not in _chosen and not torch.compiler.is_compiling():
        decide(variant, device)
    return served(variant, longest)


def served(variant: Variant, longest: int) -> Package | None:
    """What was chosen."""
    found = None
    for least, package in _chosen.get(variant, ()):
        if longest >= least:
            found = package
    return found


@dataclass(frozen=True)
class Decision:
    """About a variant on a device."""

    gains: dict[Package, dict[int, float]] = field(default_factory=dict)
    """Of packages that are right: length of segments -> times as fast as torch's kernel."""
    problems: dict[Package, str] = field(default_factory=dict)
    """Why the others cannot be used at all."""
    is_capped: bool = False  # torch's kernel cannot: the first that is right serves, or a loop

    @property
    def steps(self) -> tuple[tuple[int, Package | None], ...]:
        """The lengths at which the choice changes."""
        if self.is_capped:
            return tuple((0, package) for package in self.gains)[:1]
        steps: list[tuple[int, Package | None]] = [(0, None)]
        for length in sorted({length for gains in self.gains.values() for length in gains}):
            best = max(self.gains, key=lambda package: self.gains[package].get(length, 0.0))
            serves = best if self.gains[best].get(length, 0.0) >= WORTH_IT else None
            if serves is not steps[-1][1]:
                steps.append((length, serves))
        return tuple(steps[1:])

    def __str__(self) -> str:
        """Sentences."""
        refused = [
            f"{package.name} is installed and not used: it {reason}." for package, reason in self.problems.items()
        ]
        if not self.gains:
            return " ".join(refused)
        if self.is_capped:
            return " ".join([f"Rows with soft-capped scores attend by {next(iter(self.gains)).name}.", *refused])
        names = [(least, package.name if package else TORCHS) for least, package in self.steps]
        serving = ", ".join(f"by {name} from {least:,} tokens a segment on" for least, name in names) or f"by {TORCHS}"
        times = [
            f"{package.name} is {', '.join(f'{gain:.2f} times at {length:,}' for length, gain in gains.items())}"
            for package, gains in self.gains.items()
        ]
        return " ".join([f"Rows attend {serving}: {'; '.join(times)} as fast as torch's.", *refused])


def decide(variant: Variant, device: torch.device) -> Decision:
    """Try a variant once in a process, so that later calls know."""
    decision = _decision(variant, device)
    _chosen[variant] = decision.steps
    return decision


@functools.cache
def _decision(variant: Variant, device: torch.device) -> Decision:
    found = Decision(is_capped=bool(variant.softcap))
    for package in INSTALLED:
        gains = _gains_or_reason(package, variant, device)
        kept = found.problems if isinstance(gains, str) else found.gains
        kept[package] = gains
    return found


@functools.cache
def _gains_or_reason(package: Package, variant: Variant, device: torch.device) -> dict[int, float] | str:
    usual = Variant(*variant[:4])
    try:
        with torch.random.fork_rng([device] * (device.type == "cuda")):
            problem = alone_in_a_thread(lambda: _why_wrong(package, variant, device), device)
            if problem is not None or variant.softcap:
                return problem or {}
            if variant == usual:
                return alone_in_a_thread(lambda: _gains(package, variant, device), device)
    except Exception as error:  # kernels of others may fail in any way of their own; torch's runs
        logger.info(f"{package.name} failed for {variant}.", exc_info=True)  # the sentence is a note of the run
        return f"could not be run ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
    return _gains_or_reason(package, usual, device)


def _bounds(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)


def _by(package: Package, given: list[Tensor], bounds: Tensor, longest: int, variant: Variant) -> Tensor:
    """(1, heads, tokens, width) -> (tokens, heads, width)."""
    q, k, v = (x[0].transpose(0, 1) for x in given)
    left, right = (PROBE_WINDOW - 1, 0) if variant.windowed else (-1, -1)
    how = (variant.width**-0.5, variant.causal, left, right, variant.softcap)
    return package.forward(q, k, v, bounds, bounds, longest, longest, *how)[0]


def _why_wrong(package: Package, variant: Variant, device: torch.device) -> str | None:
    """None when answers and gradients of a ragged row are those of the formula."""
    counts = (variant.heads, variant.key_heads, variant.key_heads)
    given = heads_of(sum(PROBE_LENGTHS), counts, variant.width, variant.dtype, device)
    given[0] = (max(1.0, variant.softcap * PROBE_SPREAD) * given[0].detach()).requires_grad_()
    bounds = _bounds(PROBE_LENGTHS, device)
    exact = [x.detach().float().requires_grad_() for x in given]
    _, wanted = tried(lambda: _by_formula(exact, variant), exact, 0)
    _, found = tried(lambda: _by(package, given, bounds, max(PROBE_LENGTHS), variant), given, 0)
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


def _gains(package: Package, variant: Variant, device: torch.device) -> dict[int, float]:
    """Of the usual variant, over torch's kernel."""
    counts = (variant.heads, variant.key_heads, variant.key_heads)
    given, gains = heads_of(TOKENS, counts, variant.width, variant.dtype, device), {}
    for length in LENGTHS:
        bounds = _bounds((length,) * (TOKENS // length), device)

        def by_torch(bounds: Tensor = bounds, length: int = length) -> Tensor:
            q, k, v = (x[0].transpose(0, 1) for x in given)
            return torch.ops.aten._flash_attention_forward(q, k, v, bounds, bounds, length, length, 0.0, True, False)[0]

        seconds = tried(by_torch, given)[0]
        mine = tried(lambda bounds=bounds, length=length: _by(package, given, bounds, length, variant), given)[0]
        gains[length] = seconds / mine
    return gains
