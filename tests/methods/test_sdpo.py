"""SDPO: what the teacher is shown, who takes part, and what the policy term is."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from datasets import Dataset

from posttrain import GRPOConfig, GRPOTrainer, SDPOConfig, SDPOTrainer
from posttrain.core.batch import ACTIVE
from posttrain.core.results import TokenScores
from posttrain.methods.sdpo import demonstration, without_thinking
from posttrain.rollout.rollout import ADVANTAGES, POLICY_LOGPS
from tests import tiny
from tests.forked import start_group, wait_for_group
from tests.losses.policy_oracle import token_batch
from tests.trainer.test_distilling import collected

ROWS = [{"prompt": f"What is {i}?", "privileged_context": f"Not {i}." if i % 2 else ""} for i in range(8)]


def odd(completion_ids, **columns):
    return [float(sum(ids) % 2) for ids in completion_ids]


def rare(completion_ids, **columns):
    return [float(sum(ids) % 5 == 0) for ids in completion_ids]


def options_of(folder, **options):
    shared = {
        "output_dir": str(folder), "report_to": "none", "use_cpu": True, "save_strategy": "no", "logging_steps": 1,
        "disable_tqdm": True, "per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 4,
        "max_steps": 2, "learning_rate": 1e-2, "reward_workers": 0,
    }  # fmt: skip
    return shared | options


def sdpo(folder, reward=odd, **options):
    args = SDPOConfig(**options_of(folder, **options))
    return SDPOTrainer(tiny.causal_lm(), reward, args, Dataset.from_list(ROWS), processing_class=tiny.tokenizer())


def test_the_first_success_of_the_same_prompt_and_not_the_sample_itself():
    successes = [(3, 1, "a"), (3, 2, "b"), (4, 0, "c")]
    assert demonstration(successes, 3, 0, True) == "a"
    assert demonstration(successes, 3, 1, True) == "b"
    assert demonstration(successes, 3, 1, False) == "a"
    assert demonstration(successes, 4, 0, True) is None
    assert demonstration(successes, 5, 0, False) is None


def test_of_a_demonstration_only_the_answer_may_be_shown():
    assert without_thinking("<think>no\nno</think> Yes.") == "Yes."
    assert without_thinking("hm, no</think>\n\nYes.") == "Yes."  # the template opened it
    assert without_thinking("Yes.") == "Yes."


def shown_by(rollout, others):
    """What the teacher's prompt should be, without feedback."""
    found = [o for o in others if o.group == rollout.group and o.reward >= 1 and o is not rollout]
    if not found:
        return None
    said = min(found, key=lambda one: one.request.sample).completion
    question = f"{rollout.prompt}\nCorrect solution:\n\n{said}\n\n"
    return f"{question}\n\nCorrectly solve the original question.\n"


def test_the_teacher_is_shown_a_success_of_another_and_samples_without_one_take_part_in_nothing(tmp_path):
    trainer = sdpo(tmp_path, reward=rare, steps_per_generation=4)  # 8 prompts
    rollouts, decode = collected(trainer), trainer.processing_class.decode
    units = trainer.arranged([rollouts])
    lone = 0
    for rollout, unit in zip(rollouts, units):
        wanted, twin = shown_by(rollout, rollouts), rollout.sample.twin
        assert rollout.sample.scalars[ACTIVE] == float(wanted is not None) == float(unit is not None)
        lone += wanted is None
        if wanted is not None:
            own = rollout.completion_ids
            assert decode(twin.input_ids[: len(twin) - len(own)]) == wanted
            assert twin.input_ids[twin.trained].tolist() == own.tolist()
    assert 0 < lone < len(rollouts)


def test_feedback_is_shown_where_there_is_some(tmp_path):
    options = {"include_environment_feedback": True, "environment_feedback_only_without_solution": True}
    trainer = sdpo(tmp_path, reward=lambda completions, **_: [0.0] * len(completions), max_reprompt_len=1000, **options)
    for rollout in collected(trainer):
        said = ROWS[rollout.request.row]["privileged_context"]
        assert rollout.sample.scalars[ACTIVE] == float(bool(said))
        read = trainer.processing_class.decode(rollout.sample.twin.input_ids)
        assert (f"feedback from your unsuccessful earlier attempt:\n\n{said}\n\n" in read) == bool(said)
        assert "Correct solution" not in read


def groups_on_two_processes(rank, folder):
    trainer = sdpo(folder / str(rank), per_device_train_batch_size=2)  # a group of four lies on both
    rollouts = collected(trainer)
    seen = [[r.group, r.request.sample, r.reward, r.completion, r.sample.twin.input_ids.tolist()] for r in rollouts]
    (folder / f"{rank}.json").write_text(json.dumps(seen))


def test_a_success_on_another_process_is_shown_too(tmp_path):
    group = start_group(2, lambda rank: groups_on_two_processes(rank, tmp_path), tmp_path / "rank")
    assert wait_for_group(group, 300) == [0, 0], "\n".join(child.output() for child in group)
    parts = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    alone = collected(sdpo(tmp_path / "alone", per_device_train_batch_size=4))
    one = {(r.group, r.request.sample): r.sample.twin.input_ids.tolist() for r in alone}
    assert {(group, sample): twin for part in parts for group, sample, _, _, twin in part} == one
    assert {sample for _, sample, *_ in parts[0]}.isdisjoint(sample for _, sample, *_ in parts[1])


AHEAD = {"async_rollouts": True, "async_lead": 2, "async_order": "in_order", "max_steps": 5, "learning_rate": 0.05}


@pytest.mark.parametrize("ahead", [{}, AHEAD], ids=["in turns", "beside training"])
def test_without_distillation_it_is_grpo_to_the_bit(tmp_path, ahead):
    """Beside training, tokens are two steps old, and weighed for it."""
    own = sdpo(tmp_path / "sdpo", distillation_weight=0.0, beta=0.1, **ahead)
    args = GRPOConfig(**options_of(tmp_path / "grpo", beta=0.1, disable_dropout=True, **ahead))
    other = GRPOTrainer(tiny.causal_lm(), odd, args, Dataset.from_list(ROWS), processing_class=tiny.tokenizer())
    for trainer in (own, other):
        trainer.train()
    for (name, one), two in zip(own.model.named_parameters(), other.model.parameters()):
        assert torch.equal(one, two), name


@pytest.mark.parametrize("weight", [0.25, 0.5])
def test_the_policy_term_beside_a_distillation_weighs_tokens_of_older_weights(tmp_path, weight):
    trainer = sdpo(tmp_path, distillation_weight=weight, async_rollouts=True, loss_type="dapo")
    batch, logps = token_batch([3, 2]), torch.full((5,), -1.0, requires_grad=True)
    ages = torch.tensor([0.5, 0.0, 2.0, -1.0, 0.0])
    batch.per_token |= {POLICY_LOGPS: logps.detach() - ages, ADVANTAGES: torch.ones(5)}
    found = trainer.loss(batch, TokenScores(logps, divergences=torch.zeros(5)), None)
    assert [term.weight for term in found.terms] == [1 - weight, weight]
    found.terms[0].values.sum().backward()
    torch.testing.assert_close(logps.grad, -ages.exp().clamp(max=2))


def test_without_a_success_nothing_moves_and_it_is_said(tmp_path, caplog):
    trainer = sdpo(tmp_path, success_reward_threshold=2.0, diagnostics_warning_interval=2)
    before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert all(torch.equal(one, two) for one, two in zip(before, trainer.model.parameters()))
    assert "For 2 generations in a row no completion reached `success_reward_threshold`=2" in caplog.text
    (entry, *_) = [one for one in trainer.state.log_history if "self_distillation/reprompt_sample_fraction" in one]
    assert entry["self_distillation/reprompt_sample_fraction"] == 0
    assert entry["self_distillation/success_sample_fraction"] == 0
    assert entry["self_distillation/reward_max"] == 1
    assert entry["self_distillation/rewards/odd"] == entry["self_distillation/reward_mean"]
    assert entry["self_distillation/reward_std"] == entry["reward_std"] > 0  # of a sample, as in GRPO and in TRL


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"beta": 0.1}, "belongs to the policy term, which `distillation_weight=1` leaves out"),
        ({"use_successful_as_teacher": False}, "the teacher is shown nothing"),
        ({"reprompt_template": "{prompt}{solution}"}, "`reprompt_template` has no {feedback}"),
        ({"loss_type": "cispo"}, "`loss_type` is 'cispo'; it must be one of grpo, bnpo, dr_grpo, dapo"),
        ({"distillation_mode": "topk_logits"}, "needs `distillation_topk`"),
    ],
)
def test_what_has_no_meaning_is_refused(options, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        SDPOConfig(**options_of(tmp_path, **options))
