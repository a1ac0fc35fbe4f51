"""The folders in which a server writes the adapters that trainers push, among those of other servers and of users.

Each has the name of the process that made it, so that two servers never write the same one, and a lock that the process holds
for as long as the folder is its own. The kernel lets go of it when the process ends, however it ends: what nobody holds is swept
away by the next server that starts.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import secrets
import shutil
import time
from pathlib import Path
from typing import Any

from torch import Tensor

log = logging.getLogger(__name__)

WEIGHTS, CONFIG, LOCK = "adapter_model.safetensors", "adapter_config.json", "posttrain.lock"
_NAME = re.compile(r"(\.?)pushed-[0-9a-f]{16}-\d+-\d+")
UNLOCKED_SECONDS = 60.0
"""A folder that is still being written (its name has a dot before it) and younger than this may not be locked yet."""


class PushedAdapters:
    """Those of one process. `close` removes them."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._instance, self._number = folder, secrets.token_hex(8), 0
        self._locks: dict[Path, int] = {}
        self._sweep()

    def write(self, version: int, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
        """A whole adapter under its final name; OSError, and nothing left behind, where it cannot be written."""
        from safetensors.torch import save_file

        self._number += 1
        path = self._folder / f"pushed-{self._instance}-{version}-{self._number}"
        unfinished = path.with_name(f".{path.name}")
        unfinished.mkdir(parents=True)
        try:
            self._locks[path] = _locked(unfinished / LOCK)
            save_file(tensors, unfinished / WEIGHTS)
            (unfinished / CONFIG).write_text(json.dumps(config))
            unfinished.rename(path)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            self.remove(path)
            raise
        return path

    def remove(self, path: Path) -> None:
        """If it is one of this process; others stay as they are."""
        lock = self._locks.pop(path, None)
        if lock is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)

    def close(self) -> None:
        for path in list(self._locks):
            self.remove(path)

    def _sweep(self) -> None:
        try:
            stale = [path for path in self._folder.iterdir() if _NAME.fullmatch(path.name) and _is_stale(path)]
        except OSError as error:
            log.warning("Adapters that other servers left in %s were not looked for: %s", self._folder, error)
            return
        for path in stale:
            log.info("Removing %s, which a server left that is gone.", path)
            shutil.rmtree(path, ignore_errors=True)


def _locked(path: Path) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (
        OSError
    ) as error:  # a file system without locks: `_is_stale` cannot take one there either, and nothing is swept
        log.warning("%s cannot be locked (%s); if this server is killed, its adapters stay.", path, error)
    return descriptor


def _is_stale(path: Path) -> bool:
    """Whether nobody holds the lock of this folder."""
    try:
        if path.name.startswith(".") and time.time() - path.stat().st_mtime < UNLOCKED_SECONDS:
            return False
        if not (path / LOCK).exists():
            return path.is_dir() and not path.is_symlink()  # its maker died before it had a lock, or while removing it
        descriptor = os.open(path / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False  # removed by its maker meanwhile, or another user's
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False  # its maker lives
    finally:
        os.close(descriptor)
    return True
