"""Online DPO and XPO: which completions become a pair, what the loss is, who writes, what is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig

from posttrain import OnlineDPOConfig, OnlineDPOTrainer, XPOConfig, XPOTrainer
from posttrain.core.batch import TokenBatch
from posttrain.core.sample import Sample
from posttrain.data.collate import collate
from posttrain.models.scoring.token_scores import score_tokens
from posttrain.rollout.rollout import POLICY_LOGPS, Request, Rollout
from tests import tiny

CLASSES = {"online_dpo": (OnlineDPOTrainer, OnlineDPOConfig), "xpo": (XPOTrainer, XPOConfig)}
ROWS = [{"prompt": f"Say {number}"} for number in range(16)]


def checksum(completion_ids, **kwargs):
    return [float(sum(ids) % 13) for ids in completion_ids]


def config(method, folder, **options):
    chosen = {
        "max_steps": 2,
        "per_device_train_batch_size": 2,
        "max_new_tokens": 6,
        "max_length": 64,
        "logging_steps": 1,
    }
    chosen |= {"learning_rate": 1e-3, "report_to": "none", "use_cpu": True, "reward_workers": 0, "save_strategy": "no"}
    return CLASSES[method][1](output_dir=str(folder), **{**chosen, **options})


def make(method, folder, reward=checksum, model=None, given=None, **options):
    return CLASSES[method][0](
        tiny.causal_lm() if model is None else model,
        reward_funcs=reward,
        args=config(method, folder, **options),
        train_dataset=Dataset.from_list(ROWS),
        processing_class=tiny.tokenizer(),
        **(given or {}),
    )


def rollout(number, sample, reward, *, masked=False, cut=False):
    ids = np.array([5, 6, 7 + sample])
    made = Rollout(
        Request(number, number, sample), "p", "c", Sample(ids, [False, True, True], row=number), 1,
        finish_reason="length" if cut else "stop",
    )  # fmt: skip
    made.reward, made.masked = reward, masked
    return made


def paired(trainer, groups):
    """The units of groups, credited by hand as the collector does it."""
    flat = [one for group in groups for one in group]
    table = type("Table", (), {})()
    table.groups = torch.tensor([one.group for one in flat])
    table.truncated = torch.tensor([one.is_truncated for one in flat])
    totals = torch.tensor([math.nan if one.masked else one.reward for one in flat], dtype=torch.float64)
    for one, advantage in zip(flat, trainer.credit(table, totals).tolist()):
        one.advantage = advantage
    trainer.spread(flat)
    return trainer.arranged(groups)


# ---- pairs ---------------------------------------------------------------------------------------------------------------


def test_the_best_against_the_worst_and_ties_teach_nothing(tmp_path):
    trainer = make("online_dpo", tmp_path, num_generations=3)
    groups = [
        [rollout(0, 0, 0.1), rollout(0, 1, 0.7), rollout(0, 2, -0.3)],
        [rollout(1, 0, 0.1), rollout(1, 1, 0.1), rollout(1, 2, 0.1)],  # 0.1 + 0.1 + 0.1 is not 3 * 0.1
        [rollout(2, 0, 5.0, masked=True), rollout(2, 1, 1.0), rollout(2, 2, 2.0)],
        [rollout(3, 0, 5.0, masked=True), rollout(3, 1, math.nan), rollout(3, 2, 2.0)],
    ]
    units = paired(trainer, groups)
    assert [unit and [sample.input_ids[-1] - 7 for sample in unit] for unit in units] == [[1, 2], None, [2, 1], None]


def test_a_completion_that_was_cut_off_loses_by_the_penalty(tmp_path):
    trainer = make("online_dpo", tmp_path, missing_eos_penalty=1.0)
    (unit,) = paired(trainer, [[rollout(0, 0, 0.9, cut=True), rollout(0, 1, 0.2)]])
    assert [sample.scalars["score"] for sample in unit] == [0.2, pytest.approx(-0.1)]
    assert [sample.scalars["ended"] for sample in unit] == [1.0, 0.0]


def test_micro_batches_count_prompts_and_hold_whole_groups(tmp_path):
    trainer = make("online_dpo", tmp_path, num_generations=4, gradient_accumulation_steps=2)
    schedule = trainer.args.schedule()
    assert (schedule.batch_size, schedule.prompts, schedule.samples) == (8, 4, 16)
    batch = next(iter(trainer.get_train_dataloader()))
    assert batch.num_units <= 2
    assert batch.roles == ("chosen", "rejected")


def test_prompts_are_cut_at_their_beginning_so_that_prompt_and_completion_fit(tmp_path):
    args = config("online_dpo", tmp_path, max_length=9)
    trainer = OnlineDPOTrainer(
        tiny.causal_lm(), None, checksum, args, None, Dataset.from_list([{"prompt": "a b c d e f g h"}] * 4),
        processing_class=tiny.tokenizer(),
    )  # fmt: skip
    assert trainer.train_dataset.longest == 3
    whole = tiny.tokenizer()("a b c d e f g h")["input_ids"]
    assert trainer.train_dataset.take([0])[0].ids.tolist() == whole[-3:]


# ---- losses --------------------------------------------------------------------------------------------------------------


def pair_batch(chosen, rejected, by_reference=(0.0, 1.0)) -> TokenBatch:
    """One pair with (log-probs of the reference) on its tokens."""
    sides = []
    for logps, written in zip((chosen, rejected), by_reference):
        column = np.array([0.0, *logps], dtype=np.float32)
        scalars = {"score": 1.0 - written, "ended": 1.0, "by_reference": written}
        sides.append(
            Sample([1] * len(column), [False, *[True] * len(logps)], {"reference_logps": column}, scalars=scalars)
        )
    return collate([tuple(sides)], ("chosen", "rejected"))


def loss_of(trainer, batch, logps):
    from posttrain.core.results import TokenScores

    policy = TokenScores(logps=torch.tensor(logps, dtype=torch.float64, requires_grad=True))
    output = trainer.loss(batch, policy, trainer.reference.scores(batch))
    return output.reduce(batch.totals(), 1), output.metrics


def test_xpo_by_hand(tmp_path):
    """d = 3, beta 0.1, sum log policy(y') = -40, alpha 1e-5: -ls(0.3) - 4e-4 = 0.553955."""
    trainer = make("xpo", tmp_path)
    loss, metrics = loss_of(trainer, pair_batch([-10.0], [-40.0, -1.0]), [-8.0, -39.5, -0.5 - 1.5])
    assert loss.item() == pytest.approx(math.log1p(math.exp(-0.25)) + 1e-5 * -41.5, abs=1e-6)
    loss, metrics = loss_of(trainer, pair_batch([-10.0], [-30.0, -10.0]), [-7.0, -30.0, -10.0])
    assert loss.item() == pytest.approx(0.553955, abs=1e-6)
    assert metrics["loss/xpo"].item() == pytest.approx(-4e-4)
    assert metrics["loss/dpo"].item() == pytest.approx(0.554355, abs=1e-6)
    assert [metrics[f"objective/{name}_scores"].item() for name in ("model", "ref")] == [1.0, 0.0]


def test_online_dpo_logs_what_the_pairs_say(tmp_path):
    trainer = make("online_dpo", tmp_path, beta=0.5)
    loss, metrics = loss_of(trainer, pair_batch([-2.0, -1.0], [-4.0]), [-1.0, -1.0, -5.0])
    assert loss.item() == pytest.approx(math.log1p(math.exp(-0.5 * (1.0 + 1.0))), abs=1e-6)
    assert metrics["objective/kl"].tolist() == [1.0, -1.0]
    assert metrics["objective/entropy"].tolist() == [2.0, 5.0]
    assert metrics["objective/rlhf_reward"].tolist() == [0.5, 0.5]  # scores 1 and 0, less half of the divergence
    assert metrics["objective/scores_margin"].tolist() == [1.0]


def test_beta_and_alpha_are_those_of_the_epoch(tmp_path):
    trainer = make("xpo", tmp_path, beta=[0.1, 0.3], alpha=[1e-5, 0.0])
    found = []
    for epoch in (None, 0.99, 1.0, 7.3):
        trainer.state.epoch = epoch
        found.append((trainer.beta, trainer.alpha))
    assert found == [(0.1, 1e-5), (0.1, 1e-5), (0.3, 0.0), (0.3, 0.0)]


# ---- runs ----------------------------------------------------------------------------------------------------------------


def test_log_probs_are_those_at_temperature_1(tmp_path):
    """Sampled at 0.9, scored at 1: before the first step policy and reference agree, and the loss is ln 2."""
    trainer = make("online_dpo", tmp_path, max_steps=1)
    assert (trainer.args.temperature, trainer.scoring_temperature, trainer.live.temperature) == (0.9, 1.0, 1.0)
    trainer.train()
    (first,) = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert first["objective/kl"] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("adapter", [False, True], ids=["copy", "adapter"])
def test_the_second_completion_of_xpo_is_the_reference_s(adapter, tmp_path):
    """With a LoRA that changes the model, or a reference of its own: log-probs of the samples are those of who wrote them."""
    if adapter:
        given = {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)}
    else:
        given = {"ref_model": tiny.causal_lm(7)}
    trainer = make("xpo", tmp_path, given=given, temperature=1.0)
    trainer.get_train_dataloader()
    rollouts = trainer.collector.collect(
        [Request(row, row, sample) for row in range(4) for sample in (0, 1)], trainer.train_dataset,
        trainer.args.sampling(trainer.stop_ids),
    ).rollouts  # fmt: skip
    for one in rollouts:
        batch = collate([(one.sample,)], ("completion",))
        own = score_tokens(trainer.model.eval(), batch).logps.detach()
        reference = trainer.live.scores(batch).logps
        written = torch.from_numpy(one.sample.per_token[POLICY_LOGPS])[1:][torch.from_numpy(one.sample.trained[1:])]
        assert one.author == ("reference" if one.request.sample else "policy")
        mine, other = (reference, own) if one.request.sample else (own, reference)
        assert torch.allclose(written, mine, atol=1e-4)
        assert not torch.allclose(written, other, atol=1e-3)


@pytest.mark.parametrize("method", CLASSES)
def test_a_run_learns_which_completions_are_better(method, tmp_path):
    """The reward is the share of one half of the alphabet: it rises."""

    def low(completion_ids, **kwargs):
        return [sum(token < 128 for token in ids) / max(len(ids), 1) for ids in completion_ids]

    trainer = make(
        method, tmp_path, reward=low, max_steps=18, per_device_train_batch_size=16, learning_rate=2e-2,
        lr_scheduler_type="constant", max_new_tokens=8,
    )  # fmt: skip
    trainer.train()
    name = "objective/model_scores" if method == "xpo" else "reward"
    seen = [entry[name] for entry in trainer.state.log_history if name in entry]
    assert np.mean(seen[-5:]) > np.mean(seen[:5]) + 0.15


def test_an_evaluation_makes_pairs_too(tmp_path):
    trainer = make("online_dpo", tmp_path, per_device_eval_batch_size=1)
    found = trainer.evaluate(Dataset.from_list(ROWS[:5]))
    assert found["eval_loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert 0 <= found["eval_objective/scores_margin"] <= 12


# ---- what is refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "options", "sentence"),
    [
        ("online_dpo", {"mask_truncated_completions": True}, "missing_eos_penalty"),
        ("online_dpo", {"replay_buffer_size": 4}, "drop_zero_variance"),
        ("online_dpo", {"max_length": 6}, "leaves no token for a prompt"),
        ("online_dpo", {"beta": [0.1, 0.0]}, "beta"),
        ("online_dpo", {"num_generations": 1}, "num_generations"),
        ("online_dpo", {"loss_type": "nonsense"}, "nonsense"),
        ("xpo", {"num_generations": 4}, "one completion of the policy"),
        ("xpo", {"alpha": -1.0}, "alpha"),
        ("online_dpo", {"reward_model_path": "some/model"}, "reward_funcs"),
    ],
)
def test_options_without_a_meaning_are_refused(method, options, sentence, tmp_path):
    with pytest.raises(ValueError, match=sentence):
        config(method, tmp_path, **options)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"judge": checksum}, "give one of them"),
        ({"data_collator": print}, "leave `data_collator` out"),
        ({"compute_metrics": print}, "reward function of weight 0"),
    ],
)
def test_arguments_without_a_meaning_are_refused(given, sentence, tmp_path):
    with pytest.raises(ValueError, match=sentence):
        make("online_dpo", tmp_path, given=given)
