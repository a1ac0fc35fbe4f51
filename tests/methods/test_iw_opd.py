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
from tests.methods import model_server
from tests.methods.test_server_distillation import Dying
from tests.rollout.served import needs_uvicorn
from tests.trainer.test_distilling import ROWS, collected


def iw_opd(folder, teacher=1, student=None, **options):
    """`teacher`: the seed of one beside the student, or the module; None: it is on a server."""
    args = IWOPDConfig(
        output_dir=str(folder), report_to="none", use_cpu=True, logging_steps=1, disable_tqdm=True,
        **{"save_strategy": "no", "per_device_train_batch_size": 4, "max_completion_length": 6, "learning_rate": 1e-3,
           "max_steps": 2, **options},
    )  # fmt: skip
    own = {"processing_class": tiny.tokenizer(), "teacher_processing_class": tiny.tokenizer()}
    taught_by = tiny.causal_lm(teacher) if isinstance(teacher, int) else teacher
    return IWOPDTrainer(student or tiny.causal_lm(), taught_by, args, train_dataset=Dataset.from_list(ROWS), **own)


AT = {"use_teacher_server": True, "teacher_model_server_url": "http://127.0.0.1:9"}


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
        ({"use_teacher_server": True}, "nothing says where that server is: set `teacher_model_server_url`"),
        (
            {"teacher_model_server_url": "http://localhost:1"},
            "nothing reads it: leave it out, or set `use_teacher_server=True`",
        ),
        ({"teacher_timeout": 3.0}, "`teacher_timeout` is set, but with `use_teacher_server=False`"),
        ({**AT, "teacher_model_name_or_path": "big"}, "`teacher_model_name_or_path` is set, but .* on a server"),
        ({**AT, "temperature": 0.7}, "those at temperature 1"),
        ({**AT, "distillation_objective": "jsd", "loss_top_k": 0}, "not with the whole vocabulary"),
        ({**AT, "distillation_objective": "jsd", "loss_top_k": 3}, "`loss_top_k` is 3 and `beta` 1"),
        ({**AT, "distillation_objective": "jsd", "reverse_kl_top_1_mode": "argmax"}, "find likeliest in the update"),
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


# ---- a teacher on a server ------------------------------------------------------------------------------------------------


@pytest.fixture
def served(tmp_path):
    """(the server's process, options that name it); the teacher is `tiny.causal_lm(1)`."""
    tiny.causal_lm(1).save_pretrained(tmp_path / "teacher")
    server, options = model_server.started(tmp_path / "teacher", tmp_path)
    return server, {"use_teacher_server": True, **options}


def losses(trainer):
    return [entry for entry in trainer.state.log_history if "loss" in entry]


@needs_uvicorn
def test_a_served_teacher_teaches_what_one_beside_the_student_teaches(served, tmp_path):
    """The same completions, losses and weights after three steps, of every objective that a server can serve."""
    for objective in (
        {"lmbda": 0.5, "num_iterations": 3},
        {"distillation_objective": "jsd", "beta": 0.0, "loss_top_k": 3},
        {"distillation_objective": "jsd", "beta": 0.3},
        {"distillation_objective": "jsd"},
    ):
        own = iw_opd(tmp_path / "beside", max_steps=3, **objective)
        other = iw_opd(tmp_path / "served", None, max_steps=3, **objective, **served[1])
        for trainer in (own, other):
            trainer.train()
        for ours, theirs in zip(losses(own), losses(other), strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-4)
            assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)
            assert theirs.get("teacher/unanswered", 0) == 0  # of steps with a generation
        for ours, theirs in zip(own.model.parameters(), other.model.parameters()):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


@needs_uvicorn
def test_the_loss_of_tokens_through_the_server_is_the_formula(served, tmp_path):
    """-sum_t w_t (log q_t - log p_t) log p_t / tokens in float64, from both models and the completions that were written."""
    trainer = iw_opd(tmp_path, None, max_steps=1, **served[1])
    models = [tiny.causal_lm(seed).double().eval() for seed in (0, 1)]
    rollouts = collected(trainer)
    total, tokens = 0.0, 0
    for rollout in rollouts[:4]:
        ids = torch.from_numpy(rollout.sample.input_ids.astype("int64"))
        at = torch.from_numpy(rollout.sample.trained[1:])
        with torch.no_grad():
            p, q = (m(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0][at] for m in models)
        assert rollout.sample.read_trained(TEACHER_LOGPS) == pytest.approx(q.numpy(), abs=1e-4)
        assert "teacher_top_ids" not in rollout.sample.per_token  # nothing reads it
        gaps = (q - p).tolist()
        whole = sum(map(abs, gaps))
        weights = [1 + 0.5 * (1 - sum(map(abs, gaps[:t])) / whole) for t in range(len(gaps))]
        total -= sum(w * a * own for w, a, own in zip(weights, gaps, p.tolist()))
        tokens += len(gaps)
    trainer.train()
    assert losses(trainer)[0]["loss"] == pytest.approx(total / tokens, abs=1e-4)


@needs_uvicorn
@pytest.mark.parametrize("most", [0.5, 1.0])
def test_a_server_that_is_killed_stops_the_run_or_masks_as_configured(served, tmp_path, most):
    server, options = served
    trainer = iw_opd(tmp_path, None, max_steps=3, teacher_max_unanswered=most, **options)
    trainer.teacher._wait = 1.0  # it had longer to start
    Dying(trainer, server)
    if most < 1:
        with pytest.raises(RuntimeError, match=r"left 4 of 4 .* `teacher_max_unanswered`=0.5 .* resume from the last"):
            trainer.train()
        return
    trainer.train()
    assert [entry["teacher/unanswered"] for entry in losses(trainer)] == [0, 1, 1]
    assert [entry["loss"] for entry in losses(trainer)][1:] == [0, 0]
    assert losses(trainer)[0]["loss"] != 0


@needs_uvicorn
def test_a_resumed_run_does_not_ask_again_for_what_it_has(served, tmp_path):
    """In the middle of a generation: its answers are in the checkpoint, and the server has ended when the run continues."""
    server, options = served
    more = {"num_iterations": 2, "max_steps": 4, "save_strategy": "steps", "save_steps": 3}
    whole = iw_opd(tmp_path, None, **more, **options)
    whole.train()
    resumed = iw_opd(tmp_path, None, **more, **options)
    server.end()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    for name, tensor in resumed.model.state_dict().items():
        assert (tensor == whole.model.state_dict()[name]).all(), name


def test_a_teacher_of_both_kinds_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"`teacher_model` is given to IWOPDTrainer, .* on a server: give one"):
        iw_opd(tmp_path, 1, **AT)


# ---- padded vocabularies ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("padded", ["teacher", "student"])
def test_words_that_one_of_them_has_alone_are_in_no_normaliser(padded, tmp_path):
    """Student and teacher are one model but for three further words, which are likely: there is nothing to learn."""
    models = {"student": tiny.causal_lm(), "teacher": tiny.causal_lm()}
    models[padded] = tiny.padded(models[padded], 3)
    trainer = iw_opd(tmp_path, models["teacher"], models["student"], lmbda=0.0, num_iterations=2, optim="sgd")
    assert trainer.vocabulary == tiny.causal_lm().config.vocab_size
    for rollout in collected(trainer):
        theirs, ours = (rollout.sample.read_trained(name) for name in (TEACHER_LOGPS, OLD_LOGPS))
        assert theirs == pytest.approx(ours, abs=1e-5)
    trainer.train()
    assert max(abs(entry["loss"]) for entry in losses(trainer)) < 1e-4


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
