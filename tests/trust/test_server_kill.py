"""The server killed at random instants of a run: the run ends, every prompt is there once, and little time is lost."""

from __future__ import annotations

import os
import random
import signal
import threading
import time

import pytest

from posttrain.rollout.engines.protocol import LENGTH, SamplingParams
from posttrain.rollout.engines.vllm.server_engine import ServedOptions, ServedVLLM
from tests.rollout.served import QUICK, echo_process, needs_uvicorn, numbered, prompts

pytestmark = needs_uvicorn
LENGTHS = [pytest.param(3, id="short"), pytest.param(20, id="long", marks=pytest.mark.trust)]
PHASES = {"generation": 0.6, "update": 0.04, "idle": 0.2}
"""What the trainer does, and about how long: a kill falls at a random instant of one of them."""
MAX_LOST = 15.0


class Assassin(threading.Thread):
    """Kills the server in one phase after the other, at a random instant of it."""

    def __init__(self, engine, process, kills, seed) -> None:
        super().__init__(daemon=True)
        self.engine, self.process, self.rng = engine, process, random.Random(seed)
        self.plan = [list(PHASES)[i % 3] for i in range(kills)]
        self.phase, self.hit, self.down = "", [], []
        self.done = threading.Event()

    def run(self) -> None:
        for phase in self.plan:
            delay = self.rng.uniform(0, PHASES[phase])
            self._until(lambda phase=phase: self.engine.fleet.up() and self.phase == phase)
            time.sleep(delay)
            self.hit.append(self.phase)
            os.kill(self.process.pid, signal.SIGKILL)
            killed = time.monotonic()
            self._until(lambda: not self.engine.fleet.up())
            self._until(self.engine.fleet.up)
            self.down.append(time.monotonic() - killed)
        self.done.set()

    @staticmethod
    def _until(holds) -> None:
        end = time.monotonic() + 60
        while not holds() and time.monotonic() < end:
            time.sleep(0.001)


def a_step(engine, assassin, step, rng):
    """Update, generation, the trainer's own work; the number of prompts. Asserts that each came back once, and whole."""
    assassin.phase = "update"
    engine.load_weights(numbered(step), step)
    assassin.phase = "generation"
    seen = {}
    with engine.session(SamplingParams(64)) as session:
        asked = {session.add(prompt): prompt for prompt in prompts(24, rng)}
        while session.in_flight:
            for ticket, completion in session.advance():
                assert ticket not in seen, "handed over twice"
                seen[ticket] = completion
    assert set(seen) == set(asked)
    for ticket, completion in seen.items():
        wanted = (LENGTH, step, [step] * asked[ticket].max_tokens)
        assert (completion.finish_reason, completion.version, completion.ids.tolist()) == wanted
    assassin.phase = "idle"
    time.sleep(PHASES["idle"])
    return len(seen)


@pytest.mark.parametrize("kills", LENGTHS)
def test_a_server_killed_at_random_instants_loses_no_prompt(kills, tmp_path, figure):
    process = echo_process(tmp_path, "--engine-args", '{"step_seconds": 0.02}')
    began = time.monotonic()
    with ServedVLLM([process], options=ServedOptions(QUICK, bucket_bytes=8)) as engine:
        start_seconds = time.monotonic() - began
        assassin, rng, step, total = Assassin(engine, process, kills, seed=kills), random.Random(kills), 0, 0
        assassin.start()
        while not assassin.done.is_set():
            step += 1
            total += a_step(engine, assassin, step, rng)
            assert time.monotonic() - began < 60 + 30 * kills, "the run does not end"
        assert process.starts == kills + 1
        assert len(assassin.hit) == kills
    lost = max(assassin.down) - start_seconds
    assert lost < MAX_LOST
    figure(
        "SIGKILL of the rollout server",
        kills,
        f"{total} of {total} prompts once, in {step} steps; at most {lost:.1f} s lost beyond the restart",
        f"all once, {MAX_LOST:g} s",
    )
