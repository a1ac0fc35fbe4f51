"""Rollout workers as processes: they write what a thread would, and whatever happens to them, every prompt is trained once."""

from __future__ import annotations

import os
import random
import signal
import threading
import time

import cloudpickle
import psutil
import pytest
import torch
from transformers import TrainerCallback

from posttrain.rollout.engines.native.engine import NativeSession
from posttrain.rollout.feed import feed, remote
from posttrain.rollout.feed.ledger import Ledger
from posttrain.trainer.online import async_rollouts
from tests import tiny
from tests.forked_workers import LAUNCHED, forked_workers  # noqa: F401
from tests.trainer.test_async import LORA, odd_sums, run, trainer, weights, written
from tests.waiting import eventually

EXACT = {"async_rollouts": True, "async_order": "in_order", "async_lead": 2, "max_steps": 8}
forked = pytest.mark.usefixtures("forked_workers")
"""The first test starts them as a run does."""


class Attack(TrainerCallback):
    """Beside the training, `attack` is called with the workers again and again; steps take long enough to be met by it."""

    def __init__(self, attack, seconds=0.3, every=0.2):
        self.attack, self.seconds, self.every, self.over = attack, seconds, every, threading.Event()

    def on_train_begin(self, args, state, control, **kwargs):
        self.thread = threading.Thread(target=self._go)
        self.thread.start()

    def _go(self):
        while not self.over.wait(self.every):
            ahead = self.trainer.ahead
            if ahead is not None and ahead.platform is not None:
                self.attack(ahead.platform.children)

    def on_step_end(self, args, state, control, **kwargs):
        time.sleep(self.seconds)

    def on_train_end(self, args, state, control, **kwargs):
        self.over.set()
        self.thread.join()


def attacked(folder, attack, *, every=0.2, **options):
    callback = Attack(attack, every=every)
    made = trainer(
        folder,
        odd_sums,
        **{"rollout_engine": "native", "learning_rate": 0.05, "seed": 7},
        **options,
        callbacks=[callback],
    )
    callback.trainer = made
    try:
        made.train()
    finally:
        callback.over.set()
        made.close()
    return made


def no_children():
    started = psutil.Process().children(recursive=True)
    has_ended = not [child for child in started if "rollout.feed.child" in " ".join(child.cmdline())]
    return has_ended and all(worker.poll() is not None for worker in LAUNCHED)


@pytest.fixture(scope="module")
def inline(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inline")
    return weights(run(folder, **EXACT)), written(folder)


def same(made, folder, inline):
    assert all(torch.equal(left, right) for left, right in zip(inline[0].values(), weights(made).values()))
    assert written(folder) == inline[1]
    assert no_children()


def test_two_processes_write_what_a_thread_does(tmp_path, inline):
    same(run(tmp_path, rollout_workers=2, **EXACT), tmp_path, inline)


class Issued(Ledger):
    """How many groups a worker had when it was issued another."""

    def __init__(self):
        super().__init__()
        self.held, Issued.last = [], self

    def issue(self, number, worker, *how):
        attempt = super().issue(number, worker, *how)
        self.held.append(len(self.held_by(worker)))
        return attempt


@forked
def test_what_begins_is_dealt_out_to_all_workers(tmp_path, monkeypatch):
    """Whoever asked first got everything, and the other GPUs stood still until the next step."""
    monkeypatch.setattr(feed, "Ledger", Issued)
    free = {"async_rollouts": True, "async_order": "window", "async_lead": 3, "max_steps": 2}
    run(tmp_path, rollout_workers=2, **free)
    assert max(Issued.last.held[:8]) == 4  # of eight that may begin at once


@pytest.mark.parametrize("slots", [4, 8, 64])
def test_no_more_begins_than_the_engine_has_room_for(tmp_path, monkeypatch, slots):
    """Four completions a group, and eight groups may begin. Up to three completions wait in the engine: no slot is empty."""
    most, add = [0], NativeSession.add

    def counted(session, prompt):
        ticket = add(session, prompt)
        most[0] = max(most[0], session.in_flight)
        return ticket

    monkeypatch.setattr(NativeSession, "add", counted)
    free = {"async_rollouts": True, "async_order": "window", "async_lead": 3, "max_steps": 2}
    run(tmp_path, max_rollout_slots=slots, **free)
    assert slots <= most[0] <= slots + 3 or most[0] == 32
    assert len({row["group"] for row in written(tmp_path)}) == 4


@forked
@pytest.mark.slow
def test_adapters_and_frozen_weights_reach_a_process(tmp_path):
    options = {**EXACT, **LORA, "max_steps": 4}
    wanted = weights(run(tmp_path / "thread", **options))
    found = weights(run(tmp_path / "process", rollout_workers=1, **options))
    assert all(torch.equal(left, right) for left, right in zip(wanted.values(), found.values()))


@forked
@pytest.mark.slow
def test_a_process_writes_with_recurrent_states(tmp_path):
    """What passes segment bounds on to the layers is sent to the worker with the model."""
    found = []
    for workers in (None, 1):
        model = tiny.causal_lm(family="lfm2", layer_types=["conv", "full_attention"])
        made = run(tmp_path / f"{workers}", model=model, rollout_workers=workers, **EXACT | {"max_steps": 3})
        assert made.loaded.layout == "shared"
        found.append((weights(made), written(tmp_path / f"{workers}")))
    assert all(torch.equal(left, right) for left, right in zip(found[0][0].values(), found[1][0].values()))
    assert found[0][1] == found[1][1]


@forked
@pytest.mark.slow
def test_workers_that_are_killed_at_any_time_are_replaced(tmp_path, inline):
    rng, killed = random.Random(0), []

    def kill(children):
        busy = [
            child
            for child in children
            if child.seat.has_begun and child.deaths < 2 and child.handle.popen.poll() is None
        ]
        if busy and len(killed) < 4:
            time.sleep(rng.random() * 0.2)
            killed.append(rng.choice(busy).handle.popen.pid)
            os.kill(killed[-1], signal.SIGKILL)

    made = attacked(tmp_path, kill, rollout_workers=2, **EXACT)
    assert len(killed) == 4
    same(made, tmp_path, inline)


@forked
@pytest.mark.slow
def test_a_worker_that_is_stopped_is_noticed_and_its_late_results_are_refused(tmp_path, inline, monkeypatch):
    monkeypatch.setattr(remote, "SILENT_SECONDS", 2.0)
    stopped = []

    def stop(children):
        if not stopped and children[0].seat.has_begun:
            stopped.append(children[0].process)
            os.kill(stopped[0], signal.SIGSTOP)

    made = attacked(tmp_path, stop, rollout_workers=2, **EXACT)
    assert stopped
    same(made, tmp_path, inline)


@forked
@pytest.mark.slow
def test_a_worker_that_cannot_live_ends_the_run_with_a_sentence(tmp_path):
    def kill(children):
        for child in children:
            if (handle := child.handle) is not None and handle.popen.poll() is None:
                os.kill(handle.popen.pid, signal.SIGKILL)

    with pytest.raises(RuntimeError, match=r"Rollout worker-0 ended 3 times in a row, the last time with -9"):
        attacked(tmp_path, kill, every=0.05, rollout_workers=1, **EXACT)
    assert no_children()


def test_what_cannot_be_sent_to_a_worker_is_named(tmp_path):
    lock = threading.Lock()

    def episodes(rows, requests, params):
        return lock

    made = trainer(tmp_path, odd_sums, rollout_engine="native", rollout_workers=1, **EXACT)
    made.collector.writer.episodes = episodes
    with pytest.raises(
        ValueError, match=r"`rollout_workers`: what makes episodes cannot be sent .*lock.* a thread writes"
    ):
        made.train()
    assert no_children()


@forked
@pytest.mark.slow
def test_a_mistake_in_a_worker_is_shown_where_the_trainer_waits(tmp_path, monkeypatch):
    def broken(rows, requests, params):
        raise KeyError("a bug of mine")

    made = trainer(tmp_path, odd_sums, rollout_engine="native", rollout_workers=1, **EXACT)
    made.collector.writer.episodes = broken
    with pytest.raises(RuntimeError, match=r"(?s)Rollout worker-0 failed:.*a bug of mine"):
        made.train()
    assert no_children()


@forked
@pytest.mark.slow
def test_a_worker_whose_code_hangs_is_named_when_the_trainer_has_waited_for_it(tmp_path, monkeypatch):
    """Its process lives, and nobody can tell a deadlock from long work: it is not replaced."""
    monkeypatch.setattr(async_rollouts, "STOP_SECONDS", 0.1)

    def hangs(rows, requests, params):
        time.sleep(600)

    made = trainer(tmp_path, odd_sums, rollout_engine="native", rollout_workers=1, **EXACT)
    made.collector.writer.episodes = hangs

    def lose_patience():
        eventually(lambda: made.ahead is not None and made.ahead.feed.being_written())
        made.ahead.feed.patience = 1.5

    thread = threading.Thread(target=lose_patience)
    thread.start()
    with pytest.raises(
        TimeoutError, match=r"`heartbeat_stale_after_s` is 1.5.*Being written: prompt 0 by worker-0 for"
    ):
        made.train()
    thread.join()
    assert no_children()


def test_what_a_worker_is_made_of_holds_no_weights(tmp_path):
    """They are published apart from it; a worker on another GPU would load them onto the trainer's."""
    made = trainer(tmp_path, odd_sums, rollout_engine="native")
    content = next(made.model.parameters()).detach().numpy().tobytes()[:256]
    assert content in cloudpickle.dumps(made.model)
    assert content not in cloudpickle.dumps(remote.without_weights(made.model))
