"""Journal: finished groups are on disk before a step takes them, and so is the order in which steps took them.

    OUTPUT/rollout_journal/process-0/000000.seg      groups, one after the other: a header with checksums, then the group's bytes
    OUTPUT/rollout_journal/process-0/windows.jsonl   window and round -> the numbers that were taken; rounds above 0 replace groups

A killed trainer trains its last windows again from here, on the same groups in the same order: the same weights, and no group is
lost or trained on twice.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import struct
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from posttrain.core.faults import fault_point

logger = logging.getLogger(__name__)

FOLDER, WINDOWS, SEGMENT = "rollout_journal", "windows.jsonl", "{:06d}.seg"
PROCESS = "process-"
HEADER = struct.Struct(">4sQQQ16s")  # mark, number, attempt, length, digest of the content
SEAL = struct.Struct(">I")  # crc32 of the header
MARK = b"PTG1"
SEGMENT_BYTES = 64 * 2**20

Key = tuple[int, int]
"""A window, and the round of it: 0, or one more for each time that groups of it were replaced."""


def digest_of(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()


class JournalNotWritten(RuntimeError):
    """Without it a crash would lose groups, so the run ends here."""


class Journal:
    """Of one run, written by one thread at a time. What a crash cut off at the end of a segment is passed over."""

    def __init__(self, output_dir: str | Path, process: int = 0) -> None:
        self.folder = Path(output_dir) / FOLDER / f"{PROCESS}{process}"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.places: dict[int, tuple[Path, int]] = {}  # number -> segment and offset of its content's header
        self.damaged: list[str] = []  # sentences about what cannot be read, until they are said
        for segment in sorted(self.folder.glob("*.seg")):
            self.places |= {number: (segment, start) for number, start in self._scan(segment)}
        self._file: BinaryIO | None = None
        self._ends_whole = False  # whether the last line of windows was looked at
        self._failure = ""  # why nothing more can be written
        self._next = 1 + max((int(path.stem) for path in self.folder.glob("*.seg")), default=-1)

    # ---- writing -----------------------------------------------------------------------------------------------------

    def append(self, number: int, attempt: int, content: bytes) -> str:
        """The digest of what was written. It is not on disk before `sync`."""
        with self._writing():
            if self._file is None or self._file.tell() > SEGMENT_BYTES:
                self._open_segment()
            header = HEADER.pack(MARK, number, attempt, len(content), digest_of(content))
            self.places[number] = (Path(self._file.name), self._file.tell())
            self._file.write(header + SEAL.pack(zlib.crc32(header)) + content)
        return digest_of(content).hex()

    def _open_segment(self) -> None:
        self.close()
        path = self.folder / SEGMENT.format(self._next)
        self._file, self._next = path.open("xb"), self._next + 1

    def sync(self) -> None:
        with self._writing():
            if self._file is not None:
                self._file.flush()
                os.fsync(self._file.fileno())

    def take(self, key: Key, numbers: Sequence[int], dropped: dict[int, str]) -> None:
        """These groups are of this window. On disk, and they with it, when this returns."""
        self.sync()
        line = {"window": key[0], "round": key[1], "numbers": [*numbers], "dropped": dropped}
        with self._writing():
            fault_point("journal")
            with (self.folder / WINDOWS).open("ab") as file:
                if not self._ends_whole:  # what a crash cut off would swallow this line
                    file.truncate(len(self._whole_lines()))
                    self._ends_whole = True
                file.write(json.dumps(line).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Whatever is written after a failure might rely on what is not there: nothing is."""
        if self._failure:
            raise JournalNotWritten(self._failure)
        try:
            yield
        except OSError as error:
            self._failure = (
                f"Groups of rollouts could not be written to {self.folder} ({error.strerror or error}), and none is trained on "
                "that is not there. Make room, or the folder writable, then resume (`resume_from_checkpoint=True`): what is in "
                "the folder is not written again."
            )
            raise JournalNotWritten(self._failure) from error

    def close(self) -> None:
        if self._file is not None:
            if not self._failure:
                self.sync()
            file, self._file = self._file, None
            with suppress(OSError):  # of what could not be written, which was said; else all of it is on disk
                file.close()

    def remove_before(self, number: int) -> None:
        """Remove segments whose groups all have lower numbers, but for the one that is being written."""
        newest: dict[Path, int] = {}
        for one, (segment, _) in self.places.items():
            newest[segment] = max(one, newest.get(segment, one))
        newest.pop(Path(self._file.name) if self._file is not None else None, None)
        for segment in [segment for segment, last in newest.items() if last < number]:
            self.places = {one: place for one, place in self.places.items() if place[0] != segment}
            segment.unlink()

    # ---- reading -----------------------------------------------------------------------------------------------------

    @property
    def num_bytes(self) -> int:
        """Of its segments."""
        return sum(segment.stat().st_size for segment in self.folder.glob("*.seg"))

    def read(self, number: int) -> bytes | None:
        """The content of a group; None where it was never written, or is damaged."""
        if number not in self.places:
            return None
        path, start = self.places[number]
        if self._file is not None:
            self._file.flush()
        with path.open("rb") as file:
            file.seek(start)
            head = file.read(HEADER.size + SEAL.size)
            _, _, _, length, digest = HEADER.unpack(head[: HEADER.size])
            content = file.read(length)
        if digest_of(content) != digest:
            self.damaged.append(f"{path}: the group of prompt {number} is damaged.")
            del self.places[number]
            return None
        return content

    def windows(self) -> dict[Key, dict[str, Any]]:
        """What was taken: a line replaces whatever an earlier one says of it and of all that followed. A line that a crash cut off
        was never acted on."""
        path, found, whole = self.folder / WINDOWS, {}, self._whole_lines()
        if path.exists() and path.stat().st_size > len(whole):
            self.damaged.append(f"{path}: the last line is cut off, and passed over: it was never acted on.")
        for line in whole.splitlines():
            try:
                entry = json.loads(line)
            except ValueError:
                self.damaged.append(f"{path}: a line is damaged, and passed over: {line[:60]!r}")
                continue
            key = (entry["window"], entry.get("round", 0))
            found = {before: taken for before, taken in found.items() if before < key}
            found[key] = entry | {"dropped": {int(n): why for n, why in entry["dropped"].items()}}
        return found

    def _whole_lines(self) -> bytes:
        """The file of windows, up to its last end of a line."""
        path = self.folder / WINDOWS
        content = path.read_bytes() if path.exists() else b""
        return content[: content.rfind(b"\n") + 1]

    def say_damage(self, what_follows: str) -> None:
        """Warn of all that was found, once."""
        found, self.damaged = self.damaged, []
        for sentence in found:
            logger.warning("%s %s", sentence, what_follows)

    def _scan(self, segment: Path) -> Iterator[tuple[int, int]]:
        size, start = segment.stat().st_size, 0
        with segment.open("rb") as file:
            while start < size:
                file.seek(start)
                head = file.read(HEADER.size + SEAL.size)
                whole = len(head) == HEADER.size + SEAL.size
                if not whole or zlib.crc32(head[: HEADER.size]) != SEAL.unpack(head[HEADER.size :])[0]:
                    self.damaged.append(f"{segment}: damaged or cut off at byte {start}, and not read from there on.")
                    return
                _, number, _, length, _ = HEADER.unpack(head[: HEADER.size])
                if start + len(head) + length > size:
                    self.damaged.append(f"{segment}: the group of prompt {number} is cut off.")
                    return
                yield number, start
                start += len(head) + length

    def forget(self, processes: int = 1) -> None:
        """A new run in the folder of an old one begins with nothing, and with as many folders as it has processes."""
        self.close()
        self.places.clear()
        self.damaged.clear()
        for path in (*self.folder.glob("*.seg"), self.folder / WINDOWS):
            path.unlink(missing_ok=True)
        for other in self.folder.parent.glob(f"{PROCESS}*") if self.folder.name == f"{PROCESS}0" else ():
            if (number := other.name.removeprefix(PROCESS)).isdigit() and int(number) >= processes:
                shutil.rmtree(other)
