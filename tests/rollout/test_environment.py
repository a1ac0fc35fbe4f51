"""Environments: pooled, reset for each episode, their methods tools, and none of their mistakes anybody else's."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest

from posttrain.rollout.episodes.environment import Environments, extended_prompt
from posttrain.rollout.episodes.tools import Toolbox
from posttrain.rollout.prompt_rows import PromptRow
from tests.waiting import eventually


class Game:
    """A game."""

    title = "game"

    def reset(self, level, **row):
        self.level, self.row = level, row

    @property
    def secret(self):
        raise RuntimeError("nobody should look")

    def _hidden(self):
        """Not for models."""

    def jump(self, height: int) -> str:
        """
        Jump.

        Args:
            height: How high.
        """
        return f"{height} at level {self.level}"

    async def rest(self) -> str:
        """Rest a while."""
        return "rested"

    def sleep(self) -> None:
        """Sleep too long."""
        time.sleep(0.6)

    def get_reward(self):
        return self.level


class Other:
    def reset(self, level=0):
        self.level = level

    async def get_reward(self):
        return -self.level


def row(**columns):
    return PromptRow(np.arange(3), [{"role": "user", "content": "Hi"}], columns, 0)


def wait(environment, pending):
    eventually(lambda: environment.toolbox.threads.is_over(pending))
    return pending


def finished(running):
    eventually(lambda: running.is_over)
    return running.finished()


def test_public_methods_are_tools_and_reset_gets_the_columns():
    made = Environments(Game, Toolbox([]))
    game = made.take(row(level=3, other="x"))
    assert sorted(game.toolbox.tools) == ["jump", "rest", "sleep"]
    assert made.kinds[""].needed_columns == ["level"]
    assert wait(game, game.start_reset(row(level=3, other="x"))).error is None
    assert game.instance.row == {"other": "x", "prompt": [{"role": "user", "content": "Hi"}]}
    assert finished(game.start("jump", {"height": 2})).result == "2 at level 3"
    assert finished(game.start("rest", {})).result == "rested"
    assert "no tool 'reset'" in finished(game.start("reset", {})).error


def test_columns_that_reset_does_not_name_are_not_given():
    made = Environments({"o": Other}, Toolbox([]))
    other = made.take(row(level=3, environment="o", more=1))
    assert wait(other, other.start_reset(row(level=3, environment="o", more=1))).error is None
    assert other.instance.level == 3


def test_instances_are_used_again_but_not_while_a_call_runs_in_them():
    made = Environments(Game, Toolbox([], timeout=0.1))
    first, second = made.take(row(level=1)), made.take(row(level=1))
    assert first.instance is not second.instance
    assert finished(first.start("sleep", {})).error == "It took longer than 0.1 s."
    assert "still running" in finished(first.start("rest", {})).error
    made.give_back([first.instance, second.instance])
    third, fourth = made.take(row(level=1)), made.take(row(level=1))
    assert third.instance is second.instance
    assert fourth.instance is not first.instance
    assert made.kinds[""].made == 3


def test_rewards_are_named_after_classes_and_ask_their_own():
    made = Environments({"g": Game, "h": Game, "o": Other}, Toolbox([]))
    game, other = made.take(row(environment="g")), made.take(row(environment="o"))
    game.instance.level, other.instance.level = 4, 5
    rewards = {reward.__name__: reward for reward in made.rewards()}
    assert list(rewards) == ["Game", "Other"]
    both = [game.instance, other.instance]
    assert asyncio.run(rewards["Game"](environments=both)) == [4, None]
    assert asyncio.run(rewards["Other"](environments=both)) == [None, -5]


def jump(height: int) -> str:
    """
    Another jump.

    Args:
        height: How high.
    """


class Undescribed:
    def reset(self):
        pass

    def act(self, x):
        pass


@pytest.mark.parametrize(
    ("factory", "tools", "told"),
    [
        (Game, [jump], "two tools called 'jump'"),
        (Undescribed, [], "Tool Undescribed.act cannot be described"),
        (object, [], "needs a method `reset`; object has none"),
        (3, [], "must be callable"),
        ({}, [], "empty dict"),
    ],
)
def test_what_cannot_work_is_refused(factory, tools, told):
    with pytest.raises((ValueError, TypeError), match=told):
        Environments(factory, Toolbox(tools))


def test_what_reset_returns_goes_to_the_last_message():
    prompt = [{"role": "system", "content": "S"}, {"role": "user", "content": "Hi. "}]
    assert extended_prompt(prompt, "Go.")[-1] == {"role": "user", "content": "Hi. Go."}
    assert extended_prompt(prompt, [{"type": "text", "text": "A"}, "B"])[-1]["content"] == "Hi. AB"
    assert prompt[-1]["content"] == "Hi. "
    with pytest.raises(TypeError, match="neither text nor image"):
        extended_prompt(prompt, [{"type": "image", "image": 1}])
    with pytest.raises(TypeError, match="returned a int"):
        extended_prompt(prompt, 3)
