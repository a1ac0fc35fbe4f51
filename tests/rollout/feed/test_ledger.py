"""The fate of prompt numbers: one each, whatever order results and deaths come in."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from posttrain.rollout.feed.feed import Feed
from posttrain.rollout.feed.group import Group, Work
from posttrain.rollout.feed.ledger import FINISHED, ISSUED, LATE, PLANNED, TAKEN, Ledger
from posttrain.rollout.feed.pacing import DROP, FIRST_FINISHED, IN_ORDER, WAIT, WINDOW, Lead, Pace


class Fates(RuleBasedStateMachine):
    """Beside a ledger, a plain list of what was done; results of any attempt arrive at any time, also twice."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.attempts: list[tuple[int, int]] = []  # every lease that was ever given
        self.settled: dict[int, str] = {}
        self.used: set[int] = set()

    @rule(label=st.integers(0, 9))
    def begin(self, label):
        assert self.ledger.begin(label) == self.ledger.begun - 1

    @precondition(lambda self: self.ledger.numbers(PLANNED))
    @rule(data=st.data(), worker=st.sampled_from("ab"))
    def issue(self, data, worker):
        number = data.draw(st.sampled_from(self.ledger.numbers(PLANNED)))
        self.attempts.append((number, self.ledger.issue(number, worker, 0)))
        assert len(set(self.attempts)) == len(self.attempts)

    @precondition(lambda self: self.attempts)
    @rule(data=st.data())
    def result(self, data):
        number, attempt = data.draw(st.sampled_from(self.attempts))
        late = self.ledger.totals[LATE]
        accepted = self.ledger.finish(number, attempt, "digest")
        assert accepted or self.ledger.totals[LATE] == late + 1
        assert not (accepted and number in self.used)
        self.used |= {number} if accepted else set()

    @rule(worker=st.sampled_from("ab"))
    def death(self, worker):
        for number in self.ledger.held_by(worker):
            assert self.ledger.give_back(number, self.ledger.live[number].attempt)
        assert self.ledger.held_by(worker) == []

    @precondition(lambda self: self.ledger.numbers(FINISHED))
    @rule(data=st.data())
    def take(self, data):
        numbers = data.draw(st.lists(st.sampled_from(self.ledger.numbers(FINISHED)), unique=True, min_size=1))
        self.ledger.take(numbers)
        self._settle(dict.fromkeys(numbers, TAKEN))

    @precondition(lambda self: self.ledger.live)
    @rule(data=st.data())
    def drop(self, data):
        number = data.draw(st.sampled_from(sorted(self.ledger.live)))
        self.ledger.drop(number, "stale")
        self._settle({number: "stale"})

    @rule()
    def restart(self):
        """Of the process that has the ledger: leases end, nothing else changes."""
        before, self.ledger = self.ledger, Ledger()
        self.ledger.load_state(before.state())
        assert sorted(self.ledger.live) == sorted(before.live)
        assert self.ledger.numbers(ISSUED) == []
        assert self.ledger.numbers(FINISHED) == before.numbers(FINISHED)

    def _settle(self, fates):
        assert not fates.keys() & self.settled.keys()
        self.settled |= fates

    @invariant()
    def every_number_is_somewhere_once(self):
        assert sorted([*self.ledger.live, *self.settled]) == list(range(self.ledger.begun))
        assert self.ledger.totals[TAKEN] + self.ledger.dropped == len(self.settled)
        places = [self.ledger.live[number].place for number in self.ledger.numbers(FINISHED)]
        assert len(set(places)) == len(places)


class Orders(RuleBasedStateMachine):
    """The feed, with ledger and pacing: results come in any order, twice, too late, or for numbers that nobody was given."""

    @initialize(
        order=st.sampled_from([IN_ORDER, WINDOW, FIRST_FINISHED]),
        on_stale=st.sampled_from([WAIT, DROP]),
        steps=st.integers(1, 2),
        lead=st.integers(0, 2),
        spare=st.integers(0, 2),
    )
    def begin(self, order, on_stale, steps, lead, spare):
        bound = lead * steps + steps - 1 + spare
        pace = Pace(2, steps, bound, order, WAIT if order == IN_ORDER else on_stale)
        self.feed = Feed(pace, Lead(float(lead), pace.most_lead, adapts=False), lambda n: (n, 0), None)
        self.given: list[Work] = []
        self.taken: list[int] = []
        self.accepted: set[int] = set()

    @rule(worker=st.sampled_from("abc"), behind=st.integers(0, 2), most=st.integers(1, 4))
    def pull(self, worker, behind, most):
        found = self.feed.pull(worker, max(self.feed.published - behind * self.feed.pace.steps, 0), most)
        assert not [work for work in found if not work.counts and work.number not in self.accepted]
        found = [work for work in found if work.counts]
        assert not {work.number for work in found} & {*self.taken}
        self.given += found

    @precondition(lambda self: self.given)
    @rule(data=st.data())
    def result(self, data):
        work = data.draw(st.sampled_from(self.given))
        is_new = self.feed.finish(Group(work.number, work.attempt, work.label, None))
        assert not (is_new and work.number in self.accepted)
        self.accepted |= {work.number} if is_new else set()

    @rule(number=st.integers(0, 99), attempt=st.integers(1, 5))
    def stray(self, number, attempt):
        if (number, attempt) not in {(work.number, work.attempt) for work in self.given}:
            late = self.feed.ledger.totals[LATE]
            assert not self.feed.finish(Group(number, attempt, 0, None))
            assert self.feed.ledger.totals[LATE] == late + 1

    @rule(worker=st.sampled_from("abc"))
    def death(self, worker):
        self.feed.give_back(worker)

    @precondition(lambda self: self.feed.pace.order != IN_ORDER)
    @rule(share=st.floats(0, 1))
    def another_lead(self, share):
        self.feed.lead.value = share * self.feed.lead.most

    @precondition(lambda self: self.feed.windows == self.feed.step // self.feed.pace.steps)
    @rule()
    def window(self):
        if not self.feed.has_window():
            return
        pace, first = self.feed.pace, self.feed.windows * self.feed.pace.steps
        found = self.feed.next_window()
        assert len(found) == pace.groups
        for group in found:
            assert group.number not in self.taken
            assert group.number in self.accepted
            assert first + pace.steps - 1 - group.label <= pace.max_staleness
        self.taken += [group.number for group in found]

    @precondition(lambda self: self.feed.windows > self.feed.step // self.feed.pace.steps)
    @rule()
    def step(self):
        self.feed.trained(self.feed.step + 1)

    @invariant()
    def every_number_is_somewhere_once(self):
        if not hasattr(self, "feed"):
            return
        ledger = self.feed.ledger
        assert ledger.totals[TAKEN] == len(self.taken)
        assert ledger.begun == len(ledger.live) + len(self.taken) + ledger.dropped
        assert sorted(self.feed.groups) == sorted(ledger.numbers(FINISHED))


@pytest.mark.parametrize("machine", [Fates, Orders])
@pytest.mark.parametrize("runs", [pytest.param(60, id="short"), pytest.param(2000, id="long", marks=pytest.mark.trust)])
def test_every_number_has_one_fate(machine, runs):
    run_state_machine_as_test(machine, settings=settings(max_examples=runs, stateful_step_count=40, deadline=None))


@pytest.mark.parametrize(
    "orders", [pytest.param(300, id="short"), pytest.param(10_000, id="long", marks=pytest.mark.trust)]
)
def test_results_in_any_order_count_once(orders):
    """Twice, of an attempt before the last, and for numbers that were never begun: 0 are used that should not be."""
    for seed in range(orders):
        rng, ledger, seen, used = random.Random(seed), Ledger(), [], Counter()
        for _ in range(rng.randint(5, 40)):
            kind = rng.choice(["begin", "issue", "issue", "back", "result", "result", "result", "never"])
            planned, issued = ledger.numbers(PLANNED), ledger.numbers(ISSUED)
            if kind == "begin":
                ledger.begin(0)
            elif kind == "issue" and planned:
                number = rng.choice(planned)
                seen.append((number, ledger.issue(number, "a", 0)))
            elif kind == "back" and issued:
                number = rng.choice(issued)
                ledger.give_back(number, ledger.live[number].attempt)
            elif kind == "result" and seen:
                number, attempt = rng.choice(seen)
                is_last = attempt == max(other for one, other in seen if one == number)
                accepted = ledger.finish(number, attempt, "")
                assert not accepted or (is_last and not used[number])
                used[number] += accepted
            elif kind == "never":
                assert not ledger.finish(ledger.begun + rng.randrange(3), rng.randint(0, 3), "")
        assert sum(used.values()) == len(ledger.numbers(FINISHED))


def test_what_has_its_fate_keeps_it():
    ledger = Ledger()
    number = ledger.begin(0)
    with pytest.raises(ValueError, match="Prompt 0 is planned, not finished"):
        ledger.take([number])
    attempt = ledger.issue(number, "a", 3)
    with pytest.raises(ValueError, match="Prompt 0 is issued, not planned"):
        ledger.issue(number, "b", 3)
    assert ledger.finish(number, attempt, "x")
    ledger.take([number])
    assert not ledger.finish(number, attempt, "x")
    with pytest.raises(ValueError, match="Prompt 0 has its fate already"):
        ledger.drop(number, "stale")


def test_a_checkpoint_of_an_older_version_is_read():
    """It has a field more: leases had deadlines."""
    ledger, state = Ledger(), Ledger().state()
    old = {"fate": ISSUED, "label": 3, "attempt": 1, "worker": "a", "until": 9.0, "since": 1.0, "place": -1}
    ledger.load_state({**state, "begun": 1, "live": {0: old}})
    assert (ledger.live[0].fate, ledger.live[0].label, ledger.live[0].attempt) == (PLANNED, 3, 1)
