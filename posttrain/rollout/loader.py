"""RolloutLoader: to transformers.Trainer, rollouts are just a dataloader.

`next()` generates when a window is used up; Trainer asks for all micro-batches of an optimizer step before it takes the first of
them, so that no step falls between. What decides the next batch is small (a cursor into the prompts, a place in the window) but
for the samples of a window that is partly used: those are saved with a checkpoint, and a resumed run goes on with them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from posttrain.core.sample import Sample, Unit
from posttrain.data.collate import Collator, laid_out_tokens
from posttrain.rollout.rollout import Request
from posttrain.rollout.schedule import Schedule


class PromptOrder(Protocol):
    """Which row the `number`-th prompt of a run is."""

    num_rows: int | None  # of an epoch; None: not known

    def row(self, number: int) -> int: ...


class PromptStream:
    """An endless order of rows: one permutation of the dataset after the other, each a function of (seed, epoch)."""

    def __init__(self, num_rows: int, seed: int, shuffle: bool) -> None:
        self.num_rows, self.seed, self.shuffle = num_rows, seed, shuffle
        self._known: tuple[int, np.ndarray] = (-1, np.zeros(0, dtype=np.int64))

    def row(self, number: int) -> int:
        """The row of the `number`-th prompt of the run."""
        epoch, place = divmod(number, self.num_rows)
        if self._known[0] != epoch:
            self._known = (epoch, self._order(epoch))
        return int(self._known[1][place])

    def _order(self, epoch: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(self.num_rows)
        return torch.randperm(self.num_rows, generator=torch.Generator().manual_seed(self.seed + epoch)).numpy()


class RolloutLoader:
    """Micro-batches of this process. The position is saved and restored; nothing else has to be skipped or replayed."""

    def __init__(
        self,
        stream: PromptOrder,
        schedule: Schedule,
        collect: Callable[[RolloutLoader], list[Sample | None]],
        collate: Collator,
        rank: int = 0,
        pins: bool = False,
    ) -> None:
        self.stream, self.schedule, self.collect, self.collate, self.rank = stream, schedule, collect, collate, rank
        self.pins = pins  # batches in page-locked memory: the copy to the device overlaps
        self.taken = 0  # prompts of the stream, by all processes
        self.position = 0  # micro-batches of this epoch
        self.window: list[Sample | None] = []  # this process's samples of the window in use
        self.window_start = 0  # value of `taken` before the window in use was generated

    # ---- as a dataloader ---------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Micro-batches of an epoch: as many windows as the prompts fill, at least one."""
        if self.stream.num_rows is None:
            raise TypeError("The prompts are a stream, which has no length.")
        return max(self.schedule.micro_batches_of_epoch(self.stream.num_rows), self.schedule.window)

    def set_epoch(self, epoch: int) -> None:
        """A new epoch begins where the last one ended; only a resumed one begins inside."""
        if self._is_over():
            self.position = 0

    def _is_over(self) -> bool:
        """Of a stream, the trainer counts the steps: to it they are one epoch."""
        return self.stream.num_rows is not None and self.position >= len(self)

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
                self.window_start = self.taken
                self.window = self.collect(self)
            batch = self.collate(self._units(offset % self.schedule.micro_batches))
            self.position += 1
            yield batch.pin_memory() if self.pins else batch

    def _units(self, micro_batch: int) -> list[Unit]:
        size = self.schedule.batch_size
        samples = self.window[micro_batch * size : (micro_batch + 1) * size]
        return as_units([sample for sample in samples if sample is not None], self.collate)

    # ---- prompts -----------------------------------------------------------------------------------------------------

    def take_window(self) -> list[Request]:
        """The requests of this process in the next generation batch."""
        schedule, first = self.schedule, self.taken
        self.taken += schedule.prompts
        size = schedule.num_generations
        return [self._request(first + place // size, place % size) for place in schedule.places(self.rank)]

    def take_groups(self, wanted: Sequence[int]) -> list[Request]:
        """Whole groups in the place of others: `wanted[r]` for process r; those of this process are returned."""
        first = self.taken + sum(wanted[: self.rank])
        self.taken += sum(wanted)
        numbers = range(first, first + wanted[self.rank])
        return [self._request(number, sample) for number in numbers for sample in range(self.schedule.num_generations)]

    def _request(self, number: int, sample: int) -> Request:
        return Request(self.stream.row(number), number, sample)

    # ---- state -------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Everything that decides the next batch, as tensors and numbers."""
        in_use = self.position % self.schedule.window != 0
        return {
            "taken": self.taken,
            "position": self.position,
            "window_start": self.window_start,
            "window": pack_samples(self.window) if in_use else None,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self.taken, self.position, self.window_start = state["taken"], state["position"], state["window_start"]
        self.window = [] if state["window"] is None else unpack_samples(state["window"])


def as_units(samples: list[Sample], collate: Collator) -> list[Unit]:
    """Neighbours of one group as one unit, so that their prompt is computed once; of no more tokens than a pass may hold."""
    units: list[Unit] = []
    for _, members in itertools.groupby(samples, key=lambda sample: sample.group):
        unit: Unit = ()
        for sample in members:
            larger = (*unit, sample)
            if unit and collate.max_tokens and laid_out_tokens([larger], collate.layout) > collate.max_tokens:
                units.append(unit)
                larger = (sample,)
            unit = larger
        units.append(unit)
    return units


# ---- samples as tensors ---------------------------------------------------------------------------------------------------


def pack_samples(samples: list[Sample | None]) -> dict[str, Any]:
    """Samples, end to end, for a checkpoint; None (takes part in nothing) has length -1."""
    real = [sample for sample in samples if sample is not None]
    names = sorted(real[0].per_token) if real else []
    scalars = sorted(real[0].scalars) if real else []

    def flat(arrays: list[np.ndarray], dtype: Any) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(arrays).astype(dtype) if arrays else np.zeros(0, dtype))

    def column(name: str) -> torch.Tensor:
        """(tokens,) or (tokens, k): ids stay integers, everything else is float32."""
        arrays = [sample.per_token[name] for sample in real]
        return flat(arrays, np.int64 if np.issubdtype(arrays[0].dtype, np.integer) else np.float32)

    return {
        "lengths": torch.tensor([-1 if sample is None else len(sample) for sample in samples], dtype=torch.int64),
        "input_ids": flat([sample.input_ids for sample in real], np.int32),
        "trained": flat([sample.trained for sample in real], np.uint8),
        "per_token": {name: column(name) for name in names},
        "scalars": {name: torch.tensor([s.scalars[name] for s in real], dtype=torch.float64) for name in scalars},
        "numbers": torch.tensor([[s.row, s.group, s.policy_version] for s in real], dtype=torch.int64).view(-1, 3),
        "twins": pack_samples([s.twin for s in real]) if any(s.twin for s in real) else None,
    }


def unpack_samples(packed: dict[str, Any]) -> list[Sample | None]:
    samples: list[Sample | None] = []
    start = which = 0
    twins = unpack_samples(packed["twins"]) if packed.get("twins") else [None] * len(packed["numbers"])
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
            )
        )
        start, which = start + length, which + 1
    return samples
