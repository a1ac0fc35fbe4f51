"""TRL's public data helpers, under their names.

Differences: every key of an example is looked at (not one of them), empty values do not crash, role names of ShareGPT are
mapped, and a prompt is taken from two answers only at the end of a word or a turn, never so that an answer becomes empty.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict

from posttrain.data.rows.foreign_formats import (
    MESSAGE_COLUMNS,
    MESSAGES,
    SHAREGPT,
    from_value_messages,
    value_kind,
)
from posttrain.data.store.packing import MERGING_STRATEGIES, Packing, packing_strategy

Row = dict[str, Any]
AnyDataset = Dataset | IterableDataset | DatasetDict | IterableDatasetDict


def is_conversational(example: Row) -> bool:
    """Whether a column that may hold a conversation holds one (messages with `role`)."""
    return any(value_kind(example[key]) == MESSAGES for key in MESSAGE_COLUMNS if key in example)


def is_conversational_from_value(example: Row) -> bool:
    """Whether `conversations` holds messages in ShareGPT's form, {"from": ..., "value": ...}."""
    return value_kind(example.get("conversations")) == SHAREGPT


def maybe_convert_to_chatml(example: Row) -> Row:
    """ShareGPT messages as {"role", "content"}, `human` and `gpt` as `user` and `assistant`, under `messages`."""
    converted = {
        key: from_value_messages(value) if value_kind(value) == SHAREGPT else value for key, value in example.items()
    }
    if "conversations" in converted:
        converted["messages"] = converted.pop("conversations")
    return converted


# ------------------------------------------------------------------------------------------------------ implicit prompts


def split_shared_text(chosen: str, rejected: str) -> tuple[str, str, str] | None:
    """(prompt, chosen, rejected): the beginning that both share, cut where a word ends; None when there is none.

    A single space at the cut goes to the answers, as tokenizers join it to the word that follows. Both answers keep
    at least one word, also when one text is the beginning of the other.
    """
    shared = _shared_length(chosen, rejected)
    limit = min(shared, len(chosen.rstrip()) - 1, len(rejected.rstrip()) - 1)
    for cut in range(limit, 0, -1):
        if _is_word_end(chosen, cut) and _is_word_end(rejected, cut):
            if chosen[cut - 1] == " ":
                cut -= 1
            if not chosen[:cut].strip():
                return None
            return chosen[:cut], chosen[cut:], rejected[cut:]
    return None


def _shared_length(a: str, b: str) -> int:
    low, high = 0, min(len(a), len(b))
    while low < high:  # bisection on slices compares at the speed of memcmp
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low


def _is_word_end(text: str, cut: int) -> bool:
    """Whether a new word, or something that is not a word, begins at `cut`."""
    before, after = text[cut - 1], text[cut]
    if unicodedata.combining(after) or after in "\u200d\ufe0f" or before == "\u200d":
        return False  # the character before is not finished
    if before in "'’" and after.isalpha():
        return False
    is_east_asian = ord(after) >= 0x2E80 and ord(before) >= 0x2E80  # scripts without spaces between words
    return is_east_asian or not (before.isalnum() and (after.isalnum() or after in "'’"))


def split_shared_turns(chosen: list[Any], rejected: list[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """(prompt, chosen, rejected): the turns that both share, leaving at least one turn to each side."""
    shared = 0
    while shared < min(len(chosen), len(rejected)) - 1 and chosen[shared] == rejected[shared]:
        shared += 1
    return chosen[:shared], chosen[shared:], rejected[shared:]


def extract_prompt(example: Row) -> Row:
    """The example with `prompt`, `chosen` and `rejected`, the prompt being what both sides share."""
    chosen, rejected = example["chosen"], example["rejected"]
    if not chosen or not rejected or chosen == rejected:
        what = "are equal" if chosen == rejected else "must not be empty"
        raise ValueError(f"'chosen' and 'rejected' {what}: no prompt can be told apart from the answers.")
    split = split_shared_turns if isinstance(chosen, list) else split_shared_text
    parts = split(chosen, rejected)
    if parts is None or not parts[0]:
        raise ValueError(f"'chosen' and 'rejected' share no beginning that could be their prompt: {chosen!r:.80}.")
    return {**example, **dict(zip(("prompt", "chosen", "rejected"), parts))}


def maybe_extract_prompt(example: Row) -> Row:
    """`extract_prompt` where a preference example has no prompt, or a plain one beside conversations."""
    if "chosen" not in example or "rejected" not in example:
        return example
    prompt_is_chat = value_kind(example.get("prompt")) == MESSAGES
    if example.get("prompt") is not None and prompt_is_chat == (value_kind(example["chosen"]) == MESSAGES):
        return example
    return extract_prompt(example)


# ----------------------------------------------------------------------------------------------- pairs to single answers


def unpair_preference_dataset(dataset: AnyDataset, num_proc: int | None = None, **map_kwargs: Any) -> AnyDataset:
    """Pairs -> `prompt`, `completion`, `label`: of every batch, the chosen answers first, then the rejected ones.

    Other columns are repeated. Where there is no prompt it is taken from what both answers share.
    """
    if isinstance(dataset, (DatasetDict, IterableDatasetDict)):
        splits = {split: unpair_preference_dataset(part, num_proc, **map_kwargs) for split, part in dataset.items()}
        return type(dataset)(splits)
    if num_proc is not None and isinstance(dataset, Dataset):
        map_kwargs["num_proc"] = num_proc
    if isinstance(dataset, IterableDataset):
        map_kwargs.pop("desc", None)  # a stream has no progress bar
    return dataset.map(_unpair, batched=True, remove_columns=["chosen", "rejected"], **map_kwargs)


def _unpair(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
    rows = [maybe_extract_prompt(dict(zip(batch, values))) for values in zip(*batch.values())]
    kept = [column for column in rows[0] if column not in ("chosen", "rejected")] if rows else []
    unpaired = {column: [row[column] for row in rows] * 2 for column in kept}
    unpaired["completion"] = [row["chosen"] for row in rows] + [row["rejected"] for row in rows]
    unpaired["label"] = [True] * len(rows) + [False] * len(rows)
    return unpaired


def maybe_unpair_preference_dataset(
    dataset: AnyDataset, num_proc: int | None = None, desc: str | None = None
) -> AnyDataset:
    """`unpair_preference_dataset` where the dataset holds pairs; the dataset itself otherwise."""
    one = next(iter(dataset.values())) if isinstance(dataset, (DatasetDict, IterableDatasetDict)) else dataset
    columns = get_dataset_column_names(one)
    if not {"chosen", "rejected"} <= set(columns):
        return dataset
    return unpair_preference_dataset(dataset, num_proc, desc=desc)


def get_dataset_column_names(dataset: Dataset | IterableDataset) -> list[str]:
    """The names of the columns; a stream that does not know them is asked for its first row."""
    if dataset.column_names is not None:
        return list(dataset.column_names)
    return list(next(iter(dataset), {}))


# -------------------------------------------------------------------------------------------------- packing and cutting


def pack_dataset(
    dataset: AnyDataset, seq_length: int, strategy: str = "bfd", map_kwargs: dict[str, Any] | None = None
) -> AnyDataset:
    """Rows of equally long lists -> rows of at most `seq_length` tokens; `bfd` kinds add `seq_lengths`.

    The whole dataset is packed at once (a stream: a batch of rows at a time), so that blocks cross no batch boundary.
    """
    pack = packing_strategy(strategy)

    def pack_table(table: pa.Table) -> pa.Table:
        return _pack_table(table, pack, seq_length, adds_lengths=strategy not in MERGING_STRATEGIES)

    return _map_tables(dataset, pack_table, {"batch_size": -1, **(map_kwargs or {})})


def truncate_dataset(dataset: AnyDataset, max_length: int, map_kwargs: dict[str, Any] | None = None) -> AnyDataset:
    """The first `max_length` entries of every list column; other columns as they are."""

    def truncate(table: pa.Table) -> pa.Table:
        columns = [
            pc.list_slice(column, 0, max_length) if _is_list(column.type) else column for column in table.columns
        ]
        return pa.Table.from_arrays(columns, names=table.column_names)

    return _map_tables(dataset, truncate, map_kwargs or {})


def _map_tables(dataset: AnyDataset, change: Callable[[pa.Table], pa.Table], map_kwargs: dict[str, Any]) -> AnyDataset:
    if isinstance(dataset, (DatasetDict, IterableDatasetDict)):
        return type(dataset)({split: _map_tables(part, change, map_kwargs) for split, part in dataset.items()})
    if isinstance(dataset, Dataset):
        return dataset.with_format("arrow").map(change, batched=True, **map_kwargs).with_format(None)

    def change_batch(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        return change(pa.table(batch)).to_pydict()

    map_kwargs = {key: value for key, value in map_kwargs.items() if key not in ("desc", "num_proc")}
    if map_kwargs.get("batch_size") == -1:  # a stream has no end to wait for
        map_kwargs["batch_size"] = 1000
    columns = get_dataset_column_names(dataset)
    return dataset.map(change_batch, batched=True, remove_columns=columns, **map_kwargs)


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _pack_table(table: pa.Table, pack: Callable[[Any, int], Packing], seq_length: int, adds_lengths: bool) -> pa.Table:
    columns = {name: table[name].combine_chunks() for name in table.column_names}
    odd = [name for name, column in columns.items() if not _is_list(column.type)]
    if odd:
        raise ValueError(f"Packing needs lists in every column; {', '.join(map(repr, odd))} holds something else.")
    lengths = {name: pc.fill_null(pc.list_value_length(column), 0).to_numpy() for name, column in columns.items()}
    first, *others = lengths
    for name in others:
        if not np.array_equal(lengths[name], lengths[first]):
            row = int(np.flatnonzero(lengths[name] != lengths[first])[0])
            raise ValueError(
                f"Row {row}: {name!r} has {lengths[name][row]} entries, {first!r} has {lengths[first][row]}."
            )
    packing = pack(lengths[first], seq_length)
    sample_starts = np.cumsum(lengths[first]) - lengths[first]
    sizes = packing.pieces[:, 2] - packing.pieces[:, 1]
    begins = sample_starts[packing.pieces[:, 0]] + packing.pieces[:, 1]
    taken = np.repeat(begins - (np.cumsum(sizes) - sizes), sizes) + np.arange(sizes.sum())
    stops = np.concatenate([[0], np.cumsum(sizes)])[packing.offsets]
    packed = {
        name: pa.LargeListArray.from_arrays(pa.array(stops), column.flatten().take(pa.array(taken)))
        for name, column in columns.items()
    }
    if adds_lengths:
        packed["seq_lengths"] = pa.LargeListArray.from_arrays(pa.array(packing.offsets), pa.array(sizes))
    narrow = {n: a.cast(pa.list_(a.type.value_type)) for n, a in packed.items()}
    return pa.table(narrow)


# ---------------------------------------------------------------------------------------------------- messages and images


def prepare_multimodal_messages(messages: list[Row], images: list[Any] | None = None) -> list[Row]:
    """Text content as typed blocks, images placed before the text of the first user turn; the input is not changed.

    Where blocks of type `image` are there already, the images are put into them in order; their number must agree.
    """
    known = ("system", "developer", "user", "assistant", "tool")
    for message in messages:
        if message.get("role") not in known:
            raise ValueError(f"The role {message.get('role')!r} is none of {', '.join(known)}.")
    prepared = [{**message, "content": _blocks(message.get("content"))} for message in messages]
    if images is None:
        return prepared
    places = [
        block
        for message in prepared
        if message["role"] != "tool"
        for block in message["content"] or ()
        if block.get("type") == "image"
    ]
    if not places:
        first = next((message for message in prepared if message["role"] == "user"), None)
        if first is None and images:
            raise ValueError(f"There is no user turn to put the {len(images)} image(s) into.")
        places = [{"type": "image"} for _ in images]
        if first is not None:
            first["content"] = [*places, *(first["content"] or ())]
    if len(places) != len(images):
        raise ValueError(f"The messages have room for {len(places)} image(s); {len(images)} were given.")
    for block, image in zip(places, images):
        block["image"] = image
    return prepared


def _blocks(content: Any) -> list[Row] | None:
    if content is None:  # an answer that only calls tools
        return None
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [dict(block) for block in content]
