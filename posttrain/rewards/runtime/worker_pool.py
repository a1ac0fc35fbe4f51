"""The worker processes of a RewardSet: who runs where, how many at once, and when a worker is replaced."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import secrets
import signal
import socket
import sys
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain import core
from posttrain.rewards.runtime.frames import HEADER, LARGEST_ANSWER, frame, read_answer
from posttrain.rewards.runtime.invoke import CRASH, TIMEOUT, timeout_message
from posttrain.rewards.runtime.options import RewardOptions

START_SECONDS = 120.0  # to start, to import what a function needs, to read its arguments; long, on a busy machine
GRACE_SECONDS = 1.0  # what an async call, which the worker itself cancels in time, gets on top


def new_number() -> int:
    """Of a call. Code that a reward runs may try to answer other calls; it cannot guess what they are called."""
    return secrets.randbits(62)


class WorkerDied(Exception):
    """The process ended during a call; `began`: while the function ran, so that it is to blame."""

    began = False


class WorkerTimeout(Exception):
    """The call took too long; the process was killed."""


class Unloadable(Exception):
    """The function could not be unpickled in the worker; the message says why."""


class WorkerProcess:
    """A child process as the trainer sees it, the calls that run in it and the functions that it has loaded.

    Everything here runs on the event loop of the pool.
    """

    def __init__(self) -> None:
        self.in_flight = 0  # slots that were handed out, kept by the pool
        self.shared = False  # its calls are async and more may join
        self.had_company = False  # several calls have run in it since it was last idle
        self.calls = 0
        self.rss = 0
        self.alive = True
        self.state: bytes | None = None
        self.loaded: dict[int, asyncio.Future[None]] = {}
        self.began: dict[int, asyncio.Future[None]] = {}
        self.answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.process: asyncio.subprocess.Process | None = None
        self.started: asyncio.Task[None] | None = None
        self.reader: asyncio.Task[None] | None = None
        self.incoming: asyncio.StreamReader | None = None
        self.outgoing: asyncio.StreamWriter | None = None

    # ------------------------------------------------------------------------------------------- start and end

    async def start(self) -> None:
        """Start the child. It must find this package before it knows our path, and then see the user's environment."""
        ours = str(Path(core.__file__).parents[2])
        theirs = {name: os.environ.get(name) for name in ("PYTHONPATH",)}
        search = os.pathsep.join(filter(None, [ours, theirs["PYTHONPATH"]]))
        # A socket and not a pipe: what a reward starts could open a pipe of its parent in /proc/PID/fd, and write answers into it.
        ours_end, its_end = socket.socketpair()
        with its_end:
            self.incoming, self.outgoing = await asyncio.open_connection(sock=ours_end)
            self.process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",  # the folder we are in may hold a json.py
                "-m",
                "posttrain.rewards.runtime.worker",
                str(os.getpid()),
                stdin=its_end,
                stdout=its_end,
                # Workers are many and small: one thread of numpy or torch in each, unless the user says otherwise.
                env={"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": search},
                start_new_session=True,  # Ctrl-C is the trainer's to handle, and a kill reaches what a reward has started
            )
        self.reader = asyncio.create_task(self._read())
        await self._send({"do": "hello", "path": sys.path, "environment": theirs})

    async def kill(self) -> None:
        """End it now, with everything that it has started."""
        self.alive = False
        if self.started is not None and not self.started.done():
            await asyncio.wait([self.started])
        if self.process is not None:
            self._kill_group()
            await self.process.wait()
        if self.reader is not None:
            await asyncio.wait([self.reader])
        if self.outgoing is not None:
            self.outgoing.close()

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # it and all that it started are gone already
            os.killpg(self.process.pid, signal.SIGKILL)

    async def _read(self) -> None:
        """Hand the child's answers to those who wait for them, until it ends or writes something else."""
        reason = ""
        try:
            while True:
                (length,) = HEADER.unpack(await self.incoming.readexactly(HEADER.size))
                if length > LARGEST_ANSWER:
                    raise ValueError(f"it announced an answer of {length:,} bytes")
                self._take(read_answer(await self.incoming.readexactly(length)))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # its end of the socket was closed
        except (ValueError, KeyError) as error:
            reason = f" after {type(error).__name__}: {error}"
        self.alive = False
        self._kill_group()
        died = WorkerDied(f"its process ended with {_exit_in_words(await self.process.wait())}{reason}.")
        for waiting in [*self.loaded.values(), *self.began.values(), *self.answers.values()]:
            _resolve(waiting, error=died)

    def _take(self, answer: dict[str, Any]) -> None:
        """A call that is given up takes its worker with it, so an answer to a call that is not waited for was forged."""
        if answer.get("began", answer.get("call")) not in self.answers and not answer.keys() & {"loaded", "unloadable"}:
            raise ValueError("it answered a call that it was not given")
        if "began" in answer:
            _resolve(self.began[answer["began"]])
        elif "loaded" in answer:
            _resolve(self.loaded[answer["loaded"]])
        elif "unloadable" in answer:
            _resolve(self.loaded[answer["unloadable"]], error=Unloadable(answer["message"]))
        else:
            self.rss = answer.get("rss", self.rss)
            _resolve(self.answers[answer["call"]], answer)

    async def _send(self, message: dict[str, Any]) -> None:
        try:
            self.outgoing.write(frame(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)))
            await self.outgoing.drain()
        except ConnectionError:
            pass  # it has died; the reader lets all waiting calls know

    # --------------------------------------------------------------------------------------------------- calls

    async def call(
        self,
        key: int,
        function: bytes,
        arguments: bytes,
        state: bytes | None,
        limit: float | None,
        grace: float = 0.0,
        announce: bool = False,
    ) -> dict[str, Any]:
        """The answer of one call. The limit counts from when the function begins: imports and start-up have their own.

        The first call of a function in a worker, and any with `announce`, reports when it begins; the others begin at once, and
        a message less is a wake-up of this process less.
        """
        if not self.alive:
            raise WorkerDied("its process had ended before.")
        number, loop = new_number(), asyncio.get_running_loop()
        self.began[number], self.answers[number] = loop.create_future(), loop.create_future()
        announce = announce or key not in self.loaded
        message = {"do": "call", "call": number, "key": key, "arguments": arguments}
        message |= {"limit": limit, "announce": announce}
        try:
            async with asyncio.timeout(START_SECONDS) as starting:
                await self._make_ready(key, function, state)
                await self._send(message)
                if announce:
                    await self.began[number]
            self.calls += 1
            async with asyncio.timeout(None if limit is None else limit + grace):
                return await self.answers[number]
        except TimeoutError:
            await self.kill()
            slow = f"it could not be started in {START_SECONDS:g} s." if starting.expired() else timeout_message(limit)
            raise WorkerTimeout(slow) from None
        except WorkerDied as died:
            fresh = WorkerDied(*died.args)  # one exception serves all calls that were in flight
            fresh.began = self.began[number].done() and self.began[number].exception() is None
            raise fresh from None
        except OSError as error:
            self.alive = False
            raise WorkerDied(f"its process could not be started ({type(error).__name__}: {error}).") from error
        finally:
            del self.began[number], self.answers[number]

    async def _make_ready(self, key: int, function: bytes, state: bytes | None) -> None:
        """Started, the function loaded, the trainer's state of this round known."""
        if self.started is None:
            self.started = asyncio.create_task(self.start())
        await asyncio.shield(self.started)
        if state is not None and state is not self.state:
            self.state = state
            await self._send({"do": "state", "state": state})
        if key not in self.loaded:
            self.loaded[key] = asyncio.get_running_loop().create_future()
            await self._send({"do": "load", "key": key, "function": function})
        await asyncio.shield(self.loaded[key])


def _resolve(future: asyncio.Future[Any] | None, value: Any = None, error: Exception | None = None) -> None:
    if future is None or future.done():
        return
    if error is None:
        future.set_result(value)
    else:
        future.set_exception(error)
        future.exception()  # marks it as seen: it may be that nothing waits for this one


def _exit_in_words(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    return f"signal {signal.Signals(-code).name}"


FRESH_STARTS = 3  # workers that may die before a call has begun in them; after that the call is to blame


@dataclass
class PackedCall:
    """One call on its way to a worker."""

    key: int  # of the function
    function: bytes
    arguments: bytes
    state: bytes | None  # None: the function does not ask for it
    shares: bool  # async: may run beside other calls in one worker


class SuspectDied(Exception):
    """A worker ended while several calls ran in it: which of them was guilty shows when each runs alone."""


class WorkerPool:
    """At most `options.num_workers` processes, started when they are needed. Lives on one event loop."""

    def __init__(self, options: RewardOptions) -> None:
        self.options = options
        self.workers: list[WorkerProcess] = []
        self.queue: deque[tuple[bool, asyncio.Future[WorkerProcess]]] = deque()
        self.ending: set[asyncio.Task[None]] = set()  # of workers that died
        self.restarts = 0

    async def call(self, call: PackedCall, alone: bool) -> dict[str, Any]:
        """The answer of a call, or {"fault": [kind, message]}. SuspectDied where others ran beside it."""
        for fresh_starts_left in reversed(range(FRESH_STARTS)):
            worker = await self._acquire(call.shares and not alone)
            started, grace = time.perf_counter(), GRACE_SECONDS if call.shares else 0.0
            what = (call.key, call.function, call.arguments, call.state, self.options.timeout, grace)
            try:
                return await worker.call(*what, announce=fresh_starts_left < FRESH_STARTS - 1)
            except (WorkerTimeout, WorkerDied) as error:
                if worker.had_company:
                    raise SuspectDied from error
                if isinstance(error, WorkerTimeout):
                    return self._fault(TIMEOUT, error, started)
                # A worker that had died unnoticed before the call says nothing about it: the next one reports when it begins.
                if error.began or not fresh_starts_left:
                    return self._fault(CRASH, error, started)
            except asyncio.CancelledError:
                await asyncio.shield(worker.kill())  # a plain call cannot be stopped otherwise
                raise
            finally:
                await self._release(worker)
        raise AssertionError("unreachable: the last fresh start returns")

    def _fault(self, kind: str, error: Exception, started: float) -> dict[str, Any]:
        self.restarts += 1
        return {"fault": [kind, str(error)], "seconds": time.perf_counter() - started}

    # --------------------------------------------------------------------------------------------------- slots

    async def _acquire(self, shared: bool) -> WorkerProcess:
        """A worker with room, first come first served: a call that wants one for itself is not overtaken indefinitely."""
        worker = None if self.queue else self._with_room(shared)
        if worker is not None:
            return self._taken(worker, shared)
        waiting: asyncio.Future[WorkerProcess] = asyncio.get_running_loop().create_future()
        self.queue.append((shared, waiting))
        try:
            return await waiting
        except asyncio.CancelledError:
            if waiting.done() and not waiting.cancelled():  # it was given a worker in the same moment
                await self._release(waiting.result())
            raise

    def _with_room(self, shared: bool) -> WorkerProcess | None:
        for worker in [worker for worker in self.workers if worker.in_flight == 0 and not worker.alive]:
            self.workers.remove(worker)  # it died while idle: nothing else would release its place
            task = asyncio.create_task(worker.kill())
            self.ending.add(task)
            task.add_done_callback(self.ending.discard)
        idle = [worker for worker in self.workers if worker.in_flight == 0 and worker.alive]
        if idle:
            return idle[0]
        if len(self.workers) < self.options.num_workers:
            self.workers.append(WorkerProcess())
            return self.workers[-1]
        if not shared:
            return None
        open_ones = [w for w in self.workers if w.shared and w.alive and w.in_flight < self.options.concurrency]
        return min(open_ones, key=lambda worker: worker.in_flight, default=None)

    def _taken(self, worker: WorkerProcess, shared: bool) -> WorkerProcess:
        worker.had_company = worker.in_flight > 0
        worker.in_flight += 1
        worker.shared = shared
        return worker

    async def _release(self, worker: WorkerProcess) -> None:
        worker.in_flight -= 1
        if worker in self.workers and (not worker.alive or self._is_worn_out(worker)):
            if worker.in_flight == 0:
                self.workers.remove(worker)
                await worker.kill()
            else:
                worker.shared = False  # no further call joins it
        self._serve()

    def _is_worn_out(self, worker: WorkerProcess) -> bool:
        calls, memory = self.options.worker_calls, self.options.worker_memory
        return (calls is not None and worker.calls >= calls) or (memory is not None and worker.rss > memory)

    def _serve(self) -> None:
        while self.queue:
            shared, waiting = self.queue[0]
            if waiting.done():  # given up
                self.queue.popleft()
                continue
            worker = self._with_room(shared)
            if worker is None:
                return
            self.queue.popleft()
            waiting.set_result(self._taken(worker, shared))

    async def close(self) -> None:
        workers, self.workers = self.workers, []
        await asyncio.gather(*(worker.kill() for worker in workers), *self.ending)
