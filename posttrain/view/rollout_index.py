"""RolloutIndex: what is known about every rollout of a run, kept up to date while the run writes more.

A thread of its own reads new files as they appear: first the small columns, which the table shows, then the log-probs of both
sides, for how far they are apart. A file is read again when its time or size has changed, and forgotten when it is gone.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa

from posttrain.rollout.rollout_store import FOLDER, STEP_FOLDER, verify
from posttrain.view.rollout_files import SMALL_COLUMNS, FileColumns, read_columns, read_mismatch, small_columns

Stamp = tuple[int, int]  # time of the last change (ns), bytes
UNREADABLE = (OSError, pa.ArrowException, ValueError)
BATCH_FILES = 64
"""Read before what they say is shown."""
IDLE_SECONDS = 60.0
"""After so long without anybody asking, the thread ends; the next question starts another."""


@dataclass(frozen=True)
class Snapshot:
    """All rollouts that are known at one time, as arrays of one length."""

    version: int
    files: list[FileColumns]
    file: np.ndarray  # which of `files`
    place: np.ndarray  # which row of it
    numbers: dict[str, np.ndarray]
    rewards: dict[str, np.ndarray]
    finish: np.ndarray
    prompt: np.ndarray

    def __len__(self) -> int:
        return len(self.file)


@dataclass
class Progress:
    """How far the reading is."""

    files: int = 0  # complete files in the folder
    indexed: int = 0
    compared: int = 0  # of which the log-probs were looked at
    unreadable: dict[str, str] = field(default_factory=dict)  # name of a file -> why


class RolloutIndex:
    """`refresh` and then `snapshot`."""

    def __init__(self, run: Path) -> None:
        self.folder = run / FOLDER
        self.progress = Progress()
        self._columns: dict[Path, tuple[Stamp, FileColumns]] = {}
        self._mismatch: dict[Path, tuple[Stamp, np.ndarray]] = {}
        self._failed: dict[Path, tuple[Stamp, str]] = {}
        self._changed = threading.Condition()
        self._version, self._snapshot = 1, _joined(0, [], {})
        self._asked = 0  # questions so far, and how many of them the thread has seen
        self._seen = 0
        self._thread: threading.Thread | None = None

    def refresh(self, wait: float | None = 1.0, mismatch: bool = False) -> None:
        """Look for what is new, and wait until that is read, but no longer than `wait` seconds.

        `mismatch` waits for the comparison of log-probs too, which else goes on behind.
        """
        with self._changed:
            self._asked += 1
            question = self._asked
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._keep_reading, name="rollout-index", daemon=True)
                self._thread.start()
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_answered(question, mismatch), wait)

    def _is_answered(self, question: int, mismatch: bool) -> bool:
        read = self._seen >= question and self.progress.indexed == self.progress.files
        return read and (not mismatch or self.progress.compared == self.progress.files)

    def snapshot(self) -> Snapshot:
        with self._changed:
            if self._snapshot.version != self._version:
                order = sorted(self._columns, key=lambda path: (self._columns[path][1].step, _numbers_in(path)))
                files = [self._columns[path][1] for path in order]
                self._snapshot = _joined(self._version, files, {p: values for p, (_, values) in self._mismatch.items()})
            return self._snapshot

    # ---- the thread --------------------------------------------------------------------------------------------------

    def _keep_reading(self) -> None:
        while True:
            with self._changed:
                if self._seen == self._asked and not self._changed.wait_for(
                    lambda: self._seen != self._asked, IDLE_SECONDS
                ):
                    self._thread = None
                    return
                question = self._asked
            self._look(question)

    def _look(self, question: int) -> None:
        present = self._present()
        with self._changed:
            for known in (self._columns, self._mismatch, self._failed):
                for path in [path for path in known if present.get(path) != known[path][0]]:
                    del known[path]
                    self._version += 1
            new = [p for p in sorted(present, reverse=True) if p not in self._columns and p not in self._failed]
            self._tell(present, question)
        for first in range(0, len(new), BATCH_FILES):
            self._index(new[first : first + BATCH_FILES], present)
        for path in sorted((p for p in present if p in self._columns and p not in self._mismatch), reverse=True):
            self._compare(path, present)
            if self._asked != question:  # new files come first; the others are compared on the next turn
                return

    def _present(self) -> dict[Path, Stamp]:
        """Files that have their name are complete; those being written have another."""
        found: dict[Path, Stamp] = {}
        for folder in self.folder.glob("step=*"):
            if STEP_FOLDER.fullmatch(folder.name):
                for path in folder.glob("process-*.parquet"):
                    try:
                        facts = path.stat()
                    except FileNotFoundError:  # a resumed run removes what it will make again
                        continue
                    found[path] = (facts.st_mtime_ns, facts.st_size)
        return found

    def _index(self, paths: list[Path], present: dict[Path, Stamp]) -> None:
        tables, failed = {}, {}
        for path in paths:
            try:
                verify(path)
                tables[path] = read_columns(path, SMALL_COLUMNS)
            except UNREADABLE as error:
                failed[path] = (present[path], str(error))
        columns = small_columns(tables, [_step_of(path) for path in tables]) if tables else []
        with self._changed:
            self._failed |= failed
            self._columns |= {each.path: (present[each.path], each) for each in columns}
            self._version += 1
            self._tell(present)

    def _compare(self, path: Path, present: dict[Path, Stamp]) -> None:
        try:
            values = read_mismatch(path)
        except UNREADABLE:  # it was there a moment ago: a resumed run has removed it, and the next look forgets it
            values = np.full(len(self._columns[path][1]), np.nan)
        with self._changed:
            self._mismatch[path] = (present[path], values)
            self._version += 1
            self._tell(present)

    def _tell(self, present: dict[Path, Stamp], question: int | None = None) -> None:
        """With the lock held."""
        failed = {str(p.relative_to(self.folder)): reason for p, (_, reason) in self._failed.items()}
        done = len(self._failed)
        self.progress = Progress(len(present), len(self._columns) + done, len(self._mismatch) + done, failed)
        if question is not None:
            self._seen = question
        self._changed.notify_all()


def _joined(version: int, files: list[FileColumns], mismatch: dict[Path, np.ndarray]) -> Snapshot:
    sizes = [len(file) for file in files]
    names = list(files[0].numbers) if files else []
    numbers = {name: _concatenated([file.numbers[name] for file in files]) for name in names}
    numbers["mismatch"] = _concatenated([mismatch.get(f.path, np.full(len(f), np.nan)) for f in files])
    of_rewards = dict.fromkeys(name for file in files for name in file.rewards)
    rewards = {
        name: _concatenated([file.rewards.get(name, np.full(len(file), np.nan)) for file in files])
        for name in of_rewards
    }
    return Snapshot(
        version,
        files,
        np.repeat(np.arange(len(files)), sizes),
        _concatenated([np.arange(size) for size in sizes]).astype(np.int64),
        numbers,
        rewards,
        np.concatenate([np.zeros(0, object), *(file.finish for file in files)]),
        np.concatenate([np.zeros(0, np.uint64), *(file.prompt for file in files)]),
    )


def _concatenated(arrays: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0), *arrays])


def _step_of(path: Path) -> int:
    match = STEP_FOLDER.fullmatch(path.parent.name)
    return int(match[1]) if match else 0


def _numbers_in(path: Path) -> list[int]:
    return [int(part) for part in path.stem.split("-")[1:] if part.isdigit()]
