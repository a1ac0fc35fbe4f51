"""Checkpoints that are whole or absent: written beside their place, checksummed, renamed; verified before they are trusted.

    checkpoint-40.tmp-<pid>/      everything is written here and flushed to the disk
    checkpoint-40.tmp-<pid>/manifest.json    written last: name, size and SHA-256 of every file
    checkpoint-40/                the rename; a reader trusts only folders with a manifest that holds

Our own state is safetensors and JSON. Nothing is ever unpickled.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
PREFIX = "checkpoint-"
STAGING = ".tmp-"
LOCK = ".posttrain.lock"


class DamagedCheckpoint(ValueError):
    """A checkpoint that must not be resumed from, and why."""


# ---- writing -------------------------------------------------------------------------------------------------------------


def staging_folder(output_dir: str | Path, step: int) -> Path:
    """Where the checkpoint of `step` is written before it exists."""
    return Path(output_dir) / f"{PREFIX}{step}{STAGING}{os.getpid()}"


def publish(staged: Path) -> Path:
    """Flush, write the manifest, flush, rename, flush: after a power cut the folder is whole or not there."""
    files = sorted(path for path in staged.rglob("*") if path.is_file())
    for path in files:
        _flush(path)
    manifest = {
        "format": 1,
        "files": {
            str(path.relative_to(staged)): {"size": path.stat().st_size, "sha256": sha256(path)} for path in files
        },
    }
    write_json(staged / MANIFEST, manifest)
    for folder in {path.parent for path in files} | {staged}:
        _flush(folder)
    final = staged.with_name(staged.name.split(STAGING)[0])
    if (
        final.exists()
    ):  # the same step saved again, e.g. after a resume: the old one goes only when the new one is complete
        shutil.rmtree(final)
    os.rename(staged, final)
    _flush(final.parent)
    return final


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Any) -> None:
    with open(path, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=1, sort_keys=True)
        file.flush()
        os.fsync(file.fileno())


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def remove_leftovers(output_dir: str | Path) -> None:
    """Staging folders of runs that were killed while they saved."""
    for path in Path(output_dir).glob(f"{PREFIX}*{STAGING}*"):
        shutil.rmtree(path, ignore_errors=True)


def rotate(output_dir: str | Path, keep: int | None, also: list[str | None]) -> None:
    """Delete all but the newest `keep` checkpoints, after the newest has been verified. `also` names ones that stay."""
    if not keep or keep < 1:
        return
    kept = {Path(path).resolve() for path in also if path}
    newest_first = checkpoints(output_dir)
    if not newest_first:
        return
    verify(newest_first[0])
    for path in newest_first[keep:]:
        if path.resolve() not in kept:
            shutil.rmtree(path)


# ---- reading -------------------------------------------------------------------------------------------------------------


def checkpoints(output_dir: str | Path) -> list[Path]:
    """Checkpoint folders, newest step first; staged ones are not checkpoints."""
    found = []
    for path in Path(output_dir).glob(f"{PREFIX}*"):
        step = path.name.removeprefix(PREFIX)
        if path.is_dir() and step.isdigit():
            found.append((int(step), path))
    return [path for _, path in sorted(found, reverse=True)]


def verify(checkpoint: str | Path) -> None:
    """Raise DamagedCheckpoint unless every file of the manifest is there, of its size and with its checksum."""
    checkpoint = Path(checkpoint)
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
        files = manifest["files"]
        entries = [(name, int(entry["size"]), str(entry["sha256"])) for name, entry in files.items()]
    except FileNotFoundError:
        raise DamagedCheckpoint(
            f"{checkpoint} has no {MANIFEST}: its save did not finish, or another tool wrote it."
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpoint(f"{checkpoint / MANIFEST} cannot be read ({error}).") from None
    for name, size, digest in entries:
        path = checkpoint / name
        if not path.is_file():
            raise DamagedCheckpoint(f"{path} is missing.")
        if path.stat().st_size != size:
            raise DamagedCheckpoint(f"{path} has {path.stat().st_size} bytes instead of {size}.")
        if sha256(path) != digest:
            raise DamagedCheckpoint(f"{path} does not have the checksum of its manifest.")


def newest_good_checkpoint(output_dir: str | Path) -> Path | None:
    """The newest checkpoint that verifies; the ones passed over are named with the reason. None where there is none at all."""
    passed_over = []
    for path in checkpoints(output_dir):
        try:
            verify(path)
        except DamagedCheckpoint as damage:
            passed_over.append(str(damage))
            logger.warning(f"Checkpoint passed over: {damage}")
            continue
        return path
    if passed_over:
        raise DamagedCheckpoint("No checkpoint can be resumed from:\n  " + "\n  ".join(passed_over))
    return None


# ---- tensors and numbers -------------------------------------------------------------------------------------------------


def save_tree(path: Path, tree: Any) -> None:
    """Any nesting of dicts, lists, numbers, strings and tensors -> `path`.safetensors and `path`.json."""
    tensors: dict[str, Tensor] = {}
    skeleton = _take_tensors(tree, "", tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path.with_suffix(".safetensors"))
    write_json(path.with_suffix(".json"), skeleton)


def load_tree(path: Path, device: torch.device | str = "cpu") -> Any:
    with safe_open(path.with_suffix(".safetensors"), framework="pt", device=str(device)) as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return _put_tensors(json.loads(path.with_suffix(".json").read_text(encoding="utf-8")), tensors)


def _take_tensors(tree: Any, place: str, tensors: dict[str, Tensor]) -> Any:
    """Dicts become lists of [key, value] so that integer keys survive; tensors move to `tensors`."""
    if isinstance(tree, Tensor):
        tensors[place] = tree.detach().clone()
        return {"tensor": place}
    if isinstance(tree, dict):
        return {"dict": [[key, _take_tensors(value, f"{place}/{key}", tensors)] for key, value in tree.items()]}
    if isinstance(tree, (list, tuple)):
        kind = "list" if isinstance(tree, list) else "tuple"
        return {kind: [_take_tensors(value, f"{place}/{index}", tensors) for index, value in enumerate(tree)]}
    if tree is None or isinstance(tree, (bool, int, float, str)):
        return {"value": tree}
    raise TypeError(
        f"The state at {place or '/'} is a {type(tree).__name__}; only tensors, numbers and text are saved."
    )


def _put_tensors(skeleton: Any, tensors: dict[str, Tensor]) -> Any:
    ((kind, content),) = skeleton.items()
    return {
        "tensor": lambda: tensors[content],
        "value": lambda: content,
        "dict": lambda: {key: _put_tensors(value, tensors) for key, value in content},
        "list": lambda: [_put_tensors(value, tensors) for value in content],
        "tuple": lambda: tuple(_put_tensors(value, tensors) for value in content),
    }[kind]()


# ---- one run per folder --------------------------------------------------------------------------------------------------


@contextmanager
def locked(output_dir: str | Path) -> Iterator[None]:
    """Hold the output folder for this process; a second run is refused at once, with the first one's host and pid."""
    Path(output_dir).mkdir(parents=True, exist_ok=True)
    path = Path(output_dir) / LOCK
    with open(path, "a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            file.seek(0)
            raise RuntimeError(
                f"{output_dir} is in use by another run ({file.read().strip() or 'unknown process'}). Choose another `output_dir`, "
                "or wait for it."
            ) from None
        file.seek(0)
        file.truncate()
        file.write(f"host {socket.gethostname()}, pid {os.getpid()}")
        file.flush()
        yield
