"""Judge: written groups get their rewards, and go to the feed."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from posttrain.rewards.reward_set import RewardRound, RewardSet
from posttrain.rollout.collector import PendingRewards, Written
from posttrain.rollout.feed.group import Group, Work
from posttrain.rollout.rollout import Rollout


@dataclass
class _Judged:
    work: Work
    pending: PendingRewards
    round: RewardRound
    seconds: float  # that it took to write
    since: float = field(default_factory=time.perf_counter)


class Judge:
    """Rewards run where they always do; nothing waits for them here."""

    def __init__(
        self,
        rewards: RewardSet,
        state: Any,
        finish: Callable[[Group], Any],
        release: Callable[[list[Any]], None] = lambda environments: None,
    ) -> None:
        """`state`: the trainer's, which rewards are shown as it is when a group is written."""
        self.rewards, self.state, self.finish, self.release = rewards, state, finish, release
        self._open: list[_Judged] = []
        self._lock = threading.Lock()

    def add(self, work: Work, rollouts: list[Rollout], seconds: float) -> None:
        if not work.counts:
            return self._release(rollouts)
        pending = PendingRewards([rollout.request for rollout in rollouts])
        pending.reward_round = judged = self.rewards.open(copy.copy(self.state))
        for index, rollout in enumerate(rollouts):
            pending.on_finished(index, rollout)
        with self._lock:
            self._open.append(_Judged(work, pending, judged, seconds))

    def poll(self) -> bool:
        """Hand over what is judged; whether something is left."""
        with self._lock:
            done = [one for one in self._open if one.round.is_judged]
            self._open = [one for one in self._open if one not in done]
            is_left = bool(self._open)
        for one in done:
            self.finish(self._group(one))
        return is_left

    def _group(self, one: _Judged) -> Group:
        with one.round as judged:
            results = judged.finish(may_stop=False)
        rollouts = one.pending.with_rewards(results, self.rewards.names)
        self._release(rollouts)
        seconds = {"generate": one.seconds, "reward_wait": time.perf_counter() - one.since}
        labels = [rollout.sample.policy_version for rollout in rollouts if not rollout.is_given]
        written = Written(rollouts, one.pending.values(results), results, seconds)
        label = min(labels, default=one.work.label)
        return Group(one.work.number, one.work.attempt, label, written, sum(seconds.values()))

    def _release(self, rollouts: list[Rollout]) -> None:
        self.release([rollout.environment for rollout in rollouts if rollout.environment is not None])
