"""Rows of JSON, CSV and text files, read line by line by us.

The usual readers silently repair what they should report: bytes that are not UTF-8, numbers among texts, words like "None"
that become nulls. Here every fault is reported, with file and line.
"""

from __future__ import annotations

import csv
import gzip
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
from datasets.exceptions import DatasetGenerationError

SHOWN = 20
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
HALF_A_PAIR = "holds half of a surrogate pair (\\ud8.. to \\udf..), which is not a character"
LONGEST_FIELD = 2**31 - 1
"""Of a CSV file, in characters: the most that fits a C long on every system. Python's own limit is 131,072."""
DEEPEST = 100
"""How deep values of JSON may lie in each other."""
Row = dict[str, Any]


class SourceError(ValueError):
    """A dataset cannot be found, or a file of it cannot be read; says which file and line."""


@dataclass(frozen=True)
class Fault:
    """A line that is not a row, and why."""

    file: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file}, line {self.line} {self.reason}"


def suffix_of(file: Path) -> str:
    """What tells the type of a file: `.jsonl` of a.jsonl, a.JSONL and a.jsonl.gz."""
    suffix = file.suffix.lower()
    return Path(file.stem).suffix.lower() if suffix == ".gz" else suffix


def read_text_files(files: list[Path], loader: str, streaming: bool) -> datasets.Dataset | datasets.IterableDataset:
    """Rows as they stand in the files: columns of text as text, others as JSON. Nothing is cast, the check sees it all."""
    stamps = [(os.fspath(file), file.stat().st_mtime_ns, file.stat().st_size) for file in files]
    arguments = {"files": stamps, "loader": loader}
    if streaming:
        _refuse_no_rows(next(_rows_of(stamps, loader), None), files)
        return datasets.IterableDataset.from_generator(_rows_of, gen_kwargs=arguments)
    try:
        holds_text = _columns_of(stamps, loader)
        _refuse_no_rows(holds_text, files)
        kinds = {column: datasets.Value("string") if text else datasets.Json() for column, text in holds_text.items()}
        features, arguments["holds_text"] = datasets.Features(kinds), holds_text
        return datasets.Dataset.from_generator(_rows_of, features=features, gen_kwargs=arguments)
    except (SourceError, DatasetGenerationError) as error:
        faults = [row for name, *_ in stamps for row in READERS[loader](name) if isinstance(row, Fault)]
        if not faults:
            raise
        more = [f"... and {len(faults) - SHOWN:,} more"] if len(faults) > SHOWN else []
        listed = "\n".join(f"  {fault}" for fault in [*faults[:SHOWN], *more])
        lines = "1 line" if len(faults) == 1 else f"{len(faults):,} lines"
        raise SourceError(f"{lines} cannot be read:\n{listed}") from error


def _refuse_no_rows(found: Row | None, files: list[Path]) -> None:
    """`found`: the columns, or the first row. `datasets` would end in a traceback that names no file."""
    if not found:
        have = "has" if len(files) == 1 else "have"
        raise SourceError(f"{', '.join(map(str, files))} {have} no rows.")


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


def _opened(name: str) -> Any:
    return gzip.open(name, "rb") if name.lower().endswith(".gz") else open(name, "rb")


def _decoded_lines(name: str) -> Iterator[tuple[int, str | Fault]]:
    with _opened(name) as content:
        for number, line in enumerate(content, 1):
            try:
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                reason = f"is not UTF-8 text: the byte 0x{line[error.start]:02x} at {error.start} ({error.reason})"
                yield number, Fault(name, number, reason)


# ----------------------------------------------------------------------------------------------------------------- JSON


def _json_rows(name: str) -> Iterator[Row | Fault]:
    """JSON lines; a file named .json may also be one list of objects, or an object that holds one list of them."""
    if suffix_of(Path(name)) == ".json":
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
            value = _json_value(line)
        except json.JSONDecodeError as error:
            cut = "Unterminated" in str(error) or "control character" in str(error) or error.pos >= len(line.rstrip())
            what = "ends in the middle of a value" if cut else "is not JSON"
            yield Fault(name, number, f"{what}: {error}")
            continue
        except ValueError as error:
            yield Fault(name, number, str(error))
            continue
        if not isinstance(value, dict):
            yield Fault(name, number, f"is a {type(value).__name__}, a JSON object is needed")
        elif SURROGATE.search(line) and not _is_encodable(value):
            yield Fault(name, number, HALF_A_PAIR)
        else:
            yield value


def _json_value(text: str) -> Any:
    """The value of a JSON text; a ValueError with the reason where it is not JSON, or cannot be meant."""
    if max(text.count("["), text.count("{")) > DEEPEST:
        _refuse_depth(text)
    try:
        return json.loads(text, object_pairs_hook=_object, parse_int=_integer)
    except RecursionError as error:
        raise ValueError(f"is nested more than {DEEPEST} deep") from error


def _refuse_depth(text: str) -> None:
    depth = 0
    for bracket in re.findall(r'"(?:[^"\\]|\\.)*"|[\[\]{}]', text):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(bracket, 0)
        if depth > DEEPEST:
            raise ValueError(f"is nested more than {DEEPEST} deep")


def _object(pairs: list[tuple[str, Any]]) -> Row:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(
            f"names the key {twice[:80]!r} {names.count(twice)} times in one object; which of the values is meant?"
        )
    return found


def _integer(digits: str) -> int:
    """A larger one would come back from the Arrow file as a text."""
    if len(digits) > 20 or not -(2**63) <= int(digits) < 2**63:
        raise ValueError(
            f"holds the integer {digits[:24]} of {len(digits):,} digits, which 64 bits do not hold; write it as a text"
        )
    return int(digits)


def _is_encodable(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _rows_of_document(name: str) -> list[Row | Fault] | None:
    """The rows of a file that is one JSON value; None when it is JSON lines."""
    with _opened(name) as content:
        text = content.read()
    try:
        value = _json_value(text.decode(json.detect_encoding(text), "surrogatepass"))
    except ValueError as error:
        return None if _is_json_lines(name) else _faults_of_document(name, error)
    if isinstance(value, dict):
        lists = [item for item in value.values() if isinstance(item, list) and item and isinstance(item[0], dict)]
        value = lists[0] if len(lists) == 1 and len(value) == 1 else [value]
    if not isinstance(value, list):
        return [Fault(name, 1, f"is a {type(value).__name__}, a list of JSON objects is needed")]
    return [_row_of_document(name, number, row) for number, row in enumerate(value)]


def _row_of_document(name: str, number: int, row: Any) -> Row | Fault:
    if not isinstance(row, dict):
        return Fault(name, 1, f"holds {row!r:.60}, not an object")
    return row if _is_encodable(row) else Fault(name, 1, f"{HALF_A_PAIR} (entry {number} of the list, from 0)")


def _is_json_lines(name: str) -> bool:
    """Of a file that is not one JSON value: whether one of its first two lines alone is a value.

    A document that was written over several lines begins with a lone bracket, and the line after that is not a value either.
    """
    lines = (line for _, line in _decoded_lines(name) if isinstance(line, Fault) or line.strip())
    first_two = [line for line in islice(lines, 2) if isinstance(line, str)]
    return any(_is_object(line) for line in first_two)


def _is_object(line: str) -> bool:
    try:
        return isinstance(_json_value(line), dict)
    except ValueError as error:
        return not isinstance(error, json.JSONDecodeError)  # an object, with something else wrong about it


def _faults_of_document(name: str, error: ValueError) -> list[Fault]:
    """One fault, where the parser stopped: every line after it alone would be "not JSON"."""
    undecodable = [line for _, line in _decoded_lines(name) if isinstance(line, Fault)]
    if undecodable or not isinstance(error, json.JSONDecodeError):
        return undecodable or [Fault(name, 1, str(error))]
    at_end = error.pos >= len(error.doc.rstrip()) or error.msg.startswith("Unterminated string")
    what = "ends in the middle of a value" if at_end else "is not JSON"
    return [Fault(name, error.lineno, f"{what}: {error.msg} (column {error.colno})")]


# ---------------------------------------------------------------------------------------------------------- CSV and text


def _csv_rows(name: str) -> Iterator[Row | Fault]:
    """CSV or TSV with a header. All values are text, as they stand; `label` and `margin` become what they say."""
    faults: list[Fault] = []

    def lines() -> Iterator[str]:
        for _, line in _decoded_lines(name):
            if isinstance(line, Fault):
                faults.append(line)
            else:
                yield line

    # The limit is one of the whole process, so it is only ever raised.
    csv.field_size_limit(max(csv.field_size_limit(), LONGEST_FIELD))
    reader = csv.reader(lines(), delimiter=_delimiter(name), strict=True)
    header: list[str] | None = None
    try:
        for values in reader:
            if header is None:
                header = values
                if repeated := [column for column in dict.fromkeys(header) if header.count(column) > 1]:
                    places = [str(place) for place, column in enumerate(header, 1) if column == repeated[0]]
                    reason = f"names the column {repeated[0]!r} {len(places)} times (fields {', '.join(places)})"
                    yield Fault(name, reader.line_num, f"{reason}; give each a name of its own")
                    break
            elif values and len(values) != len(header):
                yield Fault(name, reader.line_num, f"has {len(values)} fields, the header has {len(header)}")
            elif values:
                yield {column: _typed(column, value) for column, value in zip(header, values)}
    except csv.Error as error:
        yield Fault(name, reader.line_num, f"is not CSV: {error}")
    yield from faults


def _delimiter(name: str) -> str:
    """What separates the columns of a CSV file's header: a comma, or `;` (spreadsheets of many countries) or a tab."""
    if suffix_of(Path(name)) == ".tsv":
        return "\t"
    header = next((line for _, line in _decoded_lines(name) if isinstance(line, str) and line.strip()), "")
    return next((sign for sign in ",;\t" if sign in header), ",")


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
