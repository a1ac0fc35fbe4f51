"""Who gets the next prompt: the server that would be done with it first. No threads, no clock, no servers: times are handed in.

    length that is expected of a completion   mean of those that finished last, or its allowance where that is less
    time of a server                          what is expected there, the prompt to be placed included, / its tokens per second

An allowance says little: with one of 2,048 and answers of 300 it would be off by seven times. Samples of one group go to one
server, which computes their prompt once. A later turn of an episode goes where its earlier turns are cached, unless that server
is overloaded.
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
"""Of work, before a server's speed counts as measured."""
TRUSTED_CROWD = 0.5
"""Of the mean number in flight, under which a server's tokens per second say how little it was asked for, not how fast it is."""


@dataclass
class Load:
    """One server."""

    work: float = 0.0  # of all that is in flight, in completions of usual length
    in_flight: int = 0
    written: float = 0.0  # tokens, with the weight of MEMORY_SECONDS; so the next two
    busy: float = 0.0  # seconds with something in flight
    crowded: float = 0.0  # in flight times seconds
    at: float = 0.0  # until when these are counted

    def pass_time(self, now: float) -> None:
        passed, self.at = max(now - self.at, 0.0), max(now, self.at)
        if not self.in_flight:
            return
        kept = 1 / (1 + passed / MEMORY_SECONDS)
        self.written *= kept
        self.busy = self.busy * kept + passed
        self.crowded = self.crowded * kept + passed * self.in_flight

    @property
    def is_measured(self) -> bool:
        return self.busy >= LEAST_SECONDS and self.written > 0


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

    def place(self, prompt: Prompt, limit: int, free: Collection[str], up: Sequence[str], now: float) -> Placed | None:
        """On one of `free`, which are among those that are `up`; None: it is done earlier if it waits for another."""
        for name in up:
            self.loads.setdefault(name, Load(at=now)).pass_time(now)
        speeds, cost = self._speeds(up), self.cost(prompt, limit)
        group = (prompt.key, hashlib.blake2b(prompt.ids.tobytes(), digest_size=8).digest())
        episode = (prompt.key, prompt.sample)
        is_first = prompt.first_token == 0
        self.samples = max(self.samples, prompt.sample + 1)
        home, count = self._homes.get(group if is_first else episode) or (None, 0)
        if home not in up or (is_first and count >= self.samples):  # more of them than a group has: equal prompts
            count, home = 0, self._soonest(cost * self.samples if is_first else cost, free, up, speeds)
        elif not (is_first and home in free) and self._is_overloaded(home, cost, up, speeds):
            home = self._soonest(cost, free, up, speeds)
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

    def _soonest(self, cost: float, free: Collection[str], up: Sequence[str], speeds: dict[str, float]) -> str | None:
        """A slow server is not filled because it has room: what it is given last would be done last."""
        times = {name: (self.loads[name].work + cost) / speeds[name] for name in up}
        home = min(free, key=times.__getitem__, default=None)
        return None if home is None or times[home] > min(times.values()) + cost / speeds[home] else home

    def _is_overloaded(self, name: str, cost: float, up: Sequence[str], speeds: dict[str, float]) -> bool:
        times = {one: self.loads[one].work / speeds[one] for one in up}
        return times[name] > OVERLOAD * fmean(times.values()) + cost / speeds[name]

    def _speeds(self, names: Sequence[str]) -> dict[str, float]:
        """Tokens per second. A server that was asked for too little to be known counts as those that are."""
        measured = {name: load for name in names if (load := self.loads[name]).is_measured}
        if not measured:
            return dict.fromkeys(names, 1.0)
        crowds = {name: load.crowded / load.busy for name, load in measured.items()}
        enough = TRUSTED_CROWD * fmean(crowds.values())
        known = {name: load.written / load.busy for name, load in measured.items() if crowds[name] >= enough}
        usual = fmean(known.values())
        return {name: known.get(name, usual) for name in names}
