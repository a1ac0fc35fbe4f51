"""Datasets by name: from the Hub or from local files, whole or in part, alone or mixed.

Files are looked at before they are parsed, because readers mend silently what they should report (bytes that are not UTF-8,
a shard with another schema); a file that cannot be parsed is read again line by line to say where.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

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
AnyDataset = datasets.Dataset | datasets.IterableDataset


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
    dataset = rename_columns(dataset, source.columns, source.path)
    if streaming:
        if source.fraction < 1:
            raise ValueError(f"fraction={source.fraction} of {source.path}: a stream has no share to take; use `take`.")
        return dataset
    if not len(dataset):
        raise SourceError(f"{source.path} (split {source.split!r}) has no rows.")
    return take_fraction(dataset, source.fraction, seed)


def _load_from_hub(source: DatasetSource, streaming: bool) -> AnyDataset:
    try:
        return datasets.load_dataset(source.path, source.subset, split=source.split, streaming=streaming)
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
    loader = _loader_of(files)
    for file in files:
        _check_file(file, loader)
    if loader == "parquet":
        _check_schemas(files)
    options = {"sep": "\t"} if all(file.suffix == ".tsv" for file in files) else {}
    names = [os.fspath(file) for file in files]
    try:
        return datasets.load_dataset(loader, data_files=names, split="train", streaming=streaming, **options)
    except (DatasetGenerationError, ValueError, pa.ArrowException) as error:
        problems = [problem for file in files for problem in FIND_PROBLEMS.get(loader, _no_problems)(file)]
        reason = "\n".join(f"  {problem}" for problem in problems[:SHOWN]) or f"  {error.__cause__ or error}"
        more = f"\n  ... and {len(problems) - SHOWN:,} more" if len(problems) > SHOWN else ""
        raise SourceError(f"{path} cannot be read:\n{reason}{more}") from error


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


def _loader_of(files: list[Path]) -> str:
    kinds = {LOADERS.get(_suffix(file)) for file in files}
    if len(kinds) != 1 or None in kinds:
        names = ", ".join(file.name for file in files[:5])
        raise SourceError(f"Files of one known type are needed ({', '.join(LOADERS)}); found {names}.")
    return kinds.pop()


def _open_bytes(file: Path) -> IO[bytes]:
    return gzip.open(file, "rb") if file.suffix == ".gz" else open(file, "rb")


def _check_file(file: Path, loader: str) -> None:
    """Refuse what the reader would pass over: an empty file, text that is not UTF-8, a file that is not Parquet."""
    if file.stat().st_size == 0:
        raise SourceError(f"{file} is empty.")
    if loader in ("parquet", "arrow"):
        return
    decoder, line = codecs.getincrementaldecoder("utf-8")(), 1
    with _open_bytes(file) as content:
        block = b"first"
        while block:
            block = content.read(1 << 20)
            try:
                decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                line += error.object[: error.start].count(b"\n")
                bad = error.object[error.start : error.start + 1].hex()
                raise SourceError(
                    f"{file}, line {line}: the byte 0x{bad} is not UTF-8 text ({error.reason})."
                ) from error
            line += block.count(b"\n")


def _check_schemas(files: list[Path]) -> None:
    """All Parquet shards have the columns and kinds of values of the first one."""
    first: dict[str, str] = {}
    for file in files:
        try:
            schema = {name: _kind(kind) for name, kind in zip(*_names_and_types(pq.read_schema(file)))}
        except (pa.ArrowException, OSError) as error:
            raise SourceError(f"{file} is no readable Parquet file: {error}") from error
        first = first or schema
        for column in dict.fromkeys((*first, *schema)):
            here, there = schema.get(column, "nothing"), first.get(column, "nothing")
            if here != there and "null" not in (here, there):
                raise SourceError(f"{file}: column {column!r} holds {here}, in {files[0].name} it holds {there}.")


def _names_and_types(schema: pa.Schema) -> tuple[list[str], list[pa.DataType]]:
    return schema.names, schema.types


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


def _json_problems(file: Path) -> Iterator[str]:
    """Lines that are not a JSON object. A file that is one JSON list or object has no lines."""
    with _open_bytes(file) as content:
        for number, line in enumerate(content, 1):
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except ValueError as error:
                what = "ends in the middle of a value" if _is_cut(line, error) else "is not JSON"
                yield f"{file}, line {number} {what}: {error}"
                continue
            if not isinstance(value, dict):
                yield f"{file}, line {number} is a {type(value).__name__}, a JSON object is needed"


def _is_cut(line: bytes, error: ValueError) -> bool:
    position = getattr(error, "pos", 0)
    return "Unterminated" in str(error) or "control character" in str(error) or position >= len(line.rstrip())


def _csv_problems(file: Path) -> Iterator[str]:
    with open(file, encoding="utf-8", newline="") as content:
        rows = csv.reader(content, delimiter="\t" if file.suffix == ".tsv" else ",")
        header = next(rows, [])
        for row in rows:
            if row and len(row) != len(header):
                yield f"{file}, line {rows.line_num} has {len(row)} fields, the header has {len(header)}"


def _no_problems(file: Path) -> Iterator[str]:
    return iter(())


FIND_PROBLEMS: dict[str, Callable[[Path], Iterator[str]]] = {"json": _json_problems, "csv": _csv_problems}


# ------------------------------------------------------------------------------------------------------------- mixtures


def load_mixture(
    sources: Sequence[DatasetSource | str], *, mixing: str = "concatenate", seed: int = 0, streaming: bool = False
) -> AnyDataset:
    """Several sources as one dataset.

    `concatenate`: weight 2 takes every row twice, 0.5 a seeded half of them; the result is shuffled (a stream is not).
    `interleave`: each row is drawn from a source with probability weight / sum of weights, until one is exhausted.
    """
    if mixing not in MIXERS:
        raise ValueError(f"mixing={mixing!r} is none of {', '.join(MIXERS)}.")
    if not sources:
        raise ValueError("A mixture needs at least one source.")
    listed = [DatasetSource(source) if isinstance(source, str) else source for source in sources]
    loaded = [load_source(source, seed=seed, streaming=streaming) for source in listed]
    if len(loaded) == 1 and listed[0].weight == 1:
        return loaded[0]
    return MIXERS[mixing](_with_common_columns(loaded, listed), [source.weight for source in listed], seed)


def _concatenate(parts: list[AnyDataset], weights: list[float], seed: int) -> AnyDataset:
    if isinstance(parts[0], datasets.IterableDataset):
        if any(weight != int(weight) for weight in weights):
            raise ValueError("Concatenated streams take whole weights: a stream has no share to take.")
        return datasets.concatenate_datasets([p for part, weight in zip(parts, weights) for p in [part] * int(weight)])
    copies = []
    for part, weight in zip(parts, weights):
        copies += [part] * int(weight)
        if weight != int(weight):
            copies.append(take_fraction(part, weight - int(weight), seed))
    return datasets.concatenate_datasets(copies).shuffle(seed=seed)


def _interleave(parts: list[AnyDataset], weights: list[float], seed: int) -> AnyDataset:
    probabilities = [weight / sum(weights) for weight in weights]
    return datasets.interleave_datasets(parts, probabilities=probabilities, seed=seed)


MIXERS: dict[str, Callable[[list[AnyDataset], list[float], int], AnyDataset]] = {
    "concatenate": _concatenate,
    "interleave": _interleave,
}


def _with_common_columns(parts: list[AnyDataset], sources: list[DatasetSource]) -> list[AnyDataset]:
    """The columns that all parts have, with values of one type: conversations that differ in their keys become JSON."""
    names = [list(part.column_names or next(iter(part), {})) for part in parts]
    common = [name for name in names[0] if all(name in others for others in names)]
    if not common:
        lists = "; ".join(f"{source.path}: {', '.join(columns)}" for source, columns in zip(sources, names))
        raise SourceError(f"The sources of the mixture share no column ({lists}). Map their columns to common names.")
    parts = [part.select_columns(common) for part in parts]
    if any(part.features is None for part in parts):
        return parts
    for name in common:
        if any(part.features[name] != parts[0].features[name] for part in parts):
            parts = [_as_json(part, name, source.path) for part, source in zip(parts, sources)]
    return parts


def _as_json(part: AnyDataset, column: str, path: str) -> AnyDataset:
    if isinstance(part.features[column], datasets.Value):
        raise SourceError(
            f"{path}: the column {column!r} holds {part.features[column].dtype}; in another source of the mixture it does "
            "not. Map one of them to another name, or convert it."
        )
    return part.cast_column(column, datasets.Json())
