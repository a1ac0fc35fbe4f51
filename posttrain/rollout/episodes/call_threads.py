"""CallThreads: calls of the user's functions, plain or async, beside the trainer, with a time limit for each.

Calls do not block the caller, who polls whether one is over. A thread cannot be killed: one that exceeds its time is abandoned and
counted, and when too many of them hang, the run is stopped.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

THREADS = 32
MAX_ABANDONED = 200
IDLE_SECONDS = 5.0
GRACE_SECONDS = 1.0  # an async call is cancelled at its limit; if that does not happen, something blocks its event loop


class CallTimeout(Exception):
    """A call took longer than it may."""


@dataclass(eq=False)
class Pending:
    """One call on its way."""

    function: Callable[[], Any]
    limit: float | None
    is_async: bool = False
    began: float | None = None  # when a thread took it up
    ended: float | None = None
    result: Any = None
    error: BaseException | None = None
    future: Any = None  # of an async call
    abandoned: bool = False
    returned: bool = False  # also an abandoned call may, in the end
    over: threading.Event = field(default_factory=threading.Event)

    @property
    def seconds(self) -> float:
        return 0.0 if self.began is None else (self.ended or time.monotonic()) - self.began

    @property
    def hangs(self) -> bool:
        """Abandoned, but still running."""
        return self.abandoned and not self.returned

    @property
    def is_late(self) -> bool:
        if self.limit is None or self.began is None:
            return False
        return time.monotonic() - self.began >= self.limit + (GRACE_SECONDS if self.is_async else 0.0)


class CallThreads:
    """`start` a function of no arguments, then ask `is_over` until it says so."""

    def __init__(self, threads: int = THREADS, most_abandoned: int = MAX_ABANDONED) -> None:
        self.size, self.most_abandoned = threads, most_abandoned
        self.abandoned = 0  # calls that were given up, ever
        self._given_up: list[Pending] = []
        self._jobs: deque[Pending] = deque()
        self._changed = threading.Condition()  # guards all that follows, and the ends of calls
        self._workers = 0  # threads that are not abandoned
        self._waiting = 0  # those of them that have nothing to do
        self._loop: asyncio.AbstractEventLoop | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """In another process there are threads of that process."""
        return CallThreads, (self.size, self.most_abandoned)

    def start(self, function: Callable[[], Any], limit: float | None, is_async: bool = False) -> Pending:
        call = Pending(function, limit, is_async)
        with self._changed:
            if is_async:
                self._start_async(call)
            else:
                self._jobs.append(call)
                self._changed.notify()
                self._add_thread()
        return call

    def is_over(self, call: Pending) -> bool:
        """Whether the call has ended, or its time has."""
        if not call.over.is_set() and call.is_late:
            self._give_up(call)
        return call.over.is_set()

    def drop(self, call: Pending) -> None:
        """Its result is no longer wanted."""
        with self._changed:
            if call.began is None and call in self._jobs:
                self._jobs.remove(call)
                call.over.set()
        if call.future is not None:
            call.future.cancel()
        elif not call.over.is_set():
            self._give_up(call)

    def _end(self, call: Pending, result: Any = None, error: BaseException | None = None) -> None:
        with self._changed:
            call.returned = True
            if not call.abandoned:
                call.result, call.error, call.ended = result, error, time.monotonic()
                call.over.set()

    def _give_up(self, call: Pending) -> None:
        with self._changed:
            if call.over.is_set():
                return
            call.abandoned = True
            call.error, call.ended = CallTimeout(took_too_long(call.limit)), time.monotonic()
            call.over.set()
            self.abandoned += 1
            if call.is_async:
                self._loop = None  # it is blocked: the next call gets another one
            else:
                self._workers -= 1
                self._add_thread()
            self._given_up = [other for other in (*self._given_up, call) if other.hangs]
            hanging = len(self._given_up)
        if hanging > self.most_abandoned:
            raise RuntimeError(
                f"{hanging} calls of tools or environments hang although their time is over. Their threads cannot be stopped, so "
                "the run is: give the tools time limits of their own."
            )

    # ---- plain functions ---------------------------------------------------------------------------------------------

    def _add_thread(self) -> None:
        if len(self._jobs) > self._waiting and self._workers < self.size:
            self._workers += 1
            threading.Thread(target=self._work, daemon=True, name="posttrain tool").start()

    def _work(self) -> None:
        call: Pending | None = None
        while call is None or not call.abandoned:  # another thread has taken the place of one that was abandoned
            call = self._next()
            if call is None:
                return
            try:
                result = call.function()
                if inspect.isawaitable(result):  # a plain function that hands on the awaitable of an async one
                    result = asyncio.run(_awaited(result))
                self._end(call, result)
            except BaseException as error:  # SystemExit too: it is the tool's, not the trainer's
                self._end(call, error=error)

    def _next(self) -> Pending | None:
        """The next call; None after some time without any, so that idle threads end."""
        with self._changed:
            while not self._jobs:
                self._waiting += 1
                has_news = self._changed.wait(IDLE_SECONDS)
                self._waiting -= 1
                if not has_news and not self._jobs:
                    self._workers -= 1
                    return None
            call = self._jobs.popleft()
            call.began = time.monotonic()
            return call

    # ---- async functions ---------------------------------------------------------------------------------------------

    def _start_async(self, call: Pending) -> None:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, daemon=True, name="posttrain async tools").start()
            weakref.finalize(self, _stop, self._loop)
        call.began = time.monotonic()
        call.future = asyncio.run_coroutine_threadsafe(self._awaited_call(call), self._loop)

    async def _awaited_call(self, call: Pending) -> None:
        try:
            async with asyncio.timeout(call.limit) as running:
                result = await call.function()
            self._end(call, result)
        except TimeoutError as error:
            self._end(call, error=CallTimeout(took_too_long(call.limit)) if running.expired() else error)
        except BaseException as error:  # as above; a cancellation is the tool's own
            self._end(call, error=error)


def _stop(loop: asyncio.AbstractEventLoop) -> None:
    loop.call_soon_threadsafe(loop.stop)


async def _awaited(awaitable: Any) -> Any:
    return await awaitable


def took_too_long(limit: float | None) -> str:
    return "It was given up." if limit is None else f"It took longer than {limit:g} s."
