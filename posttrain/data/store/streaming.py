"""PreparedStream: an IterableDataset whose rows are checked and encoded as they are read.

Its first 1,000 rows are checked before anything is trained; the rest when they come. Nothing is kept on disk.
"""

from __future__ import annotations

import itertools
import logging
import os
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch.utils.data

from posttrain.core.sample import ImageSpan, Sample, Unit
from posttrain.data.images.streamed_span import StreamedSpan
from posttrain.data.options import DROP, ERROR, PrepareOptions
from posttrain.data.packing import CUTTING_STRATEGIES, MERGING_STRATEGIES, check_packing, merge, packing_strategy
from posttrain.data.render.renderer import Renderer
from posttrain.data.rows.checks import Finding, ProblemLog
from posttrain.data.rows.examiner import RowExaminer
from posttrain.data.rows.foreign_formats import Row
from posttrain.data.rows.formats import RowFormat, detect
from posttrain.data.rows.row_images import placed_payloads
from posttrain.data.store.building import without_decoding
from posttrain.data.store.report import CUTS_IMAGES, TOO_LONG, UNTRAINED, ImageReport, PreparationReport
from posttrain.data.truncation import windows_of_unit

logger = logging.getLogger(__name__)

CHECKED_AHEAD = 1000
BATCH_ROWS = 100
PACKED_TOGETHER = 1000


class PreparedStream(torch.utils.data.IterableDataset):
    """Units of a stream. `report` counts what has been read so far, in this process, in the current pass."""

    def __init__(
        self,
        dataset: datasets.IterableDataset,
        formats: tuple[RowFormat, ...],
        renderer: Renderer,
        options: PrepareOptions,
        name: str = "train",
    ) -> None:
        if options.image_limits is not None:
            # How many images will come is not known; each is decoded soon anyway.
            options = replace(options, image_limits=options.image_limits.for_images(sys.maxsize))
        if dataset.features is not None and without_decoding(dataset.features) is not None:
            dataset = dataset.decode(False)
        self.dataset, self.renderer, self.options, self.name = dataset, renderer, options, name
        head = list(itertools.islice(iter(dataset), CHECKED_AHEAD))
        if not head:
            raise ValueError(f"{name} has no rows.")
        self.detection = detect(head, formats, renderer, options, name)
        self.roles = self.detection.format.roles
        if options.shuffle_seed is not None:
            raise ValueError(f"{name} is a stream; shuffle it with its own `shuffle(seed, buffer_size)`.")
        if options.bad_rows_file is not None:
            Path(options.bad_rows_file).unlink(missing_ok=True)  # of an earlier run
        self._check_head(head)
        self.report = self._new_report()

    def _new_report(self) -> PreparationReport:
        images = ImageReport() if self.options.image_limits is not None else None
        return PreparationReport(self.name, self.detection.explanation, images=images)

    def _check_head(self, head: list[Any]) -> None:
        """Everything that is wrong with the first rows, in one error."""
        self.report = self._new_report()
        log = ProblemLog(self.name)
        for row, result in enumerate(self._examiner().examine(head)):
            if isinstance(result, tuple):
                result = self._cut(result)
            if isinstance(result, list):
                log.add(row, result)
        if self.options.on_bad_rows == ERROR:
            log.refuse(len(head))

    def _examiner(self) -> RowExaminer:
        return RowExaminer(self.detection, self.renderer, self.options)

    def set_epoch(self, epoch: int) -> None:
        """Shuffled streams take another order in every epoch."""
        self.dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[Unit]:
        units = (unit for _, unit in self.rows_and_units())
        return self._packed(units) if self.options.packing else units

    def rows_and_units(self) -> Iterator[tuple[Any, Unit]]:
        """One pass: each row that is kept, with every column of it, and its unit."""
        self.report = self._new_report()
        examiner = self._examiner()
        rows = iter(self.dataset)
        for first in itertools.count(0, BATCH_ROWS):
            batch = list(itertools.islice(rows, BATCH_ROWS))
            if not batch:
                return
            results = examiner.examine(batch, first)
            numbers = {(row, key): number for key, row, number in examiner.images}
            images_of = Counter(row for _, row, _ in examiner.images)
            examiner.images.clear()
            for row, result in enumerate(results, first):
                self.report.rows_read += 1
                unit = self._cut(result) if isinstance(result, tuple) else result
                if isinstance(unit, list):
                    self._refuse(row, unit)
                elif unit:
                    self.report.kept += 1
                    self.report.tokens += sum(map(len, unit))
                    self.report.trained_tokens += sum(sample.num_trained for sample in unit)
                    if self.report.images is not None:
                        self.report.images.add(unit, images_of[row], result)
                    yield batch[row - first], self._with_payloads(unit, batch[row - first], row, numbers)
            self.report.control_token_rows = examiner.tally.control_token_rows
            self.report.notes = dict(examiner.tally.notes)

    def _with_payloads(self, unit: Unit, raw: Row, row: int, numbers: dict[tuple[int, bytes], int]) -> Unit:
        """The unit whose spans carry their images: the row will be gone when its batch is made."""
        if not any(sample.images for sample in unit):
            return unit
        payloads = placed_payloads(raw)

        def carrying(span: ImageSpan) -> StreamedSpan:
            payload, column, place = payloads[numbers[row, span.key]]
            where = f"{self.name}, row {row}, column {column!r}: {place}"
            return StreamedSpan.of(span, payload, self.options.image_limits, where)

        return tuple(replace(sample, images=tuple(map(carrying, sample.images))) for sample in unit)

    def _refuse(self, row: int, findings: list[Finding]) -> None:
        file = Path(self.options.bad_rows_file) if self.options.bad_rows_file is not None else None
        log = ProblemLog(self.name, file)
        log.add(row, findings)
        if self.options.on_bad_rows == ERROR:
            log.refuse(self.report.rows_read, file)
        log.flush()
        self.report.drop(f"bad ({findings[0].kind})")
        self.report.bad_rows_file = os.fspath(file) if file else None
        logger.warning("Left out: %s", log.problems[0])

    def _cut(self, unit: Unit) -> Unit | list[Finding]:
        """The unit within max_length; findings where that is an error, and () where it is dropped and counted."""
        limit, mode = self.options.max_length, self.options.truncation_mode
        if self.options.packing and any(sample.images for sample in unit):
            check_packing(self.options.packing, self.name)
        if self.options.packing and self.options.packing not in CUTTING_STRATEGIES:
            limit = None
        longest = max(map(len, unit))
        if limit is not None and longest > limit:
            if mode == ERROR:
                column = self.detection.column_of_role(self.roles[-1])
                return [Finding("too_long", column, f"has {longest} tokens, max_length is {limit}")]
            if mode == DROP:
                self.report.drop(TOO_LONG)
                return ()
            found = windows_of_unit(unit, limit, mode)
            if found.refused.any() or (found.cut_images.any() and not self.detection.format.trains_tokens):
                self.report.drop(CUTS_IMAGES)
                return ()
            whole, unit = unit, tuple(s.slice(*window) for s, *window in zip(unit, found.starts, found.stops))
            lost = [len(before) - len(after) for before, after in zip(whole, unit)]
            self.report.truncated += sum(tokens > 0 for tokens in lost)
            self.report.truncated_tokens += sum(lost)
            if self.detection.format.judges_steps:
                self.report.truncated_steps += sum(s.num_trained for s in whole) - sum(s.num_trained for s in unit)
        trained = [sample.num_trained > 0 for sample in unit]
        needs_all = len(self.roles) > 1
        if self.detection.format.trains_tokens and not (all(trained) if needs_all else any(trained)):
            self.report.drop(UNTRAINED)
            return ()
        return unit

    def _packed(self, units: Iterator[Unit]) -> Iterator[Unit]:
        """Blocks made of a thousand units at a time, as a stream has no end to look at."""
        strategy, capacity = packing_strategy(self.options.packing), self.options.max_length
        merges = self.options.packing in MERGING_STRATEGIES
        left: list[Sample] = []
        while True:
            samples = left + [s for unit in itertools.islice(units, PACKED_TOGETHER) for s in unit]
            if len(samples) == len(left):
                if left:
                    yield (merge(left),)
                return
            packing = strategy(np.array([len(sample) for sample in samples]), capacity)
            left = []
            for i in range(len(packing)):
                block = [samples[s].slice(start, stop) for s, start, stop in packing.block(i).tolist()]
                if merges and sum(map(len, block)) < capacity:
                    left = block  # the tail is continued by what comes next
                else:
                    yield (merge(block),) if merges else tuple(block)
