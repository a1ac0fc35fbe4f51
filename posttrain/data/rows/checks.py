"""What can be wrong with one value of one row, in words; and the log that collects it for a whole dataset.

A check appends `Finding`s to a list and continues, so that one pass over the data shows everything that is wrong with it.
Arrow gives every row the keys of all rows, filled with None; such keys are taken away first and never complained about.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

SHOWN = 20


class Finding(NamedTuple):
    """One thing that is wrong with a row. `kind` is a slug to count by, `reason` the rest of a sentence."""

    kind: str
    column: str
    reason: str


@dataclass(frozen=True)
class Problem:
    """A finding with its place. Rows are counted from 0; -1 stands for the dataset as a whole."""

    dataset: str
    row: int
    column: str
    kind: str
    reason: str

    def __str__(self) -> str:
        place = f"row {self.row}" if self.row >= 0 else "all rows"
        return f"{self.dataset}, {place}, column {self.column!r}: {self.reason}"


class BadRowsError(ValueError):
    """Raised before any model is loaded when `on_bad_rows='error'` and some rows cannot be trained on."""

    def __init__(self, problems: list[Problem], total: int, num_rows: int, file: str | None) -> None:
        self.problems, self.total, self.file = problems, total, file
        shown = problems[:SHOWN]
        lines = [f"  {problem}" for problem in shown]
        if total > len(shown):
            lines.append(f"  ... and {total - len(shown):,} more")
        where = f" All of them are in {file}." if file else ""
        name = problems[0].dataset if problems else "the dataset"
        super().__init__(
            f"{total:,} problem{'s' * (total != 1)} in the {num_rows:,} rows of {name} (rows are counted from 0):\n"
            + "\n".join(lines)
            + f"\nFix the rows, or set on_bad_rows='drop' to leave them out and count them.{where}"
        )


@dataclass
class ProblemLog:
    """Problems of one dataset: the first `keep` in memory, all of them counted by kind and written to `file`."""

    dataset: str
    file: Path | None = None
    keep: int = SHOWN
    problems: list[Problem] = field(default_factory=list)
    by_kind: Counter[str] = field(default_factory=Counter)
    kind_of_row: dict[int, str] = field(default_factory=dict)  # the first thing that was found in each bad row
    _unwritten: list[str] = field(default_factory=list)

    def add(self, row: int, findings: Iterable[Finding]) -> None:
        """All findings about one row; row -1 stands for the dataset as a whole."""
        problems = [Problem(self.dataset, row, f.column, f.kind, f.reason) for f in findings]
        self.by_kind.update(problem.kind for problem in problems)
        if row >= 0:
            self.kind_of_row.setdefault(row, problems[0].kind)
        self.problems += problems[: max(0, self.keep - len(self.problems))]
        if self.file is not None:
            self._unwritten += [json.dumps(asdict(problem), ensure_ascii=False) + "\n" for problem in problems]
            if len(self._unwritten) > 1000:
                self.flush()

    def flush(self) -> None:
        """Write what has not been written yet."""
        if self.file is not None and self._unwritten:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with open(self.file, "a", encoding="utf-8", errors="backslashreplace") as out:
                out.writelines(self._unwritten)
            self._unwritten.clear()

    def refuse(self, num_rows: int, file: Path | None = None) -> None:
        """Raise when anything was found; `file` is where a reader finds all of it."""
        self.flush()
        if self.by_kind:
            total = sum(self.by_kind.values())
            raise BadRowsError(self.problems, total, num_rows, os.fspath(file) if file else None)


def describe(value: Any) -> str:
    """A value as a reader recognises it: its type and its beginning."""
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def without_nones(value: Any) -> Any:
    """The value without the keys that Arrow filled with None, at any depth. Lists keep their length."""
    if isinstance(value, dict):
        return {key: without_nones(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nones(item) for item in value]
    return value


def check_text(value: Any, column: str, found: list[Finding], *, may_be_blank: bool = False) -> bool:
    """Whether `value` is text that can be tokenised; what is wrong otherwise goes to `found`."""
    if value is None:
        found.append(Finding("null", column, "is missing or null, text is needed"))
    elif not isinstance(value, str):
        found.append(Finding("wrong_type", column, f"is {describe(value)}, text is needed"))
    elif not may_be_blank and (not value or value.isspace()):
        what = "holds only white space" if value else "is empty"
        found.append(Finding("blank", column, f"{what}: there is nothing to train on or to answer"))
    else:
        return check_characters(value, column, found)
    return False


def check_characters(text: str, column: str, found: list[Finding]) -> bool:
    """Refuse what is not text: NUL characters (binary data read as text) and halves of surrogate pairs."""
    if "\x00" in text:
        reason = f"holds a NUL character at position {text.index(chr(0))}: binary data, or text decoded wrongly"
        found.append(Finding("nul", column, reason))
        return False
    if text.isascii():
        return True
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = f"U+{ord(text[error.start]):04X}"
        reason = f"holds half of a surrogate pair ({code}) at position {error.start}: it was decoded wrongly"
        found.append(Finding("surrogate", column, reason))
        return False
    return True


def read_number(value: Any, column: str, found: list[Finding]) -> float:
    """A finite number; NaN with a finding otherwise."""
    if value is None:
        found.append(Finding("null", column, "is missing or null, a number is needed"))
    elif isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        found.append(Finding("wrong_type", column, f"is {describe(value)}, a number is needed"))
    elif not math.isfinite(value):
        found.append(Finding("not_finite", column, f"is {value}, a finite number is needed"))
    else:
        return float(value)
    return math.nan


def read_label(value: Any, column: str, found: list[Finding]) -> bool:
    """True or False; the integers 0 and 1 are taken for them, nothing else is."""
    if value is None:
        found.append(Finding("null", column, "is missing or null, True or False is needed"))
    elif isinstance(value, (bool, np.bool_)) or (isinstance(value, (int, np.integer)) and value in (0, 1)):
        return bool(value)
    else:
        found.append(Finding("label_not_bool", column, f"is {describe(value)}, True or False is needed"))
    return False


def read_ids(value: Any, column: str, found: list[Finding], vocab_size: int | None = None) -> np.ndarray | None:
    """Token ids: a non-empty flat list of integers inside the vocabulary."""
    if value is None:
        found.append(Finding("null", column, "is missing or null, a list of token ids is needed"))
        return None
    ids = read_integers(value, column, found)
    if ids is None:
        return None
    if not len(ids):
        found.append(Finding("empty", column, "is empty, at least one token id is needed"))
    elif ids.min() < 0:
        found.append(Finding("negative_id", column, f"holds the negative id {ids.min()} at {int(ids.argmin())}"))
    elif vocab_size is not None and ids.max() >= vocab_size:
        reason = f"holds the id {ids.max()} at {int(ids.argmax())}; the vocabulary ends at {vocab_size - 1}"
        found.append(Finding("out_of_vocabulary", column, reason))
    else:
        return ids.astype(np.int32)
    return None


def read_integers(value: Any, column: str, found: list[Finding], length: int | None = None) -> np.ndarray | None:
    """A flat list of integers, `length` long where that is given."""
    if isinstance(value, (str, bytes, dict)) or not hasattr(value, "__len__"):
        found.append(Finding("wrong_type", column, f"is {describe(value)}, a list of integers is needed"))
        return None
    try:
        numbers = np.asarray(value)
    except ValueError:  # lists of unequal length
        numbers = np.asarray(value, dtype=object)
    if len(value) and (numbers.ndim != 1 or numbers.dtype.kind not in "iub"):
        first = next((v for v in value if isinstance(v, bool) or not isinstance(v, (int, np.integer))), value[0])
        found.append(Finding("not_integers", column, f"holds {describe(first)}, a flat list of integers is needed"))
        return None
    if length is not None and len(numbers) != length:
        found.append(Finding("other_length", column, f"has {len(numbers)} entries for {length} token ids"))
        return None
    return numbers.astype(np.int64)
