"""Tools and environments in worker processes: built there by the same factory, asked there for their rewards, and the same run."""

from __future__ import annotations

import functools
import os

import pytest
import torch

from posttrain.rollout.store import read_rollouts
from tests.rollout.scripted_engine import ScriptedEngine
from tests.trainer import test_agents
from tests.trainer.test_agents import by_sample, call, chats, double, said

pytestmark = pytest.mark.slow
EXACT = {"async_rollouts": True, "async_order": "in_order", "async_lead": 1, "max_steps": 4}


class Climb(test_agents.Counter):
    """Each instance serves one episode after the other, in the process that plays them."""

    def reset(self, number, **row):
        self.count = number
        return f"You are at {number}."

    def where(self) -> str:
        """
        The process that plays.
        """
        return str(os.getpid())


class Silent:
    def reset(self, **row):
        return None

    async def get_reward(self) -> float:
        return -1.0


class Moody(Climb):
    def get_reward(self) -> float:
        if self.count % 2:
            raise ValueError(f"not at {self.count}")
        return float(self.count)


def speak(prompt):
    """Each sample climbs another way."""
    turns = [call("up", by=3 + prompt.sample), "Done"]
    spoken = test_agents.TOKENIZER.decode(prompt.ids).count("<|im_start|>assistant") - 1
    return said(turns[min(spoken, 1)] + f" {prompt.sample}" * (spoken == 1))


def scripted(model, speak=speak):
    return ScriptedEngine(speak, shuffle=1)


def play(folder, rewards=None, data=None, speaks=speak, **options):
    data = chats() if data is None else data
    made = test_agents.trainer(folder, rewards, data, **EXACT | {"reward_on_error": "mask"} | options)
    made.engine_maker = lambda **_: functools.partial(scripted, speak=speaks)
    made.train()
    weights = [parameter.detach().clone() for parameter in made.model.parameters()]
    made.close()
    rows = read_rollouts(folder).to_pylist()
    for row in rows:
        for timed in (row, *row["tool_calls"]):
            timed.pop("seconds", None)
    return weights, rows


CASES = {
    "environment": {"environment_factory": Climb},
    "several": {
        "environment_factory": {"climb": Climb, "silent": Silent},
        "rewards": by_sample,
        "data": chats(environment=["climb", "silent"] * 6),
    },
    "a reward that fails": {"environment_factory": Moody, "rewards": by_sample},
    "a factory of one's own": {"environment_factory": lambda: Climb()},
}


@pytest.mark.parametrize("name", CASES)
def test_worker_processes_play_what_a_thread_does(tmp_path, name):
    wanted, rows = play(tmp_path / "thread", **CASES[name])
    found, others = play(tmp_path / "workers", rollout_workers=2, **CASES[name])
    assert [row["rewards"] for row in others] == [row["rewards"] for row in rows]
    assert [row["tool_calls"] for row in others] == [row["tool_calls"] for row in rows]
    assert [row["completion_ids"] for row in others] == [row["completion_ids"] for row in rows]
    assert all(torch.equal(left, right) for left, right in zip(wanted, found))
    if name == "a reward that fails":
        failed = [failure for row in others for failure in row["failures"]]
        assert failed
        assert all("not at" in str(failure) for failure in failed)


def test_tools_run_in_the_worker(tmp_path):
    def asks(prompt):
        return said(
            call("double", number=4) if "<tool_response>" not in test_agents.TOKENIZER.decode(prompt.ids) else "8"
        )

    _, rows = play(tmp_path, by_sample, speaks=asks, tools=[double], rollout_workers=1, max_steps=1)
    assert {row["tool_calls"][0]["result"] for row in rows} == {"8"}


def test_an_environment_lives_in_the_process_that_plays(tmp_path):
    def asks(prompt):
        return said(call("where") if "<tool_response>" not in test_agents.TOKENIZER.decode(prompt.ids) else "there")

    _, rows = play(tmp_path, speaks=asks, environment_factory=Climb, rollout_workers=1, max_steps=1)
    assert str(os.getpid()) not in {row["tool_calls"][0]["result"] for row in rows}


def test_a_reward_that_takes_live_environments_is_refused(tmp_path):
    def looks(completions, environments, **kwargs):
        return [float(environment.count) for environment in environments]

    with pytest.raises(ValueError, match="The reward looks takes `environments`, and worker processes keep theirs"):
        play(tmp_path, looks, environment_factory=Climb, rollout_workers=1)
