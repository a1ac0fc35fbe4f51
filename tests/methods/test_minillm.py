"""MiniLLM: advantages of tokens, rewards or none, and what is refused."""

from __future__ import annotations

import copy
import inspect

import numpy as np
import pytest
from datasets import Dataset

from posttrain import MiniLLMConfig, MiniLLMTrainer
from posttrain.methods.minillm import GAIN, discounted_gains
from posttrain.migration.trl_names import found
from posttrain.rollout.rollout import ADVANTAGES
from tests import tiny
from tests.trainer.test_distilling import ROWS, collected


def length(completions, **columns):
    return [float(len(text)) for text in completions]


def minillm(folder, teacher=1, reward_funcs=None, **options):
    args = MiniLLMConfig(
        output_dir=str(folder), report_to="none", use_cpu=True, logging_steps=1, disable_tqdm=True,
        **{"save_strategy": "no", "per_device_train_batch_size": 4, "max_completion_length": 6, "learning_rate": 1e-3,
           "max_steps": 2, "num_generations": 2, "reward_workers": 0, **options},
    )  # fmt: skip
    own = {"processing_class": tiny.tokenizer(), "teacher_processing_class": tiny.tokenizer()}
    prompts = Dataset.from_list([{"prompt": row["prompt"]} for row in ROWS])
    taught_by = tiny.causal_lm(teacher) if isinstance(teacher, int) else teacher
    return MiniLLMTrainer(tiny.causal_lm(), taught_by, reward_funcs, args, train_dataset=prompts, **own)


@pytest.mark.parametrize(
    ("gamma", "normalised", "after_step", "wanted"),
    [
        (0.9, False, False, [0.401, -0.11, 0.1]),
        (0.9, True, False, [0.147970, -0.057895, 0.1]),
        (0.9, False, True, [-0.11, 0.1, 0.0]),
        (0.9, True, True, [-0.057895, 0.1, 0.0]),
        (0.0, True, False, [0.5, -0.2, 0.1]),
        (0.0, True, True, [-0.2, 0.1, 0.0]),
    ],
)
def test_the_worked_example(gamma, normalised, after_step, wanted):
    values = discounted_gains(np.array([0.5, -0.2, 0.1]), gamma, normalised, after_step)
    assert values.tolist() == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize("rewarded", [False, True])
def test_the_advantage_of_a_token_is_the_groups_and_the_teachers(rewarded, tmp_path):
    """Also when a generation is used twice: what was written on it stays."""
    options = {"gamma": 0.5, "single_step_decomposition": False, "num_iterations": 2, "kd_temperature": 0.7}
    trainer = minillm(tmp_path, reward_funcs=length if rewarded else None, **options)
    rollouts = collected(trainer)
    for rollout in rollouts:
        gains = rollout.sample.read_trained(GAIN)
        more = discounted_gains(gains, 0.5, True, False)
        assert rollout.sample.read_trained(ADVANTAGES) == pytest.approx(rollout.advantage + more, abs=1e-5)
        assert abs(gains).max() > 0.1
    assert any(rollout.advantage for rollout in rollouts) == rewarded
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert all(entry["minillm/teacher_gain"] != 0 for entry in logs)
    assert any("reward" in entry for entry in logs) == rewarded


@pytest.mark.parametrize("options", [{}, {"num_generations": 1, "kd_temperature": 0.7, "gamma": 1.0}], ids=str)
def test_a_perfect_student_without_rewards_stays_where_it_is(options, tmp_path):
    trainer = minillm(tmp_path, teacher=0, optim="sgd", **options)
    before = copy.deepcopy(trainer.model.state_dict())
    trainer.train()
    assert max((p - before[name]).abs().max().item() for name, p in trainer.model.state_dict().items()) < 1e-6
    assert all(abs(entry["minillm/reverse_kl"]) < 1e-6 for entry in trainer.state.log_history if "loss" in entry)


@pytest.mark.parametrize("options", [{}, {"num_iterations": 2}, {"kd_temperature": 0.7}], ids=str)
def test_words_that_the_teacher_has_alone_are_no_gain_and_no_loss(options, tmp_path):
    """It is the student but for three further words, which are likely; old log-probs are there where a generation is used twice."""
    trainer = minillm(tmp_path, tiny.padded(tiny.causal_lm(), 3), **options)
    for rollout in collected(trainer):
        assert rollout.sample.read_trained(GAIN) == pytest.approx(0, abs=1e-5)


def test_the_student_comes_nearer_to_its_teacher(tmp_path):
    trainer = minillm(tmp_path, max_steps=12, learning_rate=5e-3)
    trainer.train()
    seen = [entry["minillm/reverse_kl"] for entry in trainer.state.log_history if "loss" in entry]
    assert sum(seen[-3:]) < 0.8 * sum(seen[:3])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"rkl_advantage": False, "single_step_decomposition": False}, "nothing would be learnt from the teacher"),
        ({"rkl_advantage": False, "gamma": 0.9}, "`gamma` is set, but without `rkl_advantage` nothing reads it"),
        ({"single_step_decomposition": False, "long_term_includes_step": True}, "the step is always included"),
        ({"keep_logits": True}, "compared chunk by chunk, and never kept"),
        ({"drop_zero_variance": True}, "`drop_zero_variance` looks at rewards, and there are none"),
    ],
)
def test_what_has_no_effect_is_refused(options, sentence, tmp_path):
    with pytest.raises(ValueError, match=sentence):
        minillm(tmp_path, **options)


def test_a_resumed_run_continues_in_the_middle_of_a_generation(tmp_path):
    """What the teacher said of it is in the checkpoint: another teacher's answer would be another gradient."""
    options = {"num_iterations": 2, "max_steps": 4, "save_strategy": "steps", "save_steps": 3}
    whole = minillm(tmp_path, **options)
    whole.train()
    resumed = minillm(tmp_path, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    for name, tensor in resumed.model.state_dict().items():
        assert (tensor == whole.model.state_dict()[name]).all(), name


def test_arguments_are_where_trl_has_them():
    order = [
        "model",
        "teacher_model",
        "reward_funcs",
        "args",
        "train_dataset",
        "eval_dataset",
        "processing_class",
        "reward_processing_classes",
        "callbacks",
        "optimizers",
        "peft_config",
        "rollout_func",
    ]
    assert list(inspect.signature(MiniLLMTrainer).parameters)[: len(order)] == order
    assert found("MiniLLMTrainer", "trl.experimental.minillm") is MiniLLMTrainer
