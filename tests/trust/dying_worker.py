"""A rollout worker that ends, or stops, at places of its own code: each of them once in a run, whoever passes it."""

from __future__ import annotations

import functools
import itertools
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from posttrain.rewards.runtime.frames import frame, write_all
from posttrain.rollout.episodes.episode import RunningEpisodes
from posttrain.rollout.feed import child

PLACES = {
    "before pull": 12, "after pull": 12, "decode": 6, "before deliver": 12, "half of deliver": 12, "after deliver": 12,
    "after reading": 6, "before read": 6, "after read": 6, "before label_for": 20,
}  # fmt: skip
"""Where it may happen, and the passing (over all workers of a run) up to which it may."""


ENDS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP, "all killed": signal.SIGKILL}


@dataclass
class Dying:
    """In the place of an engine's maker: what a worker is handed before it begins."""

    make_engine: Callable[[Any], Any]
    folder: str  # where all workers count together
    how: str
    deaths: frozenset[tuple[str, int]]

    def __call__(self, model: Any) -> Any:
        return self.make_engine(model)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """In a worker: nobody else is handed one."""
        self.__dict__ |= state
        Path(self.folder, f"worker.{os.getpid()}").touch()
        main = sys.modules["__main__"]
        self._arm(main if hasattr(main, "FeedOverSocket") else child)

    def alive(self) -> list[int]:
        """Workers of the run."""
        pids = [int(path.suffix[1:]) for path in Path(self.folder).glob("worker.*")]
        return [pid for pid in pids if psutil.pid_exists(pid)]

    def _arm(self, program: Any) -> None:
        ask, send, advance = program.RemoteFeed.ask, program.FeedOverSocket.send, RunningEpisodes.advance

        @functools.wraps(ask)
        def asked(feed: Any, call: str, **arguments: Any) -> Any:
            self.passes(f"before {call}")
            found = ask(feed, call, **arguments)
            self.passes(f"after {call}")
            return found

        def sent(feed: Any, message: bytes) -> None:
            if b'"deliver"' in message[:100]:
                half = frame(message)[: len(message) // 2]
                self.passes("half of deliver", lambda: write_all(feed.descriptor, half))
            send(feed, message)

        def advanced(running: Any) -> None:
            advance(running)
            self.passes("decode")

        program.RemoteFeed.ask, program.FeedOverSocket.send, RunningEpisodes.advance = asked, sent, advanced

    def passes(self, place: str, first: Callable[[], None] = lambda: None) -> None:
        if place not in PLACES:
            return
        for count in itertools.count(len([*Path(self.folder).glob(f"{place}.*")])):
            try:
                os.close(os.open(Path(self.folder, f"{place}.{count}"), os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
            if (place, count) in self.deaths:
                first()
                Path(self.folder, f"death at {place}, {count}").touch()
                for process in {*(self.alive() if self.how == "all killed" else ()), os.getpid()} - {os.getpid()}:
                    os.kill(process, ENDS[self.how])
                os.kill(os.getpid(), ENDS[self.how])
            return
