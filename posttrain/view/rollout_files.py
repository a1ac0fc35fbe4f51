"""What is known about the rollouts of one parquet file without looking at its tokens one by one: a table of small columns."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xxhash

from posttrain.rollout.rollout_store import FILE_SCHEMA
from posttrain.view.arrow_numbers import Lists, floats, valid, whole

SMALL_COLUMNS = [
    "row", "group", "sample", "prompt", "trained", "advantage", "rewards", "reward", "failures", "tool_calls",
    "finish_reason", "error", "masked", "truncated", "policy_version",
]  # fmt: skip
"""`trained` is a bit for each completion token, and so tells how long a completion is for next to nothing."""


@dataclass(frozen=True)
class FileColumns:
    """Arrays of one length, one value for each rollout of a file."""

    path: Path
    step: int
    numbers: dict[str, np.ndarray]  # float64; NaN: not known
    rewards: dict[str, np.ndarray]  # by reward function
    finish: np.ndarray  # of str
    prompt: np.ndarray  # uint64: a hash of the prompt, the same whenever that prompt is asked

    def __len__(self) -> int:
        return len(self.prompt)


def read_columns(path: Path, names: list[str]) -> pa.Table:
    """Columns of a file; one that an older file does not have is null."""
    with pq.ParquetFile(path, page_checksum_verification=True) as file:
        there = set(file.schema_arrow.names)
        present = [name for name in names if name in there]
        table = file.read(columns=present, use_threads=False).combine_chunks()
    arrays = {name: table.column(name) for name in present}
    wanted = [(name, FILE_SCHEMA.field(name).type) for name in names]
    return pa.table({name: arrays.get(name, pa.nulls(len(table), kind)) for name, kind in wanted})


def small_columns(tables: dict[Path, pa.Table], steps: list[int]) -> list[FileColumns]:
    """What SMALL_COLUMNS of several files say. They are looked at together: the work is in the number of tables, not of rows."""
    joined = pa.concat_tables(tables.values())
    column = {name: whole(joined.column(name)) for name in SMALL_COLUMNS}
    trained, calls = Lists(column["trained"]), Lists(column["tool_calls"])
    numbers = {
        "tokens": trained.lengths.astype(np.float64),
        "trained_tokens": trained.sums(floats(trained.values)),
        "failures": Lists(column["failures"]).lengths.astype(np.float64),
        "tool_calls": calls.lengths.astype(np.float64),
        "tool_errors": calls.sums(valid(pc.struct_field(calls.values, "error"))),
        "error": valid(column["error"]),
    }
    for name in ("row", "group", "sample", "advantage", "reward", "masked", "truncated", "policy_version"):
        numbers[name] = floats(column[name])
    finish = np.array(column["finish_reason"].to_pylist(), dtype=object)
    rewards, prompts = _rewards(Lists(column["rewards"])), _hashes(column["prompt"])
    found, start = [], 0
    for (path, table), step in zip(tables.items(), steps):
        part = slice(start, start + len(table))
        start += len(table)
        mine = {"step": np.full(len(table), float(step))} | {name: values[part] for name, values in numbers.items()}
        of_rewards = {name: values[part] for name, values in rewards.items()}
        found.append(FileColumns(path, step, mine, of_rewards, finish[part], prompts[part]))
    return found


def read_mismatch(path: Path) -> np.ndarray:
    """(rollouts,) mean |sampling log-prob - trainer log-prob| over the trained tokens; NaN where one side is not known."""
    table = read_columns(path, ["sampling_logps", "old_logps", "trained"])
    sampled, scored, trained = (Lists(whole(table.column(name))) for name in table.column_names)
    is_known = (sampled.lengths == scored.lengths) & (sampled.lengths == trained.lengths)
    one, other, mask = (
        floats(lists.values)[np.repeat(is_known, lists.lengths)] for lists in (sampled, scored, trained)
    )
    apart = np.abs(one - other)
    counted = np.isfinite(apart) & (mask > 0)
    owners = np.repeat(np.flatnonzero(is_known), sampled.lengths[is_known])
    sums = np.bincount(owners, np.where(counted, apart, 0.0), len(table))
    tokens = np.bincount(owners, counted, len(table))
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(tokens > 0, sums / tokens, np.nan)


def _rewards(maps: Lists) -> dict[str, np.ndarray]:
    """By reward function, one value for each rollout."""
    owners, values = maps.owners(), floats(maps.items)
    names = np.array(maps.keys.to_pylist(), dtype=object)
    rewards: dict[str, np.ndarray] = {}
    for name in dict.fromkeys(names):
        mine = names == name
        rewards[name] = np.full(maps.size, np.nan)
        rewards[name][owners[mine]] = values[mine]
    return rewards


def _hashes(texts: pa.Array) -> np.ndarray:
    encoded = texts.dictionary_encode()
    hashes = [xxhash.xxh3_64_intdigest((text or "").encode()) for text in encoded.dictionary.to_pylist()]
    places = np.nan_to_num(floats(encoded.indices), nan=len(hashes)).astype(np.int64)
    return np.array([*hashes, 0], dtype=np.uint64)[places]
