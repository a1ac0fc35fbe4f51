"""Blocks of bytes that two processes of one machine hand over by name: files in one private folder of /dev/shm.

The folder belongs to one user (mode 0700) and so does every block in it (0600), under a name that cannot be guessed. The
process that makes a block holds a lock on it, which the kernel releases when that process ends, however it ends: a block without
a holder is stale and is deleted.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import secrets
import stat
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import TransportFailed
from .host_memory import copy_bytes
from .payload import Buffer

MEMORY_FOLDER = Path("/dev/shm")
_NAME = re.compile(r"block-[0-9a-f]{32}")
STALE_SECONDS = 60.0
"""A block younger than this is left alone: it may have been made an instant ago, and not be locked yet."""


def default_folder() -> Path | None:
    """This user's folder in shared memory; None where the machine has none."""
    return MEMORY_FOLDER / f"posttrain-{os.geteuid()}" if MEMORY_FOLDER.is_dir() else None


def host_id() -> str | None:
    """The same for all processes of one running kernel, containers included."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


@dataclass
class Block:
    """A block that this process made; to be closed by it."""

    folder: SharedFolder
    name: str
    descriptor: int
    size: int = 0
    mapped: memoryview = memoryview(b"")  # at least `size` bytes: a write by the kernel takes several times as long

    def write(self, pieces: Sequence[Buffer]) -> None:
        """These bytes instead of those that it has. The memory is the same as far as it suffices: fresh pages are slow."""
        views = [memoryview(piece).cast("B") for piece in pieces if memoryview(piece).nbytes]
        self._resize(sum(len(view) for view in views))
        at = 0
        for view in views:
            copy_bytes(view, self.mapped[at : at + len(view)])
            at += len(view)

    def _resize(self, nbytes: int) -> None:
        if nbytes > self.size:  # no room is an error here, and not the end of this process when it copies
            os.posix_fallocate(self.descriptor, self.size, nbytes - self.size)
        elif nbytes < self.size:
            os.ftruncate(self.descriptor, nbytes)
        self.size = nbytes
        if nbytes > len(self.mapped):
            self.mapped = memoryview(mmap.mmap(self.descriptor, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE))

    def close(self) -> None:
        self.mapped = memoryview(b"")
        self.folder.remove(self.name)
        os.close(self.descriptor)

    def __enter__(self) -> Block:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SharedFolder:
    """The one folder in which blocks are made and found. Nothing outside of it is ever opened."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        found = os.fstat(self._folder)
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
            os.close(self._folder)
            raise PermissionError(
                f"The folder {path} for shared blocks must belong to user {os.geteuid()} alone (mode 0700); it belongs to "
                f"{found.st_uid} with mode {stat.S_IMODE(found.st_mode):04o}."
            )
        self.sweep()

    def describe(self) -> dict[str, Any]:
        """By which another process knows whether it sees the same folder: device and inode are unique on a running kernel."""
        found = os.fstat(self._folder)
        return {"folder": str(self.path), "device": found.st_dev, "inode": found.st_ino, "user": os.geteuid()}

    def close(self) -> None:
        os.close(self._folder)

    # making ---------------------------------------------------------------------------------------------------------

    def write(self, pieces: Sequence[Buffer]) -> Block:
        """A block of these bytes. OSError where there is no room."""
        name = f"block-{secrets.token_hex(16)}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        block = Block(self, name, os.open(name, flags, 0o600, dir_fd=self._folder))
        try:
            fcntl.flock(block.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            block.write(pieces)
        except BaseException:
            block.close()
            raise
        return block

    def remove(self, name: str) -> None:
        try:
            os.unlink(name, dir_fd=self._folder)
        except FileNotFoundError:
            return  # another process has swept

    def sweep(self) -> int:
        """Remove the blocks of processes that are gone; how many."""
        removed = 0
        for name in os.listdir(self._folder):
            if _NAME.fullmatch(name) and self._is_stale(name):
                self.remove(name)
                removed += 1
        return removed

    def _is_stale(self, name: str) -> bool:
        try:
            descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._folder)
        except OSError as error:
            return error.errno == errno.ELOOP  # a link is nothing that was made here
        try:
            if time.time() - os.fstat(descriptor).st_mtime < STALE_SECONDS:
                return False
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False  # its maker lives
        finally:
            os.close(descriptor)
        return True

    # reading --------------------------------------------------------------------------------------------------------

    def read(self, name: str, into: memoryview) -> None:
        """Copy the bytes of a block; it stays. A copy: its maker can still change what lies there, or make it shorter."""
        descriptor = self._open(name, len(into))
        try:
            _read_all(descriptor, into, name)
        finally:
            os.close(descriptor)

    def map(self, name: str, nbytes: int) -> mmap.mmap:
        """The bytes of a block of this program's own, without a copy; it stays."""
        descriptor = self._open(name, nbytes)
        try:
            return mmap.mmap(descriptor, nbytes, access=mmap.ACCESS_COPY)
        finally:
            os.close(descriptor)

    def _open(self, name: str, nbytes: int) -> int:
        """A regular file of this folder, this user's own, of exactly this size."""
        if not _NAME.fullmatch(name):
            raise TransportFailed("The name of the shared block is not one that a trainer gives.")
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # not blocking: it could be a pipe
        try:
            descriptor = os.open(name, flags, dir_fd=self._folder)
        except OSError as error:
            raise TransportFailed(f"The shared block cannot be opened ({error.strerror}).") from error
        found = os.fstat(descriptor)
        wrong = _what_is_wrong(found, nbytes)
        if wrong:
            os.close(descriptor)
            raise TransportFailed(f"The shared block is not accepted: {wrong}.")
        return descriptor


def _what_is_wrong(found: os.stat_result, nbytes: int) -> str | None:
    if not stat.S_ISREG(found.st_mode):
        return "it is not a plain file"
    if found.st_uid != os.geteuid():
        return f"it belongs to user {found.st_uid}, and this server runs as {os.geteuid()}"
    if found.st_size != nbytes:
        return f"it has {found.st_size} bytes, and the header describes {nbytes}"
    return None


def _read_all(descriptor: int, into: memoryview, name: str) -> None:
    done = 0
    while done < len(into):
        count = os.readv(descriptor, [into[done:]])
        if not count:
            raise TransportFailed(f"The shared block {name} became shorter while it was read.")
        done += count
