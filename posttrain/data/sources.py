"""Datasets by name: from the Hub or from local files, whole or in part. `mixtures` puts several together.

JSON, CSV and text files are read line by line by us, because the usual readers mend in silence what they should report: bytes
that are not UTF-8, numbers among texts, words like "None" that become nulls. Faults are told with file and line, all of them.
"""

from __future__ import annotations

import csv
import gzip
import json
import math
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
from datasets.exceptions import DatasetGenerationError

LOADERS = {
    ".jsonl": "json",
    ".json": "json",
    ".ndjson": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".txt": "text",
}
SHOWN = 20
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
AnyDataset = datasets.Dataset | datasets.IterableDataset
Row = dict[str, Any]


class SourceError(ValueError):
    """A dataset cannot be found, or a file of it cannot be read; says which file and line."""


@dataclass
class DatasetSource:
    """One dataset: where it is, which part of it, and under which names its columns are read."""

    path: str
    """Hub id, file (JSONL, JSON, CSV, TSV, Parquet, Arrow, text; JSON lines also as .gz) or folder of such files."""
    subset: str | None = None
    """Configuration of a Hub dataset."""
    split: str = "train"
    columns: dict[str, str] = field(default_factory=dict)
    """Their name -> the name that the method reads, such as {"question": "prompt", "answer": "completion"}."""
    fraction: float = 1.0
    """Share of the rows to take, chosen by a seeded shuffle."""
    weight: float = 1.0
    """In a mixture: how often its rows are taken (concatenated), or its share of the draws (interleaved)."""
    share: float | None = None
    """In a mixture: its share of the rows (of all sources or of none)."""
    keep: list[str] | None = None
    """Columns to keep; None: all."""
    data_files: Any = None
    """Of a Hub dataset: which files of its repository."""
    data_dir: str | None = None

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise ValueError(f"fraction={self.fraction} of {self.path}: a share above 0 and up to 1 is needed.")
        if not (self.weight > 0 and math.isfinite(self.weight)):
            raise ValueError(f"weight={self.weight} of {self.path}: a positive number is needed.")


def load_source(source: DatasetSource | str, *, seed: int = 0, streaming: bool = False) -> AnyDataset:
    """The rows of one source."""
    if isinstance(source, str):
        source = DatasetSource(source)
    path = Path(source.path)
    if path.exists():
        dataset = _load_local(path, source.split, streaming)
    elif path.suffix in (*LOADERS, ".gz") or source.path.startswith((".", "/", "~")):
        raise SourceError(f"There is no file or folder {source.path}.")
    else:
        dataset = _load_from_hub(source, streaming)
    dataset = _kept_columns(rename_columns(dataset, source.columns, source.path), source)
    if streaming:
        if source.fraction < 1:
            raise ValueError(f"fraction={source.fraction} of {source.path}: a stream has no share to take; use `take`.")
        return dataset
    if not len(dataset):
        raise SourceError(f"{source.path} (split {source.split!r}) has no rows.")
    return take_fraction(dataset, source.fraction, seed)


def _load_from_hub(source: DatasetSource, streaming: bool) -> AnyDataset:
    try:
        files = {"data_files": source.data_files, "data_dir": source.data_dir}
        return datasets.load_dataset(source.path, source.subset, split=source.split, streaming=streaming, **files)
    except (ValueError, OSError) as error:
        where = f"{source.path} (subset {source.subset!r}, split {source.split!r})"
        raise SourceError(f"{where} is no local file and could not be loaded from the Hub: {error}") from error


def rename_columns(dataset: AnyDataset, columns: dict[str, str], name: str) -> AnyDataset:
    """The dataset with some columns under other names."""
    if not columns:
        return dataset
    present = list(dataset.column_names or next(iter(dataset), {}))
    missing = [column for column in columns if column not in present]
    taken = [new for old, new in columns.items() if new in present and new != old and new not in columns]
    if missing:
        raise SourceError(
            f"{name} has no column {', '.join(map(repr, missing))}; it has {', '.join(map(repr, present))}."
        )
    if taken:
        raise SourceError(
            f"{name} has a column {', '.join(map(repr, taken))} already; map that one to another name too."
        )
    return dataset.rename_columns({old: new for old, new in columns.items() if old != new})


def _kept_columns(dataset: AnyDataset, source: DatasetSource) -> AnyDataset:
    if source.keep is None:
        return dataset
    present = list(dataset.column_names or next(iter(dataset), {}))
    if missing := [column for column in source.keep if column not in present]:
        raise SourceError(
            f"{source.path} has no column {missing[0]!r} to keep; it has {', '.join(map(repr, present))}."
        )
    return dataset.select_columns(source.keep)


def take_fraction(dataset: datasets.Dataset, fraction: float, seed: int) -> datasets.Dataset:
    """A seeded random share of the rows, at least one of them."""
    if fraction >= 1:
        return dataset
    return dataset.shuffle(seed=seed).select(range(max(1, round(len(dataset) * fraction))))


# ---------------------------------------------------------------------------------------------------------- local files


def _load_local(path: Path, split: str, streaming: bool) -> AnyDataset:
    if path.is_dir() and ((path / "state.json").exists() or (path / "dataset_dict.json").exists()):
        return _load_saved(path, split, streaming)
    files = _files_of(path, split)
    kinds = {LOADERS.get(_suffix(file)) for file in files}
    if len(kinds) != 1 or None in kinds:
        names = ", ".join(file.name for file in files[:5])
        raise SourceError(f"Files of one known type are needed ({', '.join(LOADERS)}); found {names}.")
    empty = [file for file in files if file.stat().st_size == 0]
    if empty:
        raise SourceError(f"{empty[0]} is empty.")
    loader = kinds.pop()
    if loader in READERS:
        return _read_files(files, loader, streaming)
    if loader == "parquet":
        _check_schemas(files)
    names = [os.fspath(file) for file in files]
    try:
        return datasets.load_dataset(loader, data_files=names, split="train", streaming=streaming)
    except (DatasetGenerationError, ValueError, pa.ArrowException) as error:
        raise SourceError(f"{path} cannot be read: {error.__cause__ or error}") from error


def _load_saved(path: Path, split: str, streaming: bool) -> AnyDataset:
    saved = datasets.load_from_disk(os.fspath(path))
    if isinstance(saved, datasets.DatasetDict):
        if split not in saved:
            raise SourceError(f"{path} has the splits {', '.join(map(repr, saved))}, not {split!r}.")
        saved = saved[split]
    return saved.to_iterable_dataset() if streaming else saved


def _files_of(path: Path, split: str) -> list[Path]:
    """The data files of a folder; those that carry the name of the split where any carries the name of one."""
    if path.is_file():
        return [path]
    files = sorted(f for f in path.rglob("*") if f.is_file() and _suffix(f) in LOADERS and not f.name.startswith("."))
    if not files:
        raise SourceError(f"The folder {path} holds no file of type {', '.join(LOADERS)}.")
    relative = {file: os.fspath(file.relative_to(path)).lower() for file in files}
    of_splits = {
        s: [f for f in files if s in relative[f]] for s in dict.fromkeys((split, "train", "validation", "test"))
    }
    if of_splits[split] or not any(of_splits.values()):
        return of_splits[split] or files
    present = [name for name, found in of_splits.items() if found]
    raise SourceError(f"{path} has files for the splits {', '.join(map(repr, present))}, none for {split!r}.")


def _suffix(file: Path) -> str:
    return Path(file.stem).suffix if file.suffix == ".gz" else file.suffix


def _check_schemas(files: list[Path]) -> None:
    """All Parquet shards have the columns and kinds of values of the first one; a reader would cast them in silence."""
    first: dict[str, str] = {}
    rows = 0
    for file in files:
        try:
            metadata = pq.read_metadata(file)
        except (pa.ArrowException, OSError) as error:
            raise SourceError(f"{file} is no readable Parquet file: {error}") from error
        rows += metadata.num_rows
        arrow = metadata.schema.to_arrow_schema()
        schema = {name: _kind(kind) for name, kind in zip(arrow.names, arrow.types)}
        first = first or schema
        for column in dict.fromkeys((*first, *schema)):
            here, there = schema.get(column, "nothing"), first.get(column, "nothing")
            if here != there and "null" not in (here, there):
                raise SourceError(f"{file}: column {column!r} holds {here}, in {files[0].name} it holds {there}.")
    if not rows:
        raise SourceError(f"{', '.join(map(str, files))} has no rows.")


def _kind(kind: pa.DataType) -> str:
    """A type without its width: shards written by different tools differ in it, and it does not matter."""
    if pa.types.is_integer(kind):
        return "integers"
    if pa.types.is_floating(kind):
        return "numbers"
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return "text"
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return f"lists of {_kind(kind.value_type)}"
    if pa.types.is_struct(kind):
        return "records"
    return str(kind)


# ------------------------------------------------------------------------------------------- files of text, line by line


@dataclass(frozen=True)
class Fault:
    """A line that is no row, and why."""

    file: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file}, line {self.line} {self.reason}"


def _read_files(files: list[Path], loader: str, streaming: bool) -> AnyDataset:
    """Rows as they stand in the files: columns of text as text, others as JSON. Nothing is cast, the check sees it all."""
    stamps = [(os.fspath(file), file.stat().st_mtime_ns, file.stat().st_size) for file in files]
    arguments = {"files": stamps, "loader": loader}
    if streaming:
        return datasets.IterableDataset.from_generator(_rows_of, gen_kwargs=arguments)
    try:
        holds_text = _columns_of(stamps, loader)
        kinds = {column: datasets.Value("string") if text else datasets.Json() for column, text in holds_text.items()}
        features, arguments["holds_text"] = datasets.Features(kinds), holds_text
        return datasets.Dataset.from_generator(_rows_of, features=features, gen_kwargs=arguments)
    except (SourceError, DatasetGenerationError) as error:
        faults = [row for name, *_ in stamps for row in READERS[loader](name) if isinstance(row, Fault)]
        if not faults:
            raise
        more = [f"... and {len(faults) - SHOWN:,} more"] if len(faults) > SHOWN else []
        listed = "\n".join(f"  {fault}" for fault in [*faults[:SHOWN], *more])
        raise SourceError(f"{len(faults):,} lines cannot be read:\n{listed}") from error


def _rows_of(
    files: list[tuple[str, int, int]], loader: str, holds_text: dict[str, bool] | None = None
) -> Iterator[Row]:
    """All rows of the files. (The stamps of the files are for the cache.)

    With `holds_text` (column -> whether it holds only text) every row has all columns, and what is not text is written as
    JSON here: the Json type of `datasets` would take a text like "007" for JSON already.
    """
    for name, *_ in files:
        for row in READERS[loader](name):
            if isinstance(row, Fault):
                raise SourceError(f"{row}.")
            yield row if holds_text is None else {c: _stored(row.get(c), text) for c, text in holds_text.items()}


def _stored(value: Any, is_text: bool) -> str | None:
    return value if is_text or value is None else json.dumps(value)


def _columns_of(files: list[tuple[str, int, int]], loader: str) -> dict[str, bool]:
    """Column -> whether all its values are text (or null)."""
    holds_text: dict[str, bool] = {}
    for row in _rows_of(files, loader):
        for column, value in row.items():
            is_text = value is None or isinstance(value, str)
            holds_text[column] = holds_text.get(column, True) and is_text
    return holds_text


def _decoded_lines(name: str) -> Iterator[tuple[int, str | Fault]]:
    with gzip.open(name, "rb") if name.endswith(".gz") else open(name, "rb") as content:
        for number, line in enumerate(content, 1):
            try:
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                reason = f"is not UTF-8 text: the byte 0x{line[error.start]:02x} at {error.start} ({error.reason})"
                yield number, Fault(name, number, reason)


def _json_rows(name: str) -> Iterator[Row | Fault]:
    """JSON lines; a file named .json may also be one list of objects, or an object that holds one list of them."""
    if name.removesuffix(".gz").endswith(".json"):
        rows = _rows_of_document(name)
        if rows is not None:
            yield from rows
            return
    for number, line in _decoded_lines(name):
        if isinstance(line, Fault):
            yield line
            continue
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            cut = "Unterminated" in str(error) or "control character" in str(error) or error.pos >= len(line.rstrip())
            what = "ends in the middle of a value" if cut else "is not JSON"
            yield Fault(name, number, f"{what}: {error}")
            continue
        if not isinstance(value, dict):
            yield Fault(name, number, f"is a {type(value).__name__}, a JSON object is needed")
        elif SURROGATE.search(line) and not _is_encodable(value):
            yield Fault(name, number, "holds half of a surrogate pair (\\ud8.. to \\udf..), which is no character")
        else:
            yield value


def _is_encodable(value: Row) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _rows_of_document(name: str) -> list[Row | Fault] | None:
    """The rows of a file that is one JSON value; None when it is not, and may be JSON lines."""
    try:
        with gzip.open(name, "rb") if name.endswith(".gz") else open(name, "rb") as content:
            value = json.loads(content.read())
    except ValueError:
        return None
    if isinstance(value, dict):
        lists = [item for item in value.values() if isinstance(item, list) and item and isinstance(item[0], dict)]
        value = lists[0] if len(lists) == 1 and len(value) == 1 else [value]
    if not isinstance(value, list):
        return [Fault(name, 1, f"is a {type(value).__name__}, a list of JSON objects is needed")]
    return [row if isinstance(row, dict) else Fault(name, 1, f"holds {row!r:.60}, not an object") for row in value]


def _csv_rows(name: str) -> Iterator[Row | Fault]:
    """CSV or TSV with a header. All values are text, as they stand; `label` and `margin` become what they say."""
    faults: list[Fault] = []

    def lines() -> Iterator[str]:
        for _, line in _decoded_lines(name):
            if isinstance(line, Fault):
                faults.append(line)
            else:
                yield line

    reader = csv.reader(lines(), delimiter="\t" if ".tsv" in name else ",", strict=True)
    header: list[str] | None = None
    try:
        for values in reader:
            if header is None:
                header = values
            elif values and len(values) != len(header):
                yield Fault(name, reader.line_num, f"has {len(values)} fields, the header has {len(header)}")
            elif values:
                yield {column: _typed(column, value) for column, value in zip(header, values)}
    except csv.Error as error:
        yield Fault(name, reader.line_num, f"is not CSV: {error}")
    yield from faults


def _typed(column: str, value: str) -> Any:
    if column not in ("label", "margin"):
        return value
    try:
        return json.loads(value.strip().lower())
    except ValueError:
        return value


def _text_rows(name: str) -> Iterator[Row | Fault]:
    """A row for every line that is not blank."""
    for _, line in _decoded_lines(name):
        if isinstance(line, Fault):
            yield line
        elif line.strip():
            yield {"text": line.rstrip("\r\n")}


READERS: dict[str, Callable[[str], Iterator[Row | Fault]]] = {"json": _json_rows, "csv": _csv_rows, "text": _text_rows}
