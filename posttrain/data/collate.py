"""The one collator: units of Samples -> TokenBatch. Here, and only here, numbers about tokens are shifted by one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import numpy as np
import torch

from posttrain.core.batch import (
    PADDED,
    RAGGED,
    SHARED,
    BatchImages,
    LongSegments,
    Passes,
    RowPart,
    SharedPrefixes,
    TokenBatch,
    passes_of,
)
from posttrain.core.sample import ImageSpan, Sample, Unit
from posttrain.core.vision import VisionFamily
from posttrain.data.images.limits import BadImage

T = TypeVar("T")


class Pixels(Protocol):
    """Makes the pixels of images when a batch needs them."""

    family: VisionFamily

    def load(self, images: Sequence[ImageSpan]) -> dict[str, torch.Tensor]:
        """Arguments of the model's image encoder for these images, end to end."""


@dataclass
class Collator:
    """Callable for a DataLoader; `layout` may be changed until the first batch is made.

    Units with more than `max_tokens` tokens together become several passes; the step's gradient does not depend on it. A token
    counts `graphs` times: as often as its activations are kept. With `part` = (rank, size), a row is shared by so many processes,
    and a token counts on one of them.

    Images are read here, before a step is counted: a unit that is left out because one of its images cannot be read any more is in
    no divisor of the loss, as a row that was never dealt out.
    """

    roles: tuple[str, ...]
    pad_token_id: int
    layout: str = RAGGED
    pad_to_multiple_of: int | None = None
    max_tokens: int | None = None
    pixels: Pixels | None = None  # None: samples with images are refused
    graphs: int = 1  # passes with gradient that a batch is run in before its backward
    part: tuple[int, int] | None = None
    twins: tuple[int, Pixels | None] | None = None  # padding and pixels of twins that are another model's tokens
    leaves_out_unreadable: bool = False  # else an image that cannot be read is an error

    def __call__(self, units: Sequence[Unit]) -> TokenBatch | Passes:
        try:
            return self._laid_out(units)
        except BadImage as error:
            if not self.leaves_out_unreadable:
                advice = 'Restore it, or take the row out; offline methods leave it out with `on_bad_rows="drop"`.'
                raise BadImage(error.kind, f"{error} {advice}") from error
        kept, reasons = self._readable(units)
        made = self._laid_out(kept)
        passes_of(made)[0].left_out = reasons
        return made

    def _readable(self, units: Sequence[Unit]) -> tuple[list[Unit], tuple[str, ...]]:
        """What can be read of these units, and why the rest cannot. Texts of a packed block do without each other, the sides of a
        pair do not."""
        kept: list[Unit] = []
        reasons: list[str] = []
        for unit in units:
            found = [self._unreadable(sample) for sample in unit]
            if len(self.roles) == 1:
                unit = tuple(sample for sample, reason in zip(unit, found) if reason is None)
            elif any(found):
                unit = ()
            kept += [unit] if unit else []
            reasons += [reason for reason in found if reason is not None]
        return kept, tuple(dict.fromkeys(reasons))

    def _unreadable(self, sample: Sample) -> str | None:
        """Why an image of a sample or of its twin cannot be read; None: all can."""
        shown = [(self.pixels, sample)]
        if sample.twin is not None:
            shown.append((self.pixels if self.twins is None else self.twins[1], sample.twin))
        try:
            for pixels, image in ((pixels, image) for pixels, one in shown for image in one.images):
                pixels.load([image])
        except BadImage as error:
            return str(error)
        return None

    def _laid_out(self, units: Sequence[Unit]) -> TokenBatch | Passes:
        parts = [self.one_pass(part) for part in split_by_tokens(units, self.layout, self.limit)]
        if len(parts) == 1:
            return parts[0]
        trained = sum(part.num_trained for part in parts)
        shares = [part.num_trained / trained if trained else 1 / len(parts) for part in parts]
        return Passes([replace(part, share=share) for part, share in zip(parts, shares)])

    @property
    def limit(self) -> int | None:
        """Tokens of a pass."""
        if self.max_tokens is None:
            return None
        return max(self.max_tokens // self.graphs, 1) * (1 if self.part is None else self.part[1])

    def one_pass(self, units: Sequence[Unit]) -> TokenBatch:
        multiple = self.pad_to_multiple_of
        if self.part is not None:
            multiple = math.lcm(multiple or 1, self.part[1])
        how = (self.roles, self.layout, self.pad_token_id, multiple, self.pixels)
        batch = collate(units, *how, twins=self.twins)
        return batch if self.part is None else replace(batch, part=RowPart.of(batch, *self.part))


def split_by_tokens(
    units: Sequence[T], layout: str, max_tokens: int | None, size: Callable[[T], tuple[int, int, int]] | None = None
) -> list[Sequence[T]]:
    """Runs of units, in order, that lie on at most `max_tokens` tokens each; a unit is never split.

    `size` gives (laid-out tokens, tokens of the longest sample, samples) of a unit that is not a tuple of Samples.
    """
    if max_tokens is None or not units:
        return [units]
    size = size or (lambda unit: (laid_out_tokens([unit], layout), max(map(len, unit)), len(unit)))
    parts: list[list[T]] = []
    tokens = longest = rows = 0
    for unit in units:
        of_unit = size(unit)
        tokens, longest, rows = tokens + of_unit[0], max(longest, of_unit[1]), rows + of_unit[2]
        if not parts or (rows * longest if layout == PADDED else tokens) > max_tokens:
            parts.append([])
            tokens, longest, rows = of_unit
        parts[-1].append(unit)
    return parts


def as_units(samples: list[Sample], collate: Collator) -> list[Unit]:
    """Neighbours of one group as one unit, so that their prompt is computed once; of no more tokens than a pass may hold."""
    units: list[Unit] = []
    for _, members in itertools.groupby(samples, key=lambda sample: sample.group):
        unit: Unit = ()
        for sample in members:
            larger = (*unit, sample)
            if unit and collate.limit and laid_out_tokens([larger], collate.layout) > collate.limit:
                units.append(unit)
                larger = (sample,)
            unit = larger
        units.append(unit)
    return units


def laid_out_tokens(units: Sequence[Unit], layout: str) -> int:
    """Tokens of these units that a forward pass computes, padding left out."""
    shared = sum((len(unit) - 1) * shared_prefix(unit) for unit in units) if layout == SHARED else 0
    return sum(len(sample) for unit in units for sample in unit) - shared


def collate(
    units: Sequence[Unit],
    roles: tuple[str, ...],
    layout: str = RAGGED,
    pad_token_id: int = 0,
    pad_to_multiple_of: int | None = None,
    pixels: Pixels | None = None,
    *,
    twins: tuple[int, Pixels | None] | None = None,
) -> TokenBatch:
    """Lay the samples of all units out for one forward pass. `twins`: padding and pixels of theirs, where not the same.

    Position `t` of a sample predicts its token `t + 1`, so the number that a Sample keeps at a trained token `t` lands in
    the batch at the entry whose position is `t - 1`. A process that got no row sends one token that is not trained on:
    a (1, 0) batch breaks attention kernels, and a process that skips its forward pass breaks collectives.
    """
    samples = [sample for unit in units for sample in unit] or [Sample([pad_token_id], [False])]
    lengths = np.array([len(sample) for sample in samples], dtype=np.int64)
    plan = _plan(layout, units, lengths, pad_to_multiple_of)

    # All samples end to end, prefixes repeated: what belongs to token number n of that row comes from the Samples as they are.
    starts = np.cumsum(lengths) - lengths
    tokens = np.concatenate([sample.input_ids for sample in samples])
    places = plan.places()
    ids = np.full(plan.shape, pad_token_id, dtype=np.int64)
    ids.reshape(-1)[places] = tokens
    is_predicted = np.concatenate([sample.trained for sample in samples])
    is_predicted[starts[lengths > 0]] = False  # no position lies before the first token of a sample
    predicted = np.flatnonzero(is_predicted)

    width = plan.shape[1]
    is_padded = layout == PADDED
    return TokenBatch(
        layout=layout,
        input_ids=torch.from_numpy(ids),
        position_ids=torch.from_numpy(_position_ids(samples, places, plan.shape, layout)),
        positions=torch.from_numpy(places[predicted - 1]),
        targets=torch.from_numpy(tokens[predicted].astype(np.int64)),
        counts=torch.from_numpy(np.diff(np.searchsorted(predicted, [*starts, len(tokens)]))),
        lengths=torch.from_numpy(lengths),
        ends=torch.from_numpy(places[starts + lengths - 1]),
        num_units=len(units),
        roles=roles,
        rows=tuple(sample.row for sample in samples),
        cu_segments=None if is_padded else torch.from_numpy(np.cumsum([0, *plan.segments]).astype(np.int32)),
        longest=int(max(plan.segments)),
        prefixes=plan.prefixes,
        attention_mask=torch.from_numpy((np.arange(width) < lengths[:, None]).astype(np.int64)) if is_padded else None,
        places=torch.from_numpy(places[predicted]),
        per_token=_per_token(samples, predicted),
        scalars=_scalars(samples),
        images=_images(samples, starts, places, ids, pixels),
        long=None if is_padded or plan.prefixes else LongSegments.of(plan.segments),
        num_tokens=int(lengths.sum()) if units else 0,
        num_trained=len(predicted),
        twin=_twins(units, roles, layout, pad_to_multiple_of, twins or (pad_token_id, pixels)),
    )


def _twins(
    units: Sequence[Unit], roles: tuple[str, ...], layout: str, multiple: int | None, how: tuple[int, Pixels | None]
) -> TokenBatch | None:
    """The twins of all samples as a batch of their own; None where they have none."""
    samples = [sample for unit in units for sample in unit]
    alone = [sample for sample in samples if sample.twin is None]
    if len(alone) == len(samples):
        return None
    if alone:
        raise ValueError(f"The sample of row {alone[0].row} has no twin, and others of its batch have one.")
    pad_token_id, pixels = how
    twins = [tuple(sample.twin for sample in unit) for unit in units]
    return collate(twins, roles, layout, pad_token_id, multiple, pixels)


@dataclass
class _Plan:
    """Where the tokens of each sample go: in one run, or in two where it shares its beginning."""

    shape: tuple[int, int]
    runs: np.ndarray  # of all samples, in order: the flat index of the first token of each run
    run_lengths: np.ndarray
    segments: list[int]  # lengths of what attends to itself, in order
    prefixes: SharedPrefixes | None = None

    def places(self) -> np.ndarray:
        """The flat index of every token, sample after sample."""
        before = np.cumsum(self.run_lengths) - self.run_lengths
        return np.arange(self.run_lengths.sum()) + np.repeat(self.runs - before, self.run_lengths)


def _plan(layout: str, units: Sequence[Unit], lengths: np.ndarray, multiple: int | None) -> _Plan:
    if layout not in _PLANS:
        raise ValueError(f"A batch is laid out {', '.join(map(repr, _PLANS))}, not {layout!r}.")
    return _PLANS[layout](units, lengths, multiple)


def _padded(units: Sequence[Unit], lengths: np.ndarray, multiple: int | None) -> _Plan:
    width = _filled(int(lengths.max()), multiple)
    return _Plan((len(lengths), width), width * np.arange(len(lengths)), lengths, lengths.tolist())


def _ragged(units: Sequence[Unit], lengths: np.ndarray, multiple: int | None) -> _Plan:
    return _one_row(np.cumsum(lengths) - lengths, lengths, lengths.tolist(), multiple)


def _shared(units: Sequence[Unit], lengths: np.ndarray, multiple: int | None) -> _Plan:
    """[prefixes of the units whose samples begin alike][the other samples][continuations]; see SharedPrefixes."""
    shared = [shared_prefix(unit) for unit in units]
    if not any(shared):
        return _ragged(units, lengths, multiple)
    groups = [(unit, prefix) for unit, prefix in zip(units, shared) if prefix]
    alone = [len(sample) for unit, prefix in zip(units, shared) if not prefix for sample in unit]
    prefix_lengths = [prefix for _, prefix in groups]
    rests = [[len(sample) - prefix for sample in unit] for unit, prefix in groups]
    segments = [*prefix_lengths, *alone, *(rest for group in rests for rest in group)]
    starts = np.cumsum([0, *segments])
    of_prefixes, of_alone, of_rests = (iter(part) for part in np.split(starts, [len(groups), len(groups) + len(alone)]))
    runs: list[tuple[int, int]] = []  # (start, length)
    for unit, prefix in zip(units, shared):
        if not prefix:
            runs += [(next(of_alone), len(sample)) for sample in unit]
            continue
        beginning = (next(of_prefixes), prefix)
        for sample in unit:
            runs += [beginning, (next(of_rests), len(sample) - prefix)]
    group_sizes = [sum(group) for group in rests]
    start = sum(prefix_lengths) + sum(alone)
    prefixes = SharedPrefixes(
        cu_prefixes=torch.from_numpy(np.cumsum([0, *prefix_lengths]).astype(np.int32)),
        cu_continuations=torch.from_numpy(np.cumsum([0, *group_sizes]).astype(np.int32)),
        num_prefix_tokens=sum(prefix_lengths),
        start=start,
        stop=start + sum(group_sizes),
        longest_prefix=max(prefix_lengths),
        longest_continuations=max(group_sizes),
    )
    return _one_row(*np.array(runs, dtype=np.int64).T, segments, multiple, prefixes)


def shared_prefix(unit: Unit) -> int:
    """Tokens with which all samples of a unit begin, and after which each of them continues.

    A shared position may predict a trained token of several samples: it is computed once and asked by each. One sample may be
    trained on the prompt as well (ORPO's chosen one), so the prefix ends where the last of them begins its answer. The same tokens
    may stand for different images: it ends before the first image that differs, and never inside of one.
    """
    if len(unit) < 2:
        return 0
    limit = min(max(_first_trained(sample) for sample in unit), min(map(len, unit)) - 1)
    first = unit[0].input_ids[:limit]
    differs = np.zeros(limit, dtype=bool)
    for sample in unit[1:]:
        differs |= sample.input_ids[:limit] != first
    return _before_images(unit, int(differs.argmax()) if differs.any() else limit)


def _before_images(unit: Unit, prefix: int) -> int:
    """The prefix up to the first image that is not whole in it, or is not that of all samples."""
    if not any(sample.images for sample in unit):
        return prefix
    for images in itertools.zip_longest(*(sample.images for sample in unit)):
        start = min((image.start for image in images if image), default=prefix)
        if start >= prefix:
            break
        if len({None if image is None else (image.start, image.stop, *_shown(image)) for image in images}) > 1:
            return start
        if images[0].stop > prefix:
            return start
    return prefix


def _shown(image: ImageSpan) -> tuple[bytes, tuple[int, ...], int | None]:
    """What the model sees of an image: spans that agree in it show the same pixels."""
    return image.key, image.grid, image.draw


def _first_trained(sample: Sample) -> int:
    """Place of the first token that is trained, or of the last token."""
    trained = np.flatnonzero(sample.trained[1:])
    return int(trained[0]) + 1 if len(trained) else len(sample) - 1


def _one_row(
    runs: np.ndarray,
    run_lengths: np.ndarray,
    segments: list[int],
    multiple: int | None,
    prefixes: SharedPrefixes | None = None,
) -> _Plan:
    """Filling up to a multiple adds a last segment that no other attends to."""
    tokens = sum(segments)
    width = _filled(tokens, multiple)
    return _Plan((1, width), runs, run_lengths, segments if width == tokens else [*segments, width - tokens], prefixes)


def _filled(width: int, multiple: int | None) -> int:
    return -(-width // multiple) * multiple if multiple else width


_PLANS = {PADDED: _padded, RAGGED: _ragged, SHARED: _shared}


def _per_token(samples: list[Sample], predicted: np.ndarray) -> dict[str, torch.Tensor]:
    """`predicted`: the numbers of the trained tokens, counted through all samples."""
    return {
        name: torch.from_numpy(np.concatenate([sample.per_token[name] for sample in samples])[predicted])
        for name in samples[0].per_token
    }


def _scalars(samples: list[Sample]) -> dict[str, torch.Tensor]:
    return {
        name: torch.tensor([sample.scalars[name] for sample in samples], dtype=torch.float32)
        for name in samples[0].scalars
    }


def _position_ids(samples: list[Sample], places: np.ndarray, shape: tuple[int, int], layout: str) -> np.ndarray:
    """(rows, width), from 0 in every sample; with images of three axes those before it, see `TokenBatch.position_ids`."""
    plain = np.concatenate([np.arange(len(sample)) for sample in samples])
    if all(sample.positions is None for sample in samples):
        position_ids = np.zeros(shape, dtype=np.int64)
        position_ids.reshape(-1)[places] = plain
        return position_ids
    of_text = (
        np.tile(np.arange(len(sample)), (3, 1)) if sample.positions is None else sample.positions for sample in samples
    )
    axes = np.concatenate([*of_text], axis=1)
    if layout != PADDED:
        axes = np.concatenate([plain[None], axes])
    position_ids = np.zeros((len(axes), *shape), dtype=np.int64)
    position_ids.reshape(len(axes), -1)[:, places] = axes
    return position_ids


def _images(
    samples: list[Sample], starts: np.ndarray, places: np.ndarray, ids: np.ndarray, pixels: Pixels | None
) -> BatchImages | None:
    """Models match features to placeholders by order alone, so images come in the order in which their tokens lie in the batch,
    whatever the layout. Those of a shared prefix lie there once."""
    tokens: dict[int, tuple[ImageSpan, np.ndarray]] = {}  # by the place of the first
    for sample, start in zip(samples, starts):
        for image in sample.images:
            here = places[start + image.start : start + image.stop]
            tokens[int(here[0])] = image, here
    if pixels is not None:
        _refuse_strays(samples, pixels.family)
    if not tokens:
        return None
    if pixels is None:
        row = next(sample.row for sample in samples if sample.images)
        raise ValueError(f"The sample of row {row} has images, and this batch is made for texts only.")
    family, is_placeholder = pixels.family, ids.reshape(-1) == pixels.family.placeholder_id
    spans, shown = zip(*(tokens[place] for place in sorted(tokens)))
    distinct = {_shown(image): image for image in spans}
    numbers = {what: number for number, what in enumerate(distinct)}
    placeholders = [here[is_placeholder[here]] for here in shown]
    return BatchImages(
        encoder=pixels.load([*distinct.values()]),
        tiles=tuple(family.pixel_rows(image.grid) for image in distinct.values()),
        shown=tuple(numbers[_shown(image)] for image in spans),
        placeholders=tuple(map(len, placeholders)),
        **_per_token_of_images(placeholders, ids.shape, family),
    )


def _refuse_strays(samples: list[Sample], family: VisionFamily) -> None:
    """A placeholder that belongs to no image would be given the features of the next one, by models that do not count."""
    for sample in samples:
        stray = sample.input_ids == family.placeholder_id
        for image in sample.images:
            stray[image.start : image.stop] = False
        if stray.any():
            raise ValueError(
                f"The sample of row {sample.row} has the placeholder of images ({family.placeholder!r}) at token {stray.argmax()}, "
                "and no image stands there: take it out of the text, or give the row its image."
            )


def _per_token_of_images(
    placeholders: list[np.ndarray], shape: tuple[int, int], family: VisionFamily
) -> dict[str, torch.Tensor]:
    """What a family asks about every token: whether it stands for an image, and which tokens see each other whole."""
    made = {}
    if family.token_types_key is not None:
        types = np.zeros(shape, dtype=np.int64)
        types.reshape(-1)[np.concatenate(placeholders)] = 1
        made["token_types"] = torch.from_numpy(types)
    if family.images_see_themselves_whole:  # of an image that is shown in several crops, each sees itself
        every = np.concatenate(placeholders)
        begins = [np.diff(here, prepend=-2) > 1 for here in placeholders]
        blocks = np.full(shape, -1, dtype=np.int32)
        blocks.reshape(-1)[every] = np.cumsum(np.concatenate(begins)) - 1
        made["blocks"] = torch.from_numpy(blocks)
    return made
