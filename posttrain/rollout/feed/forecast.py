"""Forecast: how fast a run with rollouts beside training would be, from the seconds of its parts.

A discrete-event simulation around the feed itself, with a clock that jumps: what begins, what is waited for, what is too old and
how the lead adapts is decided by the code of the run. `benchmarks/async_model.py` compares it with real runs.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from posttrain.rollout.feed.feed import Feed
from posttrain.rollout.feed.group import Group, Work
from posttrain.rollout.feed.ledger import PLANNED
from posttrain.rollout.feed.pacing import IN_ORDER, Lead, Pace


@dataclass(frozen=True)
class Parts:
    """What a run is made of, in seconds."""

    # of the group of a number, from its beginning to its last reward, if no other needs the engine
    group: Callable[[int], float]
    update: float  # of all optimizer steps of a window, and of what is done between them
    engine: float = 0.0  # of all engines together, for a group: they write no faster than this


@dataclass(frozen=True)
class Forecast:
    """Means over windows."""

    seconds: float  # of a window
    waits: float  # share of it in which the trainer waits
    group_age: float  # steps from the oldest weights of a group to the last step that trains on it
    oldest: int  # the largest of those
    lead: float  # at the end
    dropped: int


def forecast(pace: Pace, lead: Lead, parts: Parts, windows: int = 60, warm_up: int = 10) -> Forecast:
    """Of `windows` windows, after others that do not count."""
    return _Run(pace, replace(lead), parts).forecast(windows, warm_up)


class _Run:
    def __init__(self, pace: Pace, lead: Lead, parts: Parts) -> None:
        self.pace, self.lead, self.parts = pace, lead, parts
        self.now = self.engine_is_free = 0.0
        self.feed = Feed(pace, lead, lambda number: (number, 0), lambda row: None, clock=lambda: self.now)
        self.writing: list[tuple[float, int, Work]] = []  # (when it is finished, number, work)

    def forecast(self, windows: int, warm_up: int) -> Forecast:
        ends, waits, ages, taken = [], [], [], 0.0
        for window in range(warm_up + windows):
            asked = self.now
            groups = self._next_window()
            waits.append(self.now - asked)
            ages.append([(window + 1) * self.pace.steps - 1 - group.label for group in groups])
            if window:  # nothing can be written ahead of the first
                self.lead.after_window(waits[-1] / max(self.now - taken, 1e-9))
            taken = self.now
            self._begin()
            self._until(self.now + self.parts.update)
            self.feed.trained((window + 1) * self.pace.steps)
            ends.append(self.now)
        began = ends[warm_up - 1] if warm_up else 0.0
        counted = np.array(ages[warm_up:])
        took = max(ends[-1] - began, 1e-9)
        return Forecast(
            took / windows,
            sum(waits[warm_up:]) / took,
            counted.mean(),
            counted.max(),
            self.lead.value,
            self.feed.ledger.dropped,
        )

    def _next_window(self) -> list[Group]:
        self._begin()
        while not self.feed.has_window():
            self._finish_one()
            self._begin()
        return self.feed.next_window()

    def _until(self, then: float) -> None:
        while self.writing and self.writing[0][0] <= then:
            self._finish_one()
            self._begin()
        self.now = then

    def _begin(self) -> None:
        """Begin all groups that may begin: in order, with the weights of each one's own label."""
        feed = self.feed
        labels = [feed.published]
        if self.pace.order == IN_ORDER:
            feed.pull("", -1)  # plans
            labels = sorted({feed.ledger.live[number].label for number in feed.ledger.numbers(PLANNED)})
        for label in labels:
            for work in feed.pull("", label):
                self.engine_is_free = max(self.engine_is_free, self.now) + self.parts.engine
                ends = max(self.now + self.parts.group(work.number), self.engine_is_free)
                heapq.heappush(self.writing, (ends, work.number, work))

    def _finish_one(self) -> None:
        ends, number, work = heapq.heappop(self.writing)
        self.now = max(self.now, ends)
        self.feed.finish(Group(number, work.attempt, work.label, None))
