"""Runs with judges: GRPO on a judge that fails for some prompts, and win rates on the engines of online and offline trainers."""

from __future__ import annotations

import json
import math
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet
import pytest
from datasets import Dataset
from torch import nn
from transformers import GenerationConfig

from posttrain import (
    BaseBinaryJudge,
    BasePairwiseJudge,
    ChatJudge,
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    RewardConfig,
    RewardModelJudge,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
    WinRateCallback,
)
from posttrain.models.load.reference import frozen_copy
from posttrain.rewards.judging import Verdict, is_swapped
from posttrain.rollout.schedule import Schedule
from posttrain.trainer.online import win_rate
from posttrain.trainer.online.win_rate import reference_model, sampling_of, win_rates
from tests import tiny
from tests.forked import start_group, wait_for_group
from tests.rewards.chat_server import DROP, HANG, ChatServer, longer, said
from tests.trainer import sharded_answers

QUICK = {
    "max_steps": 2, "per_device_train_batch_size": 16, "report_to": "none", "logging_steps": 1, "use_cpu": True,
    "save_strategy": "no", "disable_tqdm": True, "learning_rate": 1e-2, "lr_scheduler_type": "constant",
}  # fmt: skip


def rows(count=16):
    return Dataset.from_dict({"prompt": [f"Say {i}." for i in range(count)]})


def grpo(folder, judge, **options):
    given = {"num_generations": 2, "max_completion_length": 6, "rollout_engine": "transformers", **QUICK, **options}
    named = {name: given.pop(name) for name in ("eval_dataset", "ref_model") if name in given}
    args = GRPOConfig(str(folder), dataset_cache_dir=str(Path(folder) / "cache"), **given)
    return GRPOTrainer(tiny.causal_lm(), judge, args, rows(), processing_class=tiny.tokenizer(), **named)


def logged(folder):
    return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


def letters(text):
    return sum("!" <= letter < "a" for letter in text)


class More(BasePairwiseJudge):
    """Prefers the text with more of some characters; keeps what it was shown."""

    def __init__(self):
        self.seen = []

    def judge(self, prompts, completions, shuffle_order=True):
        self.seen.append((prompts, completions))
        counts = [[letters(text) for text in pair] for pair in completions]
        return [0.5 if a == b else int(b > a) for a, b in counts]


# ---- training ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault", [(500, {"error": "tired"}), DROP, HANG, said("hm"), "<html>"], ids=["500", "drop", "hang", "lie", "html"]
)
def test_a_judge_that_fails_for_some_prompts_masks_them_and_the_run_continues(tmp_path, fault):
    def behave(asked):
        return fault if asked.prompt in ("Say 3.", "Say 7.") else longer(asked)

    with ChatServer(behave) as server:
        judge = ChatJudge(server.url, "m", timeout=1.0 if fault is HANG else 60.0, retries=0, max_requests=100)
        made = grpo(tmp_path, judge, max_steps=2, per_device_train_batch_size=32)  # every prompt in each generation
        made.train()
    steps = [entry for entry in logged(tmp_path) if "rollouts/masked" in entry]
    assert len(steps) == 2
    kind = {DROP: "error", HANG: "timeout"}.get(fault if fault in (DROP, HANG) else None) or (
        "error" if isinstance(fault, tuple) else "invalid"
    )
    asked_about = {asked.prompt for asked in server.asked}
    faulty = 2 * len(asked_about & {"Say 3.", "Say 7."})
    assert [entry["rollouts/masked"] for entry in steps] == pytest.approx([faulty / 32] * 2)
    assert [entry["rewards/ChatJudge/failed"] for entry in steps] == pytest.approx([faulty / 32] * 2)
    assert [entry[f"reward_failures/{kind}"] for entry in steps] == [faulty, 2 * faulty]
    assert all(entry["reward"] == pytest.approx(0.5) for entry in steps)  # winners and losers, or ties
    assert all(math.isfinite(entry["loss"]) for entry in steps)


def test_a_reward_model_judges_after_generation_and_its_probabilities_are_rewards(tmp_path):
    made = grpo(tmp_path, RewardModelJudge(tiny.reward_model(seed=3), tiny.tokenizer()), max_steps=1)
    made.train()
    (step,) = [entry for entry in logged(tmp_path) if "reward" in entry]
    assert step["reward"] == pytest.approx(0.5)  # P and 1 - P
    assert 0 < step["rewards/RewardModelJudge/std"] < 0.5
    assert step["rollouts/masked"] == 0


def test_a_group_must_lie_on_one_process():
    split = {"batch_size": 2, "world_size": 2, "accumulation": 1}
    assert Schedule.of(num_generations=4, **split).splits_groups
    assert not Schedule.of(num_generations=2, **split).splits_groups
    assert not Schedule.of(num_generations=4, **{**split, "accumulation": 2}).splits_groups
    assert not Schedule.of(num_generations=4, **{**split, "world_size": 1, "batch_size": 4}).splits_groups


def test_an_evaluation_with_one_completion_is_refused(tmp_path):
    with pytest.raises(ValueError, match="More compares the completions of a prompt, and `num_generations_eval` is 1"):
        grpo(tmp_path, More(), num_generations_eval=1)


class Coin(BasePairwiseJudge):
    """Tosses a coin."""

    def judge(self, prompts, completions, shuffle_order=True):
        return [int(is_swapped(1, prompt, *pair)) for prompt, pair in zip(prompts, completions)]


def rate_after(folder, judge, seed):
    """Win rate of a policy trained on a judge, as `More` sees it."""
    made = grpo(
        folder, judge, reward_workers=0, max_steps=20, per_device_train_batch_size=32, num_generations=4, beta=0.0, seed=seed,
        eval_strategy="steps", eval_steps=20, eval_dataset=rows(128),
    )  # fmt: skip
    made.add_callback(WinRateCallback(More(), made))
    made.train()
    (rate,) = [entry["eval_win_rate"] for entry in logged(folder) if "eval_win_rate" in entry]
    return rate


def test_a_policy_trained_on_a_judge_wins_against_its_beginning(tmp_path):
    assert rate_after(tmp_path, More(), 1) > 0.7


@pytest.mark.trust
def test_a_policy_trained_on_coins_does_not(tmp_path):
    """A random walk goes somewhere, so it is the mean of several."""
    assert 0.35 < np.mean([rate_after(tmp_path / str(seed), Coin(), seed) for seed in range(1, 4)]) < 0.65


# ---- win rates ---------------------------------------------------------------------------------------------------------


def table(folder, name):
    return pyarrow.parquet.read_table(Path(folder) / "win_rate" / f"{name}.parquet").to_pydict()


def test_win_rates_leave_failures_and_ties_out():
    verdicts = [Verdict(0.2), Verdict(0.9), Verdict(0.4), Verdict(0.5), Verdict()]  # of the reference
    found = win_rates(verdicts, soft=True)
    assert found == {
        "eval_win_rate": pytest.approx(2 / 3), "eval_avg_win_prob": pytest.approx((0.8 + 0.1 + 0.6 + 0.5) / 4),
        "eval_judge_failed": pytest.approx(0.2), "eval_judge_ties": pytest.approx(0.2),
    }  # fmt: skip
    assert win_rates([Verdict(), Verdict(0.5)], soft=False) == {"eval_judge_failed": 0.5, "eval_judge_ties": 0.5}


def test_an_online_trainer_measures_on_its_own_engine_against_its_beginning(tmp_path, capsys):
    judge = More()
    made = grpo(
        tmp_path, lambda completions, **_: [letters(text) for text in completions], reward_workers=0, max_steps=4,
        per_device_train_batch_size=32, eval_strategy="steps", eval_steps=2, eval_dataset=rows(6),
    )  # fmt: skip
    callback = WinRateCallback(judge, made, num_prompts=5)
    made.add_callback(callback)
    sessions = []
    session = made.engine.session
    made.engine.session = lambda params: sessions.append(params) or session(params)
    made.train()
    evaluations = [entry for entry in logged(tmp_path) if "eval_judge_ties" in entry]
    assert [entry["step"] for entry in evaluations] == [2, 4]
    assert sessions.count(callback.sampling) == 3  # reference, and two evaluations
    kept = table(tmp_path, "step_4")
    assert list(kept) == ["step", "prompt", "reference_model", "policy", "winner_index"]
    assert kept["prompt"] == [f"Say {n}." for n in range(5)]
    assert (
        kept["reference_model"]
        == table(tmp_path, "reference")["completion"]
        == table(tmp_path, "step_2")["reference_model"]
    )
    counts = [(letters(a), letters(b)) for a, b in zip(kept["reference_model"], kept["policy"])]
    assert kept["winner_index"] == [0.5 if a == b else float(b > a) for a, b in counts]
    decided = [winner for winner in kept["winner_index"] if winner != 0.5]
    assert evaluations[1].get("eval_win_rate") == (pytest.approx(np.mean(decided)) if decided else None)
    assert evaluations[1]["eval_judge_ties"] == pytest.approx(1 - len(decided) / 5)
    assert "win rate at step 2 (all 5 comparisons in win_rate/step_2.parquet)" in capsys.readouterr().out


def sft(folder, **options):
    args = SFTConfig(str(folder), dataset_cache_dir=str(Path(folder) / "cache"), **{**QUICK, "max_steps": 4, **options})
    data = Dataset.from_list(tiny.chats(8))
    return SFTTrainer(tiny.causal_lm(), args, train_dataset=data, eval_dataset=data, processing_class=tiny.tokenizer())


def test_a_model_that_does_not_move_ties_with_itself(tmp_path):
    made = sft(tmp_path, learning_rate=0.0, eval_strategy="epoch", num_train_epochs=1, max_steps=-1)
    made.add_callback(WinRateCallback(More(), made, GenerationConfig(max_new_tokens=4), num_prompts=3))
    made.train()
    (found,) = [entry for entry in logged(tmp_path) if "eval_judge_ties" in entry]
    assert (found["eval_judge_ties"], found["eval_judge_failed"], "eval_win_rate" in found) == (1.0, 0.0, False)


def test_answers_of_an_offline_trainer_are_those_of_generate_and_the_score_can_choose_the_best_model(tmp_path):
    class Policy(BasePairwiseJudge):
        def judge(self, prompts, completions, shuffle_order=True):
            return [1] * len(prompts)

    made = sft(tmp_path, eval_strategy="steps", eval_steps=2, save_strategy="best", metric_for_best_model="win_rate")
    made.add_callback(WinRateCallback(Policy(), made, GenerationConfig(max_new_tokens=5), num_prompts=2))
    made.train()
    assert [entry["eval_win_rate"] for entry in logged(tmp_path) if "eval_win_rate" in entry] == [1.0, 1.0]
    assert made.state.best_metric == 1.0
    found, tokenizer, model = table(tmp_path, "step_4"), made.processing_class, made.model.eval()
    for row, answer in zip(tiny.chats(2), found["policy"]):
        ids = tokenizer.apply_chat_template(
            row["messages"][:1], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        alone = model.generate(**ids, do_sample=False, max_new_tokens=5, eos_token_id=256, pad_token_id=257)
        assert answer == tokenizer.decode(alone[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)


def test_a_reference_model_of_its_own_writes_the_other_answers(tmp_path):
    args = DPOConfig(
        str(tmp_path), dataset_cache_dir=str(tmp_path / "cache"), eval_strategy="steps", eval_steps=1, **QUICK
    )
    data, other = Dataset.from_list(tiny.pairs(8)), tiny.causal_lm(seed=5)
    made = DPOTrainer(
        tiny.causal_lm(), other, args, train_dataset=data, eval_dataset=data, processing_class=tiny.tokenizer()
    )
    asked = [[{"role": "user", "content": "Name a colour."}], "Name"]
    made.add_callback(WinRateCallback(judge := More(), made, GenerationConfig(max_new_tokens=4), prompts=asked))
    made.train()
    tokenizer = made.processing_class
    ids = tokenizer("Name", return_tensors="pt")
    alone = other.eval().generate(**ids, do_sample=False, max_new_tokens=4, eos_token_id=256, pad_token_id=257)
    assert table(tmp_path, "reference")["completion"][1] == tokenizer.decode(
        alone[0, ids["input_ids"].shape[1] :], skip_special_tokens=True
    )
    (prompts, pairs), *_ = judge.seen
    assert prompts == ["User: Name a colour.", "Name"]
    assert all(text.startswith("Assistant: ") for text in pairs[0])


def test_a_resumed_run_is_compared_with_the_same_answers(tmp_path):
    def run(steps, judge, **more):
        made = sft(tmp_path, max_steps=steps, eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1)
        made.add_callback(WinRateCallback(judge, made, GenerationConfig(max_new_tokens=6), num_prompts=3))
        made.train(**more)

    run(2, More())
    before = table(tmp_path, "reference")
    run(3, More(), resume_from_checkpoint=True)
    assert (
        table(tmp_path, "step_3")["reference_model"]
        == before["completion"]
        == table(tmp_path, "step_1")["reference_model"]
    )


@pytest.mark.parametrize("fault", [(503, {}), DROP, HANG, said("maybe")], ids=["503", "drop", "hang", "lie"])
def test_a_judge_that_fails_costs_the_comparison_and_not_the_run(tmp_path, fault, caplog):
    with ChatServer(lambda asked: fault if "colour" in asked.prompt else said("0")) as server:
        judge = ChatJudge(server.url, "m", timeout=1.0 if fault is HANG else 60.0, retries=0)
        made = sft(tmp_path, max_steps=1, eval_strategy="steps", eval_steps=1, learning_rate=1.0)
        asked = ["colour", "number"]
        made.add_callback(WinRateCallback(judge, made, GenerationConfig(max_new_tokens=8), prompts=asked))
        made.train()
    (found,) = [entry for entry in logged(tmp_path) if "eval_judge_failed" in entry]
    assert found["eval_judge_failed"] == 0.5
    assert table(tmp_path, "step_1")["winner_index"][0] == -1
    assert "The judge failed in 1 of 2 comparisons, which are left out of the win rate" in caplog.text


def test_a_judge_that_raises_does_not_end_the_run(tmp_path, caplog):
    class Raises(BasePairwiseJudge):
        def judge(self, prompts, completions, shuffle_order=True):
            raise RuntimeError("not today")

    made = sft(tmp_path, max_steps=1, eval_strategy="steps", eval_steps=1)
    made.add_callback(WinRateCallback(Raises(), made, num_prompts=2))
    made.train()
    (found,) = [entry for entry in logged(tmp_path) if "eval_judge_failed" in entry]
    assert found["eval_judge_failed"] == 1.0
    assert "RuntimeError: not today" in caplog.text


def test_a_judge_that_hangs_does_not_hold_up_the_run(tmp_path, caplog, monkeypatch):
    over = threading.Event()

    class Hangs(BasePairwiseJudge):
        def judge(self, prompts, completions, shuffle_order=True):
            over.wait(600)
            return [0] * len(prompts)

    monkeypatch.setattr(win_rate, "SPARE", 0.1)
    made = sft(tmp_path, max_steps=1, eval_strategy="steps", eval_steps=1)
    made.add_callback(WinRateCallback(Hangs(), made, num_prompts=2, judge_timeout=0.5))
    made.train()
    over.set()
    (found,) = [entry for entry in logged(tmp_path) if "eval_judge_failed" in entry]
    assert found["eval_judge_failed"] == 1.0
    assert "it did not answer within 0.5 s" in caplog.text


def test_which_model_is_the_reference():
    own, given = frozen_copy(nn.Linear(1, 1)), replace(frozen_copy(nn.Linear(1, 1)), is_given=True)

    def run(reference, step=0, sharded=False):
        state = SimpleNamespace(global_step=step)
        return SimpleNamespace(reference=reference, state=state, is_fully_sharded=sharded)

    assert reference_model(run(None)) is reference_model(run(own)) is None  # the policy, before its first step
    assert reference_model(run(own, step=3)) is own.model  # resumed without the file of its answers
    assert reference_model(run(given)) is given.model
    assert reference_model(run(own, step=3, sharded=True)) is None
    with pytest.raises(ValueError, match="Under FSDP a win rate is measured against the model before training"):
        reference_model(run(given, sharded=True))


@pytest.mark.slow
def test_two_processes_under_fsdp_write_and_judge_what_one_does(tmp_path):
    homes = [tmp_path / "one", tmp_path / "two"]
    for processes, home in enumerate(homes, 1):
        group = start_group(
            processes, lambda rank, home=home: sharded_answers.main(home), tmp_path / f"rank{processes}"
        )
        assert wait_for_group(group) == [0] * processes
    for method in sharded_answers.METHODS:
        for name in ("reference", "step_2"):
            assert table(homes[0] / method, name) == table(homes[1] / method, name), (method, name)
        scores = [[e["evals/said/score"] for e in logged(home / method) if "evals/said/score" in e] for home in homes]
        assert scores[0] == scores[1]
        assert len(scores[0]) == 2  # before the first step, and after the last


def test_how_answers_are_written(tmp_path):
    args = sft(tmp_path).args
    greedy = sampling_of(None, args, (7,))
    assert (greedy.temperature, greedy.max_tokens, greedy.stop_ids) == (0.0, 128, (7,))
    config = GenerationConfig(do_sample=True, temperature=0.7, top_p=0.9, max_new_tokens=3, eos_token_id=[8, 9])
    drawn = sampling_of(config, args, (7,))
    assert (drawn.temperature, drawn.top_p, drawn.top_k, drawn.max_tokens, drawn.stop_ids) == (
        0.7,
        0.9,
        50,
        3,
        (7, 8, 9),
    )
    with pytest.raises(ValueError, match="`generation_config` sets num_beams; a win rate is measured with do_sample"):
        sampling_of(GenerationConfig(num_beams=2), args, ())


def test_what_has_no_win_rate(tmp_path):
    class Good(BaseBinaryJudge):
        def judge(self, prompts, completions, gold_completions=None, shuffle_order=True):
            return [1] * len(prompts)

    made = sft(tmp_path)
    with pytest.raises(TypeError, match="needs a pairwise judge; Good is not one"):
        WinRateCallback(Good(), made)
    with pytest.raises(ValueError, match="More gives no probabilities"):
        WinRateCallback(More(), made, use_soft_judge=True)
    with pytest.raises(ValueError, match="`num_prompts` is 0"):
        WinRateCallback(More(), made, num_prompts=0)
    args = RewardConfig(str(tmp_path / "reward"), dataset_cache_dir=str(tmp_path / "cache"), **QUICK)
    data = Dataset.from_list(tiny.pairs(8))
    scores = RewardTrainer(tiny.reward_model(), args, train_dataset=data, processing_class=tiny.tokenizer())
    with pytest.raises(ValueError, match="RewardTrainer trains a model that writes nothing: it has no win rate"):
        WinRateCallback(More(), scores, prompts=["p"])
