"""GrowingLines: the JSON lines of a file that a run is still writing, read a piece at a time."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

DEEPEST, LARGEST = 12, 1e300
"""How deep a value may lie in others, and the largest number that is shown (NaN is not below it either)."""
Entry = dict[str, Any]
Series = dict[str, tuple[list[int], list[float | None]]]


class GrowingLines:
    """`entries` grow with every `refresh`. `generation` counts how often the file began anew, as that of a resumed run does."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: list[Entry] = []
        self.generation = 0
        self._inode, self._offset = -1, 0
        self._lock = threading.Lock()

    def refresh(self) -> None:
        with self._lock:
            try:
                with open(self.path, "rb") as file:
                    self._read_new(file)
            except FileNotFoundError:
                if self._inode != -1:
                    self._restart(-1)

    def _read_new(self, file: Any) -> None:
        facts = os.fstat(file.fileno())
        if facts.st_ino != self._inode or facts.st_size < self._offset:
            self._restart(facts.st_ino)
        file.seek(self._offset)
        content = file.read()
        whole = content[: content.rfind(b"\n") + 1]  # what comes after the last line end is still being written
        self._offset += len(whole)
        for line in whole.splitlines():
            entry = _object_in(line)
            if entry is not None:
                self.entries.append(entry)

    def _restart(self, inode: int) -> None:
        self.entries, self._offset, self._inode = [], 0, inode
        self.generation += 1


def _object_in(line: bytes) -> Entry | None:
    """A line that a crash cut off is left out; the resumed run removes it."""
    try:
        entry = plain(json.loads(line))
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) else None


def plain(value: Any, depth: int = 0) -> Any:
    """What JSON and a page can hold of a value: names that are texts, numbers that are finite, and an end to the nesting."""
    if isinstance(value, (dict, list, tuple, set)) and depth >= DEEPEST:
        return "(nested too deeply to be shown)"
    if isinstance(value, dict):
        return {str(name): plain(inner, depth + 1) for name, inner in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [plain(inner, depth + 1) for inner in value]
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return value
    if isinstance(value, (int, float)):
        return value if abs(value) <= LARGEST else None
    return str(value)


NOT_CURVES = frozenset(
    ("step", "epoch", "total_flos", "train_runtime", "train_loss", "train_samples_per_second", "train_steps_per_second")
)
"""Numbers in logs that are said once, or count steps."""


def series_of(entries: list[Entry]) -> Series:
    """name -> (steps, values) of all curves in logs. A null (NaN where it was logged) stays: a gap in the curve."""
    series: Series = {}
    for entry in entries:
        step = entry.get("step")
        if not isinstance(step, int):
            continue
        for name, value in entry.items():
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if name not in NOT_CURVES and (is_number or value is None):
                steps, values = series.setdefault(name, ([], []))
                steps.append(step)
                values.append(value)
    return series
