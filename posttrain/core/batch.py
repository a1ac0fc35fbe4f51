"""TokenBatch: samples laid out as tensors for one forward pass, and the questions a loss may ask about them.

Everything at the level of a loss is one-dimensional and has no padding: `targets`, log-probs and per-token numbers have one
entry for each *trained* token, in the order of the samples. `counts` says how many belong to each sample. How the tokens
were laid out for the model (one ragged row, or padded rows) is the business of `models/token_scores` alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

RAGGED, PADDED, SHARED = "ragged", "padded", "shared"
"""One row without padding; a row per sample; one row in which samples of a unit that begin alike share their beginning."""


LONG = 4096
"""Tokens from which a segment is long: a call of attention by itself costs less than a faster kernel saves."""

ACTIVE = "active"
"""Scalar of a sample: 1 where it has a part in a term that only some samples have, which is divided per `sequence:active`."""


@dataclass(frozen=True)
class SharedPrefixes:
    """Where the shared beginnings of a SHARED batch lie: G groups of samples that begin with the same tokens.

    The row is [the G prefixes][samples that share nothing][the continuations, group by group][filling].
    """

    cu_prefixes: Tensor  # (G + 1,) int32 start of each prefix
    cu_continuations: Tensor  # (G + 1,) int32 start of each group's continuations, counted from `start`
    num_prefix_tokens: int  # of all prefixes together
    start: int  # where the continuations begin in the row
    stop: int  # where they end
    longest_prefix: int
    longest_continuations: int  # tokens of all continuations of one group

    def mapped(self, function: Callable[[Any], Any]) -> SharedPrefixes:
        """The same with `function` applied to its tensors."""
        return replace(self, **{f.name: function(getattr(self, f.name)) for f in fields(self)})


@dataclass(frozen=True)
class LongSegments:
    """A ragged row cut into runs: each long segment by itself, the short ones between two of them together."""

    tokens: tuple[int, ...]  # of each run
    longest: tuple[int, ...]  # the longest segment of each
    bounds: tuple[Tensor | None, ...]  # int32 start of each segment of a run; None: it is one long segment

    @classmethod
    def of(cls, lengths: Sequence[int]) -> LongSegments | None:
        """None where no segment is long."""
        if max(lengths) < LONG:
            return None
        runs = []
        for is_long, group in itertools.groupby(lengths, key=lambda length: length >= LONG):
            members = list(group)
            runs += [[length] for length in members] if is_long else [members]
        bounds = (
            None if run[0] >= LONG else torch.tensor([0, *itertools.accumulate(run)], dtype=torch.int32) for run in runs
        )
        return cls(tuple(map(sum, runs)), tuple(map(max, runs)), tuple(bounds))

    def mapped(self, function: Callable[[Any], Any]) -> LongSegments:
        return replace(self, bounds=tuple(function(bounds) for bounds in self.bounds))


@dataclass(frozen=True)
class BatchImages:
    """The images of a batch. Each distinct one is encoded once, however many samples show it."""

    # arguments of the image encoder: pixels of the distinct images, end to end, and their grids
    encoder: dict[str, Tensor]
    tiles: tuple[int, ...]  # rows of the pixels that belong to each distinct image
    # number of the distinct image at each place, in the order in which the places lie in the batch
    shown: tuple[int, ...]
    placeholders: tuple[int, ...]  # tokens at each of these places that stand for a feature of its image
    token_types: Tensor | None = None  # (rows, width) 1 where a feature of an image stands, for families that ask
    blocks: Tensor | None = None  # (rows, width) int32: tokens of a number above -1 see each other whole

    @property
    def num_features(self) -> int:
        """Of the distinct images together."""
        return sum(dict(zip(self.shown, self.placeholders)).values())

    def mapped(self, function: Callable[[Any], Any]) -> BatchImages:
        return replace(self, **{f.name: function(getattr(self, f.name)) for f in fields(self)})


@dataclass(frozen=True)
class RowPart:
    """The part of a row that this process computes, where several share the tokens of one: a run of width / size tokens each."""

    rank: int  # of this process among those that share it
    size: int  # how many do
    asked: Tensor  # (n,) which trained tokens are predicted at its positions, as indices into the N of the batch

    @classmethod
    def of(cls, batch: TokenBatch, rank: int, size: int) -> RowPart:
        width = batch.input_ids.shape[1] // size
        return cls(rank, size, (batch.positions // width == rank).nonzero().squeeze(-1))

    def run(self, width: int) -> slice:
        """Which tokens of a row of `width` they are."""
        return slice(self.rank * width // self.size, (self.rank + 1) * width // self.size)

    def mapped(self, function: Callable[[Any], Any]) -> RowPart:
        return replace(self, asked=function(self.asked))


def page_locked(tensor: Tensor) -> Tensor:
    """A copy that a GPU can fetch while the host continues."""
    made = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    copy_by_one_thread(made, tensor)
    return made


def copy_by_one_thread(target: Tensor, source: Tensor) -> None:
    """Copy host memory. torch's own copy wakes all of its threads for a megabyte, and their barrier was seen to take 15 ms a
    tensor in a training process, with the GPU waiting."""
    if source.numel():  # nothing cannot be viewed as bytes
        target.flatten().view(torch.uint8).numpy()[:] = source.contiguous().flatten().view(torch.uint8).numpy()


@dataclass
class TokenBatch:
    """One micro-batch. N trained tokens, S samples, U units (a unit is one pair, one text, one packed block)."""

    layout: str  # RAGGED, PADDED or SHARED
    input_ids: Tensor  # (rows, width)
    # (rows, width); restarts at 0 in each sample, continues after a shared prefix. With images of a family that has three axes:
    # (3, rows, width) when padded, else (4, 1, width), whose first is the plain one, from which masks are made.
    position_ids: Tensor
    positions: Tensor  # (N,) flat index, into rows*width, of the position that predicts each trained token
    targets: Tensor  # (N,) the trained tokens
    counts: Tensor  # (S,) trained tokens of each sample
    lengths: Tensor  # (S,) tokens of each sample
    ends: Tensor  # (S,) flat index of each sample's last token
    num_units: int
    roles: tuple[str, ...]  # names of the samples of a unit; one name where units hold any number of samples
    rows: tuple[int, ...]  # dataset row of each sample, for reports
    cu_segments: Tensor | None = None  # int32 start of each segment of the one row: samples; prefixes and continuations
    longest: int = 0  # tokens of the longest segment
    prefixes: SharedPrefixes | None = None  # SHARED layout, where anything is shared
    attention_mask: Tensor | None = None  # (rows, width), padded layout only
    places: Tensor | None = None  # (N,) flat index of each trained token itself; `positions` is the one before it
    per_token: dict[str, Tensor] = field(default_factory=dict)  # name -> (N,) or (N, k)
    scalars: dict[str, Tensor] = field(default_factory=dict)  # name -> (S,)
    images: BatchImages | None = None
    long: LongSegments | None = None  # of one row, where a segment is long and no beginning is shared
    num_tokens: int = 0  # real tokens, padding excluded
    num_trained: int = 0
    twin: TokenBatch | None = None  # the samples' twins, laid out likewise
    part: RowPart | None = None  # where other processes have the same batch and compute the rest of its row
    share: float = 1.0  # of the trained tokens of its micro-batch, where that is run in several passes
    left_out: tuple[str, ...] = ()  # why samples that were dealt out are not here: sentences about their images

    def to(self, device: torch.device | str, non_blocking: bool = False) -> TokenBatch:
        """The same batch on another device. Nothing is cast: log-probs and advantages stay in their own dtype."""
        return self._mapped(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> TokenBatch:
        """Called by torch's DataLoader: host tensors in page-locked memory, so that the copy to the device overlaps."""
        return self._mapped(page_locked)

    def _mapped(self, function: Callable[[Tensor], Tensor]) -> TokenBatch:
        def of(value: Any) -> Any:
            if isinstance(value, Tensor):
                return function(value)
            if isinstance(value, dict):
                return {name: of(item) for name, item in value.items()}
            if isinstance(value, TokenBatch):
                return value._mapped(function)
            return (
                value.mapped(of) if isinstance(value, SharedPrefixes | LongSegments | BatchImages | RowPart) else value
            )

        return replace(self, **{f.name: of(getattr(self, f.name)) for f in fields(self)})

    @property
    def device(self) -> torch.device:
        return self.input_ids.device

    @property
    def num_samples(self) -> int:
        return len(self.rows) if self.num_units else 0  # the lone token of an empty batch belongs to no sample

    def samples_of_tokens(self) -> Tensor:
        """(1, width) float32, of a batch that is one row: how many samples have each token; 0 for filling, and 1 for the lone token
        of an empty batch."""
        width = self.input_ids.shape[1]
        found = torch.ones(1, width, device=self.device)
        if self.prefixes is None:
            found[:, self.num_tokens or width :] = 0
            return found
        shared = self.prefixes
        ends = torch.searchsorted(self.cu_segments, shared.start + shared.cu_continuations)
        found[:, shared.stop :] = 0
        found[:, : shared.num_prefix_tokens] = torch.repeat_interleave(
            ends.diff().float(), shared.cu_prefixes.diff(), output_size=shared.num_prefix_tokens
        )
        return found

    def sequence_sum(self, values: Tensor) -> Tensor:
        """(N,) numbers about trained tokens -> (S,) their sum in each sample; 0 for a sample without any."""
        return segment_sum(values, self.counts)

    def sequence_mean(self, values: Tensor) -> Tensor:
        """(N,) -> (S,) mean over the trained tokens of each sample; 0 for a sample without any."""
        return self.sequence_sum(values) / self.counts.clamp(min=1)

    def expand(self, values: Tensor) -> Tensor:
        """(S,) -> (N,): each trained token gets the number of its sample."""
        return torch.repeat_interleave(values, self.counts, output_size=self.num_trained)

    def role(self, values: Tensor, name: str) -> Tensor:
        """(S, ...) numbers about samples -> (U, ...) those of the samples that play `name` in their unit."""
        real = values[: self.num_units * len(self.roles)]
        return real.view(self.num_units, len(self.roles), *values.shape[1:])[:, self.roles.index(name)]

    def role_tokens(self, values: Tensor, name: str) -> Tensor:
        """(N,) -> (N,): NaN at the trained tokens of samples that do not play `name`; a metric leaves NaN out.

        Picking the others would need their number on the host, and make it wait for the device.
        """
        plays = torch.arange(len(self.rows), device=values.device) % len(self.roles) == self.roles.index(name)
        return values.masked_fill(~self.expand(plays), float("nan"))

    def totals(self) -> StepTotals:
        """What this micro-batch adds to the denominators of its optimizer step."""
        counts: dict[str, float | Tensor] = {"token": self.num_trained, "sequence": self.num_samples}
        counts |= {"unit": self.num_units, "batch": self.share}
        if len(self.roles) > 1:
            for name in self.roles:
                counts[f"token:{name}"] = int(self.role(self.counts, name).sum())
        else:  # also where a process has none: all add up the same counts
            counts[f"sequence:{ACTIVE}"] = float(self.scalars[ACTIVE].sum()) if ACTIVE in self.scalars else 0.0
        return StepTotals(counts)


@dataclass
class Passes:
    """A micro-batch with more tokens than one forward pass may hold: it is run part by part, with one gradient."""

    parts: list[TokenBatch]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Passes:
        return Passes([part.to(device, non_blocking) for part in self.parts])

    def pin_memory(self) -> Passes:
        return Passes([part.pin_memory() for part in self.parts])

    @property
    def num_tokens(self) -> int:
        return sum(part.num_tokens for part in self.parts)


def passes_of(batch: TokenBatch | Passes) -> list[TokenBatch]:
    """The forward passes that a micro-batch is made of."""
    return batch.parts if isinstance(batch, Passes) else [batch]


def segment_sum(values: Tensor, counts: Tensor) -> Tensor:
    """Sums of consecutive runs of `values`, `counts[i]` long. Same result order on every device, differentiable."""
    if len(counts) == 0:
        return values[:0]
    return torch.segment_reduce(values, "sum", lengths=counts, unsafe=True, initial=0.0)


@dataclass
class StepTotals:
    """Denominators of one optimizer step: how many tokens, sequences, units and micro-batches it holds, over all ranks.

    `token:NAME` counts the trained tokens of one role only. Counted on the host, added up over the step's micro-batches
    and (by the trainer) over the processes, so that the loss does not depend on how the rows were laid out.
    """

    counts: dict[str, float | Tensor]

    def __add__(self, other: StepTotals) -> StepTotals:
        names = dict.fromkeys([*self.counts, *other.counts])
        return StepTotals({name: self.counts.get(name, 0) + other.counts.get(name, 0) for name in names})

    def denominator(self, per: str) -> float | Tensor:
        """The count a term is divided by, at least 1: a step without a trained token has loss 0, not 0 / 0."""
        if per not in self.counts:
            raise KeyError(f"A loss wants to be divided per {per!r}; this step counts {', '.join(self.counts)}.")
        total = self.counts[per]
        return total.clamp(min=1) if isinstance(total, Tensor) else max(total, 1)

    @classmethod
    def of(cls, batches: list[TokenBatch]) -> StepTotals:
        total = batches[0].totals()
        for batch in batches[1:]:
            total = total + batch.totals()
        return total
