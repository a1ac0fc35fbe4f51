"""The reference's log-probs of a dataset's rows, from the cache where a row was seen before, else computed and kept.

The cache is a RowStore for each reference (its weights, not its name), keyed by what a row is: a dataset with new rows, in another
order or split, in the next epoch or the next run, costs a pass over the rows that are new.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from accelerate import PartialState

from posttrain.core.console import say
from posttrain.core.processes import of_every_process
from posttrain.core.sample import Unit
from posttrain.data.collate import Collator, split_by_tokens
from posttrain.data.store.row_store import AnnotatedDataset, RowStore, row_key
from posttrain.models.load.reference import PRECOMPUTED, ModelReference
from posttrain.models.load.weights import weights_fingerprint
from posttrain.models.memory.fit import tokens_without_gradient
from posttrain.trainer.checkpoints.sharding import most_of_any_process
from posttrain.trainer.options.base import BaseConfig

SECONDS_BETWEEN_SAVES = 30  # what a kill in the middle of a long pass costs
SECONDS_BETWEEN_LINES = 10


@dataclass(frozen=True)
class Work:
    """Samples of one unit that are not in the cache; they stay together, so that a shared prompt is computed once."""

    unit: int
    samples: tuple[int, ...]
    longest: int
    tokens: int


def store_of(reference: ModelReference, folder: Path, world_size: int) -> RowStore:
    """The cache of this reference: of its weights as they are now, and its temperature."""
    with reference.context():
        fingerprint = weights_fingerprint(reference.model)
    # shards of one model have fingerprints of their own; copies have one
    every = of_every_process(fingerprint, world_size)
    fingerprint = every[0] if len(set(every)) == 1 else "-".join(every)
    name = xxhash.xxh3_128_hexdigest(f"{fingerprint}|{reference.temperature}".encode())
    return RowStore(folder / "reference_logps" / name)


def with_reference_logps(
    args: BaseConfig, collator: Collator, reference: ModelReference, store: RowStore, dataset: Any, name: str
) -> AnnotatedDataset:
    """The dataset with the reference's log-prob on every trained token. Each process computes its share of what is missing."""
    work = missing(dataset, store)
    if args.should_log:
        found = len(dataset) - len({item.unit for item in work})
        say(f"Reference log-probs: {found} of {len(dataset)} {name} rows were in the cache {store.folder}.")
    _compute(args, collator, reference, store, dataset, work[args.process_index :: args.world_size], name)
    if args.world_size > 1:
        PartialState().wait_for_everyone()
        store.refresh()  # what the others have written; on a machine without their disk it is computed again
        _compute(args, collator, reference, store, dataset, missing(dataset, store), name)
    return AnnotatedDataset(dataset, PRECOMPUTED, store)


def missing(dataset: Any, store: RowStore) -> list[Work]:
    """What the store does not hold, each row once, longest first: memory that is too small shows at once."""
    work, seen = [], set()
    for index in range(len(dataset)):
        unit = dataset[index]
        places = []
        for place, sample in enumerate(unit := with_twins(unit)):
            key = row_key(sample) if sample.num_trained else None
            if key is not None and key not in store and key not in seen:
                seen.add(key)
                places.append(place)
        if places:
            lengths = [len(unit[place]) for place in places]
            work.append(Work(index, tuple(places), max(lengths), sum(lengths)))
    return sorted(work, key=lambda item: (-item.tokens, item.unit))


def with_twins(unit: Unit) -> Unit:
    """The samples of a unit, then the twins that some of them have: what the reference is asked about, and nothing else."""
    every = (*unit, *(sample.twin for sample in unit if sample.twin is not None))
    return tuple(replace(sample, twin=None, scalars={}, per_token={}) for sample in every)


def batches_of(work: list[Work], layout: str, tokens: int, rows: int | None) -> list[Sequence[Work]]:
    """Runs of `work` up to `tokens` laid-out tokens, or of `rows` rows where the user wants it so."""
    if rows is not None:
        return [work[start : start + rows] for start in range(0, len(work), rows)]
    if not work:
        return []
    return split_by_tokens(work, layout, tokens, lambda item: (item.tokens, item.longest, len(item.samples)))


def _compute(
    args: BaseConfig,
    collator: Collator,
    reference: ModelReference,
    store: RowStore,
    dataset: Any,
    work: list[Work],
    name: str,
) -> None:
    tokens, rows_a_batch = tokens_without_gradient(args.device), args.precompute_ref_batch_size
    batches = batches_of(work, collator.layout, tokens, rows_a_batch)
    rounds = most_of_any_process(len(batches), args)
    progress = _Progress(len(work), name, args.should_log)
    rows: list[tuple[bytes, np.ndarray]] = []
    saved = time.monotonic()
    for number in range(rounds):
        # A sharded reference needs every process in every round.
        batch = batches[number] if number < len(batches) else []
        rows += _scored(args, collator, reference, dataset, batch)
        progress.advance(len(batch))
        if time.monotonic() - saved > SECONDS_BETWEEN_SAVES:
            store.add(rows)
            rows, saved = [], time.monotonic()
    store.add(rows)
    progress.end()


def _scored(
    args: BaseConfig, collator: Collator, reference: ModelReference, dataset: Any, batch: list[Work]
) -> list[tuple[bytes, np.ndarray]]:
    """(key, log-probs of its trained tokens) for every sample of a batch."""
    units = []
    for item in batch:
        unit = with_twins(dataset[item.unit])
        units.append(tuple(unit[place] for place in item.samples))
    laid_out = replace(collator, roles=("row",)).one_pass(units)
    logps = reference.scores(laid_out.to(args.device)).logps.float().cpu().numpy()
    samples = [sample for unit in units for sample in unit]
    parts = np.split(logps, np.cumsum([sample.num_trained for sample in samples]))
    for sample, part in zip(samples, parts):
        if not np.isfinite(part).all():
            raise ValueError(
                f"The reference ({reference}) gives a log-prob that is not finite to a token of row {sample.row}. Check its "
                "weights, and that its vocabulary holds every token of the data."
            )
    return [(row_key(sample), part) for sample, part in zip(samples, parts)]


class _Progress:
    """A line every few seconds of a long pass."""

    def __init__(self, total: int, name: str, is_shown: bool) -> None:
        self.total, self.name, self.is_shown = total, name, is_shown and total > 0
        self.done = 0
        self.begin = self.last = time.monotonic()

    def advance(self, rows: int) -> None:
        self.done += rows
        now = time.monotonic()
        if self.is_shown and now - self.last >= SECONDS_BETWEEN_LINES:
            self.last = now
            rate = self.done / (now - self.begin)
            left = (self.total - self.done) / max(rate, 1e-9)
            say(
                f"Reference log-probs: {self.done} of {self.total} {self.name} rows, {rate:.1f} rows/s, {left:.0f} s left."
            )

    def end(self) -> None:
        if self.is_shown:
            taken = time.monotonic() - self.begin
            say(f"Reference log-probs of {self.done} {self.name} rows were computed in {taken:.1f} s.")
