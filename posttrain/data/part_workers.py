"""Parts of a dataset built by forked processes, each of which takes the next part when it is done with one.

Nothing is pickled, so scripts without a main guard and notebooks work. Processes talk through two pipes: one holds the numbers of
the parts nobody has taken, the other brings the numbers of those that are done. Reads and writes of four bytes are whole, so
there is no lock that a killed process could keep.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import select
import traceback
from array import array
from collections.abc import Callable, Iterator
from io import FileIO
from multiprocessing.process import BaseProcess
from pathlib import Path

ITEM = 4  # bytes of a number in a pipe
CHECK_EVERY_S = 1.0  # for processes that were killed and could not say so
PARALLELISM = "TOKENIZERS_PARALLELISM"


def build_parts(
    build_part: Callable[[int], None], use_part: Callable[[int], None], num_parts: int, num_workers: int, folder: Path
) -> None:
    """Call `build_part` for every part, in `num_workers` processes if that is more than one; `use_part` here, in order.

    A part is used as soon as it and those before it are built, while later ones are still in the making. `folder` is where
    workers leave the reason when they fail.
    """
    if num_workers == 1:
        with old_objects_left_alone():
            for number in range(num_parts):
                build_part(number)
                use_part(number)
        return
    with contextlib.ExitStack() as pipes:
        tickets, ends = _pipe(pipes)
        ends.write(array("i", range(num_parts)).tobytes())
        os.set_blocking(tickets.fileno(), False)
        arrivals, done = _pipe(pipes)

        def run(worker: int) -> None:
            _work(build_part, tickets, done, folder / _error_file(worker))

        context = multiprocessing.get_context("fork")
        workers = [context.Process(target=run, args=(number,)) for number in range(num_workers)]
        try:
            with _single_threaded_tokenizers():
                for worker in workers:
                    worker.start()
            if _use_in_order(use_part, num_parts, arrivals, workers):
                for worker in workers:
                    worker.join()
        finally:
            failed = [number for number, worker in enumerate(workers) if worker.pid and worker.exitcode]
            for worker in workers:
                if worker.pid:
                    worker.kill()  # nothing of a worker is kept, and it may have inherited a handler of gentler signals
                    worker.join()
        for number in failed:
            raise RuntimeError(
                f"A worker that prepared the dataset failed: {_reason(folder / _error_file(number), workers[number])}"
            )


def _pipe(open_files: contextlib.ExitStack) -> tuple[FileIO, FileIO]:
    """The end to read from and the end to write to."""
    read, write = os.pipe()
    return open_files.enter_context(FileIO(read, "r")), open_files.enter_context(FileIO(write, "w"))


def _work(build_part: Callable[[int], None], tickets: FileIO, done: FileIO, error: Path) -> None:
    """In a forked process: build parts until none is left."""
    gc.freeze()
    try:
        while ticket := tickets.read(ITEM):
            build_part(array("i", ticket)[0])
            done.write(ticket)
    except BaseException:
        error.parent.mkdir(parents=True, exist_ok=True)
        error.write_text(traceback.format_exc(), encoding="utf-8")
        os._exit(1)
    os._exit(0)  # the parent's atexit handlers are not ours to run


def _use_in_order(
    use_part: Callable[[int], None], num_parts: int, arrivals: FileIO, workers: list[BaseProcess]
) -> bool:
    """Until all parts are used, or a worker has failed (False)."""
    built: set[int] = set()
    used = 0
    while used < num_parts:
        if any(worker.exitcode for worker in workers):
            return False
        if select.select([arrivals], [], [], CHECK_EVERY_S)[0]:
            built.add(array("i", arrivals.read(ITEM))[0])
        while used in built:
            use_part(used)
            used += 1
    return True


def _error_file(worker: int) -> str:
    return f"error-{worker}.txt"


def _reason(error: Path, worker: BaseProcess) -> str:
    return error.read_text(encoding="utf-8") if error.exists() else f"it ended with code {worker.exitcode}"


@contextlib.contextmanager
def _single_threaded_tokenizers() -> Iterator[None]:
    """For processes forked meanwhile: the threads of a tokenizer do not survive a fork."""
    before = os.environ.get(PARALLELISM)
    os.environ[PARALLELISM] = "false"
    try:
        yield
    finally:
        del os.environ[PARALLELISM]
        if before is not None:
            os.environ[PARALLELISM] = before


@contextlib.contextmanager
def old_objects_left_alone() -> Iterator[None]:
    """The collector of cycles looks through new objects only: imported libraries hold a million, and rows wake it often."""
    if gc.get_freeze_count():  # somebody else's doing, which unfreezing would undo
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
