"""Rollouts as the page shows them: rows of the table, and single ones with their tokens. Token columns are read here only."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np

from posttrain.view.errors import NotFound
from posttrain.view.rollout_files import read_columns
from posttrain.view.rollout_index import Snapshot
from posttrain.view.rollout_query import Texts, prompt_name
from posttrain.view.token_text import TokenText, numbered

SNIPPET = 240
MOST_TOKENS, FEWEST_TOKENS = 60_000, 512
"""Tokens in one answer, shared by its rollouts, and what each of them has in any case."""
DETAIL_COLUMNS = [
    "prompt", "completion", "prompt_ids", "completion_ids", "trained", "sampling_logps", "old_logps", "reference_logps",
    "rewards", "failures", "extras", "tool_calls", "error", "seconds", "epoch",
]  # fmt: skip
WHOLE = (
    "step",
    "row",
    "group",
    "sample",
    "tokens",
    "trained_tokens",
    "tool_calls",
    "tool_errors",
    "failures",
    "policy_version",
)
REAL = ("reward", "advantage", "mismatch")
YES_OR_NO = ("error", "masked", "truncated")
Json = dict[str, Any]


def known(value: float, digits: int = 6) -> float | None:
    """JSON has no NaN."""
    value = float(value)
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None


# ---- rows of the table ---------------------------------------------------------------------------------------------------


def identity(snapshot: Snapshot, number: int) -> str:
    """What a rollout is called: step, process and row, such as 12/process-0/3. It stays the same when others are added."""
    file = snapshot.files[snapshot.file[number]]
    return f"{file.step}/{file.path.stem}/{snapshot.place[number]}"


def numbers_of(snapshot: Snapshot, identities: list[str]) -> list[int]:
    """The other way round. Names are only compared with what is known: none of them becomes a path."""
    starts = np.concatenate([[0], np.cumsum([len(file) for file in snapshot.files])]).astype(int)
    files = {f"{file.step}/{file.path.stem}": number for number, file in enumerate(snapshot.files)}
    found = []
    for name in identities:
        of_file, _, place = str(name).rpartition("/")
        number = files.get(of_file)
        if number is None or not (place.isascii() and place.isdecimal()) or int(place) >= len(snapshot.files[number]):
            raise NotFound(f"There is no rollout {str(name)[:80]!r} in this run, or no longer.")
        found.append(int(starts[number]) + int(place))
    return found


def row_of(snapshot: Snapshot, number: int) -> Json:
    def whole(name: str) -> int | None:
        value = known(snapshot.numbers[name][number], 17)
        return None if value is None else int(value)

    return {
        "id": identity(snapshot, number),
        "prompt": prompt_name(snapshot.prompt[number]),
        "finish": snapshot.finish[number] or None,
        "rewards": {name: known(values[number]) for name, values in snapshot.rewards.items()},
        **{name: whole(name) for name in WHOLE},
        **{name: known(snapshot.numbers[name][number]) for name in REAL},
        **{name: bool(snapshot.numbers[name][number] > 0) for name in YES_OR_NO},
    }


def tools_of(snapshot: Snapshot, number: int, texts: Texts) -> list[Json] | None:
    """Schemas of the tools that the prompt was written with; files of earlier versions do not have them."""
    table, place = texts.of(snapshot.files[snapshot.file[number]].path), int(snapshot.place[number])
    written = table.column("tools")[place].as_py()
    return None if written is None else json.loads(written)


def texts_of(snapshot: Snapshot, number: int, texts: Texts) -> tuple[str | list[Json], str | list[Json]]:
    """(prompt, completion)"""
    table, place = texts.of(snapshot.files[snapshot.file[number]].path), int(snapshot.place[number])
    return said(table.column("prompt")[place].as_py()), said(table.column("completion")[place].as_py())


def rows_with_text(snapshot: Snapshot, numbers: np.ndarray, texts: Texts) -> list[Json]:
    rows = []
    for number in numbers:
        asked, completion = texts_of(snapshot, int(number), texts)
        row = row_of(snapshot, int(number))
        row["prompt_text"] = snippet(asked, of_the_end=True)
        row["completion_text"] = snippet(completion, of_the_end=False)
        rows.append(row)
    return rows


def said(text: str | None) -> str | list[Json]:
    """What the store has as a text: a text, or messages as JSON."""
    if text is None:
        return ""
    if text.startswith("["):
        try:
            messages = json.loads(text)
        except ValueError:
            return text
        if isinstance(messages, list) and messages and all(isinstance(m, dict) and "role" in m for m in messages):
            return messages
    return text


def snippet(what: str | list[Json], of_the_end: bool) -> str:
    """A line of it: the last message of a prompt, all of a completion."""
    if isinstance(what, list):
        what = " · ".join(_content(message) for message in (what[-1:] if of_the_end else what))
    line = " ".join(what.split())
    return line if len(line) <= SNIPPET else line[: SNIPPET - 1] + "…"


def _content(message: Json) -> str:
    content = message.get("content") or message.get("tool_calls") or ""
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


# ---- single ones ---------------------------------------------------------------------------------------------------------


def details(snapshot: Snapshot, numbers: list[int], tokenizer: TokenText | None) -> list[Json]:
    allowance = max(MOST_TOKENS // max(len(numbers), 1), FEWEST_TOKENS)
    tables: dict[int, Any] = {}
    found = []
    for number in numbers:
        file = int(snapshot.file[number])
        if file not in tables:
            try:
                tables[file] = read_columns(snapshot.files[file].path, DETAIL_COLUMNS)
            except FileNotFoundError as error:
                raise NotFound("The run has removed these rollouts to make them again.") from error
        record = tables[file].slice(int(snapshot.place[number]), 1).to_pylist()[0]
        found.append(row_of(snapshot, number) | _detail(record, tokenizer, allowance))
    return found


def _detail(record: Json, tokenizer: TokenText | None, allowance: int) -> Json:
    ids = (record["completion_ids"] or [])[:allowance]
    pieces = tokenizer.pieces(ids) if tokenizer else numbered(ids)
    return {
        "prompt_said": said(record["prompt"]),
        "completion_said": said(record["completion"]),
        "prompt_seen": tokenizer.text(record["prompt_ids"] or []) if tokenizer else None,
        "prompt_tokens": len(record["prompt_ids"] or []),
        "pieces": pieces,
        "ids": ids,
        "trained": [int(bool(flag)) for flag in (record["trained"] or [])[:allowance]],
        **{name: _logps(record[name], allowance) for name in ("sampling_logps", "old_logps", "reference_logps")},
        "failure_list": record["failures"] or [],
        "extras": dict(record["extras"] or []),
        "calls": [call | {"seconds": known(call["seconds"] or 0.0)} for call in record["tool_calls"] or []],
        "error_text": record["error"],
        "seconds": {name: known(value) for name, value in record["seconds"] or [] if value is not None},
        "epoch": known(record["epoch"] if record["epoch"] is not None else math.nan),
    }


def _logps(values: list[float | None] | None, allowance: int) -> list[float | None] | None:
    if values is None:
        return None
    return [None if value is None else known(value, 5) for value in values[:allowance]]
