"""Rollouts as the page shows them: rows of the table, and single ones with their tokens. Token columns are read here only."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

from posttrain.view.errors import NotFound, ViewError
from posttrain.view.rollout_index import Record, read_columns
from posttrain.view.token_text import TokenText, numbered

SNIPPET = 240
MAX_TOKENS, MIN_TOKENS = 60_000, 512
"""Tokens in one answer, shared by its rollouts, and what each of them has in any case."""
DETAIL_COLUMNS = [
    "prompt", "completion", "prompt_ids", "completion_ids", "trained", "sampling_logps", "old_logps", "reference_logps",
    "rewards", "failures", "extras", "tool_calls", "error", "seconds", "epoch", "images",
]  # fmt: skip
AS_THEY_ARE = (
    "id", "step", "row", "group", "sample", "author", "tokens", "trained_tokens", "tool_calls", "tool_errors", "failures",
    "policy_version", "error", "masked", "truncated",
)  # fmt: skip
REAL = ("reward", "advantage", "mismatch")
Json = dict[str, Any]


def known(value: float | None, digits: int = 6) -> float | None:
    """JSON has no NaN."""
    return float(f"{value:.{digits}g}") if value is not None and math.isfinite(value) else None


# ---- rows of the table ---------------------------------------------------------------------------------------------------


def row_of(record: Record, rewards: list[str]) -> Json:
    """A row of the index for the page; `rewards` are all that the run has."""
    given = record["rewards"] or {}
    return {
        "prompt": record["prompt_key"],
        "finish": record["finish"] or None,
        "rewards": {name: known(given.get(name)) for name in rewards},
        **{name: record[name] for name in AS_THEY_ARE},
        **{name: known(record[name]) for name in REAL},
    }


def tools_of(record: Record) -> list[Json] | None:
    """Schemas of the tools that the prompt was written with; files of earlier versions do not have them."""
    return None if record["tools"] is None else json.loads(record["tools"])


def rows_with_text(records: list[Record], rewards: list[str]) -> list[Json]:
    return [
        row_of(record, rewards)
        | {
            "prompt_text": snippet(parsed_text(record["prompt"]), of_the_end=True),
            "completion_text": snippet(parsed_text(record["completion"]), of_the_end=False),
        }
        for record in records
    ]


def parsed_text(text: str | None) -> str | list[Json]:
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
    if isinstance(content, list) and all(isinstance(part, dict) and "type" in part for part in content):
        return "".join(str(part["text"]) if "text" in part else f"[{part['type']}]" for part in content)
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


# ---- single ones ---------------------------------------------------------------------------------------------------------


def details(records: list[Record], rewards: list[str], tokenizer: TokenText | None) -> list[Json]:
    allowance = max(MAX_TOKENS // max(len(records), 1), MIN_TOKENS)
    tables: dict[str, Any] = {}
    found = []
    for record in records:
        path = record["path"]
        try:
            if path not in tables:
                tables[path] = read_columns(Path(path), DETAIL_COLUMNS)
            (stored,) = tables[path].slice(record["place"], 1).to_pylist()
        except (FileNotFoundError, ValueError) as error:  # or written again, and shorter
            raise NotFound("The run has removed these rollouts to make them again.") from error
        found.append(row_of(record, rewards) | _detail(stored, tokenizer, allowance))
    return found


def _detail(record: Json, tokenizer: TokenText | None, allowance: int) -> Json:
    ids = (record["completion_ids"] or [])[:allowance]
    pieces = tokenizer.pieces(ids) if tokenizer else numbered(ids)
    logps = {name: record[name] for name in ("sampling_logps", "old_logps", "reference_logps")}
    return {
        "prompt_said": parsed_text(record["prompt"]),
        "completion_said": parsed_text(record["completion"]),
        "prompt_seen": tokenizer.text(record["prompt_ids"] or []) if tokenizer else None,
        "prompt_tokens": len(record["prompt_ids"] or []),
        "pieces": pieces,
        "ids": ids,
        "trained": [int(bool(flag)) for flag in (record["trained"] or [])[:allowance]],
        **{name: values and [known(one, 5) for one in values[:allowance]] for name, values in logps.items()},
        "failure_list": record["failures"] or [],
        "extras": dict(record["extras"] or []),
        "calls": [call | {"seconds": known(call["seconds"] or 0.0)} for call in record["tool_calls"] or []],
        "images": record.get("images") or [],
        "error_text": record["error"],
        "seconds": {name: known(value) for name, value in record["seconds"] or [] if value is not None},
        "epoch": known(record["epoch"]),
    }


# ---- pictures: files of one folder of a run, asked for by the keys of their content and nothing else ---------------------

PICTURE_FOLDER = "rollout_images"
"""Of a run; `rollout/thumbnails.py` writes to it."""
PICTURE_TYPE = "image/webp"
KEY = re.compile(r"[0-9a-f]{32}", re.ASCII)
MAGIC = re.compile(rb"RIFF....WEBP", re.DOTALL)
MAX_PICTURE_BYTES = 4 << 20


def stored_picture(run: Path, key: str) -> bytes:
    """The bytes of a picture. A link, or a file that holds something else under this name, is not served."""
    if not KEY.fullmatch(key):
        raise ViewError("The key of a picture has 32 hexadecimal digits.")
    path = run / PICTURE_FOLDER / f"{key}.webp"
    if path.is_symlink() or not path.is_file():
        raise NotFound("There is no picture of this image: none was kept, or no longer.")
    with open(path, "rb") as file:
        data = file.read(MAX_PICTURE_BYTES + 1)
    if len(data) > MAX_PICTURE_BYTES or not MAGIC.match(data):
        raise NotFound("The file of this image is not a picture that the run wrote.")
    return data
