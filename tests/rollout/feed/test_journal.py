"""The feed's journal: what is left after a crash, whatever became of the files, and what is said about damage."""

from __future__ import annotations

import pytest

from posttrain.rollout.feed.feed import Feed
from posttrain.rollout.feed.journal import WINDOWS, Journal, JournalNotWritten
from posttrain.rollout.feed.pacing import DROP, FIRST_FINISHED, IN_ORDER, Lead, Pace
from posttrain.rollout.feed.replay import ReplayFeed
from tests.rollout.feed.test_feed import ROW, feed, group, played


@pytest.mark.parametrize("cut", [9, 1])  # of the last, nothing is missing but its end
def test_a_line_that_was_cut_off_is_passed_over_and_the_next_one_is_whole(tmp_path, cut):
    _, taken, _ = played(tmp_path, 3)
    file = tmp_path / "rollout_journal/process-0" / WINDOWS
    file.write_text(file.read_text()[:-cut])
    journal = Journal(tmp_path)
    assert sorted(journal.windows()) == [(0, 0), (1, 0)]
    assert journal.damaged == [f"{file}: the last line is cut off, and passed over: it was never acted on."]
    journal.take((2, 0), [7], {4: "stale"})
    journal.take((3, 0), [8], {})
    found = Journal(tmp_path)
    assert {key: entry["numbers"] for key, entry in found.windows().items()} == {
        (0, 0): taken[0], (1, 0): taken[1], (2, 0): [7], (3, 0): [8]
    }  # fmt: skip
    assert found.damaged == []


def flipped(folder, number: int) -> None:
    """The last bit of a group's content."""
    journal = Journal(folder)
    ends = sorted([*(start for _, start in journal.places.values()), journal.num_bytes])
    path, start = journal.places[number]
    content = bytearray(path.read_bytes())
    content[ends[ends.index(start) + 1] - 1] ^= 1
    path.write_bytes(content)


def in_order(folder, windows: int) -> tuple[Feed, dict]:
    """A feed that has taken so many windows of two, and has two more that are finished; and its state."""
    made = feed(Pace(2, order=IN_ORDER), 1, Journal(folder))
    for window in range(windows + 1):
        made.trained(window)
        for work in made.pull("a", window):
            made.finish(group(work.number, work.attempt, window))
        if window < windows:
            made.next_window()
    return made, made.state()


def test_in_order_damage_to_what_only_older_weights_could_write_is_refused(tmp_path, caplog):
    """Nobody could write it again: the run would wait for it in vain."""
    _, state = in_order(tmp_path, 3)
    flipped(tmp_path, 6)
    again = feed(Pace(2, order=IN_ORDER), 1, Journal(tmp_path))
    again.step = 3
    with pytest.raises(
        ValueError,
        match=r"rollout_journal/process-0 has no readable group .*numbers 6: .* checkpoint of step 2 or before",
    ):
        again.load_state(state)
    assert "the group of prompt 6 is damaged" in caplog.text
    whatever = feed(Pace(2, order=FIRST_FINISHED), 1, Journal(tmp_path))
    whatever.trained(3)
    whatever.load_state(state)
    assert 6 in {work.number for work in whatever.pull("a", 3)}


def test_in_order_what_the_checkpoint_s_own_weights_wrote_is_written_again(tmp_path, caplog):
    _, state = in_order(tmp_path, 3)
    flipped(tmp_path, 8)
    again = feed(Pace(2, order=IN_ORDER), 1, Journal(tmp_path))
    again.step = 3
    again.load_state(state)
    assert [(work.number, work.label, work.counts) for work in again.pull("a", 3)] == [(8, 3, True), (9, 3, False)]
    assert "the group of prompt 8 is damaged. What cannot be read is written again" in caplog.text
    assert again.journal.damaged == []


def test_what_was_dropped_while_a_window_waited_is_in_the_journal(tmp_path):
    """Dropped by the question whether the window is complete, which it was not yet."""
    made = feed(Pace(2, max_staleness=0, order=FIRST_FINISHED, on_stale=DROP), 1, Journal(tmp_path))
    for work in made.pull("a", 0)[:3]:
        made.finish(group(work.number))
    assert [one.number for one in made.next_window()] == [0, 1]
    made.trained(1)
    assert not made.has_window()
    for work in made.pull("a", 1):
        made.finish(group(work.number, work.attempt, 1))
    assert [one.number for one in made.next_window()] == [4, 5]
    assert [entry["dropped"] for entry in Journal(tmp_path).windows().values()] == [{}, {2: "stale", 3: "stale"}]
    assert made.ledger.totals["dropped/stale"] == 2


def test_a_disk_that_is_full_ends_the_run_and_loses_nothing(tmp_path):
    made, _, state = played(tmp_path, 3)
    folder, kept = (
        tmp_path / "rollout_journal/process-0",
        (tmp_path / "rollout_journal/process-0" / WINDOWS).read_bytes(),
    )
    (folder / WINDOWS).unlink()
    (folder / WINDOWS).symlink_to("/dev/full")
    said = rf"could not be written to {folder} \(No space left on device\).*`resume_from_checkpoint=True`"
    with pytest.raises(JournalNotWritten, match=said):
        made.journal.take((3, 0), [5], {})
    with pytest.raises(JournalNotWritten, match=said):  # nor anything that would rely on it
        made.journal.append(99, 1, b"content")
    made.journal.close()
    (folder / WINDOWS).unlink()
    (folder / WINDOWS).write_bytes(kept + b'{"window": 3, "ro')
    again = feed(Pace(2, order=FIRST_FINISHED), 2, Journal(tmp_path))
    again.trained(1)
    again.load_state(state)
    for window in (1, 2):
        again.next_window()
        again.trained(window + 1)
    assert sorted(again.groups) == sorted(made.groups)
    assert again.has_window()


def test_a_new_run_forgets_processes_that_it_does_not_have(tmp_path):
    for process in (0, 1, 2):
        Journal(tmp_path, process).append(0, 1, b"old")
    Journal(tmp_path, 1).forget(2)
    assert len([*(tmp_path / "rollout_journal").iterdir()]) == 3, "the first process does it for all"
    Journal(tmp_path, 0).forget(2)
    assert sorted(path.name for path in (tmp_path / "rollout_journal").iterdir()) == ["process-0", "process-1"]


def test_a_replay_says_where_the_journal_has_a_gap(tmp_path, caplog):
    _, taken, _ = played(tmp_path, 4)
    file = tmp_path / "rollout_journal/process-0" / WINDOWS
    lines = file.read_text().splitlines()
    file.write_text("\n".join([*lines[:2], lines[2][:20] + lines[3], ""]) + lines[3] + "\n")
    again = ReplayFeed(tmp_path, 0, 1, Pace(2, order=FIRST_FINISHED), Lead(2, 4, adapts=False), lambda row: ROW)
    assert again.steps == 2
    assert "says what window 3 took, and not what window 2 did: the replay ends with step 2" in caplog.text
    assert "a line is damaged, and passed over" in caplog.text
    assert [[one.number for one in again.next_window()] for _ in range(2)] == taken[:2]
