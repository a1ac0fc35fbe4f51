"""LoRA adapters by version, in folders inside of one folder."""

from __future__ import annotations

import fcntl
import itertools
import json
import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from ..engine.protocol import AdapterRef, Engine
from ..engine.versions import Serving, Versions
from ..errors import Conflict, EngineFailed, FieldError

log = logging.getLogger(__name__)

WEIGHTS, CONFIG, LOCK = "adapter_model.safetensors", "adapter_config.json", "posttrain.lock"
_NAME = re.compile(r"(\.?)pushed-[0-9a-f]{16}-\d+-\d+")
UNLOCKED_SECONDS = 60.0
"""A folder that is still being written (its name has a dot before it) and younger than this may not be locked yet."""
FORBIDDEN_CONFIG = ("auto_mapping", "custom_module_mapping")
"""Fields of an adapter_config that name code."""


def check_modules(names: Iterable[str], allowed: Sequence[str]) -> None:
    """Every tensor is a LoRA factor of a module that the engine was prepared for; others would be left out silently."""
    for name in names:
        module, found, rest = name.rpartition(".lora_")
        if not found or rest not in ("A.weight", "B.weight") or module.rpartition(".")[2] not in allowed:
            raise FieldError(
                f"The adapter has a tensor {name}; this server takes lora_A and lora_B of {', '.join(allowed)} "
                "(--adapter-modules)."
            )


class Adapters:
    """Which adapter serves. Its methods that take an engine run in the engine's thread."""

    def __init__(self, versions: Versions, folder: Path | None, in_use: Callable[[], set[int]]) -> None:
        self._versions, self.folder, self._in_use = versions, folder and folder.resolve(), in_use
        self._pushed = PushedAdapters(self.folder) if self.folder else None
        self._numbers = itertools.count(1)
        self._loaded: list[AdapterRef] = []
        self.notes: tuple[str, ...] = ()  # for /info: adapters that the engine did not remove

    def install(
        self, engine: Engine, version: int, config: dict[str, Any], tensors: Iterable[tuple[str, Tensor]], digest: str
    ) -> None:
        """Write the tensors of an update as an adapter, and let it serve."""
        if self._pushed is None:
            raise FieldError("This server was started without an adapter folder (--adapter-folder).")
        if named := [name for name in FORBIDDEN_CONFIG if config.get(name)]:
            raise FieldError(f"An adapter_config with `{named[0]}` is not accepted.")
        whole = {name: tensor.contiguous() for name, tensor in tensors}
        check_modules(whole, engine.info.adapter_modules)
        path = self._pushed.write(version, config, whole)
        try:
            self._load(engine, path, version, digest)
        except Exception:
            self._pushed.remove(path)
            raise

    def _load(self, engine: Engine, path: Path, version: int, digest: str) -> None:
        """Load an adapter and flip to it; requests that run stay with the one they began with."""
        serving = self._versions.serving
        if serving.version is None:
            raise Conflict(f"An adapter needs whole base weights: {serving.reason}")
        adapter = AdapterRef(next(self._numbers), f"pushed-{version}", version, str(path))
        try:
            engine.add_adapter(adapter)
        except Exception as error:  # the engine's own words go to the caller; what served before keeps serving
            raise EngineFailed(f"The engine refused the adapter ({type(error).__name__}: {error}).") from error
        self._versions.serve(Serving(version, digest, adapter))
        self._loaded.append(adapter)
        self._remove_unused(engine, keep=adapter.number)

    def _remove_unused(self, engine: Engine, keep: int) -> None:
        """Adapters that requests still run with stay, and are looked at again at the next change.

        So do those that the engine fails to remove: it is the new one that serves, and its update has not failed.
        """
        stay, notes = self._in_use() | {keep}, []
        for adapter in [one for one in self._loaded if one.number not in stay]:
            try:
                engine.remove_adapter(adapter)
            except Exception as error:  # whatever it is, it is about an adapter that no request will use
                log.exception("The engine did not remove the adapter %s of version %s.", adapter.name, adapter.version)
                notes.append(
                    f"The engine did not remove the adapter {adapter.name} of version {adapter.version} "
                    f"({type(error).__name__}: {error}); it is tried again at the next change."
                )
                continue
            self._loaded.remove(adapter)
            self._pushed.remove(Path(adapter.path))
        self.notes = tuple(notes)

    def close(self) -> None:
        """Remove the folders that this server has written, once no engine uses them any more."""
        if self._pushed is not None:
            self._pushed.close()


class PushedAdapters:
    """The folders in which a server writes the adapters that trainers push, among those of other servers and of users.

    Each has the name of the process that made it, so that two servers never write the same one, and a lock that the process
    holds for as long as the folder is its own. The kernel releases it when the process ends, however it ends: what is not
    held is swept away by the next server that starts. `close` removes them.
    """

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
    except OSError as error:  # a file system without locks: `_is_stale` cannot take one either, and nothing is swept
        log.warning("%s cannot be locked (%s); if this server is killed, its adapters stay.", path, error)
    return descriptor


def _is_stale(path: Path) -> bool:
    """Whether no process holds the lock of this folder."""
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
