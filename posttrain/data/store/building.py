"""Building a token store: rows in batches, several workers, one builder at a time, found again by what decides its content."""

from __future__ import annotations

import io
import itertools
import json
import logging
import os
import pickle
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import xxhash
from filelock import FileLock, Timeout

from posttrain.core.machine import usable_cores
from posttrain.data.options import PrepareOptions
from posttrain.data.render.renderer import Renderer
from posttrain.data.rows.checks import Finding, ProblemLog
from posttrain.data.rows.examiner import RowExaminer, Tally
from posttrain.data.rows.foreign_formats import Row
from posttrain.data.rows.formats import Detection
from posttrain.data.store.part_workers import build_parts
from posttrain.data.store.token_store import (
    PROBLEMS,
    DamagedStoreError,
    StoreWriter,
    TokenStore,
    join_part,
    remove_folder,
    seal,
    sort_images,
)

logger = logging.getLogger(__name__)

BATCH_ROWS = 1000
IMAGE_ROWS = 50  # the same where rows hold images, of megabytes each
ROWS_PER_WORKER = 5000  # fewer are not worth a process, which needs two seconds to start
MIN_ROWS, MAX_ROWS = 128, 20_000  # of what a worker takes at once
LOG_EVERY_S = 10
TALLY = "tally.json"
SHARED_ROWS = "rows.arrow"
LOCK_DEADLINE_S = 6 * 3600
ENCODING_VERSION = 3
"""Raised by one whenever rows are read or encoded differently, so that older stores are not used.

2: ids come from the tokenizer on the whole text. Stores of version 1 were composed of words and may hold other ids.
3: rows may have images.
"""


class RowSource:
    """Rows by number, in batches: a `datasets.Dataset` or a list of dicts, reduced to the columns that are read.

    Images stay undecoded ({"bytes", "path"}), wherever in a row they are: to read a prompt must not decode its picture.
    """

    def __init__(self, dataset: Any, columns: set[str] | None) -> None:
        self.is_arrow = isinstance(dataset, datasets.Dataset)
        self.is_transformed = self.is_arrow and dataset.format["type"] == "custom"
        if self.is_arrow and not self.is_transformed:
            dataset = dataset.with_format(None)
            if columns is not None:
                dataset = dataset.select_columns([name for name in dataset.column_names if name in columns])
        self.dataset = dataset
        is_table = self.is_arrow and not self.is_transformed
        # Made once: `with_format` copies a dataset and hashes what it is, which takes longer than to read an image.
        self._tables = dataset.with_format("arrow") if is_table else None
        self._undecoded = without_decoding(dataset.features) if is_table else None
        holds_bytes = is_table and "binary" in str(dataset.features.arrow_schema)
        self.batch_rows = IMAGE_ROWS if holds_bytes else BATCH_ROWS

    def __len__(self) -> int:
        return len(self.dataset)

    def batches(self, start: int, stop: int) -> Iterator[tuple[int, list[Row]]]:
        """(number of the first row, rows)"""
        for first in range(start, stop, self.batch_rows):
            yield first, self.rows(first, min(first + self.batch_rows, stop))

    def rows(self, start: int, stop: int) -> list[Row]:
        if self._undecoded is not None:
            return [self._undecoded.decode_example(row) for row in self._tables[start:stop].to_pylist()]
        part = self.dataset[start:stop]
        if not self.is_arrow:
            return list(part)
        return [dict(zip(part, values)) for values in zip(*part.values())]

    def content_hash(self) -> str:
        """Of the values themselves: it survives moved files, and no edit keeps it."""
        sink = _HashSink()
        if not self.is_arrow or self.is_transformed:
            for first, rows in self.batches(0, len(self)):
                sink.write(pickle.dumps((first, rows)))
            return sink.digest.hexdigest()
        sink.write(repr(self.dataset.features).encode())
        for table in self.tables():
            table = table.replace_schema_metadata(None).combine_chunks()
            with pa.ipc.new_stream(pa.PythonFile(sink, mode="w"), table.schema) as writer:
                writer.write_table(table)
        return sink.digest.hexdigest()

    def tables(self) -> Iterator[pa.Table]:
        for first in range(0, len(self), 10 * self.batch_rows):
            yield self._tables[first : first + 10 * self.batch_rows]

    def in_a_file(self, path: Path) -> RowSource:
        """The same rows where other processes can map them into memory, if they are a table that is in ours only."""
        if not self.is_arrow or self.is_transformed or self.dataset.cache_files:
            return self
        schema = self.dataset.features.arrow_schema
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
            for table in self.tables():
                writer.write_table(table.replace_schema_metadata(schema.metadata))
        return RowSource(datasets.Dataset.from_file(str(path)), None)


def without_decoding(features: datasets.Features) -> datasets.Features | None:
    """The features with every Image as it is stored; None where there is none."""
    found = False

    def visited(feature: Any) -> Any:
        nonlocal found
        if isinstance(feature, datasets.Image):
            found = True
            return datasets.Image(decode=False)
        if isinstance(feature, datasets.List | datasets.LargeList):
            return type(feature)(visited(feature.feature))
        return {name: visited(part) for name, part in feature.items()} if isinstance(feature, dict) else feature

    undecoded = datasets.Features({name: visited(feature) for name, feature in features.items()})
    return undecoded if found else None


class _HashSink(io.RawIOBase):
    """A file that remembers only the checksum of what was written to it."""

    def __init__(self) -> None:
        self.digest = xxhash.xxh3_128()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.digest.update(data)
        return len(data)


def store_key(
    source: RowSource, detection: Detection, renderer: Renderer, options: PrepareOptions, image_files: str = ""
) -> str:
    """Hash of all that decides the units: rows, tokenizer and template, format, options of encoding; no lengths.

    `image_files`: a digest of the files that rows name, whose content is not in the rows.
    """
    decided_by = {
        "encoding": ENCODING_VERSION,
        "rows": source.content_hash(),
        "image_files": image_files,
        "renderer": renderer.fingerprint,
        "format": [detection.format.name, detection.format.roles, detection.format.trains_tokens],
        "reading": [detection.conversational, detection.implicit_prompt, detection.text_field],
        "conversion": [detection.foreign and detection.foreign.name, detection.from_value_columns],
        "image_marker": detection.image_marker,
        "options": {name: getattr(options, name) for name in options.ENCODING_FIELDS},
        "formatting_func": _function_hash(options.formatting_func),
    }
    return xxhash.xxh3_128_hexdigest(json.dumps(decided_by, sort_keys=True, default=repr).encode())


def _function_hash(function: Callable[..., Any] | None) -> str | None:
    """By what the function does; a function that cannot be hashed is never found again."""
    if function is None:
        return None
    try:
        return datasets.fingerprint.Hasher.hash(function)
    except (pickle.PicklingError, TypeError, AttributeError):
        return uuid.uuid4().hex


def open_or_build(key: str, cache_dir: Path, build: Callable[[Path], dict[str, Any]]) -> TokenStore:
    """The store under `key`; built by one process while the others wait, and built again when it is damaged.

    `build` writes into a folder and returns facts for the manifest. The folder gets its name only when it is whole.
    """
    cache_dir.mkdir(parents=True, exist_ok=True)
    folder = cache_dir / key
    store = _open(folder)
    if store is not None:
        return store
    with _lock(cache_dir / f"{key}.lock", folder):
        store = _open(folder)
        if store is not None:
            return store
        unfinished = cache_dir / f"{key}.tmp-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        try:
            seal(unfinished, build(unfinished))
            remove_folder(folder)
            os.replace(unfinished, folder)
        finally:
            remove_folder(unfinished)
    return TokenStore(folder, verify=False)


def _open(folder: Path) -> TokenStore | None:
    if not folder.exists():
        return None
    try:
        return TokenStore(folder)
    except DamagedStoreError as error:
        logger.warning("%s It is built again.", error)
        return None


def _lock(path: Path, folder: Path) -> FileLock:
    lock = FileLock(path)
    deadline = time.monotonic() + LOCK_DEADLINE_S
    while True:
        try:
            lock.acquire(timeout=60)
            return lock
        except Timeout:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"Waited {LOCK_DEADLINE_S // 3600} hours for another process to prepare {folder}. If none is running, "
                    f"remove {path}."
                ) from None
            logger.info("Waiting for another process that prepares %s.", folder)


def build_store(
    source: RowSource,
    detection: Detection,
    renderer: Renderer,
    options: PrepareOptions,
    name: str,
    folder: Path,
    num_proc: int | None,
) -> dict[str, Any]:
    """Examine and encode all rows into `folder`; the facts that go with them."""
    num_workers = _num_workers(len(source), num_proc)
    shares = _shares(len(source), num_workers)
    tally = Tally()
    last_logged = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    if num_workers > 1:
        source = source.in_a_file(folder / SHARED_ROWS)

    def build_part(i: int) -> None:
        _build_part(source, *shares[i], RowExaminer(detection, renderer, options), name, folder, f"part-{i}.")

    def use_part(i: int) -> None:
        nonlocal last_logged
        counted = folder / f"part-{i}.{TALLY}"
        tally.add(Tally.of_json(json.loads(counted.read_text(encoding="utf-8"))))
        counted.unlink()
        join_part(folder, f"part-{i}.")
        if time.monotonic() - last_logged > LOG_EVERY_S:
            last_logged = time.monotonic()
            logger.info("Preparing %s: %d of %d rows.", name, shares[i][1], len(source))

    build_parts(build_part, use_part, len(shares), num_workers, folder)
    (folder / SHARED_ROWS).unlink(missing_ok=True)
    sort_images(folder)
    late = tally.late_findings(options.row_id_column)
    log = ProblemLog(name, folder / PROBLEMS)
    for row, findings in late.items():
        log.add(row, findings)
    log.flush()
    labels = tally.label_report()
    return {
        "rows_read": tally.rows_read,
        "late_bad_rows": sorted(row for row in late if row >= 0),
        "control_token_rows": tally.control_token_rows,
        "message_keys": {f"{column}: {key}": count for (column, key), count in tally.key_counts.items()},
        "notes": dict(tally.notes),
        "labels": asdict(labels) if labels else None,
        **_image_facts(options, renderer),
    }


def _image_facts(options: PrepareOptions, renderer: Renderer) -> dict[str, Any]:
    """What it takes to find the images of a store again, and to know the positions of their tokens."""
    if options.image_limits is None:
        return {}
    limits = {
        name: os.fspath(v) if isinstance(v, os.PathLike) else v for name, v in asdict(options.image_limits).items()
    }
    family = renderer.layouts.family
    axes = [family.placeholder_id, family.merge_size] if family.three_axis_positions else None
    return {"image_limits": limits, "three_axis_positions": axes}


def _num_workers(num_rows: int, num_proc: int | None) -> int:
    """As many as asked for, or as the machine has cores; fewer for few rows."""
    wanted = usable_cores() if num_proc is None else num_proc or 1
    return max(1, min(wanted, num_rows // ROWS_PER_WORKER))


def _shares(num_rows: int, num_workers: int) -> list[tuple[int, int]]:
    """Contiguous shares of the rows, which workers take one after the other: large ones first, small ones at the end, so that
    all workers end at about the same time, whatever their speed and whenever they began."""
    # Of a very large dataset they are larger: a pipe must hold the numbers of all (see part_workers).
    fewest, most = max(MIN_ROWS, num_rows // 20_000), max(MAX_ROWS, num_rows // 256)
    edges = [0]
    while edges[-1] < num_rows:
        left = num_rows - edges[-1]
        size = left if num_workers == 1 else max(fewest, left // (2 * num_workers))
        edges.append(min(edges[-1] + min(size, most), num_rows))
    return list(itertools.pairwise(edges))


def _build_part(
    source: RowSource, start: int, stop: int, examiner: RowExaminer, name: str, folder: Path, part: str
) -> None:
    """Examine and encode some of the rows into files whose names begin with `part`."""
    writer = StoreWriter(folder, part, with_images=examiner.options.image_limits is not None)
    log = ProblemLog(name, folder / f"{part}{PROBLEMS}")
    for first, rows in source.batches(start, stop):
        units = []
        for number, result in enumerate(examiner.examine(rows, first), first):
            if isinstance(result, tuple):
                units.append(result)
            else:
                log.add(number, result)
        writer.add(units, examiner.images)
        examiner.images.clear()
    writer.close()
    log.flush()
    (folder / f"{part}{TALLY}").write_text(json.dumps(examiner.tally.as_json()), encoding="utf-8")


def read_problems(store: TokenStore) -> Iterator[tuple[int, list[Finding]]]:
    """What was found when the store was built: (row, findings), in the order of the rows."""
    path = store.folder / PROBLEMS
    if not path.exists():
        return
    with open(path, encoding="utf-8") as lines:
        problems = map(json.loads, lines)
        for row, group in itertools.groupby(problems, key=lambda problem: problem["row"]):
            yield row, [Finding(p["kind"], p["column"], p["reason"]) for p in group]
