"""Parts of a dataset built by this process and by helpers, each of which takes the next part when it is done with one.

Helpers are fresh processes (`python -m posttrain.data.store.part_workers`), not forks: a process that has loaded data or a model
has threads, whose locks a fork would inherit and never see released. A helper needs two seconds to start, in which this process
builds parts already. What it is to do travels by value through a file without a name, so that scripts without a main guard and
notebooks work. Two pipes do the rest: one holds the numbers of the parts that are not taken yet, the other brings those of the
parts that are done. Reads and writes of four bytes are whole, so there is no lock that a killed process could keep.
"""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import mmap
import os
import pickle
import select
import subprocess
import sys
import tempfile
import traceback
from array import array
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path

logger = logging.getLogger(__name__)

ITEM = 4  # bytes of a number in a pipe
CHECK_EVERY_S = 1.0  # for helpers that were killed and could not say so
LARGEST_WORK = 256 * 2**20  # bytes; more are rows in memory, of which every helper would hold a copy
NOT_LOADED = 3  # exit code of a helper that could not read its work, and so has done nothing


def build_parts(
    build_part: Callable[[int], None], use_part: Callable[[int], None], num_parts: int, num_workers: int, folder: Path
) -> None:
    """Call `build_part` for every part, in `num_workers` processes, of which this is one; `use_part` here, in order.

    A part is used as soon as it and those before it are built, while later ones are still in the making. `folder` is where
    helpers leave the reason when they fail.
    """
    with contextlib.ExitStack() as open_files:
        tickets, ends = _pipe(open_files)
        ends.write(array("i", range(num_parts)).tobytes())
        os.set_blocking(tickets.fileno(), False)
        arrivals, done = _pipe(open_files)
        helpers: list[Helper] = []
        try:
            work = _packed(build_part, open_files) if num_workers > 1 else None
            if work is not None:
                helpers += [Helper(work, tickets, done, folder / f"error-{i}.txt") for i in range(num_workers - 1)]
            with gc_frozen():
                _build_and_use(build_part, use_part, num_parts, tickets, arrivals, helpers)
        finally:
            for helper in helpers:
                helper.process.kill()  # nothing of a helper is kept
                helper.process.wait()


def _build_and_use(
    build_part: Callable[[int], None],
    use_part: Callable[[int], None],
    num_parts: int,
    tickets: FileIO,
    arrivals: FileIO,
    helpers: list[Helper],
) -> None:
    built: set[int] = set()
    used = 0
    while used < num_parts:
        if ticket := tickets.read(ITEM):
            number = array("i", ticket)[0]
            build_part(number)
            built.add(number)
        wait = 0.0 if ticket else CHECK_EVERY_S
        while select.select([arrivals], [], [], wait)[0]:
            built.add(array("i", arrivals.read(ITEM))[0])
            wait = 0.0
        while used in built:
            use_part(used)
            used += 1
        for helper in helpers:
            helper.raise_if_failed()


def _pipe(open_files: contextlib.ExitStack) -> tuple[FileIO, FileIO]:
    """The end to read from and the end to write to."""
    read, write = os.pipe()
    return open_files.enter_context(FileIO(read, "r")), open_files.enter_context(FileIO(write, "w"))


class _Bounded(io.BytesIO):
    """Stops before gigabytes of rows are written out."""

    def write(self, data: bytes) -> int:
        if self.tell() + len(data) > LARGEST_WORK:
            raise ValueError(f"it carries more than {LARGEST_WORK // 2**20} MiB with it")
        return super().write(data)


def _packed(build_part: Callable[[int], None], open_files: contextlib.ExitStack) -> FileIO | None:
    """A file without a name that holds the path of modules and the function; None where it cannot leave this process."""
    import cloudpickle

    packed = _Bounded()
    pickle.dump(sys.path, packed)
    try:
        cloudpickle.dump(build_part, packed)
    except Exception as error:  # every type refuses to be pickled in its own way
        logger.warning(
            "The dataset is prepared by one process: what is done to its rows cannot be handed to others "
            f"({type(error).__name__}: {error})."
        )
        return None
    file = open_files.enter_context(tempfile.TemporaryFile(buffering=0))  # noqa: SIM115 - the stack closes it
    file.write(packed.getbuffer())
    return file


class Helper:
    """Another process that builds parts, as this one sees it."""

    def __init__(self, work: FileIO, tickets: FileIO, done: FileIO, error: Path) -> None:
        self.error = error
        self.is_needed = True
        files = [file.fileno() for file in (work, tickets, done)]
        ours = str(Path(__file__).parents[3])
        search = os.pathsep.join(filter(None, [ours, os.environ.get("PYTHONPATH")]))
        command = [sys.executable, "-P", "-m", "posttrain.data.store.part_workers"]
        self.process = subprocess.Popen(
            [*command, *map(str, (os.getpid(), *files, error))],
            stdin=subprocess.DEVNULL,
            pass_fds=files,
            # Helpers are as many as there are cores: the tokenizer of each has one thread.
            env={**os.environ, "PYTHONPATH": search, "TOKENIZERS_PARALLELISM": "false"},
            start_new_session=True,  # Ctrl-C is for this process to handle, which ends its helpers
        )

    def raise_if_failed(self) -> None:
        """A helper that could not even begin is done without."""
        code = self.process.poll()
        if not code or not self.is_needed:
            return
        reason = self.error.read_text(encoding="utf-8") if self.error.exists() else f"it ended with code {code}"
        if code != NOT_LOADED:
            raise RuntimeError(f"A worker that prepared the dataset failed: {reason}")
        self.is_needed = False
        logger.warning(f"A worker that should have prepared the dataset could not begin; others do its work. {reason}")


def main() -> None:
    """Build parts until none is left, or the process that wants them is gone."""
    parent, work, tickets, done = map(int, sys.argv[1:5])
    error = Path(sys.argv[5])
    code = NOT_LOADED
    try:
        build_part = _unpacked(work)
        code = 1
        with FileIO(tickets, "r") as left, FileIO(done, "w") as ready:
            gc.freeze()
            while os.getppid() == parent and (ticket := left.read(ITEM)):
                build_part(array("i", ticket)[0])
                ready.write(ticket)
    except BaseException:
        error.parent.mkdir(parents=True, exist_ok=True)
        error.write_text(traceback.format_exc(), encoding="utf-8")
        sys.exit(code)


def _unpacked(work: int) -> Callable[[int], None]:
    # Helpers share the position in the file, so none moves it.
    with mmap.mmap(work, 0, access=mmap.ACCESS_READ) as content:
        reader = io.BytesIO(content)
    sys.path[:] = pickle.load(reader)
    return pickle.load(reader)


@contextlib.contextmanager
def gc_frozen() -> Iterator[None]:
    """The collector of cycles looks through new objects only: imported libraries hold a million, and rows wake it often."""
    if gc.get_freeze_count():  # frozen by other code, which unfreezing would undo
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


if __name__ == "__main__":
    main()
