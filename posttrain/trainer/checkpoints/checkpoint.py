"""Checkpoints that are whole or absent: written beside their place, checksummed, renamed; verified before they are trusted.

    checkpoint-40.tmp-<pid>/      everything is written here and flushed to the disk
    checkpoint-40.tmp-<pid>/manifest.json    written last: name, size and SHA-256 of every file, and a checksum of itself
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
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import torch
from safetensors import safe_open
from torch import Tensor

from posttrain.core.faults import fault_point
from posttrain.core.trees import put_tensors, take_tensors
from posttrain.trainer.checkpoints.snapshot import json_text, write_content, write_json, write_tensors
from posttrain.trainer.checkpoints.tensor_file import FileRecord, SaveCancelled

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
PREFIX = "checkpoint-"
STAGING = ".tmp-"
DELETED = f"{STAGING}deleted-"
FORMAT = 2  # 1 had no seal
HEADROOM = 2**20
"""Bytes for what is not counted: headers, the manifest, the blocks of a filesystem, the log."""
LOCK = ".posttrain.lock"


class DamagedCheckpoint(ValueError):
    """A checkpoint that must not be resumed from, and why."""


# ---- writing -------------------------------------------------------------------------------------------------------------


def staging_folder(output_dir: str | Path, step: int) -> Path:
    """Where the checkpoint of `step` is written before it exists."""
    return Path(output_dir) / f"{PREFIX}{step}{STAGING}{os.getpid()}"


def publish(
    staged: Path, known: Mapping[Path, FileRecord] | None = None, should_continue: Callable[[], bool] = lambda: True
) -> Path:
    """Flush, write the manifest, flush, rename, flush: after a power cut the folder is whole or not there.

    `known` has the sizes and checksums of files that were hashed and flushed while they were written; the others are read.
    """
    fault_point("save.manifest")
    known = known or {}
    files = sorted(path for path in staged.rglob("*") if path.is_file())
    listed = {str(path.relative_to(staged)): known.get(path) or recorded(path) for path in files}
    write_content(staged / MANIFEST, manifest_text(listed).encode())
    for folder in {path.parent for path in files} | {staged}:
        _flush(folder)
    fault_point("save.rename")
    if not should_continue():
        raise SaveCancelled(str(staged))
    final = final_name(staged)
    replaced = _put_aside(final) if final.exists() else None  # the same step saved again, e.g. after a damage
    os.rename(staged, final)
    _flush(final.parent)
    if replaced is not None:
        shutil.rmtree(replaced)
    fault_point("save.published")
    return final


def manifest_text(records: Mapping[str, FileRecord]) -> str:
    listed = {name: asdict(record) for name, record in records.items()}
    return json_text({"format": FORMAT, "files": listed, "seal": _seal(listed)})


def _seal(listed: dict[str, Any]) -> str:
    """A checksum of the list of checksums: a manifest that was changed is noticed too."""
    return hashlib.sha256(json.dumps(listed, sort_keys=True).encode()).hexdigest()


def final_name(staged: Path) -> Path:
    return staged.with_name(staged.name.split(STAGING)[0])


def _put_aside(checkpoint: Path) -> Path:
    """Take a checkpoint's name away before it is deleted: what is half deleted must not look like a checkpoint."""
    aside = checkpoint.with_name(f"{checkpoint.name}{DELETED}{os.getpid()}")
    shutil.rmtree(aside, ignore_errors=True)
    os.rename(checkpoint, aside)
    return aside


def recorded(path: Path) -> FileRecord:
    _flush(path)
    return FileRecord(path.stat().st_size, sha256(path))


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def recover_or_remove_leftovers(output_dir: str | Path) -> None:
    """Staging folders of runs that were killed while they saved. One that verifies lacks nothing but its name, and gets it."""
    for path in sorted(Path(output_dir).glob(f"{PREFIX}*{STAGING}*")):
        final = final_name(path)
        if DELETED not in path.name and is_whole(path) and not is_whole(final):
            shutil.rmtree(final, ignore_errors=True)
            os.rename(path, final)
            _flush(path.parent)
            logger.warning(f"{final} was complete when its run was killed and is kept.")
        else:
            shutil.rmtree(path, ignore_errors=True)


def is_whole(folder: Path) -> bool:
    try:
        verify(folder)
    except DamagedCheckpoint:
        return False
    return True


def rotate(output_dir: str | Path, keep: int | None, also: Iterable[str | None]) -> None:
    """Delete all but the newest `keep` checkpoints, after the newest has been verified. `also` names ones that stay."""
    if not keep or keep < 1:
        return
    newest_first = checkpoints(output_dir)
    if not newest_first:
        return
    verify(newest_first[0])
    _delete(newest_first[keep:], also)


def _delete(paths: Iterable[Path], except_for: Iterable[str | None]) -> None:
    kept = {Path(path).resolve() for path in except_for if path}
    for path in paths:
        if path.resolve() not in kept:
            aside = _put_aside(path)
            fault_point("save.rotate")
            shutil.rmtree(aside)


# ---- room for it ---------------------------------------------------------------------------------------------------------


def make_room(output_dir: Path, needed: int, keep: int | None, also: Iterable[str | None]) -> None:
    """Raise an OSError if `needed` bytes do not fit, before the disk is filled with half a checkpoint.

    Where `save_total_limit` would delete old checkpoints after this save anyway, they are deleted before it, as long as an older
    one that verifies stays.
    """
    needed += HEADROOM
    if shutil.disk_usage(output_dir).free >= needed:
        return
    if keep:
        existing = checkpoints(output_dir)
        good = next((index for index, path in enumerate(existing) if is_whole(path)), None)
        if good is not None:
            _delete(existing[max(keep - 1, good + 1) :], also)
    free = shutil.disk_usage(output_dir).free
    if free < needed:
        raise OSError(errno.ENOSPC, f"{needed:,} bytes are needed and {free:,} are free", str(output_dir))


@contextmanager
def best_effort(what: str) -> Iterator[None]:
    """Around the writing of a file that a run can do without: an error of the disk is a warning, and training continues."""
    try:
        yield
    except OSError as error:
        logger.warning(f"{what} could not be written ({error.strerror or error}); the run continues without it.")


def refuse_unwritable(output_dir: str | Path) -> None:
    """Raise before training if checkpoints could never be written."""
    folder = Path(output_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".writable-{os.getpid()}"
        try:
            probe.write_text("yes", encoding="utf-8")
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            return  # a full disk may have room again by the first save; a read-only one stays read-only
        raise PermissionError(
            error.errno,
            f"`output_dir` cannot be written to ({error.strerror}), so nothing of this run could be saved; choose another",
            str(output_dir),
        ) from None


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
    listed = _manifest(checkpoint)
    for name, record in listed.items():
        path = checkpoint / name
        if not path.is_file():
            raise DamagedCheckpoint(f"{path} is missing.")
        if path.stat().st_size != record["size"]:
            raise DamagedCheckpoint(f"{path} has {path.stat().st_size} bytes instead of {record['size']}.")
        try:
            found = sha256(path)
        except OSError as error:
            raise DamagedCheckpoint(f"{path} cannot be read ({error.strerror}).") from None
        if found != record["sha256"]:
            raise DamagedCheckpoint(f"{path} does not have the checksum of its manifest.")
    for path in _added(checkpoint, listed):
        raise DamagedCheckpoint(
            f"{path} is not in the manifest: it was added later, and a loader may take it for a part of the model or of its state. "
            "Move it away."
        )


def _added(checkpoint: Path, listed: Mapping[str, Any]) -> list[Path]:
    """Files that are not in the manifest. Hidden ones (.nfs..., .cache/huggingface of a download) are read by no loader."""
    named = [(path.relative_to(checkpoint), path) for path in sorted(checkpoint.rglob("*")) if not path.is_dir()]
    hidden = [name for name, _ in named if any(part.startswith(".") for part in name.parts)]
    return [path for name, path in named if name not in hidden and str(name) not in listed and str(name) != MANIFEST]


def admit_added(checkpoint: Path) -> None:
    """Take files into the manifest that callbacks of this run have put beside those of a checkpoint just saved."""
    try:
        listed = _manifest(checkpoint)
    except DamagedCheckpoint as damage:  # by a callback; a resume passes it over
        logger.warning(str(damage))
        return
    if added := _added(checkpoint, listed):
        known = {name: FileRecord(**record) for name, record in listed.items()}
        known |= {str(path.relative_to(checkpoint)): recorded(path) for path in added}
        unfinished = checkpoint / f".{MANIFEST}"
        unfinished.write_text(manifest_text(known), encoding="utf-8")
        _flush(unfinished)
        os.replace(unfinished, checkpoint / MANIFEST)
        _flush(checkpoint)


def _manifest(checkpoint: Path) -> dict[str, dict[str, Any]]:
    path = checkpoint / MANIFEST
    try:
        text = path.read_text(encoding="utf-8")
        manifest = json.loads(text)
        listed, seal, version = manifest["files"], manifest["seal"], manifest["format"]
    except (FileNotFoundError, NotADirectoryError):
        raise DamagedCheckpoint(
            f"{checkpoint} has no {MANIFEST}: its save did not finish, or another tool wrote it."
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedCheckpoint(f"{path} cannot be read ({error!r}).") from None
    if version != FORMAT:
        raise DamagedCheckpoint(f"{path} has the format {version!r}; this version of posttrain reads {FORMAT}.")
    if seal != _seal(listed) or text != json_text(manifest):
        raise DamagedCheckpoint(f"{path} was changed after it was written: its own checksum does not hold.")
    return listed


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
    skeleton = take_tensors(tree, "", tensors)
    write_tensors(path.with_suffix(".safetensors"), tensors)
    write_json(path.with_suffix(".json"), skeleton)


def load_tree(path: Path, device: torch.device | str = "cpu") -> Any:
    with safe_open(path.with_suffix(".safetensors"), framework="pt", device=str(device)) as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return put_tensors(json.loads(path.with_suffix(".json").read_text(encoding="utf-8")), tensors)


# ---- one run per folder --------------------------------------------------------------------------------------------------

_HELD: list[TextIO] = []
"""Files whose locks this process holds."""


def _leave_locks() -> None:
    """In a forked child. A loader's worker outlives a killed run by seconds, and with its copy of the file so would the lock."""
    while _HELD:
        _HELD.pop().close()


os.register_at_fork(after_in_child=_leave_locks)


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
        with best_effort(f"{path}, which says who uses the folder,"):
            path.write_text(f"host {socket.gethostname()}, pid {os.getpid()}", encoding="utf-8")
        _HELD.append(file)
        try:
            yield
        finally:
            if file in _HELD:
                _HELD.remove(file)
