"""SIGKILL at any instant, then resume: the run ends as if nothing had happened, and no state of the disk is unreadable."""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path

import pytest

from posttrain.core import faults
from posttrain.trainer.checkpoints import checkpoint as files
from tests.trust import runs

KILLED = [
    pytest.param(one, 1, id=f"{one}-short", marks=pytest.mark.slow if one in runs.ALIKE else ()) for one in runs.METHODS
]
KILLED += [pytest.param(one, 20, id=f"{one}-long", marks=pytest.mark.trust) for one in runs.METHODS]


@pytest.fixture(scope="module")
def quiet(tmp_path_factory):
    """method, options -> (folder, how often each point is passed, seconds) of a run that nothing happens to."""
    made = {}

    def of(method, **options):
        key = (method, *options.items())
        if key not in made:
            folder = tmp_path_factory.mktemp("quiet") / method
            made[key] = (folder, *runs.quiet_run(method, folder, **options))
        return made[key]

    return of


@pytest.mark.parametrize(("method", "kills"), KILLED)
def test_killed_at_random_instants_and_resumed_is_bit_identical(quiet, method, kills, tmp_path, figure):
    """A third of the resumed runs is killed again, and a third of those once more.

    The short form kills every other method at a place in the code and the rest at a moment in time. A checkpoint holds
    KTO's z, BCO's rewards and the classifier of its density ratio, PPO's critic and coefficient, A2PO's V*; they are compared
    with it.
    """
    whole, passed, duration = quiet(method)
    identical, injected, first = 0, 0, runs.METHODS.index(method) % 2
    for number in range(first, first + kills):
        rng = random.Random(f"{method}-{number}")
        folder = tmp_path / f"killed-{number}"
        wanted = 1 + (rng.random() < 1 / 3) + (rng.random() < 1 / 9)
        told = []
        while len(told) < wanted:
            instant = runs.random_instant(rng, passed, duration, real_time=(number + len(told)) % 2 == 1)
            if not runs.killed_at(method, folder, instant):
                if not told:
                    continue_anew(folder)  # the moment lay behind the end of the run; another one is drawn
                    continue
                break
            told.append(str(instant))
        injected += len(told)
        runs.finish(method, folder)
        found = runs.differences(whole, folder)
        assert not found, f"{method} {number}, killed at {told}: {found}"
        identical += 1
    figure(f"SIGKILL, {method}", injected, f"{identical} of {kills} bit-identical", f"{kills} of {kills}")


def continue_anew(folder: Path) -> None:
    folder.rename(folder.with_name(f"{folder.name}-ended-{len(list(folder.parent.iterdir()))}"))


def save_points(passed: dict[str, int], every: bool) -> list[str]:
    """kill:point:count for the second save of a run; with `every`, for each passing of each point of it."""
    found = []
    for point in faults.POINTS:
        if point.startswith("save.") and passed.get(point):
            a_save = passed[point] // passed["save.done"]
            counts = range(a_save + 1, 2 * a_save + 1) if every else [a_save + 1]
            found += [f"kill:{point}:{count}" for count in counts]
    return found


@pytest.mark.parametrize(
    "every", [pytest.param(False, id="short"), pytest.param(True, id="long", marks=pytest.mark.trust)]
)
def test_killed_at_every_point_of_a_save_loses_at_most_that_save(quiet, every, tmp_path, figure):
    """Points of the second save, that of step 4, the rotation of checkpoint-2 in a run with `save_total_limit=1` included."""
    short = {"max_steps": 5}
    whole, passed, _ = quiet("sft", **short)
    schedule = [(fault, short) for fault in save_points(passed, every)]
    schedule.append(("kill:save.rotate:1", {**short, "save_total_limit": 1}))
    lost = []
    for number, (fault, options) in enumerate(schedule):
        folder = tmp_path / str(number)
        assert runs.killed_at("sft", folder, runs.Instant(fault), **options), fault
        for path in files.checkpoints(folder):
            files.verify(path)  # what has the name of a checkpoint is one
        newest = files.checkpoints(folder)[0]
        lost.append(4 - int(newest.name.removeprefix(files.PREFIX)))
        runs.finish("sft", folder, **options)
        assert not runs.differences(whole, folder), fault
        assert not list(folder.glob("*.tmp-*")), fault
    assert max(lost) <= runs.SAVE_STEPS
    figure(
        "SIGKILL inside a save",
        len(schedule),
        f"0 unreadable, at most {max(lost)} steps lost",
        f"0, at most {runs.SAVE_STEPS}",
    )


def test_a_checkpoint_that_lacked_only_its_name_is_kept(tmp_path):
    assert runs.killed_at("sft", tmp_path / "run", runs.Instant("kill:save.rename:2"))
    assert [path.name for path in files.checkpoints(tmp_path / "run")] == ["checkpoint-2"]
    runs.finish("sft", tmp_path / "run", max_steps=4)
    assert "checkpoint-4 was complete when its run was killed" in (tmp_path / "run.log").read_text()


def test_every_fault_point_is_passed_by_a_real_run(tmp_path):
    passed, _ = runs.quiet_run("grpo", tmp_path / "run", save_total_limit=1)
    beside, _ = runs.quiet_run("grpo", tmp_path / "beside", async_rollouts=True, max_staleness=8)
    passed |= {"journal": beside.get("journal", 0)}
    assert {point for point in faults.POINTS if not passed.get(point)} == set()
    assert set(passed) == set(faults.POINTS)


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ("kill:backwards:1", "known are data, forward, backward"),
        ("explode:backward:1", "known are kill"),
        ("kill:backward", "action:point:count"),
        ("kill:backward:0", "positive number"),
        ("nan:save.write:1", "`gradient` only"),
    ],
)
def test_a_fault_that_does_not_exist_is_refused(wanted, said):
    with pytest.raises(ValueError, match=said):
        faults.arm(wanted)


def test_the_environment_variable_arms_a_fresh_process(tmp_path):
    import os
    import subprocess
    import sys

    code = "from posttrain.core.faults import fault_point; fault_point('log'); print('once', flush=True); fault_point('log')"
    child = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {faults.VARIABLE: "kill:log:2"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == -signal.SIGKILL
    assert child.stdout == "once\n"


def test_a_nan_by_a_fault_is_skipped_and_its_record_survives_a_kill(tmp_path):
    """Two runs with a NaN at step 3, one of them killed at step 6 and resumed (its NaN is behind its checkpoint)."""
    for name, fault in (("whole", "nan:gradient:3"), ("killed", "nan:gradient:3,kill:backward:11")):
        child = runs.start("sft", tmp_path / name, fault=fault)
        assert child.wait() == (0 if name == "whole" else -signal.SIGKILL), child.output()
    runs.finish("sft", tmp_path / "killed")
    assert not runs.differences(tmp_path / "whole", tmp_path / "killed")
    records = [(tmp_path / name / "skipped_steps.jsonl").read_text() for name in ("whole", "killed")]
    assert records[0] == records[1]
    assert json.loads(records[0])["step"] == 3
