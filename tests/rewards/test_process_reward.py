"""Process rewards: the scores of a model's own forward at the pasted separators, and one number made of them."""

from __future__ import annotations

import math

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig

from posttrain import GRPOConfig, GRPOTrainer, PRMConfig, PRMTrainer
from posttrain.models.load.model import LoadOptions, load_model
from posttrain.models.scoring.heads import TOKEN_LABELS
from posttrain.rewards import process_reward
from posttrain.rewards.process_reward import AGGREGATES, ProcessReward, model_reward, named_reward
from posttrain.rewards.reward_model import ModelReward
from posttrain.rewards.reward_set import Judged, RewardOptions, RewardSet
from tests import tiny

PROMPT = "What is 2 + 2?\n"
STEPS = ["2 + 2 = 4", "So it is 4.", "Done"]


def own_scores(model, tokenizer, prompt, steps, separator="\n"):
    """One row, the tokens pasted by hand, the model's own forward."""
    encode = lambda text: tokenizer(text, add_special_tokens=False).input_ids  # noqa: E731
    if not isinstance(prompt, str):
        prompt = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    ids, places = encode(prompt), []
    for step in steps:
        ids += encode(step) + encode(separator)
        places.append(len(ids) - 1)
    with torch.no_grad():
        return model.eval()(input_ids=torch.tensor([ids])).logits[0, places].softmax(-1)[:, 1].tolist()


def judged(reward, samples, **options):
    with RewardSet([reward], options=RewardOptions(stop_above=1.0, **options)) as made, made.open() as round:
        round.add(samples)
        return round.finish()


@pytest.fixture
def saved(tmp_path):
    tiny.process_reward_model().save_pretrained(tmp_path / "judge")
    tiny.tokenizer().save_pretrained(tmp_path / "judge")
    return tmp_path / "judge"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("min", 0.6),
        ("product", 0.432),
        ("mean", 0.766667),
        ("last", 0.8),
        ("sum_log", -0.839330),
        ("share_above", 0.666667),
    ],
)
def test_golden_aggregates(name, expected):
    """Of step scores 0.9, 0.6, 0.8, worked by hand; the threshold is 0.7."""
    assert AGGREGATES[name](np.log([0.9, 0.6, 0.8]), 0.7) == pytest.approx(expected, abs=5e-7)


def test_sums_of_many_steps_do_not_underflow():
    logps = np.full(2000, -2.0)
    assert AGGREGATES["sum_log"](logps, 0.5) == -4000
    assert AGGREGATES["product"](logps, 0.5) == 0.0
    assert AGGREGATES["product"](np.full(3, math.log(0.5)), 0.5) == pytest.approx(0.125)


@pytest.mark.parametrize("separator", ["\n", "\n\n", " ки\n"])
def test_a_completion_is_scored_as_its_steps_were_pasted_in_training(separator):
    samples = [Judged(PROMPT, separator.join(STEPS[:n]) + separator, []) for n in (1, 3, 2)] + [
        Judged([{"role": "user", "content": "hi"}], [{"role": "assistant", "content": separator.join(STEPS)}], [])
    ]
    reward = ProcessReward(tiny.process_reward_model(), tiny.tokenizer(), step_separator=separator, max_tokens=90)
    found = judged(reward, samples)
    plain = tiny.process_reward_model()
    expected = [
        own_scores(plain, tiny.tokenizer(), sample.prompt, STEPS[:n], separator)
        for sample, n in zip(samples, (1, 3, 2, 3))
    ]
    np.testing.assert_allclose(found.values[:, 0], [min(scores) for scores in expected], rtol=1e-4)
    steps = found.extras[f"{reward.name} steps"]
    assert [[text for _, text in one] for one in steps] == [STEPS[:1], STEPS, STEPS[:2], STEPS]
    for one, scores in zip(steps, expected):
        assert [score for score, _ in one] == pytest.approx(scores, abs=1e-4)
    assert reward([s.prompt for s in samples], [s.completion for s in samples]) == pytest.approx(found.values[:, 0])


def test_whatever_the_rule_a_step_is_followed_by_the_trained_separator():
    reward = ProcessReward(tiny.process_reward_model(), tiny.tokenizer(), rule="sentences", aggregate="last")
    (value,) = reward([PROMPT], ["It is so. And it is 4."])
    expected = own_scores(tiny.process_reward_model(), tiny.tokenizer(), PROMPT, ["It is so.", "And it is 4."])
    assert value == pytest.approx(expected[-1], rel=1e-4)


def test_what_cannot_be_judged():
    reward = ProcessReward(tiny.process_reward_model(), tiny.tokenizer())
    found = judged(reward, [Judged(PROMPT, STEPS[0], []), Judged(PROMPT, " \n", []), Judged(PROMPT, "x" * 600, [])])
    assert np.isnan(found.values[:, 0]).tolist() == [False, True, True]
    assert found.masked.tolist() == [False, False, True]  # without a step there is no opinion, which is no failure
    assert "more than the 512 of the reward model" in found.failures[0].message
    with pytest.raises(ValueError, match="has no chat template"):
        ProcessReward(tiny.process_reward_model(), tiny.tokenizer(None))([[{"role": "user", "content": "hi"}]], ["a"])


def test_a_name_is_enough_and_may_bring_options(saved):
    reward = model_reward(f"{saved}?aggregate=mean&rule=blank_line&max_steps=3")
    assert isinstance(reward, ProcessReward)
    assert (reward.name, reward.rule.name, reward.rule.max_steps) == ("judge", "blank_line", 3)
    (value,) = reward([PROMPT], ["a b\n\nc\n\nd\n\ne"])
    expected = own_scores(tiny.process_reward_model(), tiny.tokenizer(), PROMPT, ["a b", "c", "d\n\ne"])
    assert value == pytest.approx(np.mean(expected), rel=1e-4)
    assert isinstance(model_reward(tiny.process_reward_model(), tiny.tokenizer()), ProcessReward)
    assert type(model_reward(tiny.reward_model(), tiny.tokenizer())) is ModelReward


def test_wrong_options_are_named_before_a_model_is_loaded(monkeypatch, tmp_path):
    monkeypatch.setattr(process_reward, "load_model", None)
    with pytest.raises(ValueError, match=r"Unknown aggregate 'max'; known: min, product"):
        ProcessReward("nowhere/judge", aggregate="max")
    with pytest.raises(ValueError, match=r"Unknown step rule 'words'"):
        ProcessReward("nowhere/judge", rule="words")
    with pytest.raises(ValueError, match=r"runs/prm\?agg=min: Unknown option 'agg'; known: rule, aggregate"):
        named_reward("runs/prm?agg=min")
    with pytest.raises(ValueError, match=r"runs/prm\?aggregate=most: Unknown aggregate 'most'"):
        named_reward("runs/prm?aggregate=most")
    with pytest.raises(ValueError, match=r"runs/prm\?mean: bad query field: 'mean'"):
        named_reward("runs/prm?mean")
    with pytest.raises(ValueError, match=r"could not convert string to float: 'low'"):
        named_reward("runs/prm?aggregate=share_above&threshold=low")
    with pytest.raises(ValueError, match=r"`threshold` is 0.7, and min has none"):
        ProcessReward("nowhere/judge", threshold=0.7)
    with pytest.raises(ValueError, match=r"The separator of steps is empty"):
        ProcessReward("nowhere/judge", step_separator="")
    tiny.reward_model().save_pretrained(tmp_path / "whole")
    with pytest.raises(
        ValueError, match=r"the option 'aggregate' needs a process reward model, and .*whole is not one"
    ):
        model_reward(f"{tmp_path / 'whole'}?aggregate=min")


@pytest.mark.parametrize("lora", [False, True])
def test_what_the_trainer_saves_is_scored_with_its_separator(lora, tmp_path):
    tiny.process_reward_model().save_pretrained(tmp_path / "base")
    args = PRMConfig(
        output_dir=str(tmp_path / "run"), report_to="none", use_cpu=True, max_steps=2, step_separator="\n\n",
        learning_rate=1e-2, dataset_cache_dir=str(tmp_path),
    )  # fmt: skip
    adapter = LoraConfig(r=2, target_modules=["q_proj"]) if lora else None
    trainer = PRMTrainer(
        str(tmp_path / "base"), args, train_dataset=Dataset.from_list(tiny.steps()), processing_class=tiny.tokenizer(),
        peft_config=adapter,
    )  # fmt: skip
    trainer.train()
    trainer.save_model()
    reward = model_reward(f"{tmp_path / 'run'}" + ("?step_separator=%0A%0A" if lora else ""))
    assert reward.separator == "\n\n"
    expected = own_scores(trainer.model, tiny.tokenizer(), PROMPT, STEPS, "\n\n")
    (found,) = reward.step_scores([(PROMPT, STEPS)])
    assert found == pytest.approx(expected, rel=1e-4)


def test_a_head_that_is_more_than_a_linear_layer_is_refused():
    model = tiny.process_reward_model()
    body = model.forward
    model.forward = lambda *args, **kwargs: _shifted(body(*args, **kwargs))
    with pytest.raises(ValueError, match="has more than one linear layer over its hidden states"):
        load_model(model, LoadOptions(task=TOKEN_LABELS))


def _shifted(output):
    output.logits = output.logits + 1
    return output


def test_grpo_is_rewarded_by_it_and_its_rollouts_hold_the_steps(saved, tmp_path):
    args = GRPOConfig(
        output_dir=str(tmp_path / "run"), report_to="none", use_cpu=True, max_steps=1, num_generations=2,
        per_device_train_batch_size=2, max_completion_length=6, reward_workers=0, dataset_cache_dir=str(tmp_path),
    )  # fmt: skip
    trainer = GRPOTrainer(
        tiny.causal_lm(), f"{saved}?rule=lines&aggregate=mean", args,
        train_dataset=Dataset.from_list([{"prompt": PROMPT}] * 4), processing_class=tiny.tokenizer(),
    )  # fmt: skip
    trainer.train()
    logged = trainer.state.log_history[0]
    assert 0 < logged["rewards/judge/mean"] < 1
    (file,) = (tmp_path / "run").rglob("*.parquet")
    extras = [dict(one) for one in pq.read_table(file, columns=["extras"]).column("extras").to_pylist()]
    assert all(one["judge steps"].startswith("[[0.") for one in extras)
