"""What may begin and what is next: the bound on age holds for every schedule, and nobody waits for ever."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.rollout.feed.ledger import ISSUED, PLANNED, Ledger
from posttrain.rollout.feed.pacing import (
    DROP,
    FIRST_FINISHED,
    IN_ORDER,
    MASK,
    WAIT,
    WINDOW,
    Lead,
    Pace,
    may_begin,
    next_window,
)

ORDERS, STALE = (IN_ORDER, WINDOW, FIRST_FINISHED), (WAIT, MASK, DROP)


def simulate(
    pace: Pace,
    lead: float,
    windows: int,
    rng: random.Random,
    slots: int = 10**6,
    deaths: float = 0.0,
    lead_changes: bool = False,
):
    """A run by events: a group takes a log-normal time, a window a fixed one. Yields (window, numbers, their labels).

    Time passes in ticks; in each, some finish, some die with their worker, and the trainer takes a window when it may.
    """
    ledger, label, trained, busy_until, now = Ledger(), 0, 0, 0.0, 0.0
    ends: dict[int, float] = {}
    training = False
    lead = Lead(lead, pace.most_lead, adapts=False)
    for _ in range(100_000):
        if training and now >= busy_until:
            training, trained = False, trained + 1
            step = trained * pace.steps
            label = step - step % pace.sync_steps
            if trained == windows:
                return
            if lead_changes:
                lead.value = rng.uniform(0, lead.most)
        for _ in range(may_begin(pace, ledger.begun, ledger.dropped, trained, lead.value)):
            ledger.begin(label)
        for number in sorted(ledger.numbers(PLANNED))[: max(slots - len(ledger.numbers(ISSUED)), 0)]:
            ledger.issue(number, "w", label)
            ends[number] = now + rng.lognormvariate(0, 1.2)
        for number in ledger.numbers(ISSUED):
            attempt = ledger.live[number].attempt
            if rng.random() < deaths:
                ledger.give_back(number, attempt)
            elif ends[number] <= now:
                ledger.finish(number, attempt, "")
        if pace.on_stale == DROP:
            for number, entry in list(ledger.live.items()):
                if pace.last_window(entry.label) < trained:
                    ledger.drop(number, "stale")
        if not training:
            choice = next_window(pace, ledger.live, trained, lead.value)
            # What was dropped just now is replaced in the next tick: there may be too few to take, and nothing to wait for.
            assert bool(choice.numbers) != bool(choice.waits_for) or len(ledger.live) < pace.groups
            if choice.numbers:
                labels = [ledger.live[number].label for number in choice.numbers]
                ledger.take(choice.numbers)
                yield trained, choice.numbers, labels
                training, busy_until = True, now + rng.uniform(0.1, 1.0)
        now += 0.1
    raise AssertionError(f"window {trained} was never taken: {ledger.live}")


SCHEDULES = given(
    st.integers(0, 10**9),
    st.integers(1, 6),
    st.integers(1, 3),
    st.sampled_from(ORDERS),
    st.sampled_from(STALE),
    st.integers(1, 3),
    st.floats(0, 3),
    st.sampled_from([0.0, 0.02]),
    st.sampled_from([3, 10**6]),
    st.booleans(),
)


def test_what_is_dropped_when_all_others_are_finished_is_replaced():
    assert_bounded(292, 2, 2, "first_finished", "drop", 2, 2.5, 0.02, 10**6, True)


@pytest.mark.parametrize(
    "schedules", [pytest.param(100, id="short"), pytest.param(1000, id="long", marks=pytest.mark.trust)]
)
def test_no_window_is_older_than_the_bound_and_every_number_is_taken_once(schedules):
    settings(max_examples=schedules, deadline=None)(SCHEDULES(assert_bounded))()


def assert_bounded(seed, groups, steps, order, on_stale, sync_steps, lead, deaths, slots, lead_changes):
    staleness = math.ceil(lead) * steps + steps - 1 + sync_steps - 1 + seed % 3
    pace = Pace(groups, steps, staleness, order, on_stale, sync_steps)
    lead = min(lead, pace.most_lead)
    pace.check(lead)
    seen: list[int] = []
    changes = lead_changes and order != IN_ORDER
    for window, numbers, labels in simulate(pace, lead, 12, random.Random(seed), slots, deaths, changes):
        assert len(numbers) == groups
        seen += numbers
        ages = [window * steps + steps - 1 - label for label in labels]
        assert min(labels) >= 0
        if on_stale != MASK:
            assert max(ages) <= staleness
    assert len(set(seen)) == len(seen) == 12 * groups


@pytest.mark.parametrize("lead", [0, 1, 2, 4])
def test_in_order_a_window_is_the_next_numbers_begun_a_lead_ahead(lead):
    pace = Pace(4, 1, max_staleness=4, order=IN_ORDER)
    for window, numbers, labels in simulate(pace, lead, 20, random.Random(lead)):
        assert numbers == tuple(range(4 * window, 4 * window + 4))
        assert set(labels) == {max(window - lead, 0)}


def test_what_begins():
    pace = Pace(8)
    assert may_begin(pace, begun=0, dropped=0, trained=0, lead=0) == 8
    assert may_begin(pace, begun=8, dropped=0, trained=0, lead=0) == 0
    assert may_begin(pace, begun=8, dropped=0, trained=1, lead=0) == 8
    assert may_begin(pace, begun=0, dropped=0, trained=0, lead=1.5) == 20
    assert may_begin(pace, begun=20, dropped=3, trained=0, lead=1.5) == 3
    assert may_begin(pace, begun=20, dropped=0, trained=0, lead=0.5) == 0, "a lead that fell throws nothing away"


def finished(ledger: Ledger, number: int) -> None:
    ledger.finish(number, ledger.live[number].attempt, "")


def test_a_group_that_is_due_is_waited_for_although_others_are_finished():
    pace, ledger = Pace(2, max_staleness=2, order=FIRST_FINISHED), Ledger()
    for number in range(6):
        ledger.begin(0)
        ledger.issue(number, "w", 0)
    for number in (5, 4, 3, 2):
        finished(ledger, number)
    assert next_window(pace, ledger.live, 0).numbers == (4, 5)
    ledger.take((4, 5))
    assert next_window(pace, ledger.live, 1).numbers == (2, 3)
    ledger.take((2, 3))
    assert next_window(pace, ledger.live, 2).waits_for == (0, 1), "in window 3 they would be 3 steps old"
    masking = Pace(2, max_staleness=2, order=FIRST_FINISHED, on_stale=MASK)
    for number in range(6, 8):
        ledger.begin(2)
        ledger.issue(number, "w", 2)
        finished(ledger, number)
    assert next_window(masking, ledger.live, 2).numbers == (6, 7)
    assert next_window(pace, ledger.live, 2).waits_for == (0, 1)


def test_a_window_looks_no_further_than_it_is_wide():
    ledger = Ledger()
    for number in range(8):
        ledger.begin(0)
        ledger.issue(number, "w", 0)
    for number in (7, 6, 3):
        finished(ledger, number)
    narrow = Pace(2, max_staleness=3, order=WINDOW)
    assert next_window(narrow, ledger.live, 0, lead=2).waits_for == (0, 1, 2), "two windows wide: numbers 0 to 3"
    assert next_window(narrow, ledger.live, 0, lead=0).numbers == (6, 7), "four windows wide: all"


def test_a_lead_that_cannot_keep_the_bound_is_refused_with_the_sum():
    with pytest.raises(ValueError, match=r"2 x 2 \+ 1 \+ 0 = 5 steps old"):
        Pace(4, steps=2, max_staleness=4).check(2)
    Pace(4, steps=2, max_staleness=5).check(2)
    Pace(4, steps=2, max_staleness=4, on_stale=DROP).check(2)


def test_the_lead_rises_while_the_trainer_waits_and_falls_when_it_does_not():
    lead = Lead(0.0, 2.0, adapts=True)
    for waited, value in [(0.5, 0.25), (0.5, 0.5), (0.03, 0.5), (0.0, 0.5), (0.0, 0.5), (0.0, 0.5), (0.0, 0.375)]:
        lead.after_window(waited)
        assert lead.value == value
    for _ in range(20):
        lead.after_window(0.9)
    assert lead.value == 2.0
    fixed = Lead(1.0, 2.0, adapts=False)
    fixed.after_window(0.9)
    assert fixed.value == 1.0
