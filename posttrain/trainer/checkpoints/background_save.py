"""CheckpointWriter: one thread that turns snapshots into checkpoints while training continues.

One save is in flight at a time; a second one waits for the first, and the wait is counted. What went wrong on the thread is
reported to the training thread when it next asks: an OSError (a full disk) as a failed save, anything else as the error that it is.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from posttrain.core.faults import fault_point
from posttrain.models.memory.fit import state_cost
from posttrain.trainer.checkpoints import checkpoint as files
from posttrain.trainer.checkpoints.snapshot import HostArena, Snapshot
from posttrain.trainer.checkpoints.tensor_file import SaveCancelled

logger = logging.getLogger(__name__)

EXIT_CODE = 74
"""EX_IOERR of sysexits.h: an error while doing input or output on a file."""
NOTEWORTHY_WAIT = 1.0
SHARE_OF_FREE_MEMORY = 0.5
ROOM_FOR_THE_REST = 16 * 2**20  # random numbers, step counters


class CheckpointNotSaved(SystemExit):
    """The run is over and its last checkpoint, or its rollouts, could not be written. Uncaught, it ends the process with status 74.

    The trained model is still in memory: catch this around `train()` and call `save_model` with a folder that has room.
    """

    def __init__(self, why: str) -> None:
        super().__init__(EXIT_CODE)
        self.why = why

    def __str__(self) -> str:
        return self.why


@dataclass
class SaveRequest:
    """One checkpoint on its way to the disk."""

    step: int
    snapshot: Snapshot
    run_dir: Path
    keep: int | None  # save_total_limit
    also: list[str | None] = field(default_factory=list)  # checkpoints that rotation leaves alone
    best_before: str | None = None  # what the best checkpoint was before this one

    @property
    def final(self) -> Path:
        return files.final_name(self.snapshot.folder)


@dataclass
class SaveStatistics:
    saves: int = 0
    failed: int = 0
    waits: int = 0
    seconds_waited: float = 0.0


def write_checkpoint(request: SaveRequest, should_continue: Callable[[], bool] = lambda: True) -> None:
    """Room, files, manifest, rename, rotation. On any error the staged folder is removed and nothing else was touched."""
    staged = request.snapshot.folder
    try:
        files.make_room(request.run_dir, request.snapshot.nbytes, request.keep, [*request.also, str(request.final)])
        staged.mkdir(parents=True, exist_ok=True)
        files.publish(staged, request.snapshot.write(should_continue), should_continue)
    except BaseException:
        shutil.rmtree(staged, ignore_errors=True)
        raise
    try:
        files.rotate(request.run_dir, request.keep, request.also)
    except files.DamagedCheckpoint as damage:  # read back, it is not what was written
        raise OSError(errno.EIO, str(damage)) from damage
    except OSError as error:
        logger.warning(f"{request.final} is saved, but an old checkpoint could not be deleted: {error}.")
    fault_point("save.done")


class CheckpointWriter:
    """Owns the thread and the host memory. All methods are called by the training thread."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.arena = HostArena(page_locked=device.type == "cuda")
        self.statistics = SaveStatistics()
        self._idle = threading.Event()  # not Thread.join: interrupted by a signal, it takes the thread for ended
        self._idle.set()
        self._ahead: threading.Thread | None = None
        self._request: SaveRequest | None = None
        self._error: BaseException | None = None
        self._cancelled = threading.Event()
        self._no_memory: str | None = None

    def reserve_ahead(self, wanted: int) -> None:
        """Allocate the page-locked memory on a thread: locking gigabytes takes seconds, which no save should pay for."""
        if self.arena.page_locked:
            self._ahead = threading.Thread(target=self._reserve, args=(wanted,), name="checkpoint-memory", daemon=True)
            self._ahead.start()

    def _reserve(self, wanted: int) -> None:
        torch.cuda.set_device(self.device)
        try:
            self.arena.reserve(wanted + ROOM_FOR_THE_REST)
        except RuntimeError as error:  # the driver gives no more page-locked memory
            self._no_memory = str(error).splitlines()[0]
            self.arena.release()

    def arena_for_next(self) -> HostArena | None:
        """The host memory, free of earlier snapshots: waits for a save in flight. None where there is no such memory."""
        self.wait()
        if self._ahead is not None:
            self._ahead.join()
            self._ahead = None
        if self._no_memory is not None:
            logger.warning(f"Checkpoints are not saved in the background: no page-locked memory ({self._no_memory}).")
            return None
        self.arena.reset()
        return self.arena

    def submit(self, request: SaveRequest) -> None:
        """Begin to write. The writer must be idle, and `outcome` asked for."""
        self._request, self._error = request, None
        self._cancelled.clear()
        self._idle.clear()
        threading.Thread(target=self._run, args=(request,), name="checkpoint-writer", daemon=True).start()

    def _run(self, request: SaveRequest) -> None:
        try:
            write_checkpoint(request, lambda: not self._cancelled.is_set())
        except BaseException as error:  # the training thread raises or reports it
            self._error = error
        finally:
            self._idle.set()

    @property
    def is_writing(self) -> bool:
        return not self._idle.is_set()

    def wait(self) -> None:
        """Until the save in flight is over. A signal that interrupts the wait calls the save off."""
        if not self.is_writing or self._cancelled.is_set():
            return
        began = time.monotonic()
        try:
            self._idle.wait()
        except BaseException:
            self._cancelled.set()
            raise
        waited = time.monotonic() - began
        self.statistics.waits += 1
        self.statistics.seconds_waited += waited
        if waited > NOTEWORTHY_WAIT:
            logger.info(
                f"Training waited {waited:.1f} s for the checkpoint of step {self._request.step} to be written."
            )

    def outcome(self) -> tuple[SaveRequest, BaseException | None] | None:
        """The save that has come to its end since the last call, and its error; None where there is none."""
        if self._request is None or self.is_writing:
            return None
        request, error = self._request, self._error
        self._request = self._error = None
        self.statistics.saves += error is None
        self.statistics.failed += error is not None
        return None if isinstance(error, SaveCancelled) else (request, error)

    def join(self) -> None:
        """Until the thread has ended, even that of a save that was called off."""
        self._idle.wait()

    def close(self) -> None:
        """Give the memory back; a save that was called off keeps its part until it has noticed."""
        if self._ahead is not None:
            self._ahead.join()
            self._ahead = None
        self.arena.release()


def state_bytes(model: Any, optim: str, save_only_model: bool) -> int:
    """About what a checkpoint will hold, before the optimizer has its state."""
    only_adapters = hasattr(model, "peft_config")
    saved = [p for p in model.parameters() if p.requires_grad] if only_adapters else model.state_dict().values()
    weights = sum({tensor.data_ptr(): tensor.nbytes for tensor in saved}.values())
    state = state_cost(model.parameters(), None)
    return weights if save_only_model else weights + state.masters + int(state.moments(optim))


def fits_host_memory(wanted: int) -> bool:
    """Whether a copy of the state leaves enough memory to the rest of the machine (or of the container)."""
    available = _available_memory()
    return available is None or wanted <= SHARE_OF_FREE_MEMORY * available


def _available_memory() -> int | None:
    """Bytes that can be had without swapping, under the limit of the container where there is one."""
    found = []
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        found += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
        group = Path("/sys/fs/cgroup")
        limit = (group / "memory.max").read_text(encoding="ascii").strip()
        if limit.isdigit():
            statistics = dict(line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
            used = int((group / "memory.current").read_text(encoding="ascii")) - int(statistics["inactive_file"])
            found.append(int(limit) - used)
    except OSError:
        found += [os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")] if not found else []
    return min(found) if found else None


def failure_sentence(step: int, path: Path, needed: int, error: OSError) -> str:
    """What a person needs to know about a save that failed."""
    try:
        free = f"{shutil.disk_usage(path.parent).free:,}"
    except OSError:
        free = "unknown"
    return (
        f"The checkpoint of step {step} was not saved: {error.strerror or error} ({needed:,} bytes needed, {free} bytes free "
        f"for {path})."
    )
