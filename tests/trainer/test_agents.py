"""GRPO with tools and environments, end to end: what the model calls is run, what it said is trained, what came back is not."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset

from posttrain import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from posttrain.rollout.episodes.tools import Toolbox
from posttrain.rollout.store import read_rollouts
from tests import tiny
from tests.rollout.fuzzed_turns import TOOLS, turn
from tests.rollout.scripted_engine import ScriptedEngine

TOKENIZER = tiny.tokenizer()
STOP = TOKENIZER.eos_token_id


def said(text: str) -> list[int]:
    """One turn of the assistant, with its stop token."""
    return [*TOKENIZER(text, add_special_tokens=False)["input_ids"], STOP]


def call(name: str, **arguments) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def script(*turns: str):
    """Each episode says these turns, one after the other; told apart by how often the assistant has spoken."""

    def speak(prompt):
        spoken = TOKENIZER.decode(prompt.ids).count("<|im_start|>assistant") - 1
        return said(turns[min(spoken, len(turns) - 1)] + f" {prompt.sample}" * (spoken == len(turns) - 1))

    return ScriptedEngine(speak, shuffle=1)


def chats(count=12, **columns):
    prompts = [[{"role": "user", "content": f"Double {i}."}] for i in range(count)]
    return Dataset.from_dict({"prompt": prompts, "number": list(range(count)), **columns})


def by_sample(completions, **kwargs):
    return [float(len(str(completion)) % 5) + i for i, completion in enumerate(completions)]


def trainer(folder, rewards=by_sample, data=None, engine=None, cls=GRPOTrainer, config=GRPOConfig, **options):
    kept = {key: options.pop(key) for key in ("tools", "environment_factory", "rollout_func") if key in options}
    defaults = {
        "output_dir": str(folder), "max_steps": 2, "per_device_train_batch_size": 8, "num_generations": 4,
        "max_completion_length": 400, "report_to": "none", "logging_steps": 1, "use_cpu": True, "save_strategy": "no",
        "dataset_cache_dir": str(Path(folder) / "cache"), "reward_workers": 0, "disable_tqdm": True,
    }  # fmt: skip
    args = config(**{**defaults, **options})
    model = tiny.causal_lm(max_position_embeddings=2048)
    return cls(model, rewards, args, data, processing_class=tiny.tokenizer(), engine=engine, **kept)


def logged(folder):
    return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


def double(number: int) -> int:
    """
    Twice a number.

    Args:
        number: The number.
    """
    return 2 * number


async def add(a: int, b: int) -> str:
    """
    The sum of two numbers.

    Args:
        a: One of them.
        b: The other one.
    """
    return str(a + b)


# ---- tools ----------------------------------------------------------------------------------------------------------------


def test_calls_are_run_and_what_was_said_is_trained(tmp_path):
    turns = (call("double", number=3), call("add", a=1, b=2) + "\n" + call("nothing"), "It is")
    seen = []

    def looks(completions, **kwargs):
        seen.extend(completions)
        return by_sample(completions)

    made = trainer(tmp_path, looks, chats(), script(*turns), tools=[double, add], max_completion_length=800)
    made.train()
    roles = [message["role"] for message in seen[0]]
    assert roles == ["assistant", "tool", "assistant", "tool", "tool", "assistant"]
    assert seen[0][0]["tool_calls"][0]["function"] == {"name": "double", "arguments": {"number": 3}}
    assert [m["content"] for m in seen[0] if m["role"] == "tool"][:2] == ["6", "3"]
    rows = read_rollouts(tmp_path).to_pylist()
    assert len(rows) == 16
    for row in rows:
        ids, trained = np.array(row["completion_ids"]), np.array(row["trained"])
        expected = [token for turn in (*turns[:2], f"It is {row['sample']}") for token in said(turn)]
        assert ids[trained].tolist() == expected
        assert np.all(np.array(row["sampling_logps"])[~trained] == 0)
        assert np.all(np.array(row["sampling_logps"])[trained] < 0)
        assert [c["name"] for c in row["tool_calls"]] == ["double", "add", "nothing"]
        assert "no tool 'nothing'" in row["tool_calls"][2]["error"]
    entry = logged(tmp_path)[0]
    assert entry["tools/call_frequency"] == 3
    assert entry["tools/failure_frequency"] == pytest.approx(1 / 3)
    assert entry["tools/double/call_frequency"] == 1
    assert entry["grad_norm"] > 0


def test_the_prompt_shows_the_tools_and_what_follows_a_turn_is_the_template_s(tmp_path):
    engine = script(call("double", number=3), "It is 6")
    made = trainer(tmp_path, data=chats(), engine=engine, tools=[double], max_steps=1)
    made.train()
    first = TOKENIZER.decode(engine.prompts[0].ids)
    assert '"name": "double"' in first
    assert "Twice a number." in first
    second = next(p for p in engine.prompts if p.first_token)
    messages = [
        {"role": "user", "content": TOKENIZER.decode(second.ids).split("user\n")[1].split("<|im_end|>")[0]},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "double", "arguments": {"number": 3}}}]},
        {"role": "tool", "name": "double", "content": "6"},
    ]  # fmt: skip
    whole = TOKENIZER.apply_chat_template(
        messages, tools=made.agents.schemas, add_generation_prompt=True, tokenize=False
    )
    assert TOKENIZER.decode(second.ids) == whole


def test_iterations_and_lengths_end_an_episode(tmp_path):
    always = script(call("double", number=3))
    trainer(
        tmp_path / "a", data=chats(), engine=always, tools=[double], max_steps=1, max_tool_calling_iterations=2
    ).train()
    assert {len(row["tool_calls"]) for row in read_rollouts(tmp_path / "a").to_pylist()} == {2}
    trainer(tmp_path / "b", data=chats(), engine=script(call("double", number=3)), tools=[double], max_steps=1).train()
    for row in read_rollouts(tmp_path / "b").to_pylist():
        assert row["truncated"]
        assert len(row["completion_ids"]) <= 400


def test_a_toolbox_is_taken_as_it_is(tmp_path):
    box = Toolbox([double], parallel=True)
    made = trainer(tmp_path, data=chats(), engine=script("x"), tools=box, tool_timeout=7.0, max_tool_result=50)
    assert made.agents.toolbox is box
    assert (box.parallel, box.timeout, box.max_result) == (True, 7.0, 50)


def test_a_real_engine_writes_episodes(tmp_path):
    made = trainer(
        tmp_path, data=chats(), tools=[double], max_steps=2, rollout_engine="transformers", max_completion_length=12
    )
    made.train()
    assert len(read_rollouts(tmp_path)) == 16
    assert logged(tmp_path)[0]["tools/call_frequency"] == 0


def test_fuzzed_episodes_end_in_finite_updates_and_readable_files(tmp_path):
    """Hundreds are in tests/rollout/test_tool_episodes; here some of them go through loss, metrics and store."""

    def speak(prompt):
        return turn(np.random.default_rng([prompt.key, prompt.sample, prompt.first_token]))

    made = trainer(
        tmp_path, data=chats(), engine=ScriptedEngine(speak, shuffle=2), tools=TOOLS, max_steps=2, tool_timeout=0.1,
        per_device_train_batch_size=12, max_tool_result=200, max_completion_length=700,
    )  # fmt: skip
    made.train()
    rows = read_rollouts(tmp_path).to_pylist()
    assert len(rows) == 24
    assert all(sum(row["trained"]) > 0 for row in rows)
    assert all(np.isfinite(entry["loss"]) and entry["grad_norm"] > 0 for entry in logged(tmp_path)[:2])
    assert 0 < logged(tmp_path)[0]["tools/failure_frequency"] < 1


# ---- environments ---------------------------------------------------------------------------------------------------------


class Counter:
    """Counts up to a goal."""

    made = 0

    def __init__(self):
        type(self).made += 1

    async def reset(self, number=0, **row):
        self.count = number
        return f"You are at {number}."

    def up(self, by: int) -> str:
        """
        Go up.

        Args:
            by: How far.
        """
        self.count += by
        return f"You are at {self.count}."

    def get_reward(self) -> float:
        return float(self.count)


class Silent:
    """An environment of one turn."""

    def reset(self, **row):
        return None

    async def get_reward(self) -> float:
        return -1.0


def test_an_environment_is_reset_played_and_asked_for_its_reward(tmp_path):
    Counter.made = 0
    data, engine = chats(), script(call("up", by=5), "Done")
    made = trainer(tmp_path, None, data, engine, environment_factory=Counter, max_steps=3)
    made.train()
    assert made.rewards.names == ["Counter"]
    for row in read_rollouts(tmp_path).to_pylist():
        number = data[row["row"]]["number"]
        assert row["reward"] == number + 5
        assert json.loads(row["prompt"])[-1]["content"] == f"Double {number}.You are at {number}."
        assert row["tool_calls"][0]["result"] == f"You are at {number + 5}."
        assert f"Double {number}.You are at {number}." in TOKENIZER.decode(row["prompt_ids"])
    assert Counter.made <= 8  # one for each episode of a generation, and used again
    assert logged(tmp_path)[0]["env/reset_s"] >= 0


def test_several_environments_in_one_dataset(tmp_path):
    data = chats(environment=["counter", "silent"] * 6)
    engine = script(call("up", by=5), "Done")
    made = trainer(
        tmp_path, by_sample, data, engine, environment_factory={"counter": Counter, "silent": Silent},
        max_steps=3, reward_weights=[0.5],
    )  # fmt: skip
    made.train()
    assert made.rewards.names == ["by_sample", "Counter", "Silent"]
    assert made.rewards.weights == [0.5, 1.0, 1.0]
    for row in read_rollouts(tmp_path).to_pylist():
        rewards, number = dict(row["rewards"]), data[row["row"]]["number"]
        if data[row["row"]]["environment"] == "counter":
            assert (rewards["Counter"], rewards["Silent"]) == (number + 5, None)
            assert '"name": "up"' in TOKENIZER.decode(row["prompt_ids"])
        else:
            assert (rewards["Counter"], rewards["Silent"]) == (None, -1.0)
            assert '"name": "up"' not in TOKENIZER.decode(row["prompt_ids"])


def test_unknown_names_of_environments_are_bad_rows(tmp_path):
    data = chats(environment=["counter", "other"] * 6)
    with pytest.raises(ValueError, match="'other'"):
        trainer(tmp_path, None, data, script("x"), environment_factory={"counter": Counter})


def test_an_environment_needs_no_dataset(tmp_path):
    made = trainer(tmp_path, None, None, script(call("up", by=1), "Done"), environment_factory=Counter, max_steps=3)
    made.train()
    rows = read_rollouts(tmp_path).to_pylist()
    assert len(rows) == 24
    assert {json.loads(row["prompt"])[0]["content"] for row in rows} == {"You are at 0."}


class Moody(Counter):
    def reset(self, number=0, **row):
        if number % 3 == 0:
            raise KeyError("a mood")
        return super().up.__doc__ and None

    def get_reward(self) -> float:
        return 1.0


def test_a_failed_reset_costs_its_episode_alone(tmp_path):
    trainer(tmp_path, [by_sample], chats(), script("Done"), environment_factory=Moody, max_steps=6).train()
    rows = read_rollouts(tmp_path).to_pylist()
    assert {row["masked"] for row in rows if row["row"] % 3} == {False}
    assert {row["masked"] for row in rows if not row["row"] % 3} == {True}
    assert "KeyError: 'a mood'" in next(row["error"] for row in rows if row["masked"])


class Broken(Counter):
    def reset(self, **row):
        raise RuntimeError("never works")


def test_a_run_in_which_no_episode_begins_is_stopped(tmp_path):
    with pytest.raises(RuntimeError, match=r"Not one of the 8 completions .* never works"):
        trainer(tmp_path, by_sample, chats(), script("Done"), environment_factory=Broken).train()


# ---- refusals -------------------------------------------------------------------------------------------------------------


def undocumented(x: int) -> int:
    return x


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"tools": [undocumented]}, "Tool undocumented cannot be described"),
        ({"tools": [double, double]}, "two tools called 'double'"),
        ({"tools": double}, "must be a list of functions"),
        ({"tools": [double], "rollout_func": lambda *a: {}}, "`rollout_func` writes rollouts itself"),
        ({"max_tool_result": 5}, "`max_tool_result` is set, but there are neither"),
        ({"environment_factory": dict}, "needs a method `reset`"),
        ({"environment_factory": {}}, "empty dict"),
        ({"tools": [double], "max_tool_calling_iterations": -1}, "max_tool_calling_iterations"),
        ({"tools": [double], "data": Dataset.from_dict({"prompt": ["plain"] * 8})}, "lists of messages"),
    ],
)
def test_what_cannot_work_is_refused(tmp_path, options, told):
    with pytest.raises((ValueError, TypeError), match=told):
        trainer(tmp_path, engine=script("x"), **{"data": chats(), **options})


def test_a_template_without_tools_is_refused(tmp_path):
    args = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, num_generations=4, report_to="none")
    with pytest.raises(ValueError, match="does not write the signatures of tools"):
        GRPOTrainer(
            tiny.causal_lm(), by_sample, args, chats(), processing_class=tiny.tokenizer("alpaca"), tools=[double]
        )


def test_rloo_has_no_tools(tmp_path):
    with pytest.raises(TypeError, match="tools"):
        trainer(tmp_path, data=chats(), cls=RLOOTrainer, config=RLOOConfig, tools=[double])
