"""The one thread that uses the engine: it adds jobs, steps, and flips weights between two steps.

Because versions change here only, a job is checked against the version that will really run it, and the tokens of a job
that lives through a flip are attributed exactly.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ..errors import (
    Busy,
    Conflict,
    DeadlinePassed,
    EngineFailed,
    FieldError,
    NotReady,
    PromptDiffers,
    ServeError,
    TooLarge,
)
from .protocol import ABORTED, ERROR, AdapterRef, Engine, GenerateJob, Job, Outcome, Progress
from .versions import Versions

log = logging.getLogger(__name__)

T = TypeVar("T")
Done = Callable[[Outcome], None]

DRAIN, CONTINUE, ABORT = "drain", "continue", "abort"
"""What a flip does with running requests: let them finish first; continue with the new weights; abort them now."""
KEEP = "keep"
"""They continue with the weights that they began with, as when one adapter replaces another."""


@dataclass
class _Running:
    job: Job
    done: Done
    marks: list[tuple[int, int]]  # (number of the first token, version)
    adapter: AdapterRef | None
    latest: Progress | None = None


@dataclass
class _Flip:
    swap: Callable[[Engine], None]
    version: int
    in_flight: str
    give_up_at: float
    result: Future[None] = field(default_factory=Future)


class EngineThread:
    """Owns the engine from `start` to `stop`."""

    def __init__(
        self, engine: Engine, versions: Versions, max_running: int = 4096, swap_seconds: float = 1800.0
    ) -> None:
        self._engine, self._versions = engine, versions
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._running: dict[str, _Running] = {}
        self._held: list[tuple[Job, Done]] = []  # came while a flip waits for running jobs
        self._flip: _Flip | None = None
        self._max_running, self._swap_seconds = max_running, swap_seconds
        self._count_lock = threading.Lock()
        self._in_flight = 0  # jobs that were submitted and are not done, the commands that still wait included
        self._stopping = threading.Event()
        self._closed = False
        self.failure: str | None = None
        self.sleeping: str | None = None  # the sentence for those who ask meanwhile
        self.sleeping_parts: set[str] = set()
        self.last_tick = time.monotonic()
        self.tokens = 0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, seconds: float = 30.0) -> None:
        """End the thread; running jobs end with an error."""
        self._stopping.set()
        self._commands.put(lambda: None)
        self._thread.join(seconds)

    @property
    def in_flight(self) -> int:
        """Jobs that wait, are held or run."""
        return self._in_flight

    def adapters_in_use(self) -> set[int]:
        """Numbers of the adapters that running jobs began with; asked in the engine's thread."""
        return {running.adapter.number for running in self._running.values() if running.adapter}

    @property
    def silent_seconds(self) -> float:
        """Since the thread last finished a step; large while it loads weights, and growing without end if it hangs."""
        return time.monotonic() - self.last_tick

    # from other threads ---------------------------------------------------------------------------------------------

    def submit(self, jobs: Sequence[tuple[Job, Done]]) -> None:
        """Run all of these jobs, or refuse all. Each `done` is called once, in the engine's thread."""
        self._refuse_if_down()
        with self._count_lock:
            self.refuse_without_room(len(jobs))
            self._in_flight += len(jobs)
        counted = [(job, self._counted(done)) for job, done in jobs]
        self._send(lambda: [self._add(job, done) for job, done in counted])

    def refuse_without_room(self, count: int) -> None:
        """Whether so many jobs would be taken now; asked before they are made, since making them takes time, too."""
        if count > self._max_running:
            raise TooLarge(
                f"The request is for {count} completions; this server takes at most {self._max_running} at once "
                "(--most-in-flight). Send it in parts."
            )
        if count > self._max_running - self._in_flight:
            raise Busy(
                f"{self._in_flight} completions are in flight and {count} more are asked for; this server takes at most "
                f"{self._max_running}. Try again later."
            )

    def _counted(self, done: Done) -> Done:
        def count_and_pass_on(outcome: Outcome) -> None:
            with self._count_lock:
                self._in_flight -= 1
            done(outcome)

        return count_and_pass_on

    def abort(self, job_ids: list[str], why: str) -> None:
        self._send(lambda: self._abort(job_ids, why))

    def abort_all(self, why: str) -> None:
        self._send(lambda: self._abort([*self._running, *(job.job_id for job, _ in self._held)], why))

    def _send(self, command: Callable[[], None]) -> None:
        """For the engine's thread to run. Where that ends just now, and may have looked for the last time, it is refused here:
        otherwise it would never be answered."""
        self._commands.put(command)
        if self._closed:
            self._drain_commands()

    def call(self, function: Callable[[Engine], T], seconds: float) -> T:
        """`function(engine)` in the engine's thread, between two steps."""
        self._refuse_if_down()
        result: Future[T] = Future()

        def command() -> None:
            if self._closed:
                result.set_exception(NotReady("The server is stopping."))
            elif result.set_running_or_notify_cancel():
                _settle(result, lambda: function(self._engine))

        self._send(command)
        return _wait(result, seconds, "The engine was busy for too long.")

    def flip(self, swap: Callable[[Engine], None], version: int, in_flight: str, seconds: float) -> None:
        """`swap(engine)` as soon as `in_flight` allows it; DeadlinePassed where that is not within `seconds`."""
        self._refuse_if_down()
        flip = _Flip(swap, version, in_flight, time.monotonic() + seconds)
        self._send(lambda: self._begin_flip(flip))
        try:
            flip.result.result(seconds + 1.0)
        except TimeoutError as error:
            if flip.result.cancel():  # the thread has not taken it up, and now never will
                raise DeadlinePassed(
                    f"The engine was busy for more than {seconds:g} s; nothing was changed."
                ) from error
            self._wait_for_swap(flip)

    def sleep(self, level: int, seconds: float) -> str | None:
        """Let the engine sleep; None, or why it did not. Refused while requests run."""

        def go(engine: Engine) -> str | None:
            if self._running:
                raise Conflict(f"{len(self._running)} completions run; let them end before the engine sleeps.")
            why_not = engine.sleep(level)
            if why_not is None:
                self.sleeping_parts = {"weights", "kv_cache"}
                self.sleeping = "The engine sleeps; wake it first."
                if level == 2:
                    self._versions.invalidate("sleep level 2 dropped the weights; send a version.")
            return why_not

        return self.call(go, seconds)

    def wake(self, tags: tuple[str, ...] | None, seconds: float) -> None:
        def go(engine: Engine) -> None:
            asked = set(tags or ("weights", "kv_cache")) & self.sleeping_parts
            if not asked:
                return
            engine.wake(tags)
            self.sleeping_parts -= asked
            if not self.sleeping_parts:
                self.sleeping = None

        self.call(go, seconds)

    def _wait_for_swap(self, flip: _Flip) -> None:
        try:
            flip.result.result(self._swap_seconds)
        except TimeoutError as error:
            self.failure = f"loading version {flip.version} into the engine took more than {self._swap_seconds:g} s."
            raise EngineFailed(f"The engine hangs: {self.failure}") from error

    def _refuse_if_down(self) -> None:
        if self.failure:
            raise NotReady(f"The engine is down: {self.failure}")
        if self._stopping.is_set():
            raise NotReady("The server is stopping.")

    # in the engine's thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._run_commands()
                self._try_flip()
                if self._running:
                    self._step()
                self.last_tick = time.monotonic()
        except Exception as error:  # whatever ends the engine ends its jobs with a sentence, not the process
            log.exception("The engine failed.")
            self.failure = f"{type(error).__name__}: {error}"
        finally:
            self._end_all(self.failure or "the server is stopping.")

    def _run_commands(self) -> None:
        """Run the commands that wait; wait a little for one where there is nothing else to do."""
        try:
            command = self._commands.get(timeout=0.0 if self._running else 0.2)
            while True:
                command()
                command = self._commands.get_nowait()
        except queue.Empty:
            return

    def _add(self, job: Job, done: Done) -> None:
        if self._flip is not None:
            self._held.append((job, done))
            return
        try:
            if self._closed or self.sleeping:
                raise NotReady(self.sleeping or "The server is stopping.")
            if job.job_id in self._running:
                raise Conflict(f"A job {job.job_id} is running.")
            serving = self._versions.check(job.accepted)
            adapter = None if job.base_weights else serving.adapter
            self._engine.add(job, adapter)
        except ServeError as error:
            done(_refused(job, error, self._versions.serving.version))
            return
        except Exception as error:  # engines refuse with errors of their own; one request must not end the others
            self._engine.abort([job.job_id])
            sentence = f"The engine refused the request ({type(error).__name__}: {str(error)[:500]})."
            done(_refused(job, FieldError(sentence), self._versions.serving.version))
            return
        self._running[job.job_id] = _Running(job, done, [(0, serving.version)], adapter)

    def _step(self) -> None:
        for progress in self._engine.step():
            running = self._running.get(progress.job_id)
            if running is None:
                continue
            running.latest = progress
            if progress.finish_reason is not None:
                del self._running[progress.job_id]
                if progress.error is not None:
                    running.done(_refused(running.job, PromptDiffers(progress.error), running.marks[0][1]))
                    continue
                self.tokens += len(progress.ids) if isinstance(running.job, GenerateJob) else 0
                running.done(_outcome(running, progress.finish_reason, None))

    def _abort(self, job_ids: list[str], why: str) -> None:
        known = [job_id for job_id in job_ids if job_id in self._running]
        self._engine.abort(known)
        for job_id in known:
            running = self._running.pop(job_id)
            running.done(_outcome(running, ABORTED, why))
        held = [(job, done) for job, done in self._held if job.job_id in job_ids]
        self._held = [(job, done) for job, done in self._held if job.job_id not in job_ids]
        for job, done in held:
            done(Outcome(job.job_id, [], [], ABORTED, [], error=why))

    def _begin_flip(self, flip: _Flip) -> None:
        if self._closed:
            _answer_flip(flip, NotReady("The server is stopping."))
        elif self._flip is not None:
            _answer_flip(flip, Conflict("Another update is flipping."))
        elif not flip.result.cancelled():
            self._flip = flip

    def _try_flip(self) -> None:
        flip = self._flip
        if flip is None:
            return
        if flip.in_flight == DRAIN and self._running:
            if time.monotonic() < flip.give_up_at:
                return
            self._end_flip(DeadlinePassed(f"{len(self._running)} requests still run; the old version keeps serving."))
            return
        if not flip.result.set_running_or_notify_cancel():
            self._end_flip(None)
            return
        if flip.in_flight == ABORT:
            self._abort(list(self._running), f"version {flip.version} replaces the weights.")
        if flip.in_flight == CONTINUE:
            self._abort(
                [job_id for job_id, running in self._running.items() if not _continues(running, flip.version)],
                f"version {flip.version} replaces the weights and the request does not accept it.",
            )
        try:
            flip.swap(self._engine)
            if flip.in_flight != KEEP:
                self._forget_old_weights(flip.version)
            self._end_flip(None)
        except Exception as error:  # handed to the caller, who waits for it
            self._end_flip(error)

    def _forget_old_weights(self, version: int) -> None:
        """From here on the tokens of running jobs are those of `version`, keys and values included."""
        if not self._engine.reset_prefix_cache(running=bool(self._running)):
            self._versions.invalidate("the engine kept cached keys and values of the weights before.")
            raise EngineFailed("The engine did not give up the cached keys and values of the old weights.")
        for running in self._running.values():
            running.marks.append((len(running.latest.ids) if running.latest else 0, version))

    def _end_flip(self, error: Exception | None) -> None:
        flip, self._flip = self._flip, None
        _answer_flip(flip, error)
        held, self._held = self._held, []
        for job, done in held:
            self._add(job, done)

    def _end_all(self, why: str) -> None:
        self._stopping.set()
        for running in list(self._running.values()):
            running.done(_outcome(running, ERROR, f"The engine is down: {why}"))
        self._running.clear()
        for job, done in self._held:
            done(_refused(job, NotReady(f"The engine is down: {why}"), None))
        self._held = []
        if self._flip is not None:
            self._end_flip(NotReady(f"The engine is down: {why}"))
        self._closed = True
        self._drain_commands()
        self._engine.close()

    def _drain_commands(self) -> None:
        """Commands that came too late: each gets its refusal."""
        while True:
            try:
                self._commands.get_nowait()()
            except queue.Empty:
                return
            except Exception:
                log.exception("A command that came while the engine stopped failed.")


def _answer_flip(flip: _Flip, error: Exception | None) -> None:
    """Unless the caller has given up; checked first, since that can happen at any time."""
    if flip.result.cancelled() or not (flip.result.running() or flip.result.set_running_or_notify_cancel()):
        return
    if error is None:
        flip.result.set_result(None)
    else:
        flip.result.set_exception(error)


def _continues(running: _Running, version: int) -> bool:
    return isinstance(running.job, GenerateJob) and running.job.accepted.takes(version)


def _outcome(running: _Running, finish_reason: str, error: str | None) -> Outcome:
    progress = running.latest or Progress(running.job.job_id, [])
    ids, spans = list(progress.ids), []
    if len(progress.logps) != len(ids) and isinstance(running.job, GenerateJob):
        ids = ids[: len(progress.logps)]  # ended from outside, before the engine handed over the log-probs
    ends = [start for start, _ in running.marks[1:]] + [len(ids)]
    for (start, version), end in zip(running.marks, ends):
        if min(end, len(ids)) > start:
            spans.append((start, min(end, len(ids)), version))
    top = [list(place) for place in progress.top]
    first = running.marks[0][1]
    return Outcome(
        running.job.job_id,
        ids,
        list(progress.logps),
        finish_reason,
        spans,
        top,
        progress.stop_reason,
        error,
        first,
        list(progress.policy_logps),
    )


def _refused(job: Job, error: ServeError, version: int | None) -> Outcome:
    """Not run at all; `stop_reason` carries the HTTP status."""
    return Outcome(job.job_id, [], [], ERROR, [], stop_reason=error.status, error=str(error), version=version)


def _settle(result: Future[Any], function: Callable[[], Any]) -> None:
    try:
        result.set_result(function())
    except Exception as error:  # handed to the caller, who waits for it
        result.set_exception(error)


def _wait(result: Future[T], seconds: float, what: str) -> T:
    try:
        return result.result(seconds)
    except TimeoutError as error:
        cancelled = result.cancel()
        state = "It was not begun and will not be." if cancelled else "It has begun and may still finish."
        raise DeadlinePassed(f"{what} {state}") from error
