"""RolloutLoader: to transformers.Trainer, rollouts are just a dataloader.

`next()` asks its source for another window when one is used up; Trainer asks for all micro-batches of an optimizer step before it
takes the first of them, so that no step falls between. What decides the next batch is small (a cursor into the prompts, a place in
the window) but for the samples of a window that is partly used: those are saved with a checkpoint, and a resumed run continues
with them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from posttrain.core.sample import ImageSpan, Sample, Unit
from posttrain.data.collate import Collator, as_units
from posttrain.rollout.schedule import Schedule

Window = list[Unit | None]
"""This process's units of a window; None takes part in nothing."""
NOT_DRAWN = -1  # draws are never negative


class WindowSource(Protocol):
    """Who makes the windows."""

    num_rows: int | None  # prompts of an epoch; None: not known
    window_start: int  # prompts before the window in use

    def next_window(self) -> Window: ...

    def state(self) -> dict[str, Any]: ...

    def load_state(self, state: dict[str, Any]) -> None: ...


class RolloutLoader:
    """Micro-batches of this process. The position is saved and restored; nothing else has to be skipped or replayed."""

    def __init__(
        self,
        source: WindowSource,
        schedule: Schedule,
        collate: Collator,
        pins: bool = False,
        permutation_seed: int | None = None,
        made_whole: Callable[[Window], Window] | None = None,
    ) -> None:
        """`made_whole`: what becomes of a window of which this process has written a part."""
        self.made_whole = made_whole
        self.source, self.schedule, self.collate = source, schedule, collate
        # None: every pass over a window has its units in the order of the prompts
        self.permutation_seed = permutation_seed
        self.pins = pins  # batches in page-locked memory: the copy to the device overlaps
        self.position = 0  # micro-batches of this epoch
        self.window: Window = []  # the one in use

    # ---- as a dataloader ---------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Micro-batches of an epoch: as many windows as the prompts fill, at least one."""
        if self.source.num_rows is None:
            raise TypeError("The prompts are a stream, which has no length.")
        return max(self.schedule.micro_batches_of_epoch(self.source.num_rows), self.schedule.window)

    def set_epoch(self, epoch: int) -> None:
        """A new epoch begins where the last one ended; only a resumed one begins inside."""
        if self._is_over():
            self.position = 0

    def _is_over(self) -> bool:
        """Of a stream, the trainer counts the steps: to it they are one epoch."""
        return self.source.num_rows is not None and self.position >= len(self)

    def skip_first(self, micro_batches: int) -> RolloutLoader:
        """Called after a resume; `load_state` has brought the loader there already."""
        if self.position != micro_batches:
            raise RuntimeError(
                f"The checkpoint's rollouts stand at micro-batch {self.position} of the epoch, the trainer at {micro_batches}."
            )
        return self

    def __iter__(self) -> Iterator[Any]:
        while not self._is_over():
            offset = self.position % self.schedule.window
            if offset == 0:
                window = self.source.next_window()
                self.window = window if self.made_whole is None else self.made_whole(window)
            batch = self.collate(self._units(*divmod(offset, self.schedule.micro_batches)))
            self.position += 1
            yield batch.pin_memory() if self.pins else batch

    def _units(self, iteration: int, micro_batch: int) -> list[Unit]:
        """A micro-batch has an equal share of the window. A permutation depends on nothing but what a checkpoint holds."""
        window, size = self.window, len(self.window) // self.schedule.micro_batches
        if self.permutation_seed is not None:
            rng = np.random.default_rng([self.permutation_seed, self.source.window_start, iteration])
            places, step = rng.permutation(len(window)), size * self.schedule.accumulation
            # The order inside of an optimizer step changes nothing; neighbours of a group share their prompt.
            ordered = [np.sort(places[start : start + step]) for start in range(0, len(window), step)]
            window = [window[place] for place in np.concatenate(ordered)]
        return units_of(window[micro_batch * size : (micro_batch + 1) * size], self.collate)

    # ---- state -------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Everything that decides the next batch, as tensors and numbers."""
        in_use = self.position % self.schedule.window != 0
        window = pack_units(self.window) if in_use else None
        return {"position": self.position, "window": window, **self.source.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        self.position = state["position"]
        self.window = [] if state["window"] is None else unpack_units(state["window"])
        self.source.load_state(state)


def whole_window(mine: Window, steps: int, of_every: Callable[[Any], list[Any]]) -> Window:
    """The window of processes that have written a part each, of every step in turn. `of_every`: what each of them has to say."""
    parts = [unpack_units(packed) for packed in of_every(pack_units(mine))]
    size = len(mine) // steps
    return [unit for step in range(steps) for part in parts for unit in part[step * size : (step + 1) * size]]


def units_of(window: Window, collate: Collator) -> list[Unit]:
    """What is trained of a part of a window. Units of one sample that are neighbours in a group become one: they share a prompt."""
    units = [unit for unit in window if unit is not None]
    if len(collate.roles) > 1:
        return units
    return as_units([sample for unit in units for sample in unit], collate)


# ---- samples as tensors ---------------------------------------------------------------------------------------------------


def pack_units(window: Window) -> dict[str, Any]:
    """A window for a checkpoint. A unit that takes part in nothing has size 0."""
    samples = [sample for unit in window if unit is not None for sample in unit]
    sizes = torch.tensor([0 if unit is None else len(unit) for unit in window], dtype=torch.int64)
    return {"sizes": sizes, "samples": pack_samples(samples)}


def unpack_units(packed: dict[str, Any]) -> Window:
    if "sizes" not in packed:  # written by a version whose windows held samples
        return [None if sample is None else (sample,) for sample in unpack_samples(packed)]
    samples = iter(unpack_samples(packed["samples"]))
    return [tuple(next(samples) for _ in range(size)) or None for size in packed["sizes"].tolist()]


def pack_samples(samples: list[Sample | None]) -> dict[str, Any]:
    """Samples, end to end, for a checkpoint; None (takes part in nothing) has length -1."""
    real = [sample for sample in samples if sample is not None]
    names = sorted(real[0].per_token) if real else []
    scalars = sorted(real[0].scalars) if real else []

    def flat(arrays: list[np.ndarray], dtype: Any) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(arrays).astype(dtype) if arrays else np.zeros(0, dtype))

    def column(name: str) -> torch.Tensor:
        """(tokens,) or (tokens, k): ids stay integers, everything else is float32 or what is better."""
        arrays = [sample.per_token[name] for sample in real]
        is_integer = np.issubdtype(arrays[0].dtype, np.integer)
        return flat(arrays, np.int64 if is_integer else np.result_type(arrays[0].dtype, np.float32))

    return {
        "lengths": torch.tensor([-1 if sample is None else len(sample) for sample in samples], dtype=torch.int64),
        "input_ids": flat([sample.input_ids for sample in real], np.int32),
        "trained": flat([sample.trained for sample in real], np.uint8),
        "per_token": {name: column(name) for name in names},
        "scalars": {name: torch.tensor([s.scalars[name] for s in real], dtype=torch.float64) for name in scalars},
        "numbers": torch.tensor([[s.row, s.group, s.policy_version] for s in real], dtype=torch.int64).view(-1, 3),
        "images": pack_spans(real),
        "twins": pack_samples([s.twin for s in real]) if any(s.twin for s in real) else None,
    }


def unpack_samples(packed: dict[str, Any]) -> list[Sample | None]:
    samples: list[Sample | None] = []
    start = which = 0
    twins = unpack_samples(packed["twins"]) if packed.get("twins") else [None] * len(packed["numbers"])
    shown = unpack_spans(packed.get("images"), [length for length in packed["lengths"].tolist() if length >= 0])
    for length in packed["lengths"].tolist():
        if length < 0:
            samples.append(None)
            continue
        part = slice(start, start + length)
        row, group, version = packed["numbers"][which].tolist()
        samples.append(
            Sample(
                packed["input_ids"][part].numpy(),
                packed["trained"][part].numpy().astype(bool),
                {name: values[part].numpy() for name, values in packed["per_token"].items()},
                {name: float(values[which]) for name, values in packed["scalars"].items()},
                row=row,
                group=group,
                policy_version=version,
                twin=twins[which],
                **shown[which],
            )
        )
        start, which = start + length, which + 1
    return samples


def pack_spans(samples: Sequence[Sample]) -> dict[str, Any] | None:
    """What a checkpoint keeps of the images of samples, never a pixel; None where no sample has one or positions of its own."""
    spans = [span for sample in samples for span in sample.images]
    if not spans and all(sample.positions is None for sample in samples):
        return None
    positions = [sample.positions for sample in samples if sample.positions is not None]
    numbers = [(s.start, s.stop, *s.size, NOT_DRAWN if s.draw is None else s.draw, len(s.grid)) for s in spans]
    grids = [side for span in spans for side in span.grid]
    return {
        "counts": torch.tensor([len(sample.images) for sample in samples], dtype=torch.int64),
        "numbers": torch.tensor(numbers, dtype=torch.int64).view(-1, 6),
        "grids": torch.tensor(grids, dtype=torch.int64),
        "keys": torch.tensor([[*span.key] for span in spans], dtype=torch.uint8).view(len(spans), -1),
        "has_positions": torch.tensor([sample.positions is not None for sample in samples], dtype=torch.uint8),
        "positions": torch.from_numpy(np.concatenate([np.zeros((3, 0), np.int32), *positions], axis=1)),
    }


def unpack_spans(packed: dict[str, Any] | None, lengths: Sequence[int]) -> list[dict[str, Any]]:
    """`images` and `positions` of samples of these lengths, as arguments of Sample."""
    if packed is None:
        return [{} for _ in lengths]
    spans = iter(_spans(packed))
    found, start = [], 0
    for count, has_positions, length in zip(packed["counts"].tolist(), packed["has_positions"].tolist(), lengths):
        positions = packed["positions"][:, start : start + length].numpy() if has_positions else None
        start += length if has_positions else 0
        found.append({"images": tuple(itertools.islice(spans, count)), "positions": positions})
    return found


def _spans(packed: dict[str, Any]) -> list[ImageSpan]:
    grids, spans = iter(packed["grids"].tolist()), []
    for (start, stop, height, width, draw, sides), key in zip(packed["numbers"].tolist(), packed["keys"].tolist()):
        grid = tuple(itertools.islice(grids, sides))
        spans.append(ImageSpan(start, stop, bytes(key), (height, width), grid, None if draw == NOT_DRAWN else draw))
    return spans
