"""Rollouts beside training under fire: workers, the trainer, or all of them are killed, and every prompt is trained on once."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import psutil
import pytest
import torch

from posttrain.core import faults
from posttrain.rollout.feed import remote
from posttrain.rollout.feed.journal import Journal
from tests.forked import Child
from tests.forked_workers import forked_workers, use  # noqa: F401
from tests.trainer.test_async import AHEAD, NATIVE, logged, losses, odd_sums, run, weights, written
from tests.trainer.test_async_workers import no_children
from tests.trainer.test_online import trainer
from tests.trust.dying_worker import PLACES, Dying
from tests.waiting import eventually

pytestmark = pytest.mark.usefixtures("forked_workers")
COUNTS = [
    pytest.param(3, id="short", marks=pytest.mark.slow),
    pytest.param(20, id="long", marks=pytest.mark.trust),
]
EXACT = {**NATIVE, "async_rollouts": True, "async_order": "in_order", "async_lead": 2, "max_steps": 10}
FREE = {
    **NATIVE,
    **AHEAD,
    "async_order": "first_finished",
    "async_lead": 2,
    "keep_rollouts": True,
    "keep_journal": True,
}


def assert_exact(folder: Path, groups: int) -> None:
    """Every number was trained on once, in the journal and in the store alike."""
    stored = [row["group"] for row in written(folder) if row["sample"] == 0]
    windows = Journal(folder).windows()
    taken = [number for window in windows.values() for number in window["numbers"]]
    assert len(stored) == len({*stored}) == groups
    assert len(taken) == len({*taken}) == groups
    assert [*windows] == sorted(windows)


# ---- workers: rows 1 to 4 ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def quiet(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quiet") / "run"
    return weights(run(folder, **EXACT)), written(folder)


@pytest.mark.parametrize("how", ["killed", "stopped", "all killed"])
@pytest.mark.parametrize("count", COUNTS)
def test_whatever_happens_to_workers_the_run_is_the_same(count, how, quiet, tmp_path, monkeypatch, figure):
    """At places of their own code: questions, answers half sent, weights half read, tokens half written."""
    monkeypatch.setattr(remote, "SILENT_SECONDS", 5.0)
    monkeypatch.setattr(remote, "START_SECONDS", 20.0)  # both may be stopped before they have asked for work
    monkeypatch.setattr(remote, "DEATHS_IN_A_ROW", 10**6)
    rng = random.Random(f"{how} {count}")
    places = [*PLACES, *rng.choices([*PLACES], k=1000)] if count > len(PLACES) else rng.sample([*PLACES], count)
    deaths = set()
    for place in places:
        deaths |= {(place, rng.randrange(PLACES[place]))} if len(deaths) < count else set()
    (tmp_path / "places").mkdir()
    made = trainer(tmp_path / "run", odd_sums, **EXACT, rollout_workers=2)
    maker = made.engine_maker
    made.engine_maker = lambda: Dying(maker(), str(tmp_path / "places"), how, frozenset(deaths))
    made.train()
    made.close()
    happened = len([*(tmp_path / "places").glob("death at *")])
    assert happened == count, {
        (place, n) for place, n in deaths if not (tmp_path / "places" / f"death at {place}, {n}").exists()
    }
    assert all(torch.equal(left, right) for left, right in zip(quiet[0].values(), weights(made).values()))
    assert written(tmp_path / "run") == quiet[1]
    assert_exact(tmp_path / "run", 20)
    eventually(lambda: not made.engine_maker().alive())
    figure(f"rollout workers {how}", count, f"{count} of {count} exact, same bits", f"{count} of {count}")


# ---- the trainer: rows 6 to 8 --------------------------------------------------------------------------------------------


def life(folder: Path, fault: str = "", **options) -> Child:
    def train() -> None:
        use()
        faults.arm(fault)
        made = trainer(folder, odd_sums, **options)
        made.train(resume_from_checkpoint=any(folder.glob("checkpoint-*")))
        made.close()

    return Child(train, folder.with_name("log"))


def end(child: Child, seconds: float, with_workers: bool) -> None:
    """After so long, all of them at once where the workers go, too."""
    child.process.join(seconds)
    try:
        trainer_itself = psutil.Process(child.process.pid)
        found = trainer_itself.children(recursive=True) if with_workers else []
    except psutil.NoSuchProcess:
        return
    for one in [trainer_itself, *found]:
        if one.is_running():
            one.send_signal(signal.SIGKILL)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """weights and seconds of the run in order, which the ones that are killed should end as."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    Child(lambda: None, folder.with_name("log")).wait()  # the start of the fork server is no part of the run
    began = time.monotonic()
    made = run(folder, **{**FREE, "async_order": "in_order", "rollout_workers": 2})
    return weights(made), written(folder), time.monotonic() - began


@pytest.mark.parametrize(
    ("who", "order", "workers"),
    [
        ("trainer", "first_finished", 2),
        ("trainer and workers", "in_order", 2),
        ("trainer at points", "first_finished", None),
    ],
)
@pytest.mark.parametrize("count", COUNTS)
def test_whenever_the_trainer_is_killed_its_steps_are_repeated_to_the_bit(
    count, who, order, workers, undisturbed, tmp_path, figure
):
    rng, folder = random.Random(f"{who} {count}"), tmp_path / "run"
    options = {**FREE, "async_order": order, "rollout_workers": workers}
    seen, killed, left_alone = {}, 0, []
    while killed < count:
        point = rng.choice(["kill:journal:{}", "kill:data:{}", "kill:step.after:{}", "kill:save.file:{}"])
        fault = point.format(rng.randint(1, 4)) if who == "trainer at points" else ""
        child = life(folder, fault, **options)
        end(child, 120 if fault else rng.uniform(0.2, undisturbed[2] * 1.1), who == "trainer and workers")
        code = child.wait()
        assert code in (0, -signal.SIGKILL), child.output()
        killed += code != 0
        if folder.exists() and (folder / "metrics.jsonl").exists():
            for step, loss in losses(folder).items():
                assert seen.setdefault(step, loss) == loss, f"step {step} after kill {killed}"
        if code == 0:  # it came to its end before: the kills that are left meet another run
            assert_exact(folder, 18)
            left_alone.append(folder)
            folder, seen = folder.with_name(f"run-{len(left_alone)}"), {}
    child = life(folder, **options)
    assert child.wait() == 0, child.output()
    after = losses(folder)
    assert {step: after[step] for step in seen} == seen
    for one in [*left_alone, folder]:
        assert_exact(one, 18)
        if order == "in_order":
            assert written(one) == undisturbed[1]
    eventually(no_children)
    figure(f"SIGKILL of the {who}, {order}", count, f"{count} of {count} exact, same bits", f"{count} of {count}")


# ---- joins and leaves: row 22 --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", COUNTS)
def test_workers_join_and_leave_again_and_again(count, quiet, tmp_path, figure):
    from transformers import TrainerCallback

    rng, gone = random.Random(count), []

    class Comes(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            platform = made.ahead.platform
            while len(gone) < count * state.global_step / args.max_steps:
                name = platform.join()
                eventually(lambda name=name: name in platform.members())
                child = rng.choice([one for one in platform.children if one.name in platform.members()])
                if rng.random() < 0.5:
                    os.kill(child.process, signal.SIGTERM)
                    eventually(lambda child=child: child.is_gone)
                else:
                    platform.leave(child.name, rng.choice([0.0, 20.0]))
                gone.append(child.name)

    made = trainer(tmp_path, odd_sums, **EXACT, rollout_workers=1, callbacks=[Comes()])
    made.train()
    made.close()
    assert len(gone) == count
    assert all(torch.equal(left, right) for left, right in zip(quiet[0].values(), weights(made).values()))
    assert written(tmp_path) == quiet[1]
    assert_exact(tmp_path, 20)
    assert no_children()
    assert "async/taken" in logged(tmp_path)[-2] or "async/taken" in logged(tmp_path)[-1]
    figure("workers join and leave", count, f"{count} of {count} exact, same bits", f"{count} of {count}")
