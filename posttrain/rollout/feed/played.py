"""AskedHere: environments live where episodes are played, and so do their rewards: the trainer gets what they said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from posttrain.rewards.runtime.invoke import is_async
from posttrain.rollout.episodes.call_threads import CallThreads, Pending
from posttrain.rollout.episodes.environment import GET_REWARD, Environments, PlayedElsewhere, name_of_class
from posttrain.rollout.episodes.tools import describe_error
from posttrain.rollout.feed.group import Work
from posttrain.rollout.rollout import Rollout

Deliver = Callable[[Work, list[Rollout], float], None]


class AskedHere:
    """Hands groups over once their environments have said their rewards; meanwhile others are written."""

    def __init__(self, environments: Environments, timeout: float | None, deliver: Deliver) -> None:
        """`timeout`: seconds that a reward may take."""
        self.environments, self.timeout, self.deliver = environments, timeout, deliver
        self.threads = CallThreads()
        self._open: list[tuple[Work, list[Rollout], float, list[Pending | None]]] = []

    def add(self, work: Work, rollouts: list[Rollout], seconds: float) -> None:
        self._open.append((work, rollouts, seconds, [self._asked(rollout, work.counts) for rollout in rollouts]))

    def _asked(self, rollout: Rollout, counts: bool) -> Pending | None:
        """What takes part in nothing is not asked."""
        takes_part = counts and not rollout.masked
        ask = getattr(rollout.environment, GET_REWARD, None)
        return self.threads.start(ask, self.timeout, is_async(ask)) if ask is not None and takes_part else None

    def poll(self) -> bool:
        """Hand over what is complete; whether something is left."""
        for one in [*self._open]:
            work, rollouts, seconds, calls = one
            if all(call is None or self.threads.is_over(call) for call in calls):
                self._open.remove(one)
                self._leave(rollouts, calls)
                self.deliver(work, rollouts, seconds)
        return bool(self._open)

    def _leave(self, rollouts: list[Rollout], calls: list[Pending | None]) -> None:
        """An instance in which a call still runs serves no other episode."""
        played = [(rollout, call) for rollout, call in zip(rollouts, calls) if rollout.environment is not None]
        self.environments.give_back([rollout.environment for rollout, call in played if call is None or not call.hangs])
        for rollout, call in played:
            rollout.environment = said_by(rollout.environment, call)


def said_by(environment: Any, call: Pending | None) -> PlayedElsewhere:
    name = name_of_class(type(environment))
    if call is None:
        return PlayedElsewhere(name)
    if call.error is not None:
        return PlayedElsewhere(name, error=describe_error(call.error))
    try:
        return PlayedElsewhere(name, None if call.result is None else float(call.result))
    except (TypeError, ValueError):
        return PlayedElsewhere(name, error=f"`get_reward` returned {call.result!r:.100}, which is no number.")
