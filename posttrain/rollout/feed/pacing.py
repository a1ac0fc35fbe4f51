"""How many groups may begin, which finished ones make the next window, and how far ahead of training to be. Pure functions.

A window is what one generation feeds: `groups` groups, `steps` optimizer steps. Window w begins at step w * steps, and the label of
weights is the number of steps that made them. The age of a token is the step that trains on it less the label that wrote it; of the
last step of window w it is w * steps + steps - 1 - label. No trained token is older than `max_staleness`: that is not left to how
many were begun, since a slow group is overtaken, but enforced where windows are taken (`next_window`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from posttrain.rollout.feed.ledger import FINISHED, Entry

IN_ORDER, WINDOW, FIRST_FINISHED = "in_order", "window", "first_finished"
WAIT, MASK, DROP = "wait", "mask", "drop"
WAITS_TOO_MUCH, WAITS_HARDLY = 0.05, 0.01  # shares of a step
UP, DOWN, HARDLY_IN_A_ROW = 0.25, 0.125, 4


@dataclass(frozen=True)
class Pace:
    """What was asked for."""

    groups: int  # of a window
    steps: int = 1  # optimizer steps of a window
    max_staleness: int = 4
    order: str = WINDOW
    on_stale: str = WAIT
    sync_steps: int = 1  # steps from one export of the weights to the next
    most_waiting: int | None = None  # finished groups, above which none begins. None: any number
    most_in_flight: int | None = None  # groups that are being written

    @property
    def most_lead(self) -> int:
        """With more windows ahead, some group would pass the bound whatever is taken first."""
        return max((self.max_staleness - (self.steps - 1) - (self.sync_steps - 1)) // self.steps, 0)

    def check(self, lead: float) -> None:
        if lead <= self.most_lead or self.on_stale != WAIT:
            return
        ahead = math.ceil(lead) * self.steps + self.steps - 1 + self.sync_steps - 1
        raise ValueError(
            f"`async_lead` is {lead:g} and `max_staleness` {self.max_staleness}: with {self.steps} optimizer steps a generation "
            f"and weights sent every {self.sync_steps} steps, a token would be {math.ceil(lead)} x {self.steps} + "
            f"{self.steps - 1} + {self.sync_steps - 1} = {ahead} steps old when it is trained on. Raise `max_staleness`, or lower "
            "the others."
        )

    def last_window(self, label: int) -> int:
        """The last window whose steps all may train on a group that was begun with `label`."""
        return (label + self.max_staleness - self.steps + 1) // self.steps


def may_begin(pace: Pace, begun: int, dropped: int, trained: int, lead: float) -> int:
    """How many groups may begin after `trained` windows: (1 + lead) more windows of them, and as many as were dropped."""
    return max(math.floor((trained + 1 + lead) * pace.groups) + dropped - begun, 0)


def fair_share(unfinished: int, held: int, workers: int) -> int:
    """How many more of the `unfinished` groups, issued or waiting, a worker that holds `held` of them may take: equal parts, so
    that the first to ask does not leave the others without work."""
    return max(math.ceil(unfinished / workers) - held, 0)


@dataclass(frozen=True)
class Choice:
    """The numbers of the next window, in their order, or what it waits for."""

    numbers: tuple[int, ...] = ()
    waits_for: tuple[int, ...] = ()


def next_window(
    pace: Pace, live: Mapping[int, Entry], window: int, lead: float = 0.0, wanted: int | None = None
) -> Choice:
    """Which groups make window number `window`, or which `wanted` ones are added to it; `live` are all that are open."""
    oldest, wanted = sorted(live), pace.groups if wanted is None else wanted
    if pace.order == IN_ORDER:
        return _whole(oldest[:wanted], live, wanted)
    within = oldest
    if pace.order == WINDOW:
        within = oldest[: pace.groups + math.floor(max(pace.most_lead - lead, 0) * pace.groups)]
    finished = sorted((n for n in within if live[n].fate == FINISHED), key=lambda n: live[n].place)
    chosen: list[int] = []
    if pace.on_stale == WAIT:
        chosen, missing = _urgent(pace, live, window, set(within))
        if missing:
            return Choice(waits_for=tuple(missing))
    chosen = [*chosen, *(number for number in finished if number not in set(chosen))][:wanted]
    if len(chosen) < wanted:
        return Choice(waits_for=tuple(number for number in within if live[number].fate != FINISHED))
    return Choice(tuple(sorted(chosen)))


def _whole(numbers: list[int], live: Mapping[int, Entry], wanted: int) -> Choice:
    missing = tuple(number for number in numbers if live[number].fate != FINISHED)
    return Choice(waits_for=missing) if missing or len(numbers) < wanted else Choice(tuple(numbers))


def _urgent(pace: Pace, live: Mapping[int, Entry], window: int, within: set[int]) -> tuple[list[int], list[int]]:
    """Finished groups without which a later window would be too late for some, and those one of which is waited for.

    Windows after this one, up to window D, have room for (D - window) * groups of those that are due by D; the rest must come now.
    Groups that this window looks at come first, and of those the finished ones: an unfinished one is waited for only if there is
    no way around it.
    """
    by_need = sorted(live, key=lambda n: (n not in within, live[n].fate != FINISHED, live[n].place, n))
    due = {number: max(pace.last_window(live[number].label), window) for number in by_need}
    chosen: list[int] = []
    for last in sorted(set(due.values())):
        until = [number for number in by_need if due[number] <= last]
        surplus = len(until) - (last - window) * pace.groups - len(chosen)
        more = [number for number in until if number not in chosen][: max(surplus, 0)]
        if missing := [number for number in more if live[number].fate != FINISHED]:
            return chosen, sorted(n for n in until if live[n].fate != FINISHED and (n in within or n in missing))
        chosen += more
    return chosen, []


@dataclass
class Lead:
    """Windows by which groups are begun ahead of training: fixed, or as small as a trainer that does not wait allows."""

    value: float
    most: float
    adapts: bool
    hardly: int = 0  # steps in a row in which the trainer hardly waited

    def after_window(self, waited: float) -> None:
        """`waited`: the share of the last window's time that the trainer spent waiting for rollouts."""
        if not self.adapts:
            return
        self.hardly = self.hardly + 1 if waited < WAITS_HARDLY else 0
        if waited > WAITS_TOO_MUCH:
            self.value = min(self.value + UP, self.most)
        elif self.hardly >= HARDLY_IN_A_ROW:
            self.value, self.hardly = max(self.value - DOWN, 0.0), 0
