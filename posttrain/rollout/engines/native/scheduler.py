"""Who runs, who waits, and whose pages are whose. Knows no tensors.

A request waits until a slot and pages are free. It then runs from its last token on: everything before that is its prefix, which
is prefilled once for all requests that begin with the same tokens. When pages run out the youngest sample goes back into the
queue with the tokens it has; its noise is counted, so it continues as if nothing had happened.
"""

from __future__ import annotations

import struct
from collections import Counter, deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from posttrain.core.sample import Sample
from posttrain.rollout.engines.native.cache import PAGE, PagePool, pages_for
from posttrain.rollout.engines.request import Request


@dataclass
class Prefix:
    """Tokens that were computed once, and the pages they lie on."""

    key: bytes
    sample: Sample
    pages: list[int]
    users: int = 0  # samples that are running on it
    states: dict[int, Any] = field(default_factory=dict)  # in which it leaves recurrences, by their owner

    @property
    def ids(self) -> np.ndarray:
        return self.sample.input_ids


@dataclass
class Running:
    """A request in a slot."""

    request: Request
    prefix: Prefix
    pages: list[int] = field(default_factory=list)  # its own, behind those of the prefix
    table: np.ndarray = field(init=False)  # both, as the decode step wants them

    def __post_init__(self) -> None:
        self.take([])

    def take(self, pages: list[int]) -> None:
        self.pages += pages
        self.table = np.asarray(self.prefix.pages + self.pages, np.int32)

    @property
    def position(self) -> int:
        """Of its last token, the one that goes into the next step."""
        return len(self.request.prompt.ids) + len(self.request.ids) - 1

    @property
    def last_token(self) -> int:
        return self.request.ids[-1] if self.request.ids else int(self.request.prompt.ids[-1])

    @property
    def room(self) -> int:
        """Tokens that can be written before it needs another page."""
        return len(self.prefix.ids) + PAGE * len(self.pages) - self.position

    def missing_pages(self, steps: int) -> int:
        """Pages that it lacks for its next `steps` tokens."""
        return max(pages_for(min(steps, self.request.remaining) - self.room), 0)


@dataclass
class _Waiting:
    request: Request
    prefix: Sample
    key: bytes

    @property
    def prefix_ids(self) -> np.ndarray:
        return self.prefix.input_ids


class Scheduler:
    """Queue, slots and pages of one session."""

    def __init__(self, pool: PagePool, max_slots: int, prefill_tokens: int, looks_ahead: bool = True) -> None:
        """`looks_ahead`: whether prefixes may be computed before a slot is free for their samples."""
        self.pool, self.max_slots, self.prefill_tokens = pool, max_slots, prefill_tokens
        self.looks_ahead = looks_ahead
        self.running: list[Running] = []
        self.preempted = 0
        # pages for all that run or could join, to their ends: set by the owner of the memory
        self.has_spare_pages = False
        self.changes = 0  # goes up whenever who runs, or on which pages, is not what it was
        self._waiting: deque[_Waiting] = deque()
        self._wanted: Counter[bytes] = Counter()  # waiting requests by prefix
        self._prefixes: dict[bytes, Prefix] = {}

    @property
    def in_flight(self) -> int:
        return len(self._waiting) + len(self.running)

    @property
    def is_waiting(self) -> bool:
        return bool(self._waiting)

    def add(self, request: Request) -> None:
        self._queue(request, first=False)

    def _queue(self, request: Request, first: bool) -> None:
        prefix = request.before_last()
        # Equal tokens may stand for different images.
        shown = b"".join(struct.pack("<i", image.start) + image.key for image in prefix.images)
        waiting = _Waiting(request, prefix, prefix.input_ids.tobytes() + b"|" + shown)
        self._wanted[waiting.key] += 1
        if first:
            self._waiting.appendleft(waiting)
        else:
            self._waiting.append(waiting)

    def wanted_pages(self) -> int:
        """Pages that are missing for all that runs, and what could join it, to finish undisturbed."""
        free_slots = self.max_slots - len(self.running)
        own = sum(run.missing_pages(run.request.remaining) for run in self.running)
        prefixes: dict[bytes, int] = {}
        tokens = 0
        for place, waiting in enumerate(self._waiting):
            if place < free_slots:
                own += pages_for(waiting.request.remaining)
            elif tokens > self.prefill_tokens:
                break
            if waiting.key not in self._prefixes and waiting.key not in prefixes:
                prefixes[waiting.key] = pages_for(len(waiting.prefix_ids))
                tokens += len(waiting.prefix_ids)
        return sum(prefixes.values()) + own - self.pool.free

    def admit(self, steps: int) -> list[Prefix]:
        """Fill the free slots; the prefixes that must be prefilled before the next step."""
        new: list[Prefix] = []
        while self._waiting and len(self.running) < self.max_slots:
            waiting = self._waiting[0]
            prefix = self._prefixes.get(waiting.key)
            need = pages_for(min(steps, waiting.request.remaining))
            need += pages_for(len(waiting.prefix_ids)) if prefix is None else 0
            # A page for each that runs already, unless all have theirs: who joins must not push out at once.
            spare = 0 if self.has_spare_pages else len(self.running)
            if not self._make_room(need + spare, keep=waiting.key):
                break
            if prefix is None:
                prefix = self._new_prefix(waiting)
                new.append(prefix)
            self._waiting.popleft()
            self._wanted[waiting.key] -= 1
            prefix.users += 1
            self.running.append(Running(waiting.request, prefix))
            self.changes += 1
        if new and self.looks_ahead:
            self._look_ahead(new)
        return new

    def _look_ahead(self, new: list[Prefix]) -> None:
        """A prefill that must be run anyway takes the next prefixes along: many small ones would stop the others each time."""
        tokens = self.prefill_tokens - sum(len(prefix.ids) for prefix in new)
        spare = self.pool.free - sum(run.missing_pages(run.request.remaining) for run in self.running)
        for waiting in self._waiting:
            if waiting.key in self._prefixes:
                continue
            tokens -= len(waiting.prefix_ids)
            spare -= pages_for(len(waiting.prefix_ids))
            if tokens < 0 or spare < 0:
                break
            new.append(self._new_prefix(waiting))

    def _new_prefix(self, waiting: _Waiting) -> Prefix:
        pages = self.pool.take(pages_for(len(waiting.prefix_ids)))
        self._prefixes[waiting.key] = Prefix(waiting.key, waiting.prefix, pages)
        return self._prefixes[waiting.key]

    def reserve(self, steps: int) -> None:
        """Give all pages for `steps` tokens, or to the end where there are plenty; else the youngest go back to the queue."""
        place = 0
        while place < len(self.running):
            run = self.running[place]
            need = run.missing_pages(run.request.remaining if self.has_spare_pages else steps)
            while not self._make_room(need) and len(self.running) > place + 1:
                self._preempt(self.running.pop())
            if self.pool.free < need:
                self._preempt(self.running.pop())
                return
            if need:
                run.take(self.pool.take(need))
                self.changes += 1
            place += 1

    def release(self, finished: list[Running]) -> None:
        self.changes += len(finished)
        gone = {id(run) for run in finished}
        self.running = [run for run in self.running if id(run) not in gone]
        for run in finished:
            self._give_back(run)

    def drop(self, tickets: Collection[int]) -> None:
        """These are not wanted any more."""
        self.release([run for run in self.running if run.request.ticket in tickets])
        dropped = [waiting for waiting in self._waiting if waiting.request.ticket in tickets]
        self._waiting = deque(waiting for waiting in self._waiting if waiting.request.ticket not in tickets)
        for waiting in dropped:
            self._wanted[waiting.key] -= 1
            prefix = self._prefixes.get(waiting.key)
            if prefix is not None and prefix.users == 0 and not self._wanted[waiting.key]:
                self._forget(prefix)

    def requests(self) -> list[Request]:
        """All that are in flight."""
        return [run.request for run in self.running] + [waiting.request for waiting in self._waiting]

    def compute_again(self) -> None:
        """Keys and values are of weights that are gone: all go back into the queue, in order, with the tokens that they have."""
        while self.running:
            self._preempt(self.running.pop())
        for prefix in list(self._prefixes.values()):
            self._forget(prefix)

    def keep_from_others(self) -> None:
        """Running requests continue with keys and values of weights that are gone; requests that join do not share them."""
        kept, self._prefixes = self._prefixes, {}
        for prefix in kept.values():
            prefix.key += b"|" + struct.pack("<q", self.changes)
            self._prefixes[prefix.key] = prefix
            if prefix.users == 0:
                self._forget(prefix)
        self.changes += 1

    def _preempt(self, run: Running) -> None:
        self._give_back(run)
        self._queue(run.request, first=True)
        self.preempted += 1
        self.changes += 1

    def _give_back(self, run: Running) -> None:
        self.pool.give(run.pages)
        run.pages = []
        run.prefix.users -= 1
        if run.prefix.users == 0 and not self._wanted[run.prefix.key]:
            self._forget(run.prefix)

    def _forget(self, prefix: Prefix) -> None:
        self.pool.give(prefix.pages)
        del self._prefixes[prefix.key]

    def _make_room(self, pages: int, keep: bytes | None = None) -> bool:
        """Whether `pages` are free, after prefixes that only waiting requests want have been dropped."""
        if self.pool.free < pages:
            for prefix in [p for p in self._prefixes.values() if p.users == 0 and p.key != keep]:
                self._forget(prefix)
        return self.pool.free >= pages
