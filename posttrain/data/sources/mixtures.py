"""Several datasets as one: concatenated or interleaved, by weights or by shares, with the columns of all of them.

No column is left out, and no value is cast. A part without a column has null there, which every reader takes for "not given" (and a
reward function for None). Columns of different types (a list in Parquet, JSON from a JSON file) are joined as JSON values, where
that changes nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import combinations, islice
from typing import Any

import datasets

from posttrain.data.sources.named import AnyDataset, DatasetSource, load_source, take_fraction
from posttrain.data.sources.text_files import Row, SourceError


def load_mixture(
    sources: Sequence[DatasetSource | str], *, mixing: str = "concatenate", seed: int = 0, streaming: bool = False
) -> AnyDataset:
    """Several sources as one dataset, with the columns of all of them.

    `concatenate`: weight 2 takes every row twice, 0.5 a seeded half of them; the result is shuffled (a stream is not).
    `interleave`: each row is drawn from a source with probability weight / sum of weights, until one is exhausted.
    """
    if mixing not in MIXERS:
        raise ValueError(f"mixing={mixing!r}; it must be one of {', '.join(MIXERS)}.")
    if not sources:
        raise ValueError("A mixture needs at least one source.")
    listed = [DatasetSource(source) if isinstance(source, str) else source for source in sources]
    loaded = [load_source(source, seed=seed, streaming=streaming) for source in listed]
    if any(source.share is not None for source in listed):
        loaded = _cut_to_shares(loaded, listed, streaming)
    if len(loaded) == 1 and listed[0].weight == 1:
        return loaded[0]
    joined = with_all_columns(loaded, [source.path for source in listed])
    return MIXERS[mixing](joined, [source.weight for source in listed], seed)


def _cut_to_shares(parts: list[AnyDataset], sources: list[DatasetSource], streaming: bool) -> list[AnyDataset]:
    """The first rows of each, as many as its share of the largest mixture that all of them can fill."""
    if streaming or any(source.share is None for source in sources):
        what = "streams have no length" if streaming else "all sources need one where one has it"
        raise ValueError(f"Shares of a mixture cannot be taken: {what}.")
    total = min(len(part) / source.share for part, source in zip(parts, sources))
    return [part.select(range(max(1, round(source.share * total)))) for part, source in zip(parts, sources)]


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


Parts = list[datasets.Dataset] | list[datasets.IterableDataset]
LOOKED_AT = 1000
"""Rows of a stream that tell its columns; as many as are checked before training begins."""
MARGIN = "margin"
"""The one column that is read in every row or in none: a pair without one is a pair with 0 (arXiv:2307.09288, eq. 2)."""
PAIR = ({"chosen", "rejected"}, {"chosen_ids", "rejected_ids"}, {"chosen_input_ids", "rejected_input_ids"})
NULL, TEXT, SCALAR, NESTED = "null", "text", "numbers or truth values", "lists or records"
JSON = "JSON values that are not all text"
JOINED = ({SCALAR, JSON}, {NESTED, JSON})
"""Different kinds that can stand in one column; whether single JSON values fit is for the check of the rows to say."""


def with_all_columns(parts: Parts, paths: list[str]) -> Parts:
    """The parts, each with all columns of all of them, in types that can be put together."""
    columns = [_columns_of(part) for part in parts]
    if not set.intersection(*map(set, columns)):
        lists = "; ".join(f"{path}: {', '.join(names)}" for path, names in zip(paths, columns))
        raise SourceError(f"The sources of the mixture share no column ({lists}). Map their columns to common names.")
    names = list(dict.fromkeys(name for each in columns for name in each))
    for name in names:
        _refuse_other_kinds(name, [each.get(name, NULL) for each in columns], paths)
    has_margin = MARGIN in names and any(pair <= set(names) for pair in PAIR)
    neutral = {MARGIN: 0.0} if has_margin else {}
    if isinstance(parts[0], datasets.IterableDataset):
        # Declared as JSON, the values of a stream are handed on as they are; otherwise types would be guessed from its head.
        features = datasets.Features({name: datasets.Json() for name in names})
        filled = [functools.partial(_completed, names=names, neutral=neutral, path=path) for path in paths]
        return [part.map(fill, features=features) for part, fill in zip(parts, filled)]
    if has_margin:
        parts = [p if MARGIN in p.column_names else p.add_column(MARGIN, [0.0] * len(p)) for p in parts]
    for name in names:
        parts = _in_one_type(parts, name)
    return parts


def _columns_of(part: Any) -> dict[str, str]:
    """Column -> kind of its values."""
    if part.features is None:
        return _columns_of_rows(islice(part, LOOKED_AT))
    return {name: _kind_of_feature(feature, part, name) for name, feature in part.features.items()}


def _columns_of_rows(rows: Any) -> dict[str, str]:
    kinds: dict[str, set[str]] = {}
    for row in rows:
        for name, value in row.items():
            kinds.setdefault(name, set()).add(_kind_of_value(value))
    # A column with several kinds of values is one of JSON values, as it is where a whole file is read.
    known = {name: found - {NULL} for name, found in kinds.items()}
    return {name: next(iter(found), NULL) if len(found) < 2 else JSON for name, found in known.items()}


def _kind_of_value(value: Any) -> str:
    if value is None:
        return NULL
    return TEXT if isinstance(value, str) else SCALAR if isinstance(value, bool | int | float) else NESTED


def _kind_of_feature(feature: Any, part: Any, name: str) -> str:
    if isinstance(feature, datasets.Json):
        return JSON
    if not isinstance(feature, datasets.Value):
        return NESTED if isinstance(feature, dict | list | datasets.List | datasets.LargeList) else str(feature)
    if isinstance(part, datasets.Dataset) and part.data.column(name).null_count == len(part.data):
        return NULL
    if feature.dtype in ("string", "large_string"):
        return TEXT
    return SCALAR if feature.dtype.startswith(("int", "uint", "float", "bool")) else feature.dtype


def _refuse_other_kinds(column: str, kinds: list[str], paths: list[str]) -> None:
    held = [(kind, path) for kind, path in zip(kinds, paths) if kind != NULL]
    for (one, here), (other, there) in combinations(held, 2):
        if one != other and {one, other} not in JOINED:
            raise SourceError(
                f"The column {column!r} of the mixture cannot be joined: in {here} it holds {one}, in {there} it holds {other}. "
                "Map one of them to another name with `columns`, or convert it."
            )


def _in_one_type(parts: list[datasets.Dataset], name: str) -> list[datasets.Dataset]:
    """A part without the column needs nothing: `datasets` fills it with null when the parts are put together."""
    having = [part for part in parts if name in part.column_names]
    if all(part.features[name] == having[0].features[name] for part in having):
        return parts
    kinds = [_kind_of_feature(part.features[name], part, name) for part in having]
    held = [part.features[name] for part, kind in zip(having, kinds) if kind != NULL] or [datasets.Value("null")]
    if all(feature == held[0] for feature in held):
        joined = held[0]
    else:
        joined = datasets.Value("string") if TEXT in kinds else datasets.Json()
    return [part.cast_column(name, joined) if name in part.column_names else part for part in parts]


def _completed(row: Row, names: list[str], neutral: Row, path: str) -> Row:
    if unknown := [name for name in row if name not in names]:
        raise SourceError(
            f"{path}: a row has the column {unknown[0]!r}, which none of the first {LOOKED_AT:,} rows of the streams has. "
            "Name the columns with `columns`, or read the files without `streaming`."
        )
    return {name: row.get(name, neutral.get(name)) for name in names}
