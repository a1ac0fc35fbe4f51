"""Platform: where rollout workers run. Threads of this process, its child processes, or actors of a Ray cluster."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

from posttrain.rollout.feed.board import Board
from posttrain.rollout.feed.feed import MANY, Feed
from posttrain.rollout.feed.group import Work

THREAD = "posttrain rollouts"
LOOK_SECONDS = 0.02


class Platform(Protocol):
    """What the trainer asks of one. Ledger, leases, journal, pacing and versions are the same on all of them."""

    board: Board | None  # where the trainer publishes weights; None: workers read the trainer's own, or are sent them

    def start(self) -> None:
        """The workers that the run begins with."""

    def join(self) -> str:
        """One more, in the middle of a run; its name."""

    def leave(self, name: str, seconds: float) -> None:
        """It begins nothing more. What it has not finished after so many seconds is issued again."""

    def members(self) -> list[str]:
        """Workers that have asked for work and neither ended nor left."""

    def stop(self, seconds: float) -> None:
        """All of them end, and leave nothing behind."""


class Seat:
    """A worker's place at the feed, from which it can be asked to leave."""

    def __init__(self, name: str, feed: Feed) -> None:
        self.name, self.feed = name, feed
        self.has_begun = self.leaves = self.must_go = False

    @property
    def stopped(self) -> bool:
        return self.feed.stopped or self.must_go or (self.leaves and not self.feed.holds(self.name))

    def pull(self, worker: str, label: int, most: int = MANY) -> list[Work]:
        self.has_begun = True
        return [] if self.leaves else self.feed.pull(self.name, label, most)

    def label_for(self, label: int) -> int | None:
        return self.feed.label_for(label)

    def give_back(self, worker: str) -> None:
        self.feed.give_back(self.name)

    def wait(self) -> None:
        self.feed.wait()

    def stop(self, error: BaseException) -> None:
        self.feed.stop(error)

    def leave(self, seconds: float, has_left: Callable[[], bool]) -> bool:
        """Ask it to, and wait for it; False: it is still there, although it must go by now."""
        self.leaves = True
        self.feed.wake()
        for self.must_go in (False, True):
            deadline = time.monotonic() + seconds
            while not has_left() and time.monotonic() < deadline:
                time.sleep(LOOK_SECONDS)
        return has_left()


class Threads:
    """Inline: each worker is a thread. They cannot be killed: a mistake in one ends the run, and so does the end of the process."""

    def __init__(
        self, feed: Feed, board: Board | None, count: int, make_worker: Callable[[Seat], Callable[[], None]]
    ) -> None:
        """`make_worker`: what a thread runs."""
        self.feed, self.board, self.count, self.make_worker = feed, board, count, make_worker
        self.threads: dict[str, tuple[Seat, threading.Thread]] = {}
        self._begun = 0

    def start(self) -> None:
        self.feed.expect(self.count)
        made = [self._make() for _ in range(self.count)]  # engines first: they take memory, and may raise
        for name in made:
            self.threads[name][1].start()

    def join(self) -> str:
        if self.board is None:
            raise ValueError(
                "The one engine that there is writes already: a thread can join where each has a copy of the weights."
            )
        name = self._make()
        self.threads[name][1].start()
        return name

    def _make(self) -> str:
        seat = Seat(f"inline-{self._begun}", self.feed)
        self._begun += 1
        self.threads[seat.name] = seat, threading.Thread(target=self.make_worker(seat), name=THREAD, daemon=True)
        return seat.name

    def leave(self, name: str, seconds: float) -> None:
        seat, thread = self.threads[name]
        seat.leave(seconds, lambda: not thread.is_alive())
        self.feed.give_back(name)

    def members(self) -> list[str]:
        return [name for name, (seat, thread) in self.threads.items() if seat.has_begun and thread.is_alive()]

    def stop(self, seconds: float) -> None:
        self.feed.stop()
        for _, thread in self.threads.values():
            thread.join(seconds)
