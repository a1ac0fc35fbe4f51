"""Runs the calls of a RewardSet on a thread of its own: workers, lanes, retries, and the search for the guilty sample."""

from __future__ import annotations

import asyncio
import concurrent.futures
import hashlib
import io
import os
import pickle
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import cloudpickle

from posttrain.data.images.lazy_picture import with_pictures_opened
from posttrain.rewards.runtime.invoke import (
    ERROR,
    INVALID,
    TIMEOUT,
    Wants,
    invoke,
    invoke_async,
    is_async,
    timeout_message,
)
from posttrain.rewards.runtime.options import ALL_AT_ONCE, AUTO, RewardOptions
from posttrain.rewards.runtime.results import Judged, Outcomes
from posttrain.rewards.runtime.worker_pool import PackedCall, SuspectDied, Unloadable, WorkerPool

JOIN_SECONDS = 10.0


@dataclass
class FunctionReward:
    """A reward function and how it is run."""

    key: int  # its column
    name: str
    function: Callable[..., Any]
    wants: Wants
    packed: bytes | None  # None: it runs in this process
    # it compares the samples of a group: a call is never split, and its values are not remembered
    whole_groups: bool = False
    keeps_time: bool = False  # it ends its calls itself when `timeout` is over
    runs_last: bool = False  # it uses the device of the run: called on the trainer's thread when all is written

    @property
    def takes_environments(self) -> bool:
        """Live environments stay in this process: a function that names them runs there."""
        return "environments" in self.wants.names


@dataclass
class Call:
    """One call of one function about some samples of a round."""

    reward: FunctionReward
    numbers: list[int]  # of the samples, in the round
    samples: list[Judged]
    outcomes: Outcomes
    alone: bool = False  # it gets a worker for itself, after one that held several calls has died

    def part(self, places: list[int], alone: bool = False) -> Call:
        numbers, samples = ([items[i] for i in places] for items in (self.numbers, self.samples))
        return Call(self.reward, numbers, samples, self.outcomes, alone)


class Runner:
    """An event loop on a daemon thread, started with the first call."""

    def __init__(self, options: RewardOptions, say: Callable[[str], None]) -> None:
        self.options, self.say = options, say
        self.owner = os.getpid()
        self.cache = RewardCache(options.cache_size) if options.cache else None
        self.pool = WorkerPool(options)
        self.in_process = InProcess(options.concurrency)
        self.judging: set[asyncio.Task[Any]] = set()
        self.loop: asyncio.AbstractEventLoop | None = None
        self.thread: threading.Thread | None = None

    def start(self, work: Coroutine[Any, Any, None]) -> concurrent.futures.Future[None]:
        """Begin some work beside the caller's."""
        if self.loop is None:
            self.loop = asyncio.new_event_loop()
            # The workers live as long as this thread: Linux ends them with the thread that started them.
            self.thread = threading.Thread(target=_run, args=(self.loop,), daemon=True, name="rewards")
            self.thread.start()
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def close(self) -> None:
        """End all work and all workers. A forked child, which has neither, leaves its parent's alone."""
        if self.loop is None or os.getpid() != self.owner:
            return
        loop, self.loop = self.loop, None
        asyncio.run_coroutine_threadsafe(self._end(), loop)
        if threading.current_thread() is not self.thread:  # the garbage collector may run there
            self.thread.join(JOIN_SECONDS)

    async def _end(self) -> None:
        for task in self.judging:
            task.cancel()
        await asyncio.gather(*self.judging, return_exceptions=True)
        await self.pool.close()
        self.in_process.close()
        asyncio.get_running_loop().stop()

    # -------------------------------------------------------------------------------------------------- judging

    async def judge(self, calls: list[Call]) -> None:
        """See to it that every sample of every call has an outcome."""
        task = asyncio.current_task()
        self.judging.add(task)
        task.add_done_callback(self.judging.discard)
        await _together([self._judge_one(call) for call in calls])

    async def _judge_one(self, call: Call) -> None:
        if self.cache is None:
            await self._judge_unknown(call, [None] * len(call.samples))
            return
        keys = [self._cache_key(call, place) for place in range(len(call.samples))]
        known = [self.cache.get(key) for key in keys]
        for number, found in zip(call.numbers, known):
            if found is not None:
                call.outcomes.settle(call.reward.key, number, found[0], found[1])
        rest = [place for place, found in enumerate(known) if found is None]
        if rest:
            await self._judge_unknown(call.part(rest), [keys[place] for place in rest])

    async def _judge_unknown(self, call: Call, keys: list[bytes | None]) -> None:
        answer = await self._answer(call)
        if "values" in answer or answer["fault"][0] == INVALID or not self._can_split(call):
            self.take(call, answer, keys)
            return
        call.outcomes.spent(call.reward.key, answer["seconds"])
        # One of the samples is guilty. Each alone, so that the others keep their values.
        parts = [(call.part([place]), keys[place : place + 1]) for place in range(len(call.samples))]
        await _together([self._judge_unknown(part, key) for part, key in parts])

    def _can_split(self, call: Call) -> bool:
        return len(call.samples) > 1 and self.options.reward_batching != ALL_AT_ONCE and not call.reward.whole_groups

    def take(self, call: Call, answer: dict[str, Any], keys: list[bytes | None] | None = None) -> None:
        """Give the samples of a call the outcomes that its answer says."""
        outcomes, reward = call.outcomes, call.reward.key
        outcomes.spent(reward, answer["seconds"])
        if "fault" in answer:
            for number in call.numbers:
                outcomes.fail(reward, number, *answer["fault"])
            return
        for place, (number, value) in enumerate(zip(call.numbers, answer["values"], strict=True)):
            if isinstance(value, dict):
                outcomes.fail(reward, number, *value["fault"])
                continue
            extras = {column: values[place] for column, values in answer["extras"].items()}
            outcomes.settle(reward, number, value, extras)
            if self.cache is not None and keys is not None:
                self.cache.put(keys[place], value, extras)
        for name, value in answer["metrics"]:
            outcomes.metric(reward, call.numbers[0], name, value)

    async def _answer(self, call: Call) -> dict[str, Any]:
        """The answer of a call; that about a sample alone after as many tries as `retries` allows."""
        answer = await self._try(call)
        tries = 0 if self._can_split(call) else self.options.retries
        while tries and "fault" in answer and answer["fault"][0] != INVALID:
            tries -= 1
            answer = await self._try(call)
        return answer

    async def _try(self, call: Call) -> dict[str, Any]:
        if call.reward.packed is None:
            return await self._in_process(call)
        try:
            return await self._in_worker(call)
        except SuspectDied:
            if self._can_split(call):
                return {"fault": [ERROR, "a neighbour died"], "seconds": 0.0}  # its samples are called one by one
            call.alone = True
            return await self._in_worker(call)
        except Unloadable as error:
            return await self._stay(call, f"a worker cannot load it ({error})")

    async def _in_worker(self, call: Call) -> dict[str, Any]:
        try:
            arguments = cloudpickle.dumps(arguments_of(call, environments=False))
        except Exception as error:  # every type refuses to be pickled in its own way
            return await self._stay(call, f"a column cannot be sent to a worker ({type(error).__name__}: {error})")
        reward = call.reward
        state = call.outcomes.packed_state if reward.wants.accepts("trainer_state") else None
        packed = PackedCall(reward.key, reward.packed, arguments, state, is_async(reward.function))
        return await self.pool.call(packed, call.alone)

    async def _stay(self, call: Call, reason: str) -> dict[str, Any]:
        """Under "auto", run the function in this process from here on."""
        if self.options.isolation != AUTO:
            why = f'it is to run in a worker process (isolation="process"), but {reason}.'
            return {"fault": [ERROR, why], "seconds": 0}
        if call.reward.packed is not None:  # several calls may find out at once
            call.reward.packed = None
            self.say(stays_in_process(call.reward.name, reason))
        return await self._in_process(call)

    async def _in_process(self, call: Call) -> dict[str, Any]:
        reward, limit = call.reward, None if call.reward.keeps_time else self.options.timeout
        return await self.in_process.call(reward.key, reward.function, all_arguments(call), limit)

    def _cache_key(self, call: Call, place: int) -> bytes | None:
        """Samples with an environment are never alike."""
        if call.samples[place].environment is not None:
            return None
        return cache_key(call.reward.key, arguments_of(call.part([place]), environments=False))


def _run(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()


async def _together(work: list[Coroutine[Any, Any, None]]) -> None:
    """All at once; an error of one, which means that the round has failed, ends the others."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def arguments_of(call: Call, environments: bool) -> dict[str, Any]:
    """The arguments of a call that the function accepts, but for those that are made where it runs."""
    samples, wants = call.samples, call.reward.wants
    columns = dict.fromkeys(name for sample in samples for name in sample.columns if wants.accepts(name))
    arguments = {name: [sample.columns.get(name) for sample in samples] for name in columns}
    arguments["prompts"] = [sample.prompt for sample in samples]
    arguments["completions"] = [sample.completion for sample in samples]
    arguments["completion_ids"] = [sample.completion_ids for sample in samples]
    if environments and any(sample.environment is not None for sample in samples):
        arguments["environments"] = [sample.environment for sample in samples]
    return arguments


def all_arguments(call: Call) -> dict[str, Any]:
    """The same for a function that runs in this process."""
    arguments = with_pictures_opened(arguments_of(call, environments=True))
    return {**arguments, "trainer_state": call.outcomes.trainer_state}


def stays_in_process(name: str, reason: str) -> str:
    return (
        f"Reward {name} runs in the trainer's process, not in a worker: {reason}. A time limit cannot stop it there, and a "
        "crash of it ends the run."
    )


# ---- remembered values -----------------------------------------------------------------------------------------------


class RewardCache:
    """The most recently used values of pure rewards, which depend on nothing but the sample, by function and arguments."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.hits = 0
        self._known: OrderedDict[bytes, tuple[float | None, dict[str, Any]]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def get(self, key: bytes | None) -> tuple[float | None, dict[str, Any]] | None:
        """(value, what it logged), or None where it is not known."""
        if key is None or key not in self._known:
            return None
        self._known.move_to_end(key)
        self.hits += 1
        return self._known[key]

    def put(self, key: bytes | None, value: float | None, extras: dict[str, Any]) -> None:
        if key is None:
            return
        self._known[key] = (value, extras)
        self._known.move_to_end(key)
        while len(self._known) > self.size:
            self._known.popitem(last=False)


def cache_key(function: int, arguments: dict[str, Any]) -> bytes | None:
    """Equal for equal arguments; None for arguments that cannot be pickled, which are not remembered.

    `fast` writes every object out in full: with pickle's memo, equal values have different bytes when they share parts.
    """
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL)
    pickler.fast = True
    try:
        pickler.dump((function, arguments))
    except Exception:  # every type refuses in its own way, and not to remember is always right
        return None
    return hashlib.sha256(buffer.getbuffer()).digest()


# ---- functions that cannot travel, on threads of the trainer's process: time limits as far as threads have them ------


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
        return AsyncLane(function, getattr(function, "concurrency", self.concurrency), self.loop)

    @property
    def abandoned(self) -> int:
        return sum(lane.abandoned for lane in self.lanes.values())

    def close(self) -> None:
        for lane in self.lanes.values():
            lane.close()
        if self.loop is not None:
            self.loop.call_soon_threadsafe(self.loop.stop)
