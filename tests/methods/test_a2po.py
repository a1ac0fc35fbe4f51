"""A*-PO: golden numbers, values by row, who is left out, the control that must not move, what is refused, exact resume."""

from __future__ import annotations

import inspect
import math
import os
import signal
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import TrainerCallback

from posttrain import A2POConfig, A2POTrainer, BEMACallback
from posttrain.core.results import TokenScores
from posttrain.methods.a2po import optimal_value
from posttrain.migration.trl_names import found
from posttrain.rollout.store import read_rollouts
from posttrain.trainer.checkpoints.checkpoint import load_tree
from tests import tiny
from tests.cli.runs import flags, folder_with_inputs, options_of, posttrain
from tests.losses.policy_oracle import token_batch
from tests.trainer import resumable_run, test_online
from tests.trainer.test_online import logged, weights
from tests.trainer.test_resume import assert_identical, run, start

ROWS = [{"prompt": "Say it", "right": i % 2} for i in range(6)]
"""One text, and two tasks: what is right is in another column."""


def parity(completion_ids, **columns):
    return [float(ids[0] % 2) for ids in completion_ids]


def by_row(completions, right, **columns):
    return [float(one) for one in right]


def make(folder, rewards=parity, data=None, **options):
    options = {"num_generations": 1, "num_value_samples": 4, **options}
    given = {name: options.pop(name) for name in ("ref_model",) if name in options}
    data = Dataset.from_list(data or [{"prompt": f"Say {i}"} for i in range(12)])
    if not given:
        return test_online.trainer(folder, rewards, A2POTrainer, A2POConfig, data=data, **options)
    args = test_online.trainer(folder, rewards, A2POTrainer, A2POConfig, data=data, **options).args
    return A2POTrainer(tiny.causal_lm(), rewards, args, data, processing_class=tiny.tokenizer(), **given)


# ---- numbers --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rewards", "value"), [((1, 0, 0, 1), 0.716890), ((0, 0, 0, 0), 0.0), ((1, 1, 1, 1), 1.0)])
def test_golden_values(rewards, value):
    got = optimal_value(torch.tensor(rewards, dtype=torch.float64), 0.5)
    assert got == pytest.approx(value, abs=1e-6)
    assert len(set(rewards)) > 1 or got == value  # equal rewards: not even a rounding error


def test_golden_loss():
    """l = -5 over two tokens, r = 1, V* = 0.716890, beta2 = 1e-3: (-0.005 - 0.283110)^2. Without a trained token: nothing."""
    batch = token_batch([2, 0])
    batch.scalars = {"advantage": torch.tensor([1 - 0.716890, 0.4]), "v_star": torch.tensor([0.716890, 0.6])}
    policy, reference = TokenScores(torch.tensor([-4.0, -3.0])), TokenScores(torch.tensor([-1.5, -0.5]))
    output = A2POTrainer.loss(SimpleNamespace(args=SimpleNamespace(beta2=1e-3)), batch, policy, reference)
    (term,) = output.terms
    assert term.per == "sequence"
    assert term.values.tolist() == pytest.approx([0.083007, 0.0], abs=1e-6)
    shown = {name: value.tolist()[0] for name, value in output.metrics.items()}
    assert shown == pytest.approx({"implicit_reward": -0.005, "advantage": 0.283110, "v_star": 0.716890})


def test_a_value_lies_between_the_mean_and_the_largest_reward_and_reaches_both():
    generator = torch.Generator().manual_seed(0)
    for size in (1, 2, 7):
        rewards = torch.randn(size, generator=generator, dtype=torch.float64)
        low, high = rewards.mean().item(), rewards.max().item()
        values = [optimal_value(rewards, beta1) for beta1 in (1e-6, 0.1, 0.5, 2.0, 1e6)]
        assert all(low - 1e-9 <= value <= high + 1e-9 for value in values)
        assert values == sorted(values, reverse=True)
        assert (values[0], values[-1]) == (pytest.approx(high, abs=1e-4), pytest.approx(low, abs=1e-4))


# ---- stage 1 --------------------------------------------------------------------------------------------------------------


def test_values_are_of_rows_and_not_of_texts(tmp_path):
    made = make(tmp_path, by_row, ROWS, filter_all_incorrect=False)
    made.train()
    assert made.values["v_star"].tolist() == [0.0, 1.0] * 3
    assert made.values["kept"].all()
    assert [entry["advantage"] for entry in logged(tmp_path) if "loss" in entry] == [0.0] * 4


def test_rows_that_the_reference_never_solves_are_left_out(tmp_path):
    """Three rows are left of six: an epoch is shorter, and every prompt that is trained on is one of them."""
    made = make(tmp_path, by_row, ROWS, per_device_train_batch_size=1, max_steps=-1, num_train_epochs=2)
    made.train()
    assert made.values["kept"].tolist() == [False, True] * 3
    assert made.state.global_step == 6
    rows = read_rollouts(tmp_path)["row"].to_pylist()
    assert sorted(rows[:3]) == sorted(rows[3:]) == [1, 3, 5]


def test_nothing_left_is_an_error(tmp_path):
    never = lambda completions, **columns: [0.0] * len(completions)  # noqa: E731
    with pytest.raises(
        ValueError, match=r"No row .* the reference has solved none in 4 tries \(`filter_all_incorrect`\)"
    ):
        make(tmp_path, never).train()


def test_samples_without_a_reward_have_no_part_in_a_value(tmp_path, caplog):
    """Of row 1 every call fails: it has no value and is not trained on. Of row 0 one in four fails: V* is of the others."""
    calls = {"0": 0, "1": 0}

    def failing(prompts, **columns):
        number = prompts[0][-1]
        if number in calls:
            calls[number] += 1
            if number == "1" or calls[number] == 2:
                raise RuntimeError("not today")
        return [float(calls[number] == 1)] if number == "0" else [1.0] * len(prompts)

    data = [{"prompt": f"Say {i}"} for i in range(4)]
    made = make(tmp_path, failing, data, reward_batching="sample", max_steps=1)
    made.train()
    first, *others = made.values["v_star"].tolist()
    assert first == pytest.approx(0.5 * math.log((math.exp(2) + 2) / 3))
    assert math.isnan(others[0])
    assert others[1:] == [1.0, 1.0]
    assert made.values["kept"].tolist() == [True, False, True, True]
    assert "1 of 4 rows have no V* and are not trained on: none of their 4 completions" in caplog.text
    assert logged(tmp_path)[0]["reward_failures/error"] == 5


def test_a_completion_whose_reward_fails_in_training_is_left_out(tmp_path):
    def failing(completion_ids, trainer_state=None, **columns):
        if made.values is not None:
            raise RuntimeError("not today")
        return [1.0] * len(completion_ids)

    made = make(tmp_path, failing, max_steps=1, per_device_train_batch_size=4)
    before = weights(made)
    made.train()
    assert logged(tmp_path)[0]["rollouts/masked"] == 1.0
    assert all(torch.equal(before[name], after) for name, after in weights(made).items())


def test_other_rewards_than_0_and_1_are_reported_once(tmp_path, caplog):
    half = lambda completions, **columns: [0.5] * len(completions)  # noqa: E731
    make(tmp_path, half, max_steps=2).train()
    assert caplog.text.count("A reward is 0.5. A*-PO was made for rewards of 0 and 1") == 1


def test_the_reference_writes_the_samples_of_stage_1(tmp_path):
    """Given the same weights as `ref_model`, the values are those without one, with an adapter too; given others, others."""
    plain = make(tmp_path / "a", max_steps=1)
    same = make(tmp_path / "b", max_steps=1, ref_model=tiny.causal_lm())
    adapter = make(tmp_path / "c", max_steps=1, peft_config=LoraConfig(r=2, target_modules=["q_proj"]))
    other = make(tmp_path / "d", max_steps=1, ref_model=tiny.causal_lm(1))
    whose = test_online.trainer(
        tmp_path / "e", parity, A2POTrainer, A2POConfig, tiny.causal_lm(1), other.train_dataset.dataset,
        num_generations=1, num_value_samples=4, max_steps=1,
    )  # fmt: skip
    found = [one.train() and one.values["v_star"] for one in (plain, same, adapter, other, whose)]
    assert [made.value_author for made in (plain, same, adapter, other)] == [
        "policy",
        "reference",
        "policy",
        "reference",
    ]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[3])
    assert torch.equal(found[3], found[4])


# ---- stage 2 --------------------------------------------------------------------------------------------------------------


def test_a_reward_that_is_always_1_moves_nothing(tmp_path):
    """r - V* is 0 exactly, and so is the log-ratio of a model that has not moved: no gradient for Adam to blow up."""
    made = make(tmp_path, lambda completions, **columns: [1.0] * len(completions))
    before = weights(made)
    made.train()
    assert made.values["v_star"].tolist() == [1.0] * 12
    assert all(torch.equal(before[name], after) for name, after in weights(made).items())
    assert [entry["grad_norm"] for entry in logged(tmp_path) if "loss" in entry] == [0.0] * 4


def test_a_rewarded_first_token_becomes_likelier(tmp_path):
    small = lambda completion_ids, **columns: [float(ids[0] < 128) for ids in completion_ids]  # noqa: E731
    options = {"per_device_train_batch_size": 16, "learning_rate": 0.1, "lr_scheduler_type": "constant"}
    made = make(tmp_path, small, max_steps=20, max_completion_length=1, **options)
    made.train()
    rewards = [entry["reward"] for entry in logged(tmp_path) if "loss" in entry]
    assert sum(rewards[:5]) / 5 < 0.7
    assert sum(rewards[-5:]) / 5 > 0.9


def test_evaluation_has_rewards_and_no_loss(tmp_path):
    data = Dataset.from_list([{"prompt": "Say a"}, {"prompt": "Say b"}])
    made = make(tmp_path, max_steps=1, eval_dataset=data)
    found = made.evaluate()
    assert {"eval_reward", "eval_implicit_reward"} <= found.keys()
    assert not {"eval_loss", "eval_v_star", "eval_advantage"} & found.keys()
    assert made.values is None  # nothing was estimated for it
    made.train()
    assert {"reward", "v_star", "implicit_reward", "advantage"} <= logged(tmp_path)[-2].keys()


# ---- resume ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "step", [1, pytest.param(3, marks=pytest.mark.slow)], ids=["after-stage-1", "inside-a-generation"]
)
def test_killed_and_resumed_is_bit_identical(step, tmp_path):
    """Step 1: there is no checkpoint yet, and the run begins again. Step 3: the third of four steps that a generation feeds."""
    run("a2po", tmp_path / "whole")
    child = start("a2po", tmp_path / "killed", callbacks=[resumable_run.KillAfter(step)])
    assert child.wait() == -signal.SIGKILL, child.output()
    run("a2po", tmp_path / "killed", resume=True)
    assert_identical(tmp_path / "whole", tmp_path / "killed")


def test_a_signal_during_stage_1_ends_the_run_before_its_first_step(tmp_path, caplog):
    def signalled(completion_ids, **columns):
        os.kill(os.getpid(), signal.SIGTERM)
        return parity(completion_ids)

    made = make(tmp_path, signalled, reward_batching="all")
    with pytest.raises(SystemExit) as left:
        made.train()
    assert left.value.code == 128 + signal.SIGTERM
    assert (made.values, made.state.global_step) == (None, 0)
    assert "Stopped while V* was estimated: nothing is trained yet" in caplog.text


def test_a_resumed_run_does_not_estimate_again(tmp_path):
    first = make(tmp_path, max_steps=2, save_strategy="steps", save_steps=1)
    first.train()
    saved = load_tree(tmp_path / "checkpoint-1" / "method_state")
    assert torch.equal(saved["v_star"], first.values["v_star"])
    judged = []

    def counted(completion_ids, **columns):
        judged.extend(completion_ids)
        return parity(completion_ids)

    again = make(tmp_path, counted, max_steps=2, save_strategy="steps", save_steps=1, resume_allow_changes=["rewards"])
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert len(judged) == 8  # those of the second step alone
    assert torch.equal(again.values["v_star"], first.values["v_star"])


class StopsAtOnce(TrainerCallback):
    """Leaves between stage 1 and the first step, as a kill would."""

    def on_step_begin(self, args, state, control, **kwargs):
        raise InterruptedError


def test_a_run_that_is_stopped_before_its_first_checkpoint_does_not_estimate_again(tmp_path, caplog):
    """Nor does it forget what failed meanwhile. Asked to start afresh, or with another `beta1`, it does estimate."""
    judged = []

    def counted(completion_ids, **columns):
        judged.extend(completion_ids)
        return [
            float("nan") if ids[0] % 5 == 0 else reward for ids, reward in zip(completion_ids, parity(completion_ids))
        ]

    def made(**options):
        judged.clear()
        return make(tmp_path, counted, max_steps=1, **options)

    first = made()
    first.add_callback(StopsAtOnce())
    with pytest.raises(InterruptedError):
        first.train()
    in_stage_1 = 12 * 4
    assert len(judged) == in_stage_1 + 8
    again = made()
    again.train(resume_from_checkpoint=True)
    assert len(judged) == 8  # of the first step
    assert all(torch.equal(again.values[name], first.values[name]) for name in first.values)
    before, after = (
        {kind: n for kind, n in one.metrics.totals.items() if kind.startswith("reward_failures/")}
        for one in (first, again)
    )
    assert sum(before.values()) > 0
    assert after == before
    made().train()
    assert len(judged) == in_stage_1 + 8
    made(beta1=2.0).train(resume_from_checkpoint=True)
    assert len(judged) == in_stage_1 + 8
    assert "v_star.json is not of this run (beta1: 0.5 -> 2.0): V* is estimated again." in caplog.text
    (tmp_path / "v_star.json").write_text('{"identity"')
    made(beta1=2.0).train(resume_from_checkpoint=True)
    assert len(judged) == in_stage_1 + 8
    assert "it cannot be read" in caplog.text


def test_values_of_other_rows_are_refused(tmp_path):
    make(tmp_path, max_steps=1, save_strategy="steps", save_steps=1).train()
    fewer = [{"prompt": f"Say {i}"} for i in range(9)]
    again = make(tmp_path, data=fewer, max_steps=2, save_strategy="steps", resume_allow_changes=["dataset"])
    with pytest.raises(ValueError, match=r"has V\* of 12 rows, and `train_dataset` has 9"):
        again.train(resume_from_checkpoint=True)


# ---- what is given, and what is refused -----------------------------------------------------------------------------------


def test_names_and_order_are_trls(tmp_path):
    order = [
        "model",
        "reward_funcs",
        "args",
        "train_dataset",
        "eval_dataset",
        "processing_class",
        "callbacks",
        "optimizers",
    ]
    assert list(inspect.signature(A2POTrainer).parameters)[:8] == order
    assert found("A2POTrainer", "trl.experimental.a2po") is A2POTrainer
    assert found("A2POConfig", "trl.experimental.a2po") is A2POConfig
    args = A2POConfig(output_dir=str(tmp_path), use_cpu=True)
    shown = (args.num_value_samples, args.beta1, args.beta2, args.filter_all_incorrect, args.learning_rate)
    assert shown == (8, 0.5, 1e-3, True, 5e-5)
    assert (args.max_length, args.truncation_mode, args.max_completion_length) == (512, "keep_end", 256)
    assert A2POConfig(output_dir=str(tmp_path), use_cpu=True, max_length=64).max_length == 64


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"beta": 0.1}, "A\\*-PO has two: `beta1`, of V\\*, and `beta2`"),
        ({"beta1": 0.0}, "beta1"),
        ({"beta2": 0.0}, "beta2"),
        ({"num_value_samples": 0}, "num_value_samples"),
        ({"sync_ref_model": True}, "a reference that moves would leave it behind"),
        ({"drop_zero_variance": True}, "A completion whose advantage is 0 teaches, too"),
        ({"load_best_model_at_end": True, "save_strategy": "no"}, "no loss in evaluation, where V\\* is not estimated"),
    ],
)
def test_options_without_a_meaning_are_refused(options, sentence, tmp_path):
    with pytest.raises(ValueError, match=sentence):
        A2POConfig(output_dir=str(tmp_path), use_cpu=True, **options)


def test_streams_and_references_that_move_are_refused(tmp_path):
    stream = Dataset.from_list(ROWS).to_iterable_dataset()
    with pytest.raises(ValueError, match="`train_dataset` is a stream; A2PO estimates a value for each of its rows"):
        test_online.trainer(tmp_path, parity, A2POTrainer, A2POConfig, data=stream, num_generations=1)
    with pytest.raises(ValueError, match=r"BEMACallback has `update_ref_model=True`\. V\* was estimated"):
        make(tmp_path, callbacks=[BEMACallback(update_ref_model=True)]).train()


def test_explain_and_the_command_line(tmp_path, monkeypatch, capsys):
    """24 rows with 8 completions of at most 6 tokens each, before the first step."""
    monkeypatch.chdir(folder_with_inputs(tmp_path))
    given = flags({**options_of("a2po"), "num_generations": 1})
    assert posttrain("explain", "a2po", *given) == 0
    shown = capsys.readouterr().out
    assert "loss = (0.001 * l - A)**2\n  sum over completions / 4 completions of the step" in shown
    assert "over the rewards r' of 8 completions of the row by the reference, before the first step" in shown
    assert "before training: generation, for V* of each row (at most): 192 of 6 tokens" in shown
    assert posttrain("a2po", *given) == 0
    assert {"v_star", "advantage"} <= logged(tmp_path / "out-a2po")[0].keys()
