"""The fate of prompt numbers: one each, whatever order results, deaths and deadlines come in."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from posttrain.rollout.feed.ledger import FINISHED, ISSUED, LATE, PLANNED, TAKEN, Ledger


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
    @rule(data=st.data(), worker=st.sampled_from("ab"), seconds=st.integers(1, 9))
    def issue(self, data, worker, seconds):
        number = data.draw(st.sampled_from(self.ledger.numbers(PLANNED)))
        self.attempts.append((number, self.ledger.issue(number, worker, 0, now=0, seconds=seconds)))
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

    @rule(now=st.integers(0, 9))
    def deadline(self, now):
        for number in self.ledger.overdue(now):
            self.ledger.give_back(number, self.ledger.live[number].attempt)
        assert self.ledger.overdue(now) == []

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


TestFates = Fates.TestCase
TestFates.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


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


def test_progress_puts_a_deadline_off_and_an_older_lease_does_not():
    ledger = Ledger()
    number = ledger.begin(0)
    first = ledger.issue(number, "a", 0, now=0.0, seconds=5.0)
    ledger.extend(number, first, until=9.0)
    assert ledger.overdue(8.0) == []
    assert ledger.overdue(9.0) == [number]
    ledger.give_back(number, first)
    ledger.issue(number, "b", 1, now=9.0, seconds=5.0)
    ledger.extend(number, first, until=99.0)
    assert ledger.overdue(14.0) == [number]
