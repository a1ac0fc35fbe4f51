"""dataset -> every row checked -> encoded once -> truncated, packed and read as views.

Checking and encoding happen before any model is loaded and are kept on disk (see store_building). What depends on lengths
(truncation, packing, order) is decided when the store is opened, so that another `max_length` costs nothing.
"""

from __future__ import annotations

import errno
import itertools
import json
import logging
import os
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import xxhash

from posttrain.core.sample import Sample, Unit
from posttrain.data.options import DROP, ERROR, PrepareOptions
from posttrain.data.packing import CUTTING_STRATEGIES, PackedDataset, check_packing
from posttrain.data.render.renderer import Renderer
from posttrain.data.rows.checks import Finding, ProblemLog
from posttrain.data.rows.foreign_formats import BESIDE_FOREIGN, CONVERSATION_COLUMNS, FOREIGN_FORMATS
from posttrain.data.rows.formats import FORMATS, Detection, RowFormat, detect
from posttrain.data.rows.label_report import LabelReport
from posttrain.data.rows.row_images import IMAGE_COLUMNS, row_images
from posttrain.data.store.building import RowSource, build_store, open_or_build, read_problems, store_key
from posttrain.data.store.image_survey import survey_images
from posttrain.data.store.report import CUTS_IMAGES, TOO_LONG, UNTRAINED, ImageReport, PreparationReport
from posttrain.data.store.streaming import PreparedStream
from posttrain.data.store.token_store import PROBLEMS, TokenStore
from posttrain.data.truncation import Windows, even_out, windows

logger = logging.getLogger(__name__)

PEEKED_ROWS = 100


def prepare_dataset(
    dataset: Any,
    formats: tuple[RowFormat, ...],
    renderer: Renderer,
    options: PrepareOptions | None = None,
    name: str = "train",
    num_proc: int | None = None,
) -> PreparedDataset | PackedDataset | PreparedStream:
    """Check and encode a `datasets.Dataset`, a list of dicts or a stream; raise BadRowsError before anything is trained.

    Gives a map-style dataset of units (tuples of Samples); a `PreparedStream` for an IterableDataset.
    """
    options = options or PrepareOptions()
    if isinstance(dataset, datasets.IterableDataset):
        return PreparedStream(dataset, formats, renderer, options, name)
    if not isinstance(dataset, (datasets.Dataset, list, tuple)):
        raise TypeError(
            f"{name} is a {type(dataset).__name__}; a datasets.Dataset, an IterableDataset or a list is read."
        )
    if not len(dataset):
        raise ValueError(f"{name} has no rows.")
    source = RowSource(dataset, columns_read(options))
    options, image_files = _with_images_decided(source, options)
    detection = detect(RowSource(dataset, None).rows(0, PEEKED_ROWS), formats, renderer, options, name)
    key = store_key(source, detection, renderer, options, image_files)

    def build(folder: Path) -> dict[str, Any]:
        logger.info("Preparing %s: %s.", name, detection.explanation)
        return build_store(source, detection, renderer, options, name, folder, num_proc)

    called = getattr(getattr(dataset, "info", None), "dataset_name", None)
    try:
        store = open_or_build(key, cache_folder(options), build)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        folder = cache_folder(options)
        reason = (
            f"the tokens of {len(dataset):,} rows of {called or name} could not be written ({error.strerror}; "
            f"{shutil.disk_usage(folder).free:,} bytes are free): make room, or name another folder with `dataset_cache_dir`"
        )
        raise OSError(error.errno, reason, str(folder)) from error
    if options.packing and len(store.spans):
        check_packing(options.packing, name)
    cut_to = options.max_length if not options.packing or options.packing in CUTTING_STRATEGIES else None
    prepared = PreparedDataset(store, detection, options, name, cut_to)
    prepared.report.source = called
    return PackedDataset(prepared, options.max_length, options.packing) if options.packing else prepared


def has_images(dataset: Any) -> bool:
    """Whether the first rows of a dataset show images."""
    is_stream = isinstance(dataset, datasets.IterableDataset)
    rows = itertools.islice(dataset, PEEKED_ROWS) if is_stream else RowSource(dataset, None).rows(0, PEEKED_ROWS)
    return any(row_images(row) for row in rows)


def _with_images_decided(source: RowSource, options: PrepareOptions) -> tuple[PrepareOptions, str]:
    """The options with `check="auto"` decided by the number of images, once for all workers; a digest of the files of images."""
    limits = options.image_limits
    if limits is None:
        return options, ""
    count, files = survey_images(source, limits)
    return replace(options, image_limits=limits.for_images(count)), files


def columns_read(options: PrepareOptions) -> set[str] | None:
    """The columns that can matter; all of them for a formatting function. Others are neither decoded nor hashed."""
    if options.formatting_func is not None:
        return None
    ours = {column for fmt in FORMATS for names in (*fmt.required, fmt.optional) for column in names}
    foreign = {column for fmt in FOREIGN_FORMATS for names in fmt.columns.values() for column in names}
    named = {options.dataset_text_field, *options.required_columns, *options.allowed_values}
    beside = {*BESIDE_FOREIGN, *CONVERSATION_COLUMNS, *IMAGE_COLUMNS}
    return ours | foreign | named | beside | ({options.row_id_column} - {None})


def cache_folder(options: PrepareOptions) -> Path:
    return Path(options.cache_dir or Path(datasets.config.HF_DATASETS_CACHE) / "posttrain")


class PreparedDataset:
    """Units of a stored dataset, cut to `max_length`, without the rows that cannot be trained on.

    `report` counts what became of the rows; `fingerprint` changes with anything that changes a unit or their order.
    """

    def __init__(
        self, store: TokenStore, detection: Detection, options: PrepareOptions, name: str, max_length: int | None
    ) -> None:
        self.store, self.detection, self.options, self.name = store, detection, options, name
        self.roles = detection.format.roles
        self.max_length = max_length
        facts = store.facts
        self.report = PreparationReport(
            name,
            detection.explanation,
            rows_read=facts["rows_read"],
            control_token_rows=facts["control_token_rows"],
            unusual_message_keys=facts["message_keys"],
            notes=dict(facts["notes"]),
            labels=LabelReport(**facts["labels"]) if facts["labels"] else None,
        )
        self._windows = self._find_windows()
        self._sample_starts, self._sample_stops = self._windows.starts, self._windows.stops
        self.units = self._select_units()  # number of each kept unit in the store, in the order of this dataset
        if options.shuffle_seed is not None:
            self.units = np.random.default_rng(options.shuffle_seed).permutation(self.units)
        self._samples = self._sample_numbers()
        self._count_kept()
        del self._windows  # of its arrays only starts and stops are needed from now on
        decided_by = [store.folder.name, self.max_length, options.truncation_mode, options.shuffle_seed, len(self)]
        self.fingerprint = xxhash.xxh3_128_hexdigest(json.dumps(decided_by).encode())

    def _find_windows(self) -> Windows:
        """The part of each stored sample that is kept."""
        store, spans = self.store, self.store.spans
        how = (self.max_length, self.options.truncation_mode)
        found = windows(store.lengths, store.sample_of_span, spans["start"], spans["stop"], *how)
        if len(self.roles) > 1:
            for unit in np.flatnonzero(self._any_sample(found.cut_images > 0)):
                numbers = range(store.unit_offsets[unit], store.unit_offsets[unit + 1])
                even_out(found, numbers, [store.images_of(number) for number in numbers])
        if not self.detection.format.trains_tokens:  # nothing says that what is left would be worth anything
            found.refused[found.cut_images > 0] = True
        return found

    def _select_units(self) -> np.ndarray:
        store, mode = self.store, self.options.truncation_mode
        good = ~np.isin(store.rows, store.facts["late_bad_rows"])
        too_long = np.zeros_like(good)
        if self.max_length is not None:
            too_long = self._any_sample(store.lengths > self.max_length) & good
        self._judge_bad_rows(np.flatnonzero(too_long) if mode == ERROR else ())
        if mode in (ERROR, DROP):
            good &= ~too_long
        if mode == DROP:
            self.report.drop(TOO_LONG, int(too_long.sum()))
        refused = good & self._any_sample(self._windows.refused)
        self.report.drop(CUTS_IMAGES, int(refused.sum()))
        good &= ~refused
        if self.detection.format.trains_tokens:
            # Pairs need a trained token on both sides; a packed row needs one somewhere.
            empty = store.trained_within(self._sample_starts, self._sample_stops) == 0
            untrained = good & (self._any_sample(empty) if len(self.roles) > 1 else ~self._any_sample(~empty))
            self.report.drop(UNTRAINED, int(untrained.sum()))
            good &= ~untrained
        return np.flatnonzero(good)

    def _judge_bad_rows(self, too_long_units: Sequence[int]) -> None:
        """Refuse the dataset, or count the bad rows that are left out, as `on_bad_rows` says."""
        target = self.options.bad_rows_file
        unfinished = Path(f"{os.fspath(target)}.tmp-{os.getpid()}") if target is not None else None
        log = ProblemLog(self.name, unfinished)
        for row, findings in read_problems(self.store):
            log.add(row, findings)
        for unit in too_long_units:
            log.add(int(self.store.rows[unit]), self._explain_length(int(unit)))
        log.flush()
        if not log.by_kind:
            if target is not None:
                Path(target).unlink(missing_ok=True)  # of an earlier run, when there were some
            return
        if unfinished is not None:
            os.replace(unfinished, target)  # several processes may write the same file
        file = Path(target) if target is not None else self.store.folder / PROBLEMS
        if self.options.on_bad_rows == ERROR:
            log.refuse(self.report.rows_read, file)
        self.report.bad_rows_file = os.fspath(file)
        self.report.warnings += [f"column {p.column!r} {p.reason}" for p in log.problems if p.row < 0]
        for kind, rows in Counter(log.kind_of_row.values()).items():
            self.report.drop(f"bad ({kind})", rows)

    def _any_sample(self, flags: np.ndarray) -> np.ndarray:
        """(samples,) flags -> (units,) whether any sample of the unit has it."""
        unit_of_sample = np.repeat(np.arange(self.store.num_units), np.diff(self.store.unit_offsets))
        return np.bincount(unit_of_sample, weights=flags, minlength=self.store.num_units) > 0

    def _explain_length(self, unit: int) -> list[Finding]:
        findings = []
        for i, role in zip(range(*self.store.unit_offsets[unit : unit + 2]), self.roles):
            length, begin = int(self.store.lengths[i]), self.store.first_trained(i)
            if length > self.max_length:
                column = self.detection.column_of_role(role)
                reason = f"has {length} tokens, max_length is {self.max_length}"
                if self.detection.format.trains_tokens and self.max_length <= begin < length:
                    reason += f"; its prompt alone has {begin}, so no trained token would be left"
                findings.append(Finding("too_long", column, reason))
        return findings

    def _count_kept(self) -> None:
        samples = self._samples
        kept = self._sample_stops[samples] - self._sample_starts[samples]
        lost = self.store.lengths[samples] - kept
        trained = self.store.trained_within(self._sample_starts, self._sample_stops)
        self.report.kept = len(self.units)
        self.report.truncated, self.report.truncated_tokens = int((lost > 0).sum()), int(lost.sum())
        self.report.tokens, self.report.trained_tokens = int(kept.sum()), int(trained[samples].sum())
        if self.detection.format.judges_steps:
            whole = self.store.trained_within(np.zeros_like(self._sample_starts), self.store.lengths.astype(np.int64))
            self.report.truncated_steps = int((whole - trained)[samples].sum())
        if len(self.store.spans):
            self.report.images = self._count_images()

    def _count_images(self) -> ImageReport:
        """Of the kept rows, and of the tokens that are kept of them."""
        store, cut = self.store, self._windows.cut_images[self._samples]
        tokens = (store.spans["stop"] - store.spans["start"]).astype(np.int64)
        of_sample = store.sample_of_span
        is_shown = np.isin(of_sample, self._samples) & (store.spans["stop"] <= self._sample_stops[of_sample])
        of_row = store.image_places["row"]
        counts = np.bincount(
            np.searchsorted(kept := np.sort(self.rows), of_row[np.isin(of_row, kept)]), minlength=len(kept)
        )
        return ImageReport(
            images=int(counts.sum()),
            tokens=int(tokens[is_shown].sum()),
            longest=int(tokens[is_shown].max(initial=0)),
            cut=int(cut.sum()),
            rows_cut=len(np.unique(self._unit_of(self._samples[cut > 0]))),
            rows_by_images={int(number): int(rows) for number, rows in enumerate(np.bincount(counts)) if rows},
        )

    def _unit_of(self, samples: np.ndarray) -> np.ndarray:
        return np.searchsorted(self.store.unit_offsets, samples, side="right") - 1

    def _sample_numbers(self) -> np.ndarray:
        """Stored numbers of the samples of all kept units, in order."""
        firsts = self.store.unit_offsets[self.units]
        sizes = self.store.unit_offsets[self.units + 1] - firsts
        within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        return np.repeat(firsts, sizes) + within

    def __len__(self) -> int:
        return len(self.units)

    def __getitem__(self, index: int) -> Unit:
        if not -len(self) <= index < len(self):
            raise IndexError(f"Unit {index} of the {len(self)} of {self.name}.")
        unit = self.units[index]
        samples = range(self.store.unit_offsets[unit], self.store.unit_offsets[unit + 1])
        row = int(self.store.rows[unit])
        return tuple(self._cut(number, row) for number in samples)

    def _cut(self, number: int, row: int) -> Sample:
        sample = self.store.sample(number, row)
        start, stop = self.window(number)
        return sample if stop - start == len(sample) else sample.slice(start, stop)

    def window(self, number: int) -> tuple[int, int]:
        """The part of a stored sample that is kept: from which token to before which."""
        return int(self._sample_starts[number]), int(self._sample_stops[number])

    @property
    def rows(self) -> np.ndarray:
        """Source row of each unit."""
        return self.store.rows[self.units]

    @property
    def unit_lengths(self) -> np.ndarray:
        """Tokens of each unit, all its samples together."""
        sizes = np.concatenate([[0], np.cumsum(self._sample_stops - self._sample_starts)])
        return sizes[self.store.unit_offsets[self.units + 1]] - sizes[self.store.unit_offsets[self.units]]

    @property
    def num_samples(self) -> int:
        return len(self._samples)

    @property
    def sample_lengths(self) -> np.ndarray:
        return self._sample_stops[self._samples] - self._sample_starts[self._samples]

    def sample(self, index: int) -> Sample:
        """The index-th sample of all kept units, in order."""
        number = int(self._samples[index])
        unit = int(np.searchsorted(self.store.unit_offsets, number, side="right")) - 1
        return self._cut(number, int(self.store.rows[unit]))
