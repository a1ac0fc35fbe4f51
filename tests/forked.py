"""Run a function, or a command, in a real child process that starts with everything imported already.

Children are forked from multiprocessing's fork server: a fresh process with one thread that holds nothing but imports, started with
the first child. The pytest worker itself is never forked: it has threads (progress bars, servers, pools), and a fork copies their
locks and their half-done work without them. The function and what it closes over travel by value; what a test patches in its own
process is not patched in a child.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import TextIO

import cloudpickle

from tests.waiting import eventually

ROOT = Path(__file__).parents[1]
PRELOADED = ("tests.preloaded", "tests.forked", "tests.trainer.resumable_run", "tests.trust.runs")
ENVIRONMENT = {
    **os.environ,
    **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),  # no pools of threads
    "JE_ARROW_MALLOC_CONF": "background_thread:false",  # importing pyarrow starts a thread of jemalloc's on some machines
    "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
}
READ_AT_IMPORT = ("huggingface_hub.constants", "datasets.config")
"""Modules whose constants come from the environment."""
RUNNING: set[Child] = set()
DEADLINE_S = 300.0  # of a child that takes a few seconds on an idle machine
START_S = 120.0  # of the fork server, which imports everything first
AFTER_A_DEATH_S = 60.0  # for the other processes of a group to notice that one has failed

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(list(PRELOADED))


def end_all() -> None:
    """Kill the children that a failed test left behind."""
    while RUNNING:
        RUNNING.pop().end()


class Child:
    """A process of its own. `wait` gives its return code; a negative one is the signal that ended it."""

    def __init__(
        self,
        function: Callable[[], object],
        log: Path,
        *,
        errors: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`errors`: where its standard error goes, if not to `log`. `environment`: the whole of it, if not that of the test."""
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        log.touch()
        given = dict(os.environ if environment is None else environment)
        words = (cloudpickle.dumps(function), str(log), str(errors or log), given)
        self.process = context.Process(target=_run, args=words, daemon=True)  # no exit of pytest waits for it
        self.store: object = None  # where a group of processes meets, which lives as long as they do
        _start(self.process)
        RUNNING.add(self)

    @property
    def pid(self) -> int:
        return self.process.pid

    def wait(self, seconds: float = DEADLINE_S, end: bool = True) -> int:
        """Until it has ended. After `seconds` it is killed, unless `end` is False, and TimeoutError is raised."""
        self.process.join(seconds)
        code = self.process.exitcode
        if code is None:
            if end:
                end_all()
            raise TimeoutError(f"the child ran longer than {seconds} s:\n{self.output()}")
        RUNNING.discard(self)
        return code

    def wait_until(self, condition: Callable[[], object], what: str, seconds: float = DEADLINE_S) -> None:
        """Until `condition` holds. An error if the child ends before it does, or after `seconds`."""
        eventually(lambda: condition() or self.process.exitcode is not None, seconds)
        if not condition():
            raise AssertionError(f"the child ended with {self.process.exitcode} before {what}:\n{self.output()}")

    def signal(self, number: int) -> None:
        """Nothing happens to a child that has ended."""
        if self.process.exitcode is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended since
                os.kill(self.process.pid, number)

    def end(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.join(DEADLINE_S)
        RUNNING.discard(self)
        if self.process.exitcode is None:
            raise TimeoutError(f"the child {self.pid} was killed and has not ended within {DEADLINE_S:g} s")

    def output(self) -> str:
        return self.log.read_text()


class ForkedProgram:
    """What a subprocess.Popen is to its owner, but forked: `function` in a session of its own, which ends with whoever started it.

    It belongs to what started it and not to a test: `end_all` leaves it alone.
    """

    def __init__(self, function: Callable[[], object], log: Path, environment: Mapping[str, str]) -> None:
        def program() -> None:
            os.setsid()
            threading.Thread(target=_end_with_the_parent, daemon=True).start()
            function()

        words = (cloudpickle.dumps(program), str(log), str(log), dict(environment))
        self._process = context.Process(target=_run, args=words, daemon=True)
        _start(self._process)
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("a forked program", timeout)
        return self.returncode


def _end_with_the_parent() -> None:
    """That of a forked process is the fork server; multiprocessing knows who asked for it."""
    multiprocessing.parent_process().join()
    os._exit(1)


def start_group(
    size: int, function: Callable[[int], object], log: Path, environments: Sequence[Mapping[str, str]] = ()
) -> list[Child]:
    """`function(rank)` in several processes that know of each other, each with the log `<log>-<rank>.log`.

    They meet at a store in this process, as those of torchrun do at the store of its agent: a port that was free a moment ago and
    is bound by the first of them could be somebody else's by then. `environments`: what each has besides.
    """
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    started = []
    for rank in range(size):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        world = {**address, **{name: str(value) for name, value in place.items()}} if size > 1 else {}
        more = environments[rank] if environments else {}
        child = Child(
            lambda rank=rank: function(rank),
            log.with_name(f"{log.name}-{rank}.log"),
            environment={**os.environ, "ACCELERATE_USE_CPU": "true", **world, **more},
        )
        child.store = store
        started.append(child)
    return started


def wait_for_group(children: Sequence[Child], seconds: float = DEADLINE_S) -> list[int]:
    """Their return codes. When one has failed, the others are given a minute to notice and are then killed."""
    codes = lambda: [child.process.exitcode for child in children]  # noqa: E731
    eventually(lambda: None not in codes() or any(codes()), seconds)
    with contextlib.suppress(AssertionError):
        eventually(lambda: None not in codes(), AFTER_A_DEATH_S)
    for child in children:
        child.end()
    return codes()


def run_command(
    *words: str, cwd: Path, environment: Mapping[str, str] | None = None, seconds: float = DEADLINE_S
) -> subprocess.CompletedProcess[str]:
    """`posttrain WORDS`, in a child that has imported its libraries before."""

    def command() -> None:
        from posttrain.cli.main import main

        sys.argv = ["posttrain", *words]
        sys.exit(main(list(words)))

    return run_function(command, cwd=cwd, environment=environment, seconds=seconds)


def run_function(
    function: Callable[[], object],
    *,
    cwd: Path,
    environment: Mapping[str, str] | None = None,
    seconds: float = DEADLINE_S,
) -> subprocess.CompletedProcess[str]:
    """A function in a child in the folder `cwd`, whose libraries have read `environment`: how it ended, and what it wrote."""

    def run() -> None:
        read_environment_again()
        os.chdir(cwd)
        function()

    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        code = Child(run, out, errors=err, environment=environment).wait(seconds)
        return subprocess.CompletedProcess(function.__name__, code, out.read_text(), err.read_text())


def read_environment_again() -> None:
    """In a child: libraries that have read the environment of the fork server read that of the child."""
    from huggingface_hub import constants, hf_api

    for name in READ_AT_IMPORT:
        importlib.reload(sys.modules[name])
    hf_api.api.endpoint = constants.ENDPOINT


def _start(process: multiprocessing.Process) -> None:
    """A fork server that does not answer is killed: whoever waits for it then gets an error, and the next child another server."""
    failures: list[BaseException] = []

    def start() -> None:
        try:
            process.start()
        except BaseException as error:
            failures.append(error)

    starting = threading.Thread(target=start, daemon=True)
    with _environment_of_the_server():
        starting.start()
        starting.join(START_S)
        if starting.is_alive():
            os.kill(forkserver._forkserver._forkserver_pid, signal.SIGKILL)
            forkserver._forkserver._stop()  # waits: until it can be reaped, multiprocessing takes a dying server for a living one
            starting.join(START_S)
            raise TimeoutError(f"the fork server did not start a child within {START_S:g} s")
    if failures:
        raise failures[0]


@contextlib.contextmanager
def _environment_of_the_server() -> Iterator[None]:
    """It is started with the first child, whatever the test of that child has made of its environment."""
    before = dict(os.environ)
    _set_environment(ENVIRONMENT)
    try:
        yield
    finally:
        _set_environment(before)


def _set_environment(wanted: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(wanted)


def freeze() -> None:
    """No garbage collection looks through what was imported again. Preparation of data asks whether anything is frozen: counting
    half a million objects each time takes longer than most of what tests prepare."""
    gc.freeze()
    gc.get_freeze_count = lambda: 1


def _run(function: bytes, log: str, errors: str, environment: Mapping[str, str]) -> None:
    """In the child."""
    freeze()
    multiprocessing.process.current_process()._config.pop("daemon", None)  # a daemon may not have children of its own
    sys.stdout, sys.stderr = _redirected(1, log), _redirected(2, errors)
    _set_environment(environment)
    code = _exit_code(function)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _redirected(descriptor: int, file: str) -> TextIO:
    opened = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(opened, descriptor)
    return os.fdopen(opened, "a", buffering=1)


def _exit_code(function: bytes) -> int:
    import torch

    try:
        if sys.platform == "linux" and (threads := len(os.listdir(f"/proc/{os.getppid()}/task"))) != 1:
            raise RuntimeError(f"the fork server has {threads} threads, and must have one: an import has started them.")
        torch.set_num_threads(1)
        cloudpickle.loads(function)()
    except SystemExit as leaving:
        if isinstance(leaving.code, str):
            print(leaving.code, file=sys.stderr)
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0
