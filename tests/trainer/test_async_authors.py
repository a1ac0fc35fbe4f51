"""Beside training, where others than the policy write: a reference (XPO), its mixture with the policy (Nash-MD), a teacher."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig

from posttrain import GKDConfig, GKDTrainer, NashMDConfig, NashMDTrainer, XPOConfig, XPOTrainer
from posttrain.rollout.rollout import MIXTURE, OLD_LOGPS, POLICY, POLICY_LOGPS, REFERENCE, TEACHER
from tests import tiny
from tests.losses.policy_oracle import token_batch
from tests.trainer.test_async import jitter, odd_sums, same_numbers, written
from tests.trainer.test_online import logged, weights

__all__ = ["jitter"]
LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
METHODS = {
    "xpo": (XPOTrainer, XPOConfig, {"alpha": 0.1}, REFERENCE),
    "nash_md": (NashMDTrainer, NashMDConfig, {"mixture_coef": 0.3}, MIXTURE),
    "gkd": (GKDTrainer, GKDConfig, {"lmbda": 0.5, "seq_kd": True}, TEACHER),
}
ROWS = {"prompt": [f"Say {i}" for i in range(24)], "completion": [" it"] * 24}


def made(folder, name, lora=False, callbacks=None, **options):
    cls, config, own, _ = METHODS[name]
    defaults = {
        "output_dir": str(folder), "max_steps": 5, "per_device_train_batch_size": 4, "max_new_tokens": 6, "use_cpu": True,
        "report_to": "none", "logging_steps": 1, "save_strategy": "no", "reward_workers": 0, "learning_rate": 0.05, "seed": 7,
        "dataset_cache_dir": str(Path(folder) / "cache"), "disable_tqdm": True, "rollout_engine": "native",
    }  # fmt: skip
    if name == "gkd":
        del defaults["reward_workers"]
    given = (
        {"teacher_model": tiny.causal_lm(seed=1), "teacher_processing_class": tiny.tokenizer()}
        if name == "gkd"
        else {"reward_funcs": odd_sums}
    )
    given |= {"peft_config": LORA} if lora else {}
    data = Dataset.from_dict(ROWS if name == "gkd" else {"prompt": ROWS["prompt"]})
    args = config(**{**defaults, **own, **options})
    how = {"train_dataset": data, "processing_class": tiny.tokenizer(), "callbacks": callbacks}
    if "eval_strategy" in options:
        how["eval_dataset"] = data.select(range(4))
    return cls(tiny.causal_lm(), args=args, **how, **given)


def run(folder, name, **options):
    trainer = made(folder, name, **options)
    trainer.train()
    trainer.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "posttrain rollouts"]
    return trainer


def assert_same_run(one, other, left, right):
    for (name, wanted), found in zip(weights(one).items(), weights(other).values()):
        assert torch.equal(wanted, found), name
    assert written(left) == written(right)


CASES = [("xpo", False), ("xpo", True), ("nash_md", False), ("nash_md", True), ("gkd", False)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "lora"), CASES)
def test_without_a_lead_it_is_the_synchronous_run_to_the_bit(tmp_path, name, lora):
    """Also while an evaluation runs, which asks the same models."""
    options = {"lora": lora, "eval_strategy": "steps", "eval_steps": 2}
    plain = run(tmp_path / "plain", name, **options)
    beside = run(tmp_path / "beside", name, async_rollouts=True, async_lead=0, **options)
    assert_same_run(plain, beside, tmp_path / "plain", tmp_path / "beside")
    same_numbers(logged(tmp_path / "beside"), logged(tmp_path / "plain"))
    assert {row["author"] for row in written(tmp_path / "beside")} == {POLICY, METHODS[name][3]}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "lora"), CASES)
def test_in_order_it_depends_on_nothing_but_its_options(tmp_path, name, lora, jitter):
    options = {"lora": lora, "async_rollouts": True, "async_lead": 2, "async_order": "in_order", "max_steps": 8}
    one, other = (run(tmp_path / str(number), name, **options) for number in range(2))
    assert_same_run(one, other, tmp_path / "0", tmp_path / "1")
    versions = {(row["step"], row["policy_version"]) for row in written(tmp_path / "0")}
    assert versions == {(step, max(step - 3, 0)) for step in range(1, 9)}


@pytest.mark.slow
@pytest.mark.parametrize("update", ["continue", "finish", "restart"])
@pytest.mark.parametrize(("name", "lora"), CASES)
def test_each_prompt_is_trained_once_and_in_time(tmp_path, name, lora, update, jitter):
    asked = {"async_rollouts": True, "update_in_flight": update, "max_staleness": 2, "max_steps": 8}
    run(tmp_path, name, lora=lora, **asked)
    groups = [row["group"] for row in written(tmp_path) if row["sample"] == 0]
    assert len(groups) == len(set(groups)) == 8 * 4
    assert max(line.get("async/token_age/max", 0) for line in logged(tmp_path)) <= 2


@pytest.mark.slow
def test_what_the_reference_writes_is_the_reference_s_whatever_was_trained(tmp_path):
    """A copy of the policy whose adapter stayed on would write something else after a few steps at this rate."""
    run(tmp_path / "plain", "xpo", lora=True, max_steps=4)
    run(tmp_path / "ahead", "xpo", lora=True, max_steps=4, async_rollouts=True, async_lead=2, async_order="in_order")
    said = [
        {row["group"]: row["completion_ids"] for row in written(tmp_path / name) if row["author"] == REFERENCE}
        for name in ("plain", "ahead")
    ]
    assert said[0] == said[1]


def test_nash_md_weighs_tokens_of_older_weights(tmp_path):
    trainer = made(tmp_path, "nash_md", async_rollouts=True, async_lead=1)
    batch = token_batch([3, 2])
    old = torch.zeros(5)
    batch.per_token |= {OLD_LOGPS: old, POLICY_LOGPS: old - torch.tensor([0.5, 0, 2, -1, 0])}
    wanted = torch.tensor([0.5, 0, 2, -1, 0]).exp().clamp(max=2)
    torch.testing.assert_close(trainer.age_weights(batch, old), wanted)
    scores = type("Scores", (), {"logps": torch.full((5,), -1.0, requires_grad=True)})
    reference = type("Scores", (), {"logps": torch.full((5,), -2.0)})
    trainer.args.kl_level = "token"
    found = trainer.loss(batch, scores, reference)
    found.terms[0].values.sum().backward()
    beta = trainer.args.beta[0] if isinstance(trainer.args.beta, list) else trainer.args.beta
    torch.testing.assert_close(scores.logps.grad, beta * wanted)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"rollout_workers": 1}, "worker processes have the weights of the policy alone"),
        ({"sync_ref_model": True}, "`sync_ref_model` changes its weights meanwhile"),
    ],
)
def test_what_cannot_be_is_refused_with_a_sentence(tmp_path, options, told):
    with pytest.raises(ValueError, match=told):
        made(tmp_path, "xpo", async_rollouts=True, **options)


def test_a_mixture_that_changes_with_the_epoch_is_not_exact(tmp_path):
    exact = {"async_rollouts": True, "async_lead": 1, "async_order": "in_order"}
    with pytest.raises(ValueError, match="`mixture_coef` changes from epoch to epoch"):
        made(tmp_path, "nash_md", mixture_coef=[0.3, 0.5], **exact)
