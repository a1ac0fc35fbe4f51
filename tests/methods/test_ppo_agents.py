"""PPO with judges as rewards, with tools and with environments: what is scored, and which tokens have a value."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from posttrain.models.load.reference import PRECOMPUTED
from posttrain.rewards.judging import BaseBinaryJudge, BasePairwiseJudge
from posttrain.rollout.rollout import ADVANTAGES, OLD_LOGPS, RETURNS, VALUES
from tests import tiny
from tests.methods.test_ppo import END, trainer
from tests.rollout.scripted_engine import ScriptedEngine
from tests.trainer import test_agents


class LowerLetters(BasePairwiseJudge):
    """Prefers the answer whose first letter comes first."""

    def judge(self, prompts, completions, shuffle_order=True):
        return [0.5 if a[:1] == b[:1] else float(a > b) for a, b in completions]


class ShortIsGood(BaseBinaryJudge):
    def judge(self, prompts, completions, gold_completions=None, shuffle_order=True):
        return [int(len(text) < 3) for text in completions]


def test_a_judge_is_a_reward(tmp_path):
    """Of a pairwise judge the score is the share of comparisons that a completion wins: it needs two of a prompt."""
    with pytest.raises(ValueError, match="`num_generations`"):
        trainer(tmp_path, reward=LowerLetters())
    engine = ScriptedEngine(lambda prompt: [65 + prompt.sample, END])
    made = trainer(tmp_path / "pairs", reward=LowerLetters(), engine=engine, options={"num_generations": 2})
    loader = made.get_train_dataloader()
    window = [unit[0] for unit in loader.source.next_window()]
    (collected,) = loader.source.take_finished()
    assert collected.totals.tolist() == [1.0, 0.0] * 4
    assert [sample.read_trained(RETURNS)[-1] for sample in window] == pytest.approx(collected.totals.tolist())
    engine = ScriptedEngine(lambda prompt: [65] * (2 + 2 * prompt.sample) + [END])
    made = trainer(tmp_path / "binary", reward=ShortIsGood(), engine=engine, options={"num_generations": 2})
    made.train()
    assert made.state.log_history[0]["objective/scores"] == 0.5


def agent(folder, engine, reward, **named):
    options = {"max_completion_length": 400, "response_length": None, "kl_coef": 0.5, "lam": 0.9}
    model = tiny.causal_lm(max_position_embeddings=2048)
    return trainer(folder, model, reward, options, engine=engine, train_dataset=test_agents.chats(16), **named)


def test_values_and_advantages_are_of_what_the_model_said(tmp_path):
    """Between two turns lies a tool's result, which has neither: the state after the first turn is that before the second."""
    calls = test_agents.call("double", number=3)
    made = agent(tmp_path, test_agents.script(calls, "It is 6"), test_agents.by_sample, tools=[test_agents.double])
    torch.nn.init.normal_(made.critic.weight)  # values that differ
    loader = made.get_train_dataloader()
    units = loader.source.next_window()
    (collected,) = loader.source.take_finished()
    assert [len(rollout.tool_calls) for rollout in collected.rollouts] == [1] * 8
    raw = []
    for (sample,), rollout in zip(units, collected.rollouts):
        spoken = [*test_agents.said(calls), *test_agents.said(f"It is 6 {rollout.request.sample}")]
        assert sample.num_trained == len(spoken) < len(sample) - rollout.prompt_length
        values, returns = (sample.read_trained(name).astype(np.float64) for name in (VALUES, RETURNS))
        rewards = -0.5 * (sample.read_trained(OLD_LOGPS) - sample.read_trained(PRECOMPUTED)).astype(np.float64)
        rewards[-1] += rollout.reward
        following, expected = 0.0, np.zeros_like(values)
        for t in reversed(range(len(values))):
            after = values[t + 1] if t + 1 < len(values) else 0.0
            following = expected[t] = rewards[t] + after - values[t] + 0.9 * following
        assert returns == pytest.approx(expected + values, abs=1e-4)
        raw.append(expected)
    whole = np.concatenate(raw)
    white = np.concatenate([unit[0].read_trained(ADVANTAGES) for unit in units])
    assert white == pytest.approx((whole - whole.mean()) / whole.std(ddof=1), abs=1e-3)
    made.train()
    assert made.state.log_history[0]["val/ratio"] == pytest.approx(1, abs=1e-5)
    assert made.state.log_history[0]["tools/call_frequency"] == 1


def test_an_environment_gives_the_score(tmp_path):
    engine = test_agents.script(test_agents.call("up", by=2), "Done")
    made = agent(tmp_path, engine, None, environment_factory=test_agents.Counter)
    loader = made.get_train_dataloader()
    units = loader.source.next_window()
    (collected,) = loader.source.take_finished()
    assert [rollout.reward for rollout in collected.rollouts] == [
        rollout.request.row + 2 for rollout in collected.rollouts
    ]
    assert [unit[0].read_trained(RETURNS)[-1] for unit in units] == pytest.approx(
        [rollout.reward for rollout in collected.rollouts]
    )


def test_options_of_tools_without_tools_are_refused(tmp_path):
    with pytest.raises(ValueError, match="neither `tools` nor an `environment_factory`"):
        trainer(tmp_path, options={"max_tool_result": 5})
