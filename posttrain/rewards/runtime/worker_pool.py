"""The worker processes of a RewardSet: who runs where, how many at once, and when a worker is replaced."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from posttrain.rewards.runtime.invoke import CRASH, TIMEOUT
from posttrain.rewards.runtime.options import RewardOptions
from posttrain.rewards.runtime.worker_process import GRACE_SECONDS, WorkerDied, WorkerProcess, WorkerTimeout

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
            started = time.perf_counter()
            try:
                return await worker.call(
                    call.key,
                    call.function,
                    call.arguments,
                    call.state,
                    self.options.timeout,
                    GRACE_SECONDS if call.shares else 0.0,
                    announce=fresh_starts_left < FRESH_STARTS - 1,
                )
            except (WorkerTimeout, WorkerDied) as error:
                if worker.had_company:
                    raise SuspectDied from error
                if isinstance(error, WorkerTimeout):
                    return self._fault(TIMEOUT, error, started)
                # A worker that had died unnoticed before the call says nothing about it: the next one tells when it begins.
                if error.began or not fresh_starts_left:
                    return self._fault(CRASH, error, started)
            except asyncio.CancelledError:
                await asyncio.shield(
                    worker.kill()
                )  # nobody waits for its answer; a plain call cannot be stopped otherwise
                raise
            finally:
                await self._release(worker)
        raise AssertionError("unreachable: the last fresh start returns")

    def _fault(self, kind: str, error: Exception, started: float) -> dict[str, Any]:
        self.restarts += 1
        return {"fault": [kind, str(error)], "seconds": time.perf_counter() - started}

    # --------------------------------------------------------------------------------------------------- slots

    async def _acquire(self, shared: bool) -> WorkerProcess:
        """A worker with room, first come first served: a call that wants one for itself is not overtaken for ever."""
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
            self.workers.remove(
                worker
            )  # it died while it was idle: nobody releases it, and calls would wait for its place
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
                worker.shared = False  # nobody joins it any more
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
