"""RolloutWorker: groups are written for as long as there is work, beside whatever the trainer does."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from posttrain.core import faults
from posttrain.rollout.engines.protocol import RolloutEngine, SamplingParams, Session
from posttrain.rollout.episodes.episode import IDLE_SECONDS, Episode, RunningEpisodes
from posttrain.rollout.episodes.writing import MakeEpisodes, given_rollout
from posttrain.rollout.feed.feed import MANY
from posttrain.rollout.feed.group import Work
from posttrain.rollout.prompt_rows import PromptRow
from posttrain.rollout.rollout import DATASET, POLICY, Request, Rollout

CONTINUE, FINISH, RESTART = "continue", "finish", "restart"
"""What a running completion does when new weights arrive: it continues with them, finishes with its own, or begins anew."""
RECOMPUTE, KEEP = "recompute", "keep"


class Weights(Protocol):
    """What a worker's engine reads."""

    label: int

    def begin(self, engine: RolloutEngine) -> None:
        """Before a session: the engine is awake, and its version is `label`."""

    def load(self, label: int) -> int:
        """Between two looks: another label that was published, this one or a newer."""


class ReadInPlace:
    """Weights of this process that an engine reads."""

    label: int

    def begin(self, engine: RolloutEngine) -> None:
        engine.load_weights(None, self.label)
        engine.wake()


class TrainersOwn(ReadInPlace):
    """The trainer's own: it does not train while a worker writes."""

    def __init__(self, state: Any) -> None:
        self.state = state

    @property
    def label(self) -> int:
        return self.state.global_step

    def load(self, label: int) -> int:
        """They are there already."""
        return self.label


class SentByTrainer:
    """Those of an engine that is another program: the trainer sends them, between two of its steps."""

    def __init__(self, engine: RolloutEngine) -> None:
        self.engine = engine

    @property
    def label(self) -> int:
        return self.engine.version

    def begin(self, engine: RolloutEngine) -> None:
        """It has them, and never sleeps."""

    def load(self, label: int) -> int:
        """They are there already."""
        return self.label


class WorkSource(Protocol):
    """The feed, or what speaks for it in another process."""

    stopped: bool

    def pull(self, worker: str, label: int, most: int = ...) -> list[Work]: ...

    def label_for(self, label: int) -> int | None: ...

    def give_back(self, worker: str) -> None: ...

    def wait(self) -> None: ...

    def stop(self, error: BaseException) -> None: ...


@dataclass(frozen=True)
class Writing:
    """What groups are made of, the same for all of them."""

    row_of: Callable[[Work], PromptRow]
    params: SamplingParams
    episodes: MakeEpisodes
    author_of: Callable[[Request], str]
    generations: int
    in_batches: bool = False  # a worker takes all that it is given at once, and writes it before it is given more


@dataclass
class _Open:
    """A group that is being written."""

    work: Work
    rollouts: list[Rollout | None]
    began: float = field(default_factory=time.perf_counter)


class RolloutWorker:
    """Runs one engine. `run` returns when the feed is stopped."""

    def __init__(
        self,
        name: str,
        engine: RolloutEngine,
        weights: Weights,
        writing: Writing,
        feed: WorkSource,
        deliver: Callable[[Work, list[Rollout], float], None],
        poll: Callable[[], bool] = lambda: False,
        *,
        in_flight: str = CONTINUE,
        keeps_cache: bool = False,
        others: Mapping[str, RolloutEngine] | None = None,
    ) -> None:
        """`deliver` takes a group that is written, and the seconds it took; `poll` is called again and again, and says whether it
        should be. `others`: engines of authors besides the policy."""
        self.name, self.engine, self.weights, self.writing, self.feed = name, engine, weights, writing, feed
        self.deliver, self.poll, self.in_flight, self.keeps_cache = deliver, poll, in_flight, keeps_cache
        self.others = others or {}
        self._open: dict[int, _Open] = {}
        self._of_others: dict[str, list[tuple[Episode, Callable[[Rollout], None]]]] = {}  # what they are to write

    def run(self) -> None:
        """What goes wrong here is raised where the trainer waits for a window."""
        try:
            while not self.feed.stopped:
                self._load_while_idle()
                self._begin_all(None)
                if self._open:
                    self._write()
                elif self.poll():
                    time.sleep(IDLE_SECONDS)
                else:
                    self.feed.wait()
        except BaseException as error:
            self.feed.stop(error)
            self.feed.give_back(self.name)

    def _write(self) -> None:
        """One session, until there is nothing left to do: memory for keys and values is given back then."""
        self.weights.begin(self.engine)
        try:
            with self.engine.session(self.writing.params) as session:
                running = RunningEpisodes(session)
                for opened in [*self._open.values()]:
                    self._join(running, opened)
                while self._open and not self.feed.stopped and (running or not self._of_others):
                    if self.in_flight == RESTART and self.feed.label_for(self.weights.label) is not None:
                        return self._abandon()
                    self._change_weights(session)
                    self._begin_all(running, session.room)
                    running.advance()
                    self.poll()
        finally:
            self.engine.sleep()
        self._write_as_others()

    def _write_as_others(self) -> None:
        """What was left for them while the policy wrote, each author in a session of its own: the weights stay as they are."""
        for author, episodes in self._of_others.items():
            engine = self.others[author]
            engine.load_weights(None, self.weights.label)
            engine.wake()
            try:
                with engine.session(self.writing.params) as session:
                    running = RunningEpisodes(session)
                    for episode, on_finished in episodes:
                        running.add(episode, on_finished)
                    while running and not self.feed.stopped:
                        running.advance()
                        self.poll()
            finally:
                engine.sleep()
        self._of_others.clear()

    # ---- groups ------------------------------------------------------------------------------------------------------

    def _begin_all(self, running: RunningEpisodes | None, room: int | None = 1) -> None:
        """As many groups as the engine has room for: where its memory is full, and completions wait or were put back, none begins
        until they run. What waits here would only grow older, and another worker might have written it."""
        if self._is_waiting_to_change or (self.writing.in_batches and self._open):
            return
        most = MANY
        if room is not None and not self.writing.in_batches:  # before there is a session, one group, which opens it
            joining = 0 if running is None else running.joining
            most = math.ceil((room - joining) / self.writing.generations)
        if most < 1:
            return
        for work in self.feed.pull(self.name, self.weights.label, most):
            faults.fault_point("generate")
            opened = self._open[work.number] = _Open(work, [None] * self.writing.generations)
            if running is not None:
                self._join(running, opened)

    def _join(self, running: RunningEpisodes, opened: _Open) -> None:
        writing, work = self.writing, opened.work
        row, asked = writing.row_of(work), dict[str, list[Request]]()
        for sample in range(writing.generations):
            request = Request(work.row, work.prompt, sample)
            asked.setdefault(writing.author_of(request), []).append(request)
        for request in asked.pop(DATASET, ()):
            self._on_finished(opened, DATASET, given_rollout(row, request))
        for author, requests in asked.items():
            on_finished = functools.partial(self._on_finished, opened, author)
            for episode in writing.episodes([row] * len(requests), requests, writing.params):
                if author == POLICY:
                    running.add(episode, on_finished)
                else:
                    self._of_others.setdefault(author, []).append((episode, on_finished))

    def _on_finished(self, opened: _Open, author: str, rollout: Rollout) -> None:
        rollout.author = author
        opened.rollouts[rollout.request.sample] = rollout
        if None not in opened.rollouts:
            del self._open[opened.work.number]
            self.deliver(opened.work, opened.rollouts, time.perf_counter() - opened.began)

    def _abandon(self) -> None:
        """Everything that is open is issued again."""
        self._open.clear()
        self._of_others.clear()
        self.feed.give_back(self.name)

    # ---- weights -----------------------------------------------------------------------------------------------------

    @property
    def _is_waiting_to_change(self) -> bool:
        """Nothing begins with weights that are about to go, where running completions keep theirs."""
        return self.in_flight != CONTINUE and bool(self._open) and self.feed.label_for(self.weights.label) is not None

    def _load_while_idle(self) -> None:
        label = self.feed.label_for(self.weights.label)
        if label is not None:
            self.weights.load(label)

    def _change_weights(self, session: Session) -> None:
        if self.in_flight != CONTINUE or (label := self.feed.label_for(self.weights.label)) is None:
            return
        session.change_weights(lambda: self.weights.load(label), self.keeps_cache)
