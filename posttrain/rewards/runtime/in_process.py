"""Reward functions that cannot travel, on threads of the trainer's process: time limits as far as threads have them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import queue
import threading
from collections.abc import Callable
from typing import Any

from posttrain.rewards.runtime.invoke import TIMEOUT, Wants, invoke, invoke_async, is_async, timeout_message


class Lane:
    """Runs the calls of one function in order, on one thread of its own.

    One at a time, since the function may not be safe to run twice at once; always on the same thread, since what
    cannot travel often cannot change threads either. A thread cannot be killed: one that is over its time is left behind.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.wants = function, Wants(function)
        self.turn = asyncio.Lock()
        self.jobs: queue.SimpleQueue[Any] | None = None
        self.abandoned = 0

    async def call(self, arguments: dict[str, Any], limit: float | None) -> dict[str, Any]:
        async with self.turn:
            done: concurrent.futures.Future[dict[str, Any]] = concurrent.futures.Future()
            self._jobs().put((arguments, done))
            try:
                async with asyncio.timeout(limit):
                    return await asyncio.wrap_future(done)
            except asyncio.CancelledError:
                self._abandon()
                raise
            except TimeoutError:
                self._abandon()
                left = f" Its thread cannot be stopped and was left behind ({self.abandoned} so far)."
                return {"fault": [TIMEOUT, timeout_message(limit) + left], "seconds": limit}

    def _abandon(self) -> None:
        self.jobs.put(None)  # the thread ends when its function does, should it ever
        self.jobs = None
        self.abandoned += 1

    def _jobs(self) -> queue.SimpleQueue[Any]:
        if self.jobs is None:
            self.jobs = queue.SimpleQueue()
            threading.Thread(target=self._run, args=(self.jobs,), daemon=True, name="reward function").start()
        return self.jobs

    def _run(self, jobs: queue.SimpleQueue[Any]) -> None:
        while (job := jobs.get()) is not None:
            arguments, done = job
            if done.set_running_or_notify_cancel():
                done.set_result(invoke(self.function, self.wants, arguments))

    def close(self) -> None:
        if self.jobs is not None:
            self.jobs.put(None)


class AsyncLane:
    """Runs the calls of one async function on an event loop for the user's code, several at once."""

    def __init__(self, function: Callable[..., Any], concurrency: int, loop: asyncio.AbstractEventLoop) -> None:
        self.function, self.wants, self.loop = function, Wants(function), loop
        self.room = asyncio.Semaphore(concurrency)
        self.abandoned = 0

    async def call(self, arguments: dict[str, Any], limit: float | None) -> dict[str, Any]:
        async with self.room:
            running = invoke_async(self.function, self.wants, arguments, limit)
            answer = asyncio.run_coroutine_threadsafe(running, self.loop)
            try:
                async with asyncio.timeout(None if limit is None else limit + 1.0):
                    return await asyncio.wrap_future(answer)
            except TimeoutError:  # something blocks the loop, so that not even the cancellation arrives
                self.abandoned += 1
                return {"fault": [TIMEOUT, timeout_message(limit) + " It blocks the event loop."], "seconds": limit}

    def close(self) -> None:
        """The loop is stopped by its owner."""


class InProcess:
    """The lanes of a RewardSet, made when their function is first called."""

    def __init__(self, concurrency: int) -> None:
        self.concurrency = concurrency
        self.lanes: dict[int, Lane | AsyncLane] = {}
        self.loop: asyncio.AbstractEventLoop | None = None

    async def call(
        self, key: int, function: Callable[..., Any], arguments: dict[str, Any], limit: float | None
    ) -> dict[str, Any]:
        if key not in self.lanes:
            self.lanes[key] = self._async_lane(function) if is_async(function) else Lane(function)
        return await self.lanes[key].call(arguments, limit)

    def _async_lane(self, function: Callable[..., Any]) -> AsyncLane:
        if self.loop is None:
            self.loop = asyncio.new_event_loop()
            threading.Thread(target=self.loop.run_forever, daemon=True, name="async rewards").start()
        return AsyncLane(function, self.concurrency, self.loop)

    @property
    def abandoned(self) -> int:
        return sum(lane.abandoned for lane in self.lanes.values())

    def close(self) -> None:
        for lane in self.lanes.values():
            lane.close()
        if self.loop is not None:
            self.loop.call_soon_threadsafe(self.loop.stop)
