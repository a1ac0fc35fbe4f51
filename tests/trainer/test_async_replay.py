"""The journal: a run that time decided can be trained again from it, and what no checkpoint needs goes."""

from __future__ import annotations

import random
import time

import pytest
import torch

from posttrain.rollout.feed import journal
from posttrain.rollout.feed.judging import Judge
from tests.forked_workers import forked_workers  # noqa: F401
from tests.trainer.test_async import AHEAD, killed_at, logged, odd_sums, resumed, run, same_numbers, weights, written
from tests.trainer.test_online import trainer

FREE = {"async_rollouts": True, "async_order": "first_finished", "async_lead": 2, "keep_journal": True}


@pytest.fixture(autouse=True)
def uneven(monkeypatch):
    """Judges that are held up at random, so that time decides who is next."""
    rng, add = random.Random(1), Judge.add

    def slowed(self, *args):
        time.sleep(rng.choice([0, 0.01, 0.03]))
        return add(self, *args)

    monkeypatch.setattr(Judge, "add", slowed)


def replayed(folder, of, **options):
    return run(folder, replay_from=str(of), **options)


def assert_same(one, other, left, right):
    assert all(torch.equal(a, b) for a, b in zip(weights(one).values(), weights(other).values()))
    assert written(left) == written(right)
    same_numbers(logged(left), logged(right))


@pytest.mark.parametrize("options", [{}, {"rollout_workers": 2}, {"on_stale": "mask", "max_staleness": 2}])
def test_a_replay_ends_with_the_same_bits(tmp_path, options):
    options = {**FREE, "max_steps": 8, **options}
    free = run(tmp_path / "free", **options)
    again = replayed(tmp_path / "again", tmp_path / "free", **options)
    assert_same(free, again, tmp_path / "free", tmp_path / "again")


def test_a_replay_needs_neither_engine_nor_rewards(tmp_path):
    options = {**FREE, "max_steps": 4}
    free = run(tmp_path / "free", **options)

    def nobody_asks(completions, **kwargs):
        raise AssertionError("a replay asked for a reward")

    nobody_asks.__name__ = odd_sums.__name__
    settings = {"rollout_engine": "native", "learning_rate": 0.05, "seed": 7}
    made = trainer(tmp_path / "again", nobody_asks, replay_from=str(tmp_path / "free"), **{**settings, **options})
    made.train()
    made.close()
    assert all(torch.equal(a, b) for a, b in zip(weights(free).values(), weights(made).values()))


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize(
    ("steps", "workers", "kills"),
    [(9, 2, (5,)), pytest.param(30, 4, (4, 9, 15, 22, 29), marks=pytest.mark.trust)],
)
def test_a_run_that_was_killed_is_replayed_whole(tmp_path, steps, workers, kills):
    options = {**AHEAD, **FREE, "max_steps": steps, "rollout_workers": workers}
    for number, step in enumerate(kills):
        given = {"resume_from_checkpoint": True} if number else {}
        killed_at(tmp_path / "free", step, tmp_path / f"log-{number}", **options, **given)
    last = resumed(tmp_path / "free", **options)
    again = replayed(tmp_path / "again", tmp_path / "free", **options)
    assert all(torch.equal(a, b) for a, b in zip(weights(last).values(), weights(again).values()))
    assert written(tmp_path / "again") == written(tmp_path / "free")


def test_a_replay_that_is_resumed(tmp_path):
    options = {**AHEAD, **FREE}
    free = run(tmp_path / "free", **options)
    killed_at(tmp_path / "again", 5, tmp_path / "log", replay_from=str(tmp_path / "free"), **options)
    again = resumed(tmp_path / "again", replay_from=str(tmp_path / "free"), **options)
    assert all(torch.equal(a, b) for a, b in zip(weights(free).values(), weights(again).values()))


def test_a_run_that_was_stopped_is_replayed_to_where_it_was(tmp_path):
    options = {**AHEAD, **FREE}
    before = killed_at(tmp_path / "free", 5, tmp_path / "log", **options)
    replayed(tmp_path / "again", tmp_path / "free", **options)
    again = {line["step"]: line["loss"] for line in logged(tmp_path / "again") if "loss" in line}
    assert again.items() >= before.items()
    assert len(again) <= 6


def test_what_cannot_be_replayed_is_refused_with_a_sentence(tmp_path):
    run(tmp_path / "free", **FREE, max_steps=2)
    with pytest.raises(ValueError, match="There is no journal in"):
        replayed(tmp_path / "again", tmp_path / "nothing", **FREE, max_steps=2)
    with pytest.raises(ValueError, match="write the replay somewhere else"):
        replayed(tmp_path / "free", tmp_path / "free", **FREE, max_steps=2)


def test_segments_that_no_checkpoint_needs_go(tmp_path, monkeypatch):
    monkeypatch.setattr(journal, "SEGMENT_BYTES", 1)  # a group each
    order = {"async_order": "in_order", "async_lead": 1}
    options = {**AHEAD, **FREE, **order, "keep_journal": False, "save_total_limit": 1}
    run(tmp_path / "short", **options)
    run(tmp_path / "whole", **{**options, "keep_journal": True})
    short, whole = (len([*(tmp_path / name).rglob("*.seg")]) for name in ("short", "whole"))
    assert whole >= 18
    assert short <= whole - 6
    with pytest.raises(ValueError, match=r"is not in .*`keep_journal=True`"):
        replayed(tmp_path / "again", tmp_path / "short", **options)


def test_without_checkpoints_what_was_trained_on_goes(tmp_path, monkeypatch):
    """It grew without bound, by 18 groups here: only a checkpoint that was saved made room."""
    monkeypatch.setattr(journal, "SEGMENT_BYTES", 1)
    options = {"async_rollouts": True, "async_order": "in_order", "async_lead": 1, "save_strategy": "no"}
    made = run(tmp_path, **options, max_steps=8)
    assert made.state.global_step == 8
    assert len([*tmp_path.rglob("*.seg")]) <= 6


def test_a_killed_run_has_what_its_checkpoint_needs(tmp_path, monkeypatch):
    monkeypatch.setattr(journal, "SEGMENT_BYTES", 1)
    options = {**AHEAD, **FREE, "keep_journal": False, "keep_rollouts": True, "save_total_limit": 2}
    before = killed_at(tmp_path, 8, tmp_path / "log", **options)
    resumed(tmp_path, **options)
    after = {line["step"]: line["loss"] for line in logged(tmp_path) if "loss" in line}
    assert {number: after[number] for number in before} == before
    groups = [row["group"] for row in written(tmp_path) if row["sample"] == 0]
    assert len(groups) == len(set(groups)) == 18
