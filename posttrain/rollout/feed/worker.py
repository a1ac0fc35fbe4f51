"""RolloutWorker: groups are written and judged for as long as there is work, beside whatever the trainer does."""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from posttrain.core import faults
from posttrain.rewards.reward_set import RewardRound, RewardSet
from posttrain.rollout.collector import PendingRewards, Written
from posttrain.rollout.engines.protocol import RolloutEngine, SamplingParams, Session
from posttrain.rollout.episodes.episode import RunningEpisodes
from posttrain.rollout.episodes.writing import MakeEpisodes, given_rollout
from posttrain.rollout.feed.feed import Feed
from posttrain.rollout.feed.group import Group, Work
from posttrain.rollout.prompt_rows import PromptRow
from posttrain.rollout.rollout import DATASET, Request, Rollout

CONTINUE, FINISH, RESTART = "continue", "finish", "restart"
"""What a running completion does when new weights arrive: it continues with them, finishes with its own, or begins anew."""
RECOMPUTE, KEEP = "recompute", "keep"


class Weights(Protocol):
    """Where a worker gets the weights that its engine reads."""

    label: int  # of what the engine reads

    def next_label(self) -> int | None:
        """Of what waits to be loaded."""

    def load(self, label: int) -> None: ...


class TrainersOwn:
    """Weights that are read in place: nobody trains while a worker writes."""

    def __init__(self, state: Any) -> None:
        self.state = state

    @property
    def label(self) -> int:
        return self.state.global_step

    def next_label(self) -> None:
        return None

    def load(self, label: int) -> None:
        raise RuntimeError("The engine reads the trainer's weights in place: there is nothing to load.")


@dataclass(frozen=True)
class Writing:
    """What groups are made of, the same for all of them."""

    row_of: Callable[[int], PromptRow]
    params: SamplingParams
    episodes: MakeEpisodes
    author_of: Callable[[Request], str]
    generations: int
    rewards: RewardSet
    state: Any  # the trainer's: rewards are shown it as it is when a group begins
    release: Callable[[list[Any]], None] = lambda environments: None


@dataclass
class _Open:
    """A group that is being written or judged."""

    work: Work
    pending: PendingRewards
    judged: RewardRound
    began: float
    missing: int  # samples that are being written
    written: float = 0.0


class RolloutWorker:
    """Runs one engine. `run` returns when the feed is stopped."""

    def __init__(
        self,
        name: str,
        engine: RolloutEngine,
        weights: Weights,
        writing: Writing,
        feed: Feed,
        in_flight: str = CONTINUE,
        keeps_cache: bool = False,
    ) -> None:
        self.name, self.engine, self.weights, self.writing, self.feed = name, engine, weights, writing, feed
        self.in_flight, self.keeps_cache = in_flight, keeps_cache
        self._open: dict[int, _Open] = {}

    def run(self) -> None:
        """What goes wrong here is raised where the trainer waits for a window."""
        try:
            while not self.feed.stopped:
                self._load_while_idle()
                self._begin_all(None)
                if self._open:
                    self._write()
                else:
                    self.feed.wait()
        except BaseException as error:
            self.feed.stop(error)
            self.feed.give_back(self.name)

    def _write(self) -> None:
        """One session, until there is nothing left to do: memory for keys and values is given back then."""
        self.engine.load_weights(None, self.weights.label)
        self.engine.wake()
        try:
            with self.engine.session(self.writing.params) as session:
                running = RunningEpisodes(session)
                for opened in self._open.values():
                    self._join(running, opened)
                while self._open and not self.feed.stopped:
                    if self.in_flight == RESTART and self.weights.next_label() is not None:
                        return self._abandon()
                    self._change_weights(session)
                    self._begin_all(running)
                    if running:
                        running.advance()
                    self._hand_over()
        finally:
            self.engine.sleep()

    # ---- groups ------------------------------------------------------------------------------------------------------

    def _begin_all(self, running: RunningEpisodes | None) -> None:
        if self._is_waiting_to_change:
            return
        for work in self.feed.pull(self.name, self.weights.label):
            opened = self._opened(work)
            self._open[work.number] = opened
            if running is not None:
                self._join(running, opened)

    def _opened(self, work: Work) -> _Open:
        faults.fault_point("generate")
        requests = [Request(work.row, work.prompt, sample) for sample in range(self.writing.generations)]
        judged = self.writing.rewards.open(copy.copy(self.writing.state))
        pending = PendingRewards(requests)
        pending.reward_round = judged
        return _Open(work, pending, judged, time.perf_counter(), len(requests))

    def _join(self, running: RunningEpisodes, opened: _Open) -> None:
        writing, requests = self.writing, opened.pending.requests
        row = writing.row_of(opened.work.row)
        asked = []
        for index, request in enumerate(requests):
            if writing.author_of(request) == DATASET:
                self._on_finished(opened, index, given_rollout(row, request))
            else:
                asked.append(index)
        episodes = writing.episodes([row] * len(asked), [requests[index] for index in asked], writing.params)
        for index, episode in zip(asked, episodes):
            running.add(episode, functools.partial(self._on_finished, opened, index))

    def _on_finished(self, opened: _Open, index: int, rollout: Rollout) -> None:
        opened.pending.on_finished(index, rollout)
        opened.missing -= 1
        opened.written = time.perf_counter()

    def _hand_over(self) -> None:
        """Groups that are written and judged."""
        for opened in [one for one in self._open.values() if not one.missing and one.judged.is_judged]:
            del self._open[opened.work.number]
            self.feed.finish(self._group(opened))

    def _group(self, opened: _Open) -> Group:
        pending, names = opened.pending, self.writing.rewards.names
        with opened.judged as judged:
            results = judged.finish(may_stop=False)
        rollouts = pending.with_rewards(results, names)
        self.writing.release([rollout.environment for rollout in rollouts if rollout.environment is not None])
        seconds = {"generate": opened.written - opened.began, "reward_wait": time.perf_counter() - opened.written}
        versions = [rollout.sample.policy_version for rollout in rollouts if not rollout.is_given]
        written = Written(rollouts, pending.values(results), results, seconds)
        label = min(versions, default=self.weights.label)
        return Group(opened.work.number, opened.work.attempt, label, written, sum(seconds.values()))

    def _abandon(self) -> None:
        """Everything that is open is issued again."""
        for opened in self._open.values():
            with opened.judged:  # calls that still run are given up
                pass
            begun = (rollout for rollout in opened.pending.rollouts if rollout is not None)
            self.writing.release([rollout.environment for rollout in begun if rollout.environment is not None])
        self._open.clear()
        self.feed.give_back(self.name)

    # ---- weights -----------------------------------------------------------------------------------------------------

    @property
    def _is_waiting_to_change(self) -> bool:
        """Nothing begins with weights that are about to go, where running completions keep theirs."""
        if self.in_flight == CONTINUE:
            return False
        return self.weights.next_label() is not None and self.feed.is_done_with(self.weights.label)

    def _load_while_idle(self) -> None:
        label = self.weights.next_label()
        if label is not None and self.feed.is_done_with(self.weights.label):
            self.weights.load(label)

    def _change_weights(self, session: Session) -> None:
        if self.in_flight != CONTINUE or (label := self.weights.next_label()) is None:
            return
        session.change_weights(lambda: self.weights.load(label), label, self.keeps_cache)
