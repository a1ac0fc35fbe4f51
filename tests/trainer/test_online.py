"""Online training end to end on a tiny model: rollouts, rewards, advantages, updates, evaluation and exact resume."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset

from posttrain import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from posttrain.rollout.rollout import ADVANTAGES
from posttrain.rollout.store import read_rollouts
from posttrain.trainer.report import progress
from tests import tiny


def share_of_letters(completions, completion_ids, **kwargs):
    return [sum(33 <= token < 97 for token in ids) / len(ids) for ids in completion_ids]


def rows(count=12):
    return Dataset.from_dict({"prompt": [f"Say {i}" for i in range(count)], "answer": list(range(count))})


def trainer(
    folder,
    rewards=share_of_letters,
    cls=GRPOTrainer,
    config=GRPOConfig,
    model=None,
    data=None,
    callbacks=None,
    **options,
):
    passed_on = (
        "eval_dataset",
        "rollout_func",
        "peft_config",
        "reward_processing_classes",
        "group_filter_func",
        "engine",
    )
    kept = {key: options.pop(key) for key in passed_on if key in options}
    defaults = {
        "output_dir": str(folder), "max_steps": 4, "per_device_train_batch_size": 8, "num_generations": 4,
        "max_completion_length": 6, "report_to": "none", "logging_steps": 1, "use_cpu": True, "save_strategy": "no",
        "dataset_cache_dir": str(Path(folder) / "cache"), "reward_workers": 0, "rollout_engine": "transformers",
        "learning_rate": 1e-3, "disable_tqdm": True,
    }  # fmt: skip
    args = config(**{**defaults, **options})
    return cls(
        model if model is not None else tiny.causal_lm(), rewards, args, data if data is not None else rows(),
        processing_class=tiny.tokenizer(), callbacks=callbacks, **kept,
    )  # fmt: skip


def logged(folder):
    lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    clocks = ("_s", "_second", "_runtime", "_time")
    return [{name: value for name, value in line.items() if not name.endswith(clocks)} for line in lines]


def weights(made):
    return {name: parameter.detach().clone() for name, parameter in made.model.named_parameters()}


# ---- learning -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cls", "config"), [(GRPOTrainer, GRPOConfig), (RLOOTrainer, RLOOConfig)])
def test_what_is_rewarded_becomes_more_frequent(tmp_path, cls, config):
    made = trainer(
        tmp_path, cls=cls, config=config, max_steps=15, per_device_train_batch_size=32, num_generations=8,
        learning_rate=2e-2, lr_scheduler_type="constant", beta=0.0,
    )  # fmt: skip
    made.train()
    found = [entry["reward"] for entry in logged(tmp_path) if "reward" in entry]
    assert np.mean(found[-5:]) > np.mean(found[:5]) + 0.2


def test_trl_s_metrics_are_logged(tmp_path):
    made = trainer(tmp_path, beta=0.1, max_steps=1)
    made.train()
    (entry, _) = logged(tmp_path)
    names = {
        "num_tokens", "completions/mean_length", "completions/min_length", "completions/max_length",
        "completions/clipped_ratio", "rewards/share_of_letters/mean",
        "rewards/share_of_letters/std",
        "reward", "frac_reward_zero_std", "kl", "entropy", "policy_loss", "clip_ratio/low_mean", "clip_ratio/high_max",
        "clip_ratio/region_mean", "sampling/sampling_logp_difference/mean", "sampling/importance_sampling_ratio/max",
    }  # fmt: skip
    assert names <= entry.keys()
    assert abs(entry["sampling/sampling_logp_difference/max"]) < 1e-5  # the sampler is the trainer
    assert entry["kl"] == pytest.approx(0, abs=1e-6)


def test_the_plan_says_the_arithmetic(tmp_path, capsys):
    trainer(tmp_path, max_steps=1).train()
    told = capsys.readouterr().out
    assert "2 prompts x 4 completions = 8 samples a generation (up to 48 tokens) feed 1 optimizer step" in told
    assert "rewards: share_of_letters" in told


def test_the_engine_is_made_ready_once_for_the_whole_run(tmp_path, monkeypatch):
    """On a GPU that means CUDA graphs, which take seconds to capture; keys and values are given back after each generation."""
    ready = []
    made = trainer(tmp_path, rollout_engine="native", max_steps=3)
    make = made.engine._make
    monkeypatch.setattr(made.engine, "_make", lambda: ready.append("made") or make())
    made.train()
    assert len(ready) <= 1  # none where the probe at the beginning has done it
    assert made.engine._made[0].store.pages == 0


# ---- advantages -----------------------------------------------------------------------------------------------------------


class Peek:
    """Keeps every sample that the loader hands to the collator."""

    def __init__(self, made):
        self.windows = []
        make = made.get_train_dataloader

        def watched():
            loader = make()
            next_window = loader.source.next_window

            def looked_at():
                units = next_window()
                self.windows.append([None if unit is None else unit[0] for unit in units])
                return units

            loader.source.next_window = looked_at
            return loader

        made.get_train_dataloader = watched


def numbered(completions, prompts, **kwargs):
    """A reward that depends on the sample, so that groups vary."""
    return [float(sum(text.encode()) % 7) for text in completions]


def test_advantages_are_those_of_an_explicit_loop(tmp_path):
    made = trainer(tmp_path, numbered, max_steps=2)
    peek = Peek(made)
    made.train()
    for window in peek.windows:
        for start in range(0, len(window), 4):
            group = window[start : start + 4]
            texts = [made.collector.writer.decode(sample.input_ids[sample.trained]) for sample in group]
            rewards = np.array(numbered(texts, None))
            expected = (
                (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4) if len(set(rewards)) > 1 else rewards * 0
            )
            for sample, value in zip(group, expected):
                np.testing.assert_allclose(sample.per_token[ADVANTAGES], value, rtol=1e-6)


def sometimes_broken(completions, prompts, **kwargs):
    found = numbered(completions, prompts)
    if any(sum(text.encode()) % 5 == 0 for text in completions):
        raise RuntimeError("no")
    return found


def test_a_sample_whose_reward_failed_takes_part_in_nothing(tmp_path):
    broken = trainer(tmp_path / "a", sometimes_broken, max_steps=1, per_device_train_batch_size=16, num_generations=8)
    peek = Peek(broken)
    broken.train()
    (window,) = peek.windows
    whole = trainer(tmp_path / "b", numbered, max_steps=1, per_device_train_batch_size=16, num_generations=8)
    other = Peek(whole)
    whole.train()
    lost = 0
    for start in (0, 8):
        kept = [(s, o) for s, o in zip(window[start : start + 8], other.windows[0][start : start + 8]) if s is not None]
        lost += 8 - len(kept)
        rewards = np.array(numbered([whole.collector.writer.decode(o.input_ids[o.trained]) for _, o in kept], None))
        expected = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)
        for (sample, twin), value in zip(kept, expected):
            assert sample.input_ids.tolist() == twin.input_ids.tolist()
            np.testing.assert_allclose(sample.per_token[ADVANTAGES], value, rtol=1e-5, atol=1e-6)
    assert 0 < lost < 8
    entry = logged(tmp_path / "a")[0]
    assert entry["rollouts/masked"] == lost / 16
    assert entry["rewards/sometimes_broken/failed"] == lost / 16


def always_one(completions, **kwargs):
    return [1.0] * len(completions)


def test_a_constant_group_gives_exactly_nothing(tmp_path):
    made = trainer(tmp_path, always_one, max_steps=2, weight_decay=0.0)
    before = weights(made)
    made.train()
    assert all(entry["grad_norm"] == 0 for entry in logged(tmp_path) if "grad_norm" in entry)
    assert all(torch.equal(before[name], value) for name, value in weights(made).items())
    assert logged(tmp_path)[0]["frac_reward_zero_std"] == 1


def seldom(completions, **kwargs):
    return [float(sum(text.encode()) % 11 == 0) for text in completions]


def test_groups_that_teach_nothing_are_replaced(tmp_path):
    plain = trainer(tmp_path / "a", seldom, max_steps=1, per_device_train_batch_size=16)
    peek = Peek(plain)
    plain.train()
    flat = sum(all(s.per_token[ADVANTAGES][0] == 0 for s in peek.windows[0][i : i + 4]) for i in range(0, 16, 4))
    assert flat
    made = trainer(
        tmp_path / "b", seldom, max_steps=1, per_device_train_batch_size=16, drop_zero_variance=True, refill_rounds=30
    )
    peek = Peek(made)
    made.train()
    (window,) = peek.windows
    assert len(window) == 16
    assert all(any(s.per_token[ADVANTAGES][0] != 0 for s in window[i : i + 4]) for i in range(0, 16, 4))
    assert logged(tmp_path / "b")[0]["rollouts/refilled_groups"] >= flat


def test_remembered_groups_take_the_place_of_those_that_teach_nothing(tmp_path):
    made = trainer(tmp_path, seldom, max_steps=4, per_device_train_batch_size=16, replay_buffer_size=8)
    peek = Peek(made)
    made.train()
    first = {sample.group for sample in peek.windows[0]}
    later = [sample for window in peek.windows[1:] for sample in window]
    again = [sample for sample in later if sample.group in first]
    assert again
    assert all("old_logps" in sample.per_token for sample in again)
    assert sum(entry.get("rollouts/replayed_groups", 0) for entry in logged(tmp_path)) >= len(again) / 4
    assert 0 < len(made.replay) <= 8


def test_truncated_completions_are_not_trained_on_where_asked(tmp_path):
    made = trainer(tmp_path, numbered, max_steps=1, mask_truncated_completions=True)
    peek = Peek(made)
    made.train()
    for sample in peek.windows[0]:
        ended = sample.input_ids[-1] == tiny.tokenizer().eos_token_id
        assert sample.trained.any() == ended


# ---- what is written ------------------------------------------------------------------------------------------------------


def test_completions_do_not_depend_on_batch_sizes(tmp_path):
    found = []
    for number, (size, steps) in enumerate([(16, 1), (4, 4), (8, 2)]):
        made = trainer(
            tmp_path / str(number),
            numbered,
            max_steps=1,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=steps,
        )
        peek = Peek(made)
        made.train()
        found.append(([s.input_ids.tolist() for s in peek.windows[0]], weights(made)))
    assert found[0][0] == found[1][0] == found[2][0]
    for name, value in found[0][1].items():
        torch.testing.assert_close(found[1][1][name], value, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(found[2][1][name], value, rtol=1e-4, atol=1e-6)


def test_a_prompt_longer_than_the_context_costs_its_own_group_only(tmp_path):
    data = Dataset.from_dict({"prompt": ["Say 1", "x" * 600, "Say 2", "Say 3"]})
    made = trainer(tmp_path, numbered, data=data, max_steps=1, per_device_train_batch_size=16, shuffle_dataset=False)
    peek = Peek(made)
    made.train()
    assert [sample is None for sample in peek.windows[0]] == [False] * 4 + [True] * 4 + [False] * 8
    assert logged(tmp_path)[0]["rollouts/masked"] == 0.25


@pytest.mark.parametrize("cast", [False, True])
def test_a_head_in_float32_is_that_of_policy_reference_and_engine(tmp_path, cast):
    made = trainer(
        tmp_path, model=tiny.causal_lm(dtype=torch.bfloat16), cast_lm_head_to_fp32=cast, beta=0.1, max_steps=1
    )
    assert made.engine.model is made.model
    kinds = {part(torch.arange(3, 9)[None]).logits.dtype for part in (made.model, made.live.model)}
    assert kinds == {torch.float32 if cast else torch.bfloat16}
    made.train()
    assert logged(tmp_path)[0]["sampling/sampling_logp_difference/max"] < 0.1
    assert {parameter.dtype for parameter in made.model.parameters()} == {torch.bfloat16}


def test_a_seed_of_ones_own_for_sampling_is_used(tmp_path):
    said = []
    for number, kwargs in enumerate([None, {"seed": 42}, {"seed": 7}]):
        made = trainer(tmp_path / str(number), max_steps=1, generation_kwargs=kwargs)
        peek = Peek(made)
        made.train()
        said.append([sample.input_ids.tolist() for sample in peek.windows[0]])
    assert said[0] == said[1] != said[2]  # 42 is the default of `seed`


def test_conversations_reach_rewards_as_messages(tmp_path):
    seen = []

    def looks(prompts, completions, answer, **kwargs):
        seen.extend(zip(prompts, completions, answer))
        return [0.0] * len(prompts)

    data = Dataset.from_dict({"prompt": [[{"role": "user", "content": "Hi"}]] * 4, "answer": ["a", "b", "c", "d"]})
    trainer(tmp_path, looks, data=data, max_steps=1).train()
    prompt, completion, answer = seen[0]
    assert prompt == [{"role": "user", "content": "Hi"}]
    assert [message["role"] for message in completion] == ["assistant"]
    assert answer in "abcd"


def test_a_function_of_ones_own_writes_rollouts(tmp_path):
    def rollout_func(prompts, trainer):
        ends = [list(f"echo {i}".encode()) for i in range(len(prompts))]
        return {
            "prompt_ids": [list(prompt.encode()) for prompt in prompts],
            "completion_ids": ends,
            "logprobs": [[-1.0] * len(ids) for ids in ends],
            "env_mask": [[1, 1, 0, *[1] * (len(ids) - 3)] for ids in ends],
            "score": list(range(len(prompts))),
        }

    def given(completions, score, **kwargs):
        return [float(value) for value in score]

    made = trainer(tmp_path, given, max_steps=1, rollout_func=rollout_func)
    peek = Peek(made)
    made.train()
    sample = peek.windows[0][5]
    assert bytes(sample.input_ids[-6:].tolist()) == b"echo 5"
    assert sample.trained[-6:].tolist() == [True, True, False, True, True, True]
    assert logged(tmp_path)[0]["reward"] == pytest.approx(3.5)


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ([1], "returned a list"),
        ({"prompt_ids": []}, "must return a dict with prompt_ids and completion_ids"),
        ({"prompt_ids": [[1]] * 8, "completion_ids": [[1]] * 7}, "7 entries of 'completion_ids' for 8 prompts"),
        (
            {"prompt_ids": [[1]] * 8, "completion_ids": [[1, 2]] * 8, "logprobs": [[0.0]] * 8},
            "1 entries of .logprobs.",
        ),
    ],
)
def test_what_a_function_of_ones_own_returns_is_checked(tmp_path, answer, told):
    with pytest.raises(ValueError, match=told):
        trainer(tmp_path, max_steps=1, rollout_func=lambda prompts, trainer: answer).train()


# ---- evaluation -----------------------------------------------------------------------------------------------------------


def test_evaluation_generates_and_says_the_same_twice(tmp_path):
    made = trainer(tmp_path, eval_dataset=rows(5), num_generations_eval=2, per_device_eval_batch_size=3)
    first, second = made.evaluate(), made.evaluate()
    assert first["eval_reward"] == second["eval_reward"]
    assert {"eval_loss", "eval_completions/mean_length", "eval_entropy"} <= first.keys()
    assert not math.isnan(first["eval_reward"])


def test_evaluation_does_not_change_training(tmp_path):
    quiet = trainer(tmp_path / "a")
    quiet.train()
    watched = trainer(
        tmp_path / "b", eval_dataset=rows(3), eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=4
    )
    watched.train()
    assert all(torch.equal(a, b) for a, b in zip(weights(quiet).values(), weights(watched).values()))


def by_length(group_completions, group_rewards):
    return [[-len(text.encode()) for text in group] for group in group_completions]


# ---- resuming -------------------------------------------------------------------------------------------------------------

WINDOWS = {  # with the steps to resume from: several where a checkpoint lies at different places of a window
    "on policy": ({}, (3,)),
    "inside a window": ({"steps_per_generation": 4, "num_iterations": 2, "beta": 0.1}, (1, 3, 4)),
    "across": ({"gradient_accumulation_steps": 3, "steps_per_generation": 2}, (1, 2, 3)),
    "adaptive entropy": ({"use_adaptive_entropy": True, "entropy_coef": 0.1, "entropy_target": 9.0}, (3,)),
    "refilled": ({"drop_zero_variance": True}, (1, 4)),
    "replayed": ({"replay_buffer_size": 4}, (1, 4)),
    "filtered": ({"num_remains_in_group": 2, "group_filter_func": by_length, "steps_per_generation": 2}, (1, 2)),
    "likeliest": ({"loss_type": "dppo", "divergence_type": "topk_kl", "num_iterations": 2, "epsilon": 1e-4}, (1, 2)),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_a_resumed_run_is_the_run(tmp_path, name):
    changes, steps = WINDOWS[name]
    options = {"max_steps": 5, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 10, **changes}
    reward = seldom if "re" in name else numbered
    quiet = trainer(tmp_path / "quiet", reward, **options)
    quiet.train()
    expected = logged(tmp_path / "quiet")
    for step in steps:
        resumed = trainer(tmp_path / "quiet", reward, **options | {"save_strategy": "no"})
        resumed.train(resume_from_checkpoint=str(tmp_path / "quiet" / f"checkpoint-{step}"))
        assert logged(tmp_path / "quiet") == expected
        assert all(torch.equal(a, b) for a, b in zip(weights(quiet).values(), weights(resumed).values()))


# ---- refusals -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"num_generations": 3}, "not a multiple of `num_generations`=3"),
        ({"num_generations": 1}, "`num_generations` is 1"),
        ({"loss_type": "nonsense"}, "nonsense"),
        (
            {"loss_type": "grpo", "sapo_temperature_pos": 2.0},
            "`sapo_temperature_pos` is set, but the loss 'grpo' does not read it",
        ),
        ({"sync_ref_model": True}, "with `beta=0` there is none"),
        ({"kl_clip": 0.5}, "with `beta=0` neither has it"),
        ({"kl_clip": 0.0, "beta": 0.1}, "kl_clip"),
        ({"advantage_std": "both"}, "it must be one of sample, population"),
        ({"advantage_std": "population", "scale_rewards": "none"}, "no advantage is scaled"),
        ({"temperature": 0.0}, "training needs samples that differ"),
        ({"generation_kwargs": {"best_of": 3}}, "best_of"),
        ({"scale_rewards": "sometimes"}, "scale_rewards"),
        ({"rollout_engine": "magic"}, "rollout_engine"),
        ({"rollout_drafts": -1}, "`rollout_drafts` is -1; it must be >= 0"),
        ({"rollout_drafts": 4, "rollout_engine": "transformers"}, "only the native engine drafts"),
        ({"rollout_drafts": 4, "use_vllm": True, "vllm_mode": "server"}, "only the native engine drafts; here vLLM"),
        ({"reward_on_error": "ignore"}, "on_error"),
        ({"ignore_data_skip": True}, "ignore_data_skip"),
        ({"drop_zero_variance": True, "replay_buffer_size": 4}, "choose one"),
    ],
)
def test_options_without_meaning_are_refused_before_anything_is_loaded(tmp_path, options, told):
    with pytest.raises(ValueError, match=told):
        GRPOConfig(output_dir=str(tmp_path), use_cpu=True, **{"num_generations": 4, **options})


# ---- what is kept ---------------------------------------------------------------------------------------------------------


def test_every_rollout_is_kept_with_its_numbers(tmp_path):
    made = trainer(tmp_path, numbered, max_steps=3, beta=0.1, num_iterations=2)
    peek = Peek(made)
    made.train()
    table = read_rollouts(tmp_path).to_pylist()
    assert [row["step"] for row in table] == [1] * 8 + [3] * 8
    first, kept = peek.windows[0][3], table[3]
    assert kept["prompt_ids"] + kept["completion_ids"] == first.input_ids.tolist()
    assert kept["advantage"] == pytest.approx(first.per_token[ADVANTAGES][0])
    assert dict(kept["rewards"])["numbered"] == numbered([kept["completion"]], None)[0] == kept["reward"]
    np.testing.assert_allclose(kept["old_logps"], kept["sampling_logps"], atol=1e-5)
    np.testing.assert_allclose(kept["reference_logps"], kept["sampling_logps"], atol=1e-5)
    assert kept["policy_version"] == 0
    assert table[-1]["policy_version"] == 2


def test_completions_are_shown_where_asked(tmp_path, capsys):
    made = trainer(tmp_path, max_steps=1, log_completions=True, num_completions_to_print=3, log_unique_prompts=True)
    made.train()
    told = capsys.readouterr().out
    assert "completions at step 1" in told
    assert told.count("  > 'Say") == 2  # two prompts in a generation
    assert "share_of_letters" in told
    assert "advantage" in told


def test_a_run_ends_with_its_reward_and_not_with_a_loss_of_zero(tmp_path, capsys):
    made = trainer(tmp_path, eval_dataset=rows(2), eval_strategy="steps", eval_steps=2)
    made.train()
    lines = capsys.readouterr().out.splitlines()
    end = lines[next(i for i, line in enumerate(lines) if line.startswith("GRPO finished")) + 1 :]
    rewards, evaluated = ([e[name] for e in made.state.log_history if name in e] for name in ("reward", "eval_reward"))
    assert end[:2] == [
        f"  reward      {progress.number(rewards[0])} -> {progress.number(rewards[-1])}",
        f"  eval_reward {progress.number(evaluated[0])} -> {progress.number(evaluated[-1])}",
    ]
    assert not any("loss" in line for line in end)


def test_rewards_that_look_wrong_are_told(tmp_path, capsys):
    trainer(tmp_path, lambda completions, **kwargs: [1e6 + i for i in range(len(completions))], max_steps=1).train()
    assert "alert  " in capsys.readouterr().out


def test_a_model_and_a_function_in_worker_processes_judge_together(tmp_path):
    judge = tiny.reward_model(seed=3)
    made = trainer(
        tmp_path, [judge, numbered], max_steps=1, reward_workers=2, reward_weights=[2.0, 0.5],
        reward_processing_classes=[tiny.tokenizer(), None],
    )  # fmt: skip
    made.train()
    kept = read_rollouts(tmp_path).to_pylist()
    names = made.rewards.names
    for row in kept:
        rewards = dict(row["rewards"])
        assert row["reward"] == pytest.approx(2 * rewards[names[0]] + 0.5 * rewards[names[1]])
        assert rewards["numbered"] == numbered([row["completion"]], None)[0]
    assert len({dict(row["rewards"])[names[0]] for row in kept}) > 1
    made.rewards.close()
