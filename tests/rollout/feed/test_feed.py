"""The feed by itself: who gets what, what it waits for, and what is left after a crash."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.core.sample import Sample
from posttrain.rewards.runtime.results import RewardFailure, RewardResults
from posttrain.rollout.collector import Written
from posttrain.rollout.feed.board import Board
from posttrain.rollout.feed.feed import GATHER_SECONDS, Feed
from posttrain.rollout.feed.group import Group, joined_groups
from posttrain.rollout.feed.journal import Journal
from posttrain.rollout.feed.ledger import LATE
from posttrain.rollout.feed.pacing import DROP, FIRST_FINISHED, IN_ORDER, Lead, Pace
from posttrain.rollout.prompt_rows import PromptRow
from posttrain.rollout.rollout import POLICY_LOGPS, SAMPLING_LOGPS, Request, Rollout, ToolCall

ROW = PromptRow(np.arange(4), [{"role": "user", "content": "a\ud800"}], {"answer": "4"}, 3)


def rollout(number: int, sample: int, label: int, **changes) -> Rollout:
    rng = np.random.default_rng([number, sample])
    size = int(rng.integers(1, 9))
    whole = Sample(np.arange(4), np.zeros(4), row=3, group=number, policy_version=label)
    columns = {SAMPLING_LOGPS: rng.normal(size=size).astype(np.float32), POLICY_LOGPS: np.zeros(size, np.float32)}
    whole = whole.append(rng.integers(0, 99, size), trained=True, **columns)
    said = [{"role": "assistant", "content": f"{number}/{sample} \udfff"}]
    given = {"seconds": {"decode": 0.5}, "rewards": {"r": float("nan")}, "extras": {"note": ["x", 1]}, **changes}
    return Rollout(Request(3, number, sample), ROW.prompt, said, whole, 4, columns=ROW.columns, **given)


def group(number: int, attempt: int = 1, label: int = 0, samples: int = 2) -> Group:
    calls = [ToolCall("add", "{}", "5", None, 0.25)]
    rollouts = [rollout(number, sample, label, tool_calls=calls) for sample in range(samples)]
    failure = RewardFailure(1, "r", "error", "it broke")
    values = np.array([[float(number)], [np.nan]])[:samples]
    results = RewardResults(
        values, np.array([False, True])[:samples], [failure], {"n": [1, None]}, {"m": [0.5]}, {"r": 0.1}
    )
    return Group(
        number, attempt, label, Written(rollouts, values.copy(), results, {"generate": 1.0, "reward_wait": 0.0}), 1.5
    )


def feed(pace: Pace | None = None, lead: float = 1.0, journal: Journal | None = None, **named) -> Feed:
    return Feed(pace or Pace(2), Lead(lead, 4, adapts=False), lambda n: (n, 3), lambda row: ROW, journal, **named)


def same(one: Group, other: Group) -> None:
    assert (one.number, one.attempt, one.label, one.seconds) == (
        other.number,
        other.attempt,
        other.label,
        other.seconds,
    )
    np.testing.assert_array_equal(one.written.values, other.written.values)
    np.testing.assert_array_equal(one.written.results.values, other.written.results.values)
    for name in ("failures", "extras", "metrics", "seconds"):
        assert getattr(one.written.results, name) == getattr(other.written.results, name)
    for left, right in zip(one.written.rollouts, other.written.rollouts, strict=True):
        for name in ("request", "prompt", "completion", "columns", "tool_calls", "extras", "finish_reason", "masked"):
            assert getattr(left, name) == getattr(right, name), name
        np.testing.assert_array_equal(left.sample.input_ids, right.sample.input_ids)
        assert left.sample.policy_version == right.sample.policy_version
        for name, column in left.sample.per_token.items():
            np.testing.assert_array_equal(column, right.sample.per_token[name])


def test_a_group_is_itself_after_a_journey():
    same(group(7, 3, 5), Group.from_bytes(group(7, 3, 5).to_bytes(), lambda row: ROW))


def test_groups_become_one_window():
    found = joined_groups([group(4), group(9)], waited=2.0)
    assert [rollout.request.number for rollout in found.rollouts] == [4, 4, 9, 9]
    assert found.results.failures[1].sample == 3
    assert found.seconds["generate"] == 2.0


# ---- who gets what -------------------------------------------------------------------------------------------------------


def test_what_begins_is_bounded_by_what_waits_and_by_what_is_in_flight():
    made = feed(Pace(2, most_waiting=3, most_in_flight=2))
    assert [work.number for work in made.pull("a", 0)] == [0, 1]
    assert made.pull("a", 0) == []
    assert made.finish(group(0))
    assert [work.number for work in made.pull("a", 0)] == [2]
    for number in (1, 2):
        made.finish(group(number))
    made.trained(1)
    assert [work.number for work in made.pull("a", 1)] == [3], "planned before three were waiting"
    assert made.pull("a", 1) == []
    assert [one.number for one in made.next_window()] == [0, 1]
    assert [work.number for work in made.pull("a", 1)] == [4]


def test_nothing_begins_with_weights_that_were_replaced():
    made = feed()
    made.trained(1)
    assert made.pull("a", 0) == []
    assert made.label_for(0) == 1
    assert made.label_for(1) is None
    assert len(made.pull("a", 1)) == 6


def test_in_order_each_block_is_for_the_weights_of_its_label():
    made = feed(Pace(2, order=IN_ORDER), lead=1)
    assert [work.number for work in made.pull("a", 0)] == [0, 1, 2, 3]
    made.trained(1)
    assert made.pull("a", 0) == []
    assert made.label_for(0) == 1
    assert [work.number for work in made.pull("b", 1)] == [4, 5]
    made.give_back("a")
    assert made.label_for(1) == 0, "what a dead worker held is written by its own label"
    assert made.oldest_label() == 0
    assert [work.attempt for work in made.pull("c", 0)] == [2] * 4


def test_whoever_asks_first_leaves_the_others_their_share():
    """Eight groups and three workers: the first got all of them, and two engines stood still."""
    now = [0.0]
    made = feed(Pace(4), lead=1.0, clock=lambda: now[0])
    made.expect(3)
    assert [work.number for work in made.pull("a", 0)] == [0, 1, 2]
    assert [work.number for work in made.pull("b", 0)] == [3, 4, 5]
    assert made.pull("a", 0) == []
    now[0] = GATHER_SECONDS + 1  # the third was never started: two share
    assert [work.number for work in made.pull("a", 0)] == [6]
    assert [work.number for work in made.pull("b", 0)] == [7]
    for number in (0, 1, 2, 6):
        made.finish(group(number))
    made.give_back("b")
    assert len(made.pull("a", 0)) == 4, "who is left writes everything"


@given(st.integers(1, 40), st.integers(1, 9))
def test_shares_are_equal_and_leave_nothing(groups, workers):
    made = feed(Pace(groups), lead=0.0)
    made.expect(workers)
    taken = [len(made.pull(str(worker), 0)) for worker in range(workers)]
    assert sum(taken) == groups
    assert max(taken) <= -(-groups // workers)


def test_a_result_that_comes_too_late_is_counted_and_not_used():
    made = feed()
    made.pull("a", 0)
    made.give_back("a")
    made.pull("b", 0)
    assert not made.finish(group(0, attempt=1))
    assert made.finish(group(0, attempt=2))
    assert not made.finish(group(0, attempt=2))
    assert made.ledger.totals[LATE] == 2


def test_what_is_too_old_is_dropped_and_something_else_begins():
    made = feed(Pace(2, max_staleness=1, order=FIRST_FINISHED, on_stale=DROP), lead=1)
    made.pull("a", 0)
    made.finish(group(2))
    made.finish(group(3))
    assert [one.number for one in made.next_window()] == [2, 3]
    made.trained(1)
    made.windows = 2  # two windows later
    assert made._drop_stale(2) == {0: "stale", 1: "stale"}
    made.trained(2)
    assert [work.number for work in made.pull("a", 2)] == list(range(4, 10))


def test_a_worker_waits_while_it_holds_nothing():
    now = [0.0]
    made = feed(Pace(2), lead=0.0, clock=lambda: now[0])

    def after(seconds, act):
        now[0] += seconds
        return act()

    after(5, lambda: made.pull("one", 0, 2))  # it was not there before
    after(1, lambda: made.pull("two", 0))  # nothing is left for it
    after(2, lambda: made.finish(group(0)))
    assert after(1, made.idle_seconds) == {"one": 0.0, "two": 3.0}
    after(1, lambda: made.finish(group(1)))  # "one" holds nothing any more
    made.pull("one", 0)
    made.next_window()
    after(4, lambda: made.trained(1))
    after(0, lambda: made.pull("two", 1, 1))
    assert after(2, made.idle_seconds) == {"one": 6.0, "two": 5.0}
    made.give_back("two")  # it ended
    assert after(1, made.idle_seconds) == {"one": 1.0}


def test_in_order_what_died_is_written_beside_what_it_was_written_beside():
    """Two windows are begun at once; when the worker dies the first has been taken, and one of the other two groups is finished."""
    made = feed(Pace(2, order=IN_ORDER), lead=1.0)
    assert [(work.number, work.counts) for work in made.pull("one", 0)] == [(n, True) for n in range(4)]
    for number in (0, 1, 3):
        assert made.finish(group(number))
    assert [one.number for one in made.next_window()] == [0, 1]
    assert made.oldest_needed() == 0
    made.give_back("one")
    again = made.pull("two", 0)
    assert [(work.number, work.counts) for work in again] == [(0, False), (1, False), (2, True), (3, False)]
    assert not made.finish(group(0, attempt=0))  # nobody hands it in; it would be refused
    assert made.finish(group(2, attempt=2))
    assert made.oldest_needed() == 4
    assert [one.number for one in made.next_window()] == [2, 3]


def test_both_sides_work_where_the_trainer_does_not_wait_and_somebody_writes():
    now = [0.0]
    made = feed(Pace(2), lead=1.0, clock=lambda: now[0])

    def at(seconds, act):
        now[0] = seconds
        return act()

    at(1, lambda: made.pull("one", 0, 3))
    at(5, lambda: made.finish(group(0)))
    at(6, lambda: made.finish(group(1)))
    at(7, made.next_window)  # the trainer trains, and prompt 2 is being written
    assert at(10, made.overlap_seconds) == 3.0
    assert at(12, lambda: made.finish(group(2)))  # nobody writes any more
    assert at(20, made.overlap_seconds) == 2.0
    assert (made.groups[2].finished_step, made.groups[2].finished_at) == (0, 12.0)
    at(21, lambda: made.pull("one", 0))
    at(22, lambda: made.give_back("one"))  # it ended
    assert at(30, made.overlap_seconds) == 1.0


def test_who_is_waited_for_in_vain_is_named():
    seconds = iter(np.arange(0, 10_000, 40.0))
    made = feed(patience=100.0, clock=lambda: float(next(seconds)))
    made.pull("worker-3", 0)
    with pytest.raises(TimeoutError, match=r"No group was finished for \d+ s .*prompt 0 by worker-3 for \d+ s"):
        made.next_window()


def test_an_error_reaches_whoever_waits():
    made = feed()
    threading.Timer(0.05, made.stop, [KeyError("mine")]).start()
    with pytest.raises(KeyError, match="mine"):
        made.next_window()


# ---- after a crash -------------------------------------------------------------------------------------------------------


def played(folder, windows: int, order: str = FIRST_FINISHED) -> tuple[Feed, list[list[int]], dict]:
    """A feed that has taken so many windows, last finished first, and its state after the first."""
    made, taken, state = feed(Pace(2, order=order), 2, Journal(folder)), [], {}
    for window in range(windows):
        for work in reversed(made.pull("a", window)):
            made.finish(group(work.number, work.attempt, window))
        taken.append([one.number for one in made.next_window()])
        made.trained(window + 1)
        state = state or made.state()
    return made, taken, state


def test_windows_are_taken_again_and_groups_that_are_finished_are_not_written_twice(tmp_path):
    before, taken, state = played(tmp_path, 4)
    again = feed(Pace(2, order=FIRST_FINISHED), 2, Journal(tmp_path))
    again.trained(1)
    again.load_state(state)
    assert again.pull("a", 1) == [], "nothing begins before the windows of then are taken"
    for window in range(1, 4):
        assert [one.number for one in again.next_window()] == taken[window]
        again.trained(window + 1)
    assert sorted(again.groups) == sorted(before.groups)
    assert {work.number for work in again.pull("a", 4)}.isdisjoint({*range(before.ledger.begun)} & {*again.groups})


@settings(max_examples=200)
@given(st.data())
def test_damage_is_noticed_and_no_group_is_lost_or_taken_twice(tmp_path_factory, data):
    """Bytes cut off, flipped or gone, anywhere in the journal: whatever cannot be trusted is written again. In order, what only
    weights of before the checkpoint could write is named, and nothing is waited for."""
    folder, order = tmp_path_factory.mktemp("journal"), data.draw(st.sampled_from([FIRST_FINISHED, IN_ORDER]))
    _, taken, state = played(folder, 3, order)
    (segment,) = (folder / "rollout_journal/process-0").glob("*.seg")
    starts = {start: number for number, (_, start) in Journal(folder).places.items()}
    content = bytearray(segment.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    kind = data.draw(st.sampled_from(["cut", "flip", "gone"]))
    if kind == "flip":
        content[place] ^= 1 << data.draw(st.integers(0, 7))
    segment.write_bytes(content[:place] if kind == "cut" else content)
    if kind == "gone":
        segment.unlink()
    journal = Journal(folder)
    again = feed(Pace(2, order=order), 2, journal)
    again.step = 1
    hit = max(start for start in starts if start <= place)
    lost = {
        number for start, number in starts.items() if kind == "gone" or start == hit or (kind == "cut" and start > hit)
    }
    if order == IN_ORDER and lost & {2, 3, 4, 5}:
        with pytest.raises(ValueError, match="has no readable group"):
            again.load_state(state)
        return
    again.load_state(state)
    whole = {one.number for one in again.groups.values()}
    assert not whole & lost
    seen = [*taken[0]]
    for window in range(1, 5):
        for work in [work for work in again.pull("a", window) if work.counts]:
            assert work.number not in whole
            again.finish(group(work.number, work.attempt, window))
        seen += [one.number for one in again.next_window()]
        again.trained(window + 1)
    assert len(seen) == len(set(seen)) == 10


# ---- groups that are replaced --------------------------------------------------------------------------------------------


def take_refilled(made: Feed, window: int) -> list[list[int]]:
    """The rounds of a window in which every third group is flat; everybody writes whatever may begin."""

    def write() -> None:
        while (label := made.label_for(-1)) is not None and (works := made.pull("a", label)):
            for work in reversed(works):
                made.finish(group(work.number, work.attempt, work.label))

    write()
    rounds = [[one.number for one in made.next_window()]]
    while flat := [number for number in rounds[-1] if number % 3 == 0]:
        threading.Timer(0.02, write).start()  # while it waits
        rounds.append([one.number for one in made.further(len(flat))])
    made.trained(window + 1)
    return rounds


@pytest.mark.parametrize("order", [IN_ORDER, FIRST_FINISHED])
@pytest.mark.parametrize("lead", [0, 2])
def test_replaced_groups_are_dropped_and_a_crash_changes_nothing(tmp_path, order, lead):
    made, taken, states = feed(Pace(2, order=order), lead, Journal(tmp_path), patience=20.0), [], []
    made.trained(0)
    for window in range(6):
        taken.append(take_refilled(made, window))
        states.append(made.state())
    numbers = [number for rounds in taken for one in rounds for number in one]
    totals, replaced = made.ledger.totals, sum(len(one) for rounds in taken for one in rounds[1:])
    assert len(numbers) == len(set(numbers)) == 12 + replaced
    assert replaced > 0
    assert (totals["taken"], totals["dropped/zero_variance"]) == (12, replaced)
    assert made.ledger.begun == 12 + replaced + len(made.ledger.live)
    again = feed(Pace(2, order=order), lead, Journal(tmp_path), patience=20.0)
    again.load_state(states[1])
    again.trained(2)
    assert [take_refilled(again, window) for window in range(2, 6)] == taken[2:]
    assert again.ledger.totals["dropped/zero_variance"] == replaced


def test_in_order_a_replacement_is_written_by_the_newest_weights_apart_from_others():
    made = feed(Pace(2, order=IN_ORDER), lead=0)
    made.trained(0)
    for work in made.pull("a", 0):
        made.finish(group(work.number, work.attempt))
    made.next_window()
    taken = []
    thread = threading.Thread(target=lambda: taken.extend(made.further(2)))
    thread.start()
    while not (works := made.pull("a", 0)):
        pass
    assert [(work.number, work.label) for work in works] == [(2, 0), (3, 0)]
    for work in works:
        made.finish(group(work.number, work.attempt))
    thread.join()
    assert [one.number for one in taken] == [2, 3]
    made.trained(1)
    assert [(work.number, work.label) for work in made.pull("a", 1)] == [(4, 1), (5, 1)]


def test_whoever_asks_while_weights_are_published_gets_the_new_ones():
    """There is one buffer, and it is being written: labels of before are gone, and the new one is not there yet."""
    source = [torch.zeros(4)]
    board, asked, found = Board(source), threading.Event(), []

    class Slow(list):
        def __iter__(self):
            asked.set()
            time.sleep(0.1)
            return super().__iter__()

    def read():
        asked.wait()
        with board.reading(0) as (label, buffer):
            found.append((label, buffer[0].tolist()))

    board.publish(0, oldest=0)
    board.source = Slow([torch.ones(4)])
    reader = threading.Thread(target=read)
    reader.start()
    board.publish(1, oldest=1)
    reader.join()
    assert found == [(1, [1.0] * 4)]
    assert len(board.buffers) == 1
