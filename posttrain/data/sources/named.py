"""Datasets by name: from the Hub or from local files, whole or in part. `mixtures` puts several together."""

from __future__ import annotations

import glob
import hashlib
import logging
import math
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
from datasets.exceptions import DatasetGenerationError

from posttrain.core.secrets import write_whole
from posttrain.data.sources.text_files import READERS, SourceError, read_text_files, suffix_of

logger = logging.getLogger(__name__)

LOADERS = {
    ".jsonl": "json", ".json": "json", ".ndjson": "json", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet",
    ".arrow": "arrow", ".txt": "text",
}  # fmt: skip
AnyDataset = datasets.Dataset | datasets.IterableDataset


@dataclass
class DatasetSource:
    """One dataset: where it is, which part of it, and under which names its columns are read."""

    path: str
    """Hub id, file (JSONL, JSON, CSV, TSV, Parquet, Arrow, text; JSON lines also as .gz), folder of such files, or a pattern
    (data/*.jsonl). A leading ~ is the home folder."""
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
        self.path = os.path.expanduser(self.path)
        for name in ("fraction", "weight", "share"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float | None):
                raise ValueError(f"{name}={value!r} of {self.path}: a number is needed.")
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
        dataset = with_whole_cache(lambda: _load_local(path, source.split, streaming))
    elif is_pattern(source.path):
        files = _matching(source.path)
        dataset = with_whole_cache(lambda: _load_files(files, source.path, streaming))
    elif path.suffix.lower() in (*LOADERS, ".gz") or source.path.startswith((".", "/", "~")):
        raise SourceError(f"There is no file or folder {source.path}.")
    else:
        dataset = with_whole_cache(lambda: _load_from_hub(source, streaming))
    dataset = _kept_columns(rename_columns(dataset, source.columns, source.path), source)
    dataset.info.dataset_name = source.path  # messages call it what the user calls it
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
        raise SourceError(f"{where} is not a local file and could not be loaded from the Hub: {error}") from error


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


# -------------------------------------------------------------------------------------------- the cache of `datasets`


def with_whole_cache(load: Callable[[], AnyDataset]) -> AnyDataset:
    """What `load` loads, read anew from its source where the files that `datasets` had cached are not as they were written.

    `datasets` trusts its Arrow files: a flipped bit there would be trained on although the source is intact.
    """
    dataset = load()
    damaged = [path for path in _cache_files(dataset) if not _is_as_recorded(path)]
    if not damaged:
        return dataset
    logger.warning(
        f"{damaged[0]} was changed after `datasets` wrote it: the cache is removed and made again from its source."
    )
    del dataset
    for folder in {path.parent for path in damaged}:
        shutil.rmtree(folder)
    dataset = load()
    for path in _cache_files(dataset):
        _is_as_recorded(path)
    return dataset


def _cache_files(dataset: AnyDataset) -> list[Path]:
    """Arrow files in the cache of `datasets`; a dataset that was saved elsewhere is a source itself."""
    cache = Path(datasets.config.HF_DATASETS_CACHE).resolve()
    paths = [Path(file["filename"]).resolve() for file in getattr(dataset, "cache_files", None) or []]
    return [path for path in paths if path.is_relative_to(cache)]


def _is_as_recorded(path: Path) -> bool:
    """Whether a file has the digest that was recorded when it was first read; the first time, it is recorded."""
    record = path.with_name(f"{path.name}.xxh3")
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
    if record.exists():
        return record.read_text(encoding="ascii") == digest
    write_whole(record, digest, private=False)
    return True


# ---------------------------------------------------------------------------------------------------------- local files


def _load_local(path: Path, split: str, streaming: bool) -> AnyDataset:
    if path.is_dir() and ((path / "state.json").exists() or (path / "dataset_dict.json").exists()):
        return _load_saved(path, split, streaming)
    files = [path] if path.is_file() else files_of_split(path, split, tuple(LOADERS))
    return _load_files(files, path, streaming)


def is_pattern(path: str) -> bool:
    """Whether a path is one of several files, such as data/*.jsonl."""
    return any(sign in path for sign in "*?[") and not os.path.exists(path)


def _matching(pattern: str) -> list[Path]:
    """All of them, whatever split their names tell: who writes a pattern has chosen."""
    files = [Path(name) for name in sorted(glob.glob(pattern, recursive=True)) if os.path.isfile(name)]
    if not files:
        raise SourceError(f"No file matches {pattern} (looked for from {os.getcwd()}).")
    return files


def _load_files(files: list[Path], path: Path | str, streaming: bool) -> AnyDataset:
    kinds = {LOADERS.get(suffix_of(file)) for file in files}
    if len(kinds) != 1 or None in kinds:
        names = ", ".join(file.name for file in files[:5])
        raise SourceError(f"Files of one known type are needed ({', '.join(LOADERS)}); found {names}.")
    empty = [file for file in files if file.stat().st_size == 0]
    if empty:
        raise SourceError(f"{empty[0]} is empty.")
    loader = kinds.pop()
    if loader in READERS:
        return read_text_files(files, loader, streaming)
    if loader == "parquet":
        _check_schemas(files)
    names = [os.fspath(file) for file in files]
    try:
        return datasets.load_dataset(loader, data_files=names, split="train", streaming=streaming)
    except (DatasetGenerationError, ValueError, pa.ArrowException) as error:
        raise SourceError(f"{path} cannot be read: {error.__cause__ or error}") from error


def has_splits(path: str) -> bool:
    """Whether another split than all of its rows can be asked of a dataset; of one on the Hub, it is the Hub that says."""
    local = Path(path)
    if not local.exists():
        return not is_pattern(path)
    if local.is_file() or (local / "state.json").exists():
        return False
    return (local / "dataset_dict.json").exists() or names_splits(local, tuple(LOADERS))


def _load_saved(path: Path, split: str, streaming: bool) -> AnyDataset:
    saved = datasets.load_from_disk(os.fspath(path))
    if isinstance(saved, datasets.DatasetDict):
        if split not in saved:
            raise SourceError(f"{path} has the splits {', '.join(map(repr, saved))}, not {split!r}.")
        saved = saved[split]
    return saved.to_iterable_dataset() if streaming else saved


def _check_schemas(files: list[Path]) -> None:
    """All Parquet shards have the columns and kinds of values of the first one; a reader would cast them silently."""
    first: dict[str, str] = {}
    rows = 0
    for file in files:
        try:
            metadata = pq.read_metadata(file)
        except (pa.ArrowException, OSError) as error:
            raise SourceError(f"{file} is not a readable Parquet file: {error}") from error
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
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return f"lists of {_kind(kind.value_type)}"
    words = {"integer": "integers", "floating": "numbers", "struct": "records"}
    words |= {"string": "text", "large_string": "text"}
    return next((word for name, word in words.items() if getattr(pa.types, f"is_{name}")(kind)), str(kind))


# ---- which files of a folder are a split ---------------------------------------------------------------------------------


WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Split -> the words that name it; the Hub's own list."""
SPLIT_OF = {word: split for split, words in WORDS.items() for word in words}
NO_ROWS = ("readme", "license", "notice", "requirements", "config", "dataset_info", "dataset_infos", "dataset_dict")
"""Files that a dataset's folder has beside its rows, by their names without suffixes."""


def files_of_split(folder: Path, split: str, suffixes: tuple[str, ...]) -> list[Path]:
    """The data files of a folder that belong to a split; all of them where no name says which.

    A file's own name decides; where it does not, the nearest folder that does. Once any file names its split, all have
    to: rows of one that does not would be lost, or put where they do not belong.
    """
    files = [file for file in sorted(folder.rglob("*")) if file.is_file() and _is_data(file, folder, suffixes)]
    if not files:
        raise SourceError(f"The folder {folder} holds no file of type {', '.join(suffixes)}.")
    splits = {file: _splits_of(file.relative_to(folder), split) for file in files}
    if not any(splits.values()):
        return files
    for file, named in splits.items():
        if len(named) != 1:
            raise SourceError(_not_one_split(file, named, folder))
    chosen = [file for file in files if SPLIT_OF.get(split.lower(), split) in splits[file]]
    if not chosen:
        present = [name for name in WORDS if [name] in splits.values()]
        raise SourceError(f"{folder} has files for the splits {', '.join(map(repr, present))}, none for {split!r}.")
    return chosen


def names_splits(folder: Path, suffixes: tuple[str, ...]) -> bool:
    """Whether any data file of the folder names its split."""
    files = [file for file in folder.rglob("*") if file.is_file() and _is_data(file, folder, suffixes)]
    return any(_splits_of(file.relative_to(folder), "train") for file in files)


def _is_data(file: Path, folder: Path, suffixes: tuple[str, ...]) -> bool:
    hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
    return suffix_of(file) in suffixes and not hidden and file.name.split(".")[0].lower() not in NO_ROWS


def _splits_of(relative: Path, wanted: str) -> list[str]:
    """The splits that the file's name gives, or else its nearest folder's: `wanted` by its whole name, others by words."""
    own_name = None if wanted.lower() in SPLIT_OF else re.compile(f"(?<![a-z]){re.escape(wanted.lower())}(?![a-z])")
    for part in reversed(relative.parts):
        name = part.lower()
        if own_name is not None and own_name.search(name):
            return [wanted]
        if named := [SPLIT_OF[word] for word in re.findall("[a-z]+", name) if word in SPLIT_OF]:
            return list(dict.fromkeys(named))
    return []


def _not_one_split(file: Path, named: list[str], folder: Path) -> str:
    if named:
        return f"{file} names the splits {' and '.join(map(repr, named))}: rename it, or name the files one by one."
    return (
        f"{file} belongs to no split, and other files of {folder} do. Rename it (train-{file.name} for one), move it "
        "elsewhere, or name the files one by one in `datasets`."
    )
