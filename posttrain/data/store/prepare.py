"""dataset -> every row checked -> encoded once -> truncated, packed and read as views.

Checking and encoding happen before any model is loaded and are kept on disk (see store_building). What depends on lengths
(truncation, packing, order) is decided when the store is opened, so that another `max_length` costs nothing.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import datasets
import numpy as np
import xxhash

from posttrain.core.sample import KEEP_END, KEEP_START, Sample, Unit
from posttrain.data.render.renderer import Renderer
from posttrain.data.render.templates import adopt_chat_format
from posttrain.data.rows.checks import Finding, ProblemLog
from posttrain.data.rows.foreign_formats import BESIDE_FOREIGN, CONVERSATION_COLUMNS, FOREIGN_FORMATS, Row
from posttrain.data.rows.formats import FORMATS, LANGUAGE_MODELLING, Detection, RowFormat, detect_format
from posttrain.data.rows.label_report import LabelReport
from posttrain.data.store.building import RowSource, build_store, open_or_build, read_problems, store_key
from posttrain.data.store.packing import CUTTING_STRATEGIES, PackedDataset, packing_strategy
from posttrain.data.store.report import PreparationReport
from posttrain.data.store.token_store import PROBLEMS, TokenStore

logger = logging.getLogger(__name__)

PEEKED_ROWS = 100
DROP, ERROR = "drop", "error"
TRUNCATION_MODES = (KEEP_START, KEEP_END, ERROR, DROP)
UNTRAINED = "left without a trained token by max_length"
TOO_LONG = "longer than max_length"


@dataclass
class PrepareOptions:
    """What the preparation of a dataset depends on, besides the rows, the format and the tokenizer."""

    max_length: int | None = 1024
    """Most tokens of a sample; the block size when packing. None: no limit."""
    truncation_mode: str = KEEP_START
    """What happens to longer samples: keep_start, keep_end (cut), drop (the whole row, counted), error (a bad row)."""
    on_bad_rows: str = ERROR
    """error: refuse the dataset and list what is wrong; drop: leave the rows out, count them and write them down."""
    completion_only_loss: bool | None = None
    """Train the completion only. None: yes where rows have prompt and completion."""
    assistant_only_loss: bool = False
    """Train the assistant's turns of conversations only."""
    dataset_text_field: str = "text"
    """Name of the text column."""
    packing: str | None = None
    """None, or the strategy by which samples share blocks of `max_length` tokens: bfd, bfd_split, wrapped."""
    shuffle_seed: int | None = None
    """Seed of the order of rows (before packing). None: the dataset's own order."""
    formatting_func: Callable[[Row], str] | None = None
    """Row -> text to train on, in place of the row's columns."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Arguments for the chat template; those of a row's own `chat_template_kwargs` column come first."""
    tools: list[dict[str, Any]] | None = None
    """Schemas of tools that conversations are rendered with; those of a row's own `tools` column come first."""
    allow_blank_prompts: bool = False
    """A user's turn may be empty: an environment writes it when an episode begins."""
    append_eos: bool = True
    """Put the end-of-sequence text after plain texts and completions that do not end on it."""
    step_separator: str = "\n"
    """Written after each step of stepwise rows; its last token is where the step is judged."""
    train_on_last_step_only: bool = False
    """Judge only the last step of stepwise rows."""
    max_completion_length: int | None = None
    """Most tokens of the steps of stepwise rows."""
    required_columns: tuple[str, ...] = ()
    """Further columns that must be there and not null, such as those a reward function reads."""
    allowed_values: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    """Column -> the values it may have, such as the names of environments."""
    row_id_column: str | None = None
    """Column that names rows; a repeated name is then a bad row."""
    bad_rows_file: str | os.PathLike[str] | None = None
    """JSONL file to which every problem is written. None: beside the cached tokens."""
    cache_dir: str | os.PathLike[str] | None = None
    """Where tokens are kept. None: the folder `posttrain` in the cache of `datasets`."""

    ENCODING_FIELDS: ClassVar[tuple[str, ...]] = (
        "completion_only_loss",
        "assistant_only_loss",
        "chat_template_kwargs",
        "tools",
        "allow_blank_prompts",
        "append_eos",
        "step_separator",
        "train_on_last_step_only",
        "max_completion_length",
        "required_columns",
        "allowed_values",
        "row_id_column",
    )
    """Options that change what is stored; the others apply to a stored dataset."""

    def __post_init__(self) -> None:
        if self.truncation_mode not in TRUNCATION_MODES:
            raise ValueError(f"truncation_mode={self.truncation_mode!r} is none of {', '.join(TRUNCATION_MODES)}.")
        if self.on_bad_rows not in (ERROR, DROP):
            raise ValueError(f"on_bad_rows={self.on_bad_rows!r} is neither {ERROR!r} nor {DROP!r}.")
        if self.max_length is not None and self.max_length < 2:
            raise ValueError(f"max_length={self.max_length}: a sample needs two tokens for one to be predicted.")
        if self.packing is not None:
            packing_strategy(self.packing)
            if self.max_length is None:
                raise ValueError("packing needs max_length, the size of a block.")

    def check_against(self, detection: Detection, name: str) -> None:
        """Options that the format of a dataset cannot honour are refused, not ignored."""
        fmt = detection.format
        if self.assistant_only_loss and not (detection.conversational or fmt.tokenised):
            raise ValueError(f"assistant_only_loss needs conversations; {name} was {detection.explanation}.")
        if self.completion_only_loss and fmt is LANGUAGE_MODELLING:
            why = "formatting_func writes one text" if self.formatting_func else f"{name} was {detection.explanation}"
            raise ValueError(f"completion_only_loss=True needs the columns 'prompt' and 'completion'; {why}.")
        if self.packing is not None and len(fmt.roles) > 1:
            raise ValueError(f"packing puts single samples into blocks; {name} was {detection.explanation}.")


def prepare_dataset(
    dataset: Any,
    formats: tuple[RowFormat, ...],
    renderer: Renderer,
    options: PrepareOptions | None = None,
    name: str = "train",
    num_proc: int | None = None,
) -> PreparedDataset | PackedDataset | Any:
    """Check and encode a `datasets.Dataset`, a list of dicts or a stream; raise BadRowsError before anything is trained.

    Gives a map-style dataset of units (tuples of Samples); a `PreparedStream` for an IterableDataset.
    """
    options = options or PrepareOptions()
    if isinstance(dataset, datasets.IterableDataset):
        from posttrain.data.store.streaming import PreparedStream

        return PreparedStream(dataset, formats, renderer, options, name)
    if not isinstance(dataset, (datasets.Dataset, list, tuple)):
        raise TypeError(
            f"{name} is a {type(dataset).__name__}; a datasets.Dataset, an IterableDataset or a list is read."
        )
    if not len(dataset):
        raise ValueError(f"{name} has no rows.")
    detection = detect(RowSource(dataset, None).rows(0, PEEKED_ROWS), formats, renderer, options, name)
    source = RowSource(dataset, columns_read(options))
    key = store_key(source, detection, renderer, options)

    def build(folder: Path) -> dict[str, Any]:
        logger.info("Preparing %s: %s.", name, detection.explanation)
        return build_store(source, detection, renderer, options, name, folder, num_proc)

    called = getattr(getattr(dataset, "info", None), "dataset_name", None)
    try:
        store = open_or_build(key, cache_folder(options), build)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _out_of_room(error, f"{len(dataset):,} rows of {called or name}", cache_folder(options)) from error
        raise
    cut_to = options.max_length if not options.packing or options.packing in CUTTING_STRATEGIES else None
    prepared = PreparedDataset(store, detection, options, name, cut_to)
    prepared.report.source = called
    return PackedDataset(prepared, options.max_length, options.packing) if options.packing else prepared


def _out_of_room(error: OSError, rows: str, folder: Path) -> OSError:
    free = shutil.disk_usage(folder).free
    said = (
        f"the tokens of {rows} could not be written ({error.strerror}; {free:,} bytes are free): make room, or name another "
        "folder with `dataset_cache_dir`"
    )
    return OSError(error.errno, said, str(folder))


def detect(
    rows: Sequence[Any], formats: tuple[RowFormat, ...], renderer: Renderer, options: PrepareOptions, name: str
) -> Detection:
    """The format of a dataset, and a refusal of options that do not go with it."""
    if options.formatting_func is not None:
        why = "read as plain language modelling because formatting_func writes the text of each row"
        detection = Detection(LANGUAGE_MODELLING, False, why)
    else:
        detection = detect_format(
            rows, formats, text_field=options.dataset_text_field, has_template=renderer.has_template, name=name
        )
    options.check_against(detection, name)
    if detection.conversational and not renderer.has_template:
        detection = replace(detection, explanation=f"{detection.explanation}; {adopt_chat_format(renderer)}")
    return detection


def columns_read(options: PrepareOptions) -> set[str] | None:
    """The columns that can matter; all of them for a formatting function. Others are neither decoded nor hashed."""
    if options.formatting_func is not None:
        return None
    ours = {column for fmt in FORMATS for names in (*fmt.required, fmt.optional) for column in names}
    foreign = {column for fmt in FOREIGN_FORMATS for names in fmt.columns.values() for column in names}
    named = {options.dataset_text_field, *options.required_columns, *options.allowed_values}
    return ours | foreign | named | {*BESIDE_FOREIGN, *CONVERSATION_COLUMNS} | ({options.row_id_column} - {None})


def cache_folder(options: PrepareOptions) -> Path:
    return Path(options.cache_dir or Path(datasets.config.HF_DATASETS_CACHE) / "posttrain")


class PreparedDataset:
    """Units of a stored dataset, cut to `max_length`, without the rows that cannot be trained on.

    `report` counts what became of the rows; `fingerprint` changes with anything that changes a unit or their order.
    """

    def __init__(
        self,
        store: TokenStore,
        detection: Detection,
        options: PrepareOptions,
        name: str,
        max_length: int | None,
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
        self._sample_starts, self._sample_stops = self._windows()
        self._units = self._select_units()
        if options.shuffle_seed is not None:
            self._units = np.random.default_rng(options.shuffle_seed).permutation(self._units)
        self._samples = self._sample_numbers()
        self._count_kept()
        decided_by = [store.folder.name, self.max_length, options.truncation_mode, options.shuffle_seed, len(self)]
        self.fingerprint = xxhash.xxh3_128_hexdigest(json.dumps(decided_by).encode())

    # ------------------------------------------------------------------------------------------------ which units stay

    def _windows(self) -> tuple[np.ndarray, np.ndarray]:
        """The part of each stored sample that is kept."""
        lengths = self.store.lengths.astype(np.int64)
        kept = lengths if self.max_length is None else np.minimum(lengths, self.max_length)
        if self.options.truncation_mode == KEEP_END:
            return lengths - kept, lengths
        return np.zeros_like(lengths), kept

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
        if self.detection.format.trains_tokens:
            untrained = self._untrained_units() & good
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

    def _untrained_units(self) -> np.ndarray:
        """Pairs need a trained token on both sides; a packed row needs one somewhere."""
        empty = self.store.trained_within(self._sample_starts, self._sample_stops) == 0
        return self._any_sample(empty) if len(self.roles) > 1 else ~self._any_sample(~empty)

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
        self.report.kept = len(self._units)
        self.report.truncated, self.report.truncated_tokens = int((lost > 0).sum()), int(lost.sum())
        self.report.tokens, self.report.trained_tokens = int(kept.sum()), int(trained[samples].sum())

    def _sample_numbers(self) -> np.ndarray:
        """Stored numbers of the samples of all kept units, in order."""
        firsts = self.store.unit_offsets[self._units]
        sizes = self.store.unit_offsets[self._units + 1] - firsts
        within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        return np.repeat(firsts, sizes) + within

    # ---------------------------------------------------------------------------------------------------------- reading

    def __len__(self) -> int:
        return len(self._units)

    def __getitem__(self, index: int) -> Unit:
        if not -len(self) <= index < len(self):
            raise IndexError(f"Unit {index} of the {len(self)} of {self.name}.")
        unit = self._units[index]
        samples = range(self.store.unit_offsets[unit], self.store.unit_offsets[unit + 1])
        row = int(self.store.rows[unit])
        return tuple(self._cut(number, row) for number in samples)

    def _cut(self, number: int, row: int) -> Sample:
        sample = self.store.sample(number, row)
        start, stop = self.window(number)
        return sample if stop - start == len(sample) else sample.slice(start, stop)

    @property
    def units(self) -> np.ndarray:
        """Number of each kept unit in the store, in the order of this dataset."""
        return self._units

    def window(self, number: int) -> tuple[int, int]:
        """The part of a stored sample that is kept: from which token to before which."""
        return int(self._sample_starts[number]), int(self._sample_stops[number])

    @property
    def rows(self) -> np.ndarray:
        """Source row of each unit."""
        return self.store.rows[self._units]

    @property
    def unit_lengths(self) -> np.ndarray:
        """Tokens of each unit, all its samples together."""
        sizes = np.concatenate([[0], np.cumsum(self._sample_stops - self._sample_starts)])
        return sizes[self.store.unit_offsets[self._units + 1]] - sizes[self.store.unit_offsets[self._units]]

    # ------------------------------------------------------------------------------- as single samples, for packing

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
