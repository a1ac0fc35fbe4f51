"""Judges on the command line: judge:MODEL@URL, judge:REWARD_MODEL, and judges of the user's files."""

from __future__ import annotations

import json

import pytest

from posttrain import ChatJudge
from posttrain.cli.errors import UsageError
from posttrain.cli.running.named_objects import is_model, judging_model, reward_named
from tests import tiny
from tests.cli.runs import flags, options_of, posttrain
from tests.rewards.chat_server import ChatServer, longer

OWN = """
from posttrain import BasePairwiseJudge

class Brief(BasePairwiseJudge):
    def judge(self, prompts, completions, shuffle_order=True):
        return [int(len(second) < len(first)) for first, second in completions]

made = Brief()
"""


@pytest.fixture(autouse=True)
def with_judges(folder):
    (folder / "judges_of_test.py").write_text(OWN)


def test_names_of_judges(folder):
    tiny.reward_model().save_pretrained(folder / "scores")
    tiny.tokenizer().save_pretrained(folder / "scores")
    judge = reward_named("judge:org/m@http://127.0.0.1:1/v1?orders=both&seed=4")
    assert isinstance(judge, ChatJudge)
    assert (judge.model, judge.orders, judge.seed) == ("org/m", "both", 4)
    assert reward_named("judge:scores") == "judge:scores"
    assert [type(reward_named(f"judges_of_test.py:{name}")).__name__ for name in ("Brief", "made")] == ["Brief"] * 2
    assert not is_model("judge:org/m@http://127.0.0.1:1/v1")
    names = ("judge:scores", "scores?rule=lines", "judge:org/m@http://127.0.0.1:1/v1", "judges_of_test.py:made")
    assert [judging_model(name) for name in names] == ["scores", "scores", None, None]
    for name, sentence in (
        ("judge:org/m@http://127.0.0.1:1/v1?order=both", "unknown option 'order'; it must be one of orders"),
        ("judge:scores?soft=1", "unknown option 'soft'; a judge by a reward model has none"),
    ):
        with pytest.raises(UsageError, match=sentence):
            reward_named(name)


def metrics(folder, run):
    return [json.loads(line) for line in (folder / run / "metrics.jsonl").read_text().splitlines()]


def test_a_run_with_a_judge_behind_a_server(folder):
    with ChatServer(longer) as server:
        options = options_of("grpo") | {
            "reward_funcs": [f"judge:m@{server.url}?max_requests=100"],
            "num_generations": 2,
        }
        assert posttrain("grpo", *flags(options)) == 0
    steps = [entry for entry in metrics(folder, "out-grpo") if "reward" in entry]
    assert [entry["rewards/ChatJudge/mean"] for entry in steps] == pytest.approx([0.5, 0.5])
    assert {asked.body["model"] for asked in server.asked} <= {"m"}


def test_a_judge_beside_a_reward_is_refused_before_a_model_is_loaded(folder, capsys):
    options = options_of("grpo") | {"reward_funcs": ["judges_of_test.py:made", "rewards_of_test.py:length"]}
    assert posttrain("grpo", *flags(options)) == 2
    assert "A judge is the only reward of a run, and there are 2 rewards" in capsys.readouterr().err
