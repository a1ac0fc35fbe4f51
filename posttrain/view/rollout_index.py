"""RolloutIndex: what is known about every rollout of a run, as a table of duckdb, kept up to date while the run writes more.

A thread of its own reads new files as they appear: first all but the tokens, which the pages show, then the log-probs of both
sides, for how far they are apart. A file is read again when its time or size has changed, and forgotten when it is gone.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import tempfile
import threading
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from posttrain.rollout.store import FILE_SCHEMA, FOLDER, STEP_FOLDER, verify

Stamp = tuple[int, int]  # time of the last change (ns), bytes
Record = dict[str, Any]
UNREADABLE = (OSError, pa.ArrowException, ValueError)
BATCH_FILES, COMPARED_FILES = 64, 8
"""Read before what they say is shown, and compared before the next look for new ones."""
IDLE_SECONDS = 60.0
"""After so long without a request, the thread ends; the next request starts another."""
SECONDS_TO_CLOSE = 10.0
SETTINGS = {
    "enable_external_access": "false",  # files are read by pyarrow, which verifies their checksums; SQL reaches none
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "python_enable_replacements": "false",
    "memory_limit": "1GB",
    "threads": "2",
}
INDEXED = [
    "row", "group", "sample", "author", "prompt", "completion", "tools", "trained", "advantage", "rewards", "reward", "failures",
    "tool_calls", "images", "finish_reason", "error", "masked", "truncated", "policy_version",
]  # fmt: skip
"""`trained` is a bit for each completion token, and so tells how long a completion is for next to nothing."""
SELECT = """
SELECT f.path, f.step, f.numbers, place - f.start AS place, f.name || '/' || (place - f.start) AS id,
  "row", "group", sample, author, prompt, completion, tools, format('{:016x}', hash(coalesce(prompt, ''))) AS prompt_key,
  coalesce(len(trained), 0) AS tokens, coalesce(len([t FOR t IN trained IF t]), 0) AS trained_tokens,
  coalesce(len(failures), 0) AS failures, coalesce(len(tool_calls), 0) AS tool_calls, coalesce(len(images), 0) AS images,
  coalesce(len([c FOR c IN tool_calls IF c.error IS NOT NULL]), 0) AS tool_errors, error IS NOT NULL AS error,
  nullif(advantage, 'nan') AS advantage, nullif(reward, 'nan') AS reward, rewards, finish_reason AS finish,
  coalesce(masked, false) AS masked, coalesce(truncated, false) AS truncated, policy_version, NULL::DOUBLE AS mismatch
FROM batch ASOF JOIN """
FILES = """(SELECT unnest($paths::VARCHAR[]) AS path, unnest($names::VARCHAR[]) AS name, unnest($steps::BIGINT[]) AS step,
  unnest($numbers::BIGINT[][]) AS numbers, unnest($starts::BIGINT[]) AS start) f ON place >= f.start"""
COMPARE = f"""
UPDATE rollouts SET mismatch = m.mismatch FROM (
  SELECT path, place, avg(abs(sampled - scored)) FILTER (trained AND isfinite(sampled - scored)) AS mismatch FROM (
    SELECT f.path, place - f.start AS place, unnest(sampling_logps)::DOUBLE AS sampled, unnest(old_logps)::DOUBLE AS scored,
      unnest(trained) AS trained
    FROM batch ASOF JOIN {FILES}
    WHERE len(sampling_logps) = len(old_logps) AND len(old_logps) = len(trained)) GROUP BY path, place) m
WHERE rollouts.path = m.path AND rollouts.place = m.place
"""
"""Mean |sampling log-prob - trainer log-prob| over the trained tokens; null where one side is not known."""


@dataclass
class Progress:
    """How far the reading is."""

    files: int = 0  # complete files in the folder
    indexed: int = 0
    compared: int = 0  # of which the log-probs were looked at
    unreadable: dict[str, str] = field(default_factory=dict)  # name of a file -> why


class RolloutIndex:
    """`refresh`, and then `rows` of SQL over the table `rollouts`. `version` changes whenever its content does."""

    def __init__(self, run: Path) -> None:
        self.folder = run / FOLDER
        self.progress = Progress()
        self.version = 1
        self._known: dict[Path, Stamp] = {}
        self._compared: set[Path] = set()
        self._failed: dict[Path, tuple[Stamp, str]] = {}
        self._changed = threading.Condition()
        self._asked = 0  # questions so far, and how many of them the thread has seen
        self._seen = 0
        self._thread: threading.Thread | None = None
        self._spilled: tempfile.TemporaryDirectory | None = None
        self._tables: duckdb.DuckDBPyConnection | None = None
        self._is_closed = False

    def rows(self, sql: str, **values: Any) -> list[Record]:
        """What SQL finds, by column. Whatever a user has typed belongs into `values`."""
        found = self._database().execute(sql, values)
        names = [column[0] for column in found.description]
        return [dict(zip(names, row)) for row in found.fetchall()]

    def _database(self) -> duckdb.DuckDBPyConnection:
        """A cursor, which one thread may use. What the memory does not hold goes to a folder that only this user can read."""
        with self._changed:
            if self._tables is None:
                self._spilled = tempfile.TemporaryDirectory(prefix="posttrain-view-")
                self._tables = duckdb.connect(":memory:", config=SETTINGS | {"temp_directory": self._spilled.name})
                self._tables.execute("SET lock_configuration = true")
                empty = {self.folder / "step=0/-": pa.Table.from_batches([], FILE_SCHEMA).select(INDEXED)}
                _execute(self._tables, f"CREATE TABLE rollouts AS {SELECT}{FILES}", empty)
                OPEN.add(self)
            return self._tables.cursor()

    def close(self) -> None:
        """When the process ends: duckdb complains about connections that are still there then."""
        with self._changed:
            self._is_closed, thread = True, self._thread
            self._changed.notify_all()
        if thread is not None:
            thread.join(SECONDS_TO_CLOSE)
        self._tables = None

    def __len__(self) -> int:
        return self.rows("SELECT count(*) AS count FROM rollouts")[0]["count"]

    def refresh(self, wait: float | None = 1.0, mismatch: bool = False) -> bool:
        """Look for what is new, and wait until that is read, but no longer than `wait` seconds: whether it was.

        `mismatch` waits for the comparison of log-probs too, which otherwise continues in the background.
        """
        with self._changed:
            self._asked += 1
            question = self._asked
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._keep_reading, name="rollout-index", daemon=True)
                self._thread.start()
            self._changed.notify_all()
            return self._changed.wait_for(lambda: self._is_answered(question, mismatch), wait)

    def _is_answered(self, question: int, mismatch: bool) -> bool:
        read = self._seen >= question and self.progress.indexed == self.progress.files
        return read and (not mismatch or self.progress.compared == self.progress.files)

    # ---- the thread --------------------------------------------------------------------------------------------------

    def _keep_reading(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._seen != self._asked or self._is_closed, IDLE_SECONDS)
                question = self._asked
                if question == self._seen or self._is_closed:
                    self._thread = None
                    return
            self._scan(self._database(), question)

    def _scan(self, database: duckdb.DuckDBPyConnection, question: int) -> None:
        present = self._present()
        gone = [path for path, stamp in self._known.items() if present.get(path) != stamp]
        if gone:
            database.execute("DELETE FROM rollouts WHERE list_contains($paths, path)", {"paths": [*map(str, gone)]})
        with self._changed:
            for path in gone:
                del self._known[path]
                self._compared.discard(path)
            self._failed = {path: found for path, found in self._failed.items() if present.get(path) == found[0]}
            new = [p for p in sorted(present, reverse=True) if p not in self._known and p not in self._failed]
            self._publish(present, bool(gone), question)
        for batch in _batches(new, BATCH_FILES):
            self._index(database, batch, present)
        compared = sorted((p for p in present if p in self._known and p not in self._compared), reverse=True)
        for batch in _batches(compared, COMPARED_FILES):
            self._compare(database, batch, present)
            if self._asked != question or self._is_closed:  # new files come first; the rest is compared next time
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

    def _index(self, database: duckdb.DuckDBPyConnection, paths: list[Path], present: dict[Path, Stamp]) -> None:
        tables, failed = {}, {}
        for path in paths:
            try:
                verify(path)
                tables[path] = read_columns(path, INDEXED)
            except UNREADABLE as error:
                failed[path] = (present[path], str(error))
        try:
            _execute(database, f"INSERT INTO rollouts {SELECT}{FILES}", tables)
        except duckdb.Error as error:  # no room in memory, nor on the disk
            failed |= {path: (present[path], str(error)) for path in tables}
            tables = {}
        with self._changed:
            self._failed |= failed
            self._known |= {path: present[path] for path in tables}
            self._publish(present, True)

    def _compare(self, database: duckdb.DuckDBPyConnection, paths: list[Path], present: dict[Path, Stamp]) -> None:
        tables = {}
        for path in paths:  # one that a resumed run has removed meanwhile is forgotten at the next look
            with contextlib.suppress(*UNREADABLE):
                tables[path] = read_columns(path, ["sampling_logps", "old_logps", "trained"])
        with contextlib.suppress(duckdb.Error):  # no room: it stays unknown
            _execute(database, COMPARE, tables)
        with self._changed:
            self._compared |= {*paths}
            self._publish(present, True)

    def _publish(self, present: dict[Path, Stamp], is_changed: bool, question: int | None = None) -> None:
        """With the lock held."""
        failed = {str(p.relative_to(self.folder)): reason for p, (_, reason) in self._failed.items()}
        done = len(self._failed)
        self.progress = Progress(len(present), len(self._known) + done, len(self._compared) + done, failed)
        self.version += is_changed
        if question is not None:
            self._seen = question
        self._changed.notify_all()


OPEN: weakref.WeakSet[RolloutIndex] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for index in list(OPEN):
        index.close()


def _batches(paths: list[Path], size: int) -> list[list[Path]]:
    return [paths[first : first + size] for first in range(0, len(paths), size)]


def read_columns(path: Path, names: list[str]) -> pa.Table:
    """Columns of a file; one that an older file does not have is null."""
    with pq.ParquetFile(path, page_checksum_verification=True) as file:
        table = file.read(columns=names, use_threads=False)  # which leaves out those that are not there
    schema = pa.schema([FILE_SCHEMA.field(name) for name in names])
    for name in set(names) - set(table.column_names):
        table = table.append_column(name, pa.nulls(len(table), schema.field(name).type))
    table = table.select(names)
    return table if table.schema.equals(schema) else table.cast(schema)


def _execute(database: duckdb.DuckDBPyConnection, sql: str, tables: dict[Path, pa.Table]) -> None:
    """SQL over `batch`, the rows of all files one after the other, and FILES: the numbers of each file, and where it starts."""
    if not tables:
        return
    joined, steps = pa.concat_tables(tables.values()), [int(STEP_FOLDER.fullmatch(p.parent.name)[1]) for p in tables]
    starts = itertools.accumulate(map(len, tables.values()), initial=0)
    values = {
        "paths": [str(path) for path in tables],
        "names": [f"{step}/{path.stem}" for step, path in zip(steps, tables)],
        "steps": steps,
        "numbers": [[int(part) for part in path.stem.split("-")[1:] if part.isdigit()] for path in tables],
        # of two files that start at one place the first is empty: no row is there for it to be found by
        "starts": [start if len(table) else -1 for start, table in zip(starts, tables.values())],
    }
    # pyarrow makes `arange` (and no `array`) without pandas, which takes half a second to import
    database.register("batch", joined.append_column("place", pa.arange(0, len(joined))))
    try:
        database.execute(sql, values)
    finally:
        database.unregister("batch")
