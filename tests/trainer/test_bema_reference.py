"""BEMACallback(update_ref_model=True): the reference of a run follows the averages of its weights."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import TrainerCallback

from posttrain import BEMACallback, DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer
from posttrain.models.load.reference import frozen_copy
from tests import tiny
from tests.forked import start_group, wait_for_group
from tests.trainer.test_callbacks import Two, quiet, sft


def dpo(tmp_path, callback, peft_config=None, ref_model=None, **changes):
    given = {"max_steps": 6, "lr_scheduler_type": "constant", "report_to": "none", **changes}
    return DPOTrainer(
        tiny.causal_lm(),
        ref_model=ref_model,
        args=DPOConfig(**quiet(tmp_path, **given)),
        train_dataset=Dataset.from_list(tiny.pairs(16)),
        processing_class=tiny.tokenizer(),
        callbacks=[callback],
        peft_config=peft_config,
    )


def following(**changes):
    given = {"update_freq": 1, "update_ref_model": True, "ref_model_update_freq": 2, "ref_model_update_after": 1}
    return BEMACallback(**{**given, **changes})


class Watch(TrainerCallback):
    """The reference's and the averages' weights after each step, called after the callback that it watches."""

    def __init__(self, name="lm_head.weight"):
        self.name, self.seen = name, []

    def on_step_end(self, args, state, control, **kwargs):
        copy = dict(self.trainer.reference.model.named_parameters())
        self.seen.append((copy[self.name].clone(), self.callback.weights[self.name].clone()))


def watched(made, callback):
    watch = Watch()
    watch.trainer, watch.callback = made, callback
    made.add_callback(watch)
    return watch


def test_the_reference_becomes_the_average_at_its_steps_and_stays_between(tmp_path):
    """After step 1 and every second from there: 1, 3, 5."""
    callback = following()
    made = dpo(tmp_path, callback)
    before = made.reference.model.lm_head.weight.clone()
    watch = watched(made, callback)
    made.train()
    references, averages = zip(*watch.seen)
    assert not torch.equal(references[0], before)
    for step, of_average in ((1, 1), (2, 1), (3, 3), (4, 3), (5, 5), (6, 5)):
        assert torch.equal(references[step - 1], averages[of_average - 1]), step
    assert not made.reference.model.lm_head.weight.requires_grad


def test_a_reference_that_followed_is_resumed_with_it(tmp_path):
    """Stopped after step 4, between two moves: policy and reference end as those of the run that was not stopped."""
    kept = {"save_strategy": "steps", "save_steps": 4}
    whole = dpo(tmp_path / "whole", following(), **kept)
    whole.train()
    dpo(tmp_path, following(), max_steps=4, **kept).train()
    resumed = dpo(tmp_path, following(), **kept)
    resumed.train(resume_from_checkpoint=True)
    for side in (lambda made: made.model, lambda made: made.reference.model):
        for (name, one), other in zip(side(whole).named_parameters(), side(resumed).parameters()):
            assert torch.equal(one, other), name


def test_a_reference_waits_for_the_first_average(tmp_path):
    callback = following(update_after=3, ref_model_update_after=0)
    made = dpo(tmp_path, callback)
    before = made.reference.model.lm_head.weight.clone()
    seen = []
    made.add_callback(
        type("Look", (TrainerCallback,), {"on_step_end": lambda *_, **__: seen.append(moved(made, before))})()
    )
    made.train()
    assert seen == [False, False, False, True, True, True]


def moved(made, before):
    return not torch.equal(made.reference.model.lm_head.weight, before)


def test_an_online_method_s_reference_follows_too(tmp_path):
    callback = following(ref_model_update_after=0)
    given = {"beta": 0.1, "num_generations": 4, "max_completion_length": 4, "reward_workers": 0, "max_steps": 2}
    made = GRPOTrainer(
        tiny.causal_lm(), lambda completion_ids, **_: [float(sum(ids) % 7) for ids in completion_ids],
        GRPOConfig(**quiet(tmp_path, **given, report_to="none")), Dataset.from_dict({"prompt": ["a", "b", "c"]}),
        processing_class=tiny.tokenizer(), callbacks=[callback],
    )  # fmt: skip
    made.train()
    for name, parameter in made.live.model.named_parameters():
        assert torch.equal(parameter, callback.weights[name]), name


def moved_on_two_processes(rank, folder):
    torch.distributed.init_process_group("gloo")
    callback, policy = following(ref_model_update_freq=1), Two()
    reference = frozen_copy(Two())
    callback.take_reference(reference, policy)
    args = SimpleNamespace(sharding=None, world_size=2, output_dir="/nonexistent")
    state = SimpleNamespace(global_step=0, max_steps=9, is_world_process_zero=rank == 0)
    callback.on_train_begin(args, state, None, model=policy)
    state.global_step = 1
    policy.move(3.0, 5.0)
    callback.on_step_end(args, state, None, model=policy)
    (folder / f"{rank}.json").write_text(json.dumps([reference.model.a.item(), reference.model.b.item()]))
    torch.distributed.destroy_process_group()


def test_the_reference_of_every_process_follows(tmp_path):
    """Only the first one has averages: beta = alpha' = 11 ** -0.5, alpha = 11 ** -0.2, from (1, -2) to (3, 5)."""
    group = start_group(2, lambda rank: moved_on_two_processes(rank, tmp_path), tmp_path / "rank")
    assert wait_for_group(group, 300) == [0, 0], "\n".join(child.output() for child in group)
    share = 11**-0.5 + 11**-0.2
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found == pytest.approx([1 + 2 * share, -2 + 7 * share])


@pytest.mark.parametrize(
    ("case", "sentence"),
    [
        (
            {"peft_config": LoraConfig(r=2, task_type="CAUSAL_LM")},
            "a model of its own; here it is the base model under the adapter",
        ),
        (
            {"precompute_ref_log_probs": True},
            "here it is precomputed log-probs. Pass `ref_model`, turn `precompute_ref_log_probs` off",
        ),
        ({"sync_ref_model": True}, "both move the reference: choose one"),
        (
            {"peft_config": LoraConfig(r=2, task_type="CAUSAL_LM"), "ref_model": "another"},
            "which has no base_model.* with an adapter, or with a reference of another shape, leave it out",
        ),
    ],
)
def test_a_reference_that_cannot_follow_is_refused_before_the_first_step(tmp_path, case, sentence):
    if "ref_model" in case:
        case = {**case, "ref_model": tiny.causal_lm(1)}
    with pytest.raises(ValueError, match=sentence):
        dpo(tmp_path, following(), **case).train()


def test_a_trainer_without_a_reference_has_none_to_move(tmp_path):
    with pytest.raises(ValueError, match="which this trainer does not have"):
        sft(tmp_path, [following()]).train()
