"""Who gets the next prompt: the server that would be done with it first. No threads, no clock, no servers: times are handed in.

    length that is expected of a completion   mean of those that finished last, or its allowance where that is less
    speed of a server                         tokens that it writes in a second of one request
    time of a server                          what is expected there, the prompt to be placed included, / its speed

Speed is that of a request and not of the whole server: a server that is asked for little writes little and is not slow. An
allowance says little: with one of 2,048 and answers of 300 it would be off by seven times. Samples of one group go to one server,
which computes their prompt once. A later turn of an episode goes where its earlier turns are cached, unless that server is
overloaded.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from posttrain.rollout.engines.protocol import Prompt
from posttrain.serve.recent import Recent

OVERLOAD = 1.25
"""Of the mean time of all servers, plus one request: above it a turn leaves its server."""
PREFILL = 1 / 16
"""What a token of a prompt takes, in written tokens: many are computed at once."""
LENGTHS = 512
"""Finished completions that say how long the next will be."""
REMEMBERED = 1 << 16
"""Groups and episodes whose server is known."""
MEMORY_SECONDS = 300.0
"""After which a measurement counts for 1/e: servers get neighbours, and lose them."""
LEAST_SECONDS = 1.0
"""Of requests, before a server's speed counts as measured."""
TOO_SLOW = 1.5
"""A server that would need so many times what all together need for the rest is given nothing more."""


@dataclass
class Load:
    """One server."""

    work: float = 0.0  # of all that is in flight, in completions of usual length
    in_flight: int = 0
    written: float = 0.0  # tokens; older ones count for less
    crowded: float = 0.0  # in flight times seconds; as above
    at: float = 0.0  # until when these are counted

    def pass_time(self, now: float) -> None:
        passed, self.at = max(now - self.at, 0.0), max(now, self.at)
        if not self.in_flight:
            return
        kept = 1 / (1 + passed / MEMORY_SECONDS)
        self.written *= kept
        self.crowded = self.crowded * kept + passed * self.in_flight

    @property
    def is_measured(self) -> bool:
        return self.crowded >= LEAST_SECONDS and self.written > 0


@dataclass(frozen=True)
class Placed:
    """A prompt at a server, to be handed to `finished`."""

    server: str
    cost: float


@dataclass
class Balancer:
    loads: dict[str, Load] = field(default_factory=dict)
    lengths: deque[int] = field(default_factory=lambda: deque(maxlen=LENGTHS))
    samples: int = 1  # of a group
    _sum: int = 0  # of the lengths
    _homes: Recent[Hashable, tuple[str, int]] = field(default_factory=lambda: Recent(REMEMBERED, REMEMBERED))

    def place(
        self, prompt: Prompt, limit: int, free: Collection[str], up: Sequence[str], waiting: int, now: float
    ) -> Placed | None:
        """On one of `free`, which are among those that are `up`; None: it is done earlier if it waits for another. `waiting`: how
        many prompts have no place yet, this one included."""
        for name in up:
            self.loads.setdefault(name, Load(at=now)).pass_time(now)
        speeds, cost = self._speeds(up), self.cost(prompt, limit)
        group = (prompt.key, hashlib.blake2b(prompt.ids.tobytes(), digest_size=8).digest())
        episode = (prompt.key, prompt.sample)
        is_first = prompt.first_token == 0
        self.samples = max(self.samples, prompt.sample + 1)
        home, count = self._homes.get(group if is_first else episode) or (None, 0)
        if home not in up or (is_first and count >= self.samples):  # more of them than a group has: equal prompts
            count, home = 0, self._soonest(cost * self.samples if is_first else cost, free, waiting, speeds)
        elif not (is_first and home in free) and self._is_overloaded(home, cost, up, speeds):
            home = self._soonest(cost, free, waiting, speeds)
        if home not in free:
            return None
        for known in (group, episode) if is_first else (episode,):
            self._homes.put(known, (home, count + 1), 1)
        self.loads[home].work += cost
        self.loads[home].in_flight += 1
        return Placed(home, cost)

    def finished(self, placed: Placed, length: int | None, now: float) -> None:
        """`length`: tokens that were written; None: it was not completed."""
        load = self.loads[placed.server]
        load.pass_time(now)
        load.in_flight -= 1
        load.work = load.work - placed.cost if load.in_flight else 0.0
        if length is not None:
            load.written += length
            self._sum += length - (self.lengths[0] if len(self.lengths) == LENGTHS else 0)
            self.lengths.append(length)

    def in_flight(self, name: str) -> int:
        return self.loads[name].in_flight if name in self.loads else 0

    def forget(self) -> None:
        """Where things were: new weights have no cache of before."""
        self._homes = Recent(REMEMBERED, REMEMBERED)

    def cost(self, prompt: Prompt, limit: int) -> float:
        """In completions of the length that is usual now: a sum of tokens would keep what was expected long ago."""
        usual = self._sum / len(self.lengths) if self._sum else limit
        return (min(usual, limit) + PREFILL * len(prompt.ids)) / usual

    def _soonest(self, cost: float, free: Collection[str], waiting: int, speeds: dict[str, float]) -> str | None:
        """A slow server is used while much is left, and not given the last: those would be done last."""
        home = min(free, key=lambda name: (self.loads[name].work + cost) / speeds[name], default=None)
        running = {name: self.loads[name].in_flight for name in speeds}
        rate = sum(count * speeds[name] for name, count in running.items())
        if home is None or not rate or speeds[home] == max(speeds.values()):
            return home
        return None if 1 / speeds[home] > TOO_SLOW * (sum(running.values()) + waiting) / rate else home

    def _is_overloaded(self, name: str, cost: float, up: Sequence[str], speeds: dict[str, float]) -> bool:
        times = {one: self.loads[one].work / speeds[one] for one in up}
        return times[name] > OVERLOAD * fmean(times.values()) + cost / speeds[name]

    def _speeds(self, names: Sequence[str]) -> dict[str, float]:
        """A server that has done too little to be known counts as those that are."""
        measured = {name: load.written / load.crowded for name in names if (load := self.loads[name]).is_measured}
        usual = fmean(measured.values()) if measured else 1.0
        return {name: measured.get(name, usual) for name in names}
