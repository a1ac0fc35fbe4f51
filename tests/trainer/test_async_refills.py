"""Groups that teach nothing are replaced beside training as they are without: the same run, each prompt once, also after a kill."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.trainer.test_async import AHEAD, RLOO, jitter, killed_at, losses, resumed, run, same_numbers, written
from tests.trainer.test_online import logged, weights

__all__ = ["jitter"]
pytestmark = pytest.mark.slow


def seldom(completions, completion_ids, **kwargs):
    """Two of three groups are flat."""
    return [float(sum(ids) % 7 == 0) for ids in completion_ids]


REFILLED = {"drop_zero_variance": True, "rewards": seldom, "refill_rounds": 3}


def assert_same_bits(one, other):
    for (name, wanted), found in zip(weights(one).items(), weights(other).values()):
        assert torch.equal(wanted, found), name


def refills(folder):
    return sum(line.get("rollouts/refilled_groups", 0) for line in logged(folder))


def settled(folder):
    """(taken, dropped for that reason) at the end, as the log has it."""
    last = [line for line in logged(folder) if "async/taken" in line][-1]
    return last["async/taken"], last["async/dropped/zero_variance"]


def assert_each_prompt_has_one_fate(folder, windows):
    groups = [row["group"] for row in written(folder) if row["sample"] == 0]
    taken, dropped = settled(folder)
    assert len(groups) == len(set(groups)) == taken + dropped
    assert taken == 2 * windows
    assert dropped == refills(folder) > 0


@pytest.mark.parametrize("order", ["in_order", "window", "first_finished"])
@pytest.mark.parametrize(
    "options",
    [{}, {**RLOO, "beta": 0.1}, {"steps_per_generation": 2, "num_iterations": 2}],
    ids=["grpo", "rloo", "iterations"],
)
def test_without_a_lead_it_is_the_synchronous_run_to_the_bit(tmp_path, order, options):
    options = {**REFILLED, **options}
    plain = run(tmp_path / "plain", **options)
    beside = run(tmp_path / "beside", async_rollouts=True, async_lead=0, async_order=order, **options)
    assert refills(tmp_path / "plain") > 0
    assert_same_bits(plain, beside)
    assert written(tmp_path / "beside") == written(tmp_path / "plain")
    same_numbers(logged(tmp_path / "beside"), logged(tmp_path / "plain"))


@pytest.mark.parametrize("lead", [1, 2])
def test_in_order_it_depends_on_nothing_but_its_options(tmp_path, lead, jitter):
    options = {**REFILLED, "async_rollouts": True, "async_lead": lead, "async_order": "in_order", "max_steps": 8}
    one = run(tmp_path / "one", **options)
    other = run(tmp_path / "other", **options, queue_maxsize=8)  # no more than one window may wait
    assert_same_bits(one, other)
    assert written(tmp_path / "other") == written(tmp_path / "one")
    ages = {row["step"] - 1 - row["policy_version"] for row in written(tmp_path / "one")}
    assert max(ages) == lead, "a group that replaces another is younger than the lead, never older"
    assert_each_prompt_has_one_fate(tmp_path / "one", 8)


@pytest.mark.parametrize("order", ["window", "first_finished"])
@pytest.mark.parametrize("on_stale", ["wait", "mask", "drop"])
def test_no_prompt_is_trained_twice_and_no_token_is_too_old(tmp_path, order, on_stale, jitter):
    asked = {"async_rollouts": True, "async_order": order, "on_stale": on_stale, "max_staleness": 2, "max_steps": 10}
    run(tmp_path, **REFILLED, **asked)
    assert max(line.get("async/token_age/max", 0) for line in logged(tmp_path)) <= 2
    groups = [row["group"] for row in written(tmp_path) if row["sample"] == 0]
    taken, dropped = settled(tmp_path)
    assert len(groups) == len(set(groups)) == taken + dropped
    assert (taken, dropped) == (20, refills(tmp_path))
    if on_stale != "mask":
        assert max(row["step"] - 1 - row["policy_version"] for row in written(tmp_path)) <= 2


@pytest.mark.parametrize("step", [3, 5, 8])
@pytest.mark.parametrize("lead", [0, 2])
def test_in_order_a_killed_run_ends_as_the_undisturbed_one(tmp_path, step, lead):
    options = {**AHEAD, **REFILLED, "async_order": "in_order", "async_lead": lead}
    whole = run(tmp_path / "whole", **options)
    killed_at(tmp_path / "killed", step, tmp_path / "log", **options)
    again = resumed(tmp_path / "killed", **options)
    assert_same_bits(whole, again)
    assert written(tmp_path / "killed") == written(tmp_path / "whole")
    assert_each_prompt_has_one_fate(tmp_path / "killed", 9)


@pytest.mark.parametrize("step", [5, 8])
def test_whatever_the_order_the_steps_before_a_kill_are_repeated_and_the_run_can_be_replayed(tmp_path, step):
    free = {"async_order": "first_finished", "async_lead": 2, "keep_journal": True}
    options = {**AHEAD, **REFILLED, **free}
    before = killed_at(tmp_path / "free", step, tmp_path / "log", **options)
    last = resumed(tmp_path / "free", **options)
    after = losses(tmp_path / "free")
    assert {number: after[number] for number in before} == before
    assert_each_prompt_has_one_fate(tmp_path / "free", 9)
    again = run(tmp_path / "again", replay_from=str(tmp_path / "free"), **options)
    assert_same_bits(last, again)
    assert written(tmp_path / "again") == written(tmp_path / "free")


def test_a_run_that_finds_others_to_replace_than_before_its_kill_continues(tmp_path):
    """A reward with noise: the windows of then cannot be repeated, and no prompt is lost or trained on twice."""
    options = {**AHEAD, **REFILLED, "async_order": "window", "async_lead": 1}
    killed_at(tmp_path, 8, tmp_path / "log", **options)
    folder = Path(tmp_path) / "rollout_journal/process-0/windows.jsonl"
    lines = [json.loads(line) for line in folder.read_text().splitlines()]
    assert any(line["round"] for line in lines if line["window"] >= 3)
    resumed(tmp_path, **options | {"refill_rounds": 1, "resume_allow_changes": ["refill_rounds"]})
    groups = [row["group"] for row in written(tmp_path) if row["sample"] == 0 and row["step"] > 3]
    assert len(groups) == len(set(groups))
