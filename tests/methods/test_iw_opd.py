"""IW-OPD: weights, a student that has nothing to learn, and what is refused."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from datasets import Dataset

from posttrain import IWOPDConfig, IWOPDTrainer
from posttrain.methods.iw_opd import TEACHER_LOGPS, prefix_weights
from posttrain.migration.trl_names import found
from posttrain.rollout.rollout import OLD_LOGPS, POLICY
from tests import tiny
from tests.trainer.test_distilling import ROWS, collected


def iw_opd(folder, teacher=1, **options):
    args = IWOPDConfig(
        output_dir=str(folder), report_to="none", use_cpu=True, logging_steps=1, disable_tqdm=True,
        **{"save_strategy": "no", "per_device_train_batch_size": 4, "max_completion_length": 6, "learning_rate": 1e-3,
           "max_steps": 2, **options},
    )  # fmt: skip
    own = {"processing_class": tiny.tokenizer(), "teacher_processing_class": tiny.tokenizer()}
    return IWOPDTrainer(tiny.causal_lm(), tiny.causal_lm(teacher), args, train_dataset=Dataset.from_list(ROWS), **own)


def test_the_worked_example_whatever_lies_beside_it():
    """Of two completions and an empty one between: a 0.4, -0.1, 0.5, and one that agrees with its teacher."""
    gaps = torch.tensor([0.4, -0.1, 0.5, 0.0, 0.0], dtype=torch.float64)
    weights = prefix_weights(gaps, torch.tensor([3, 0, 2]), 0.5, 1e-8)
    assert weights.tolist() == pytest.approx([1.5, 1.3, 1.25, 1.5, 1.5], abs=1e-12)
    assert (weights * gaps).tolist() == pytest.approx([0.6, -0.13, 0.625, 0, 0], abs=1e-12)


@pytest.mark.parametrize("objective", ["iw_opd", "jsd"])
def test_a_perfect_student_stays_where_it_is(objective, tmp_path):
    trainer = iw_opd(tmp_path, teacher=0, distillation_objective=objective, lmbda=0.5, optim="sgd")
    before = copy.deepcopy(trainer.model.state_dict())
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert max(abs(entry["loss"]) for entry in logs) < 1e-5
    assert max((p - before[name]).abs().max().item() for name, p in trainer.model.state_dict().items()) < 1e-6
    if objective == "iw_opd":  # what differs by rounding has weights between 1 and 1.5
        assert all(1 <= entry["iw_opd/min_weight"] <= entry["iw_opd/max_weight"] == 1.5 for entry in logs)


def test_the_disagreement_is_that_of_the_student_that_wrote(tmp_path):
    """Used twice, a generation has its own log-probs; both authors have lengths; the student comes nearer."""
    options = {"lmbda": 0.5, "num_iterations": 2, "max_steps": 16, "learning_rate": 5e-3}
    trainer = iw_opd(tmp_path, per_device_eval_batch_size=8, **options)
    for rollout in collected(trainer):
        sample = rollout.sample
        gaps = sample.read_trained(TEACHER_LOGPS) - sample.read_trained(OLD_LOGPS)
        assert abs(gaps).max() > 0.1
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    first, last = (sum(entry["iw_opd/mean_abs_advantage"] for entry in part) for part in (logs[:4], logs[-4:]))
    assert last < first
    named = {name for entry in logs for name in entry}
    for author in ("on_policy", "off_policy"):
        assert {f"{author}_loss", f"completions/{author}_mean_length", f"completions/{author}_max_length"} <= named
    assert "completions/truncated_fraction" in named


def test_a_generation_that_is_used_once_needs_no_pass_of_its_own(tmp_path):
    rollouts = collected(iw_opd(tmp_path))
    assert {rollout.author for rollout in rollouts} == {POLICY}
    assert all(OLD_LOGPS not in rollout.sample.per_token for rollout in rollouts)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"beta": 0.5}, "`beta` is set, but `distillation_objective` 'iw_opd' does not read it: it belongs to 'jsd'"),
        (
            {"distillation_objective": "jsd", "iw_opd_gamma": 1.0},
            "`iw_opd_gamma` is set, but .* 'jsd' does not read it",
        ),
        ({"distillation_objective": "jsd", "loss_add_tail": False}, "the loss is always 0"),
        ({"distillation_objective": "jsd", "loss_top_k": 4, "reverse_kl_top_1_mode": "argmax"}, "only `loss_top_k` 1"),
        ({"use_teacher_server": True}, "Served teachers are to come"),
        ({"teacher_model_server_url": "http://localhost:1"}, "Served teachers are to come"),
    ],
)
def test_what_has_no_effect_or_is_not_there_is_refused(options, sentence, tmp_path):
    with pytest.raises(ValueError, match=sentence):
        IWOPDConfig(output_dir=str(tmp_path), **options)


def test_a_resumed_run_continues_in_the_middle_of_a_generation(tmp_path):
    """What the teacher said of it is in the checkpoint: another teacher's answer would be another gradient."""
    options = {"num_iterations": 2, "max_steps": 4, "save_strategy": "steps", "save_steps": 3}
    whole = iw_opd(tmp_path, **options)
    whole.train()
    resumed = iw_opd(tmp_path, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    for name, tensor in resumed.model.state_dict().items():
        assert (tensor == whole.model.state_dict()[name]).all(), name


def test_arguments_are_where_trl_has_them():
    order = [
        "model",
        "teacher_model",
        "args",
        "data_collator",
        "train_dataset",
        "eval_dataset",
        "processing_class",
        "compute_metrics",
        "callbacks",
        "optimizers",
        "preprocess_logits_for_metrics",
        "peft_config",
    ]
    assert list(inspect.signature(IWOPDTrainer).parameters)[: len(order)] == order
    assert found("IWOPDTrainer", "trl.experimental.iw_opd") is IWOPDTrainer
