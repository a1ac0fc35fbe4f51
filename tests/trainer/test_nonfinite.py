"""A NaN or an infinity never reaches the weights, never reaches a checkpoint, and never goes unnoticed."""

from __future__ import annotations

import json
import math

import pytest
import torch
from transformers import TrainerCallback

from posttrain.trainer.checkpoints import checkpoint as files
from posttrain.trainer.checkpoints.skipped import NonFiniteTraining
from posttrain.trainer.step.masters import MasterWeights
from posttrain.trainer.step.optimizer import FiniteSteps
from tests.trainer import resumable_run


class Poison(TrainerCallback):
    """Does something bad to the model at the beginning of the given steps (1-based)."""

    def __init__(self, steps, act, undo=None):
        self.steps, self.act, self.undo = steps, act, undo

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if state.global_step + 1 in self.steps:
            self.handle = self.act(model)

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step in self.steps and self.handle is not None:
            self.handle.remove()


def nan_weight(model):
    with torch.no_grad():
        model.model.norm.weight[3] = math.nan


def nan_gradient(model):
    return next(model.parameters()).register_hook(lambda gradient: gradient * math.nan)


def inf_loss(model):
    return model.get_output_embeddings().register_forward_hook(lambda *call: call[-1] * math.inf)


def weights_of(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


class Watch(TrainerCallback):
    """Weights after each step."""

    def __init__(self):
        self.after = {}

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.after[state.global_step] = weights_of(model)


@pytest.mark.parametrize("poison", [nan_gradient, inf_loss])
@pytest.mark.parametrize("method", ["sft", "dpo", "sft-bf16"])
def test_a_bad_step_is_not_applied_and_its_rows_are_recorded(tmp_path, poison, method):
    watch = Watch()
    trainer = resumable_run.main(method, tmp_path, callbacks=[Poison({2}, poison), watch], eval_strategy="no")
    assert all(torch.equal(watch.after[1][n], watch.after[2][n]) for n in watch.after[1])
    assert any(not torch.equal(watch.after[2][n], watch.after[3][n]) for n in watch.after[2])
    (record,) = [json.loads(line) for line in (tmp_path / "skipped_steps.jsonl").read_text().splitlines()]
    assert record["step"] == 2
    assert len(set(record["rows"])) == len(record["rows"]) == 4 * 2
    assert trainer.checkpoints.run_state.skipped_total == 1
    logged = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert all(math.isfinite(line["loss"]) for line in logged if "loss" in line)
    assert [line.get("skipped_steps") for line in logged if "loss" in line] == [None, 1, 1, 1]  # steps 1, 3, 6 and 8
    for path in files.checkpoints(tmp_path):
        files.verify(path)


def test_optimizer_state_does_not_move_on_a_skipped_step(tmp_path):
    clean = resumable_run.main("sft", tmp_path / "a", max_steps=2, eval_strategy="no")
    poisoned = resumable_run.main(
        "sft", tmp_path / "b", max_steps=3, eval_strategy="no", callbacks=[Poison({3}, nan_gradient)]
    )
    for one, other in zip(*(t.optimizer.state_dict()["state"].values() for t in (clean, poisoned))):
        assert one["step"] == other["step"] == 2


def test_a_nan_weight_stops_the_run_after_three_steps_and_is_never_saved(tmp_path):
    with pytest.raises(NonFiniteTraining, match="3 optimizer steps in a row") as error:
        resumable_run.main("sft", tmp_path, callbacks=[Poison({4}, nan_weight)], save_steps=1, eval_strategy="no")
    assert "step 6" in str(error.value)
    assert [path.name for path in files.checkpoints(tmp_path)] == ["checkpoint-3", "checkpoint-2", "checkpoint-1"]
    lines = (tmp_path / "skipped_steps.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [4, 5, 6]


def test_a_nan_weight_that_no_gradient_shows_is_noticed_at_the_next_save(tmp_path):
    """The embedding row of a token that no row of the data uses."""

    def hidden_nan(model):
        with torch.no_grad():
            model.get_input_embeddings().weight[5] = math.nan

    with pytest.raises(NonFiniteTraining, match=r"embed_tokens.*the model came with it"):
        resumable_run.main("sft", tmp_path, callbacks=[Poison({3}, hidden_nan)], eval_strategy="no")
    assert [path.name for path in files.checkpoints(tmp_path)] == ["checkpoint-2"]


def test_two_bad_steps_apart_do_not_stop_the_run(tmp_path):
    trainer = resumable_run.main("sft", tmp_path, callbacks=[Poison({2, 3, 5, 6}, nan_gradient)], eval_strategy="no")
    assert trainer.state.global_step == 8
    assert trainer.checkpoints.run_state.skipped_total == 4


@pytest.mark.parametrize("optim", ["adamw_torch", "sgd", "adafactor"])
def test_optimizers_that_cannot_skip_on_the_device_skip_all_the_same(tmp_path, optim):
    watch = Watch()
    resumable_run.main(
        "sft", tmp_path, max_steps=3, optim=optim, callbacks=[Poison({2}, nan_gradient), watch], eval_strategy="no"
    )
    assert all(torch.equal(watch.after[1][n], watch.after[2][n]) for n in watch.after[1])
    assert all(torch.isfinite(p).all() for p in watch.after[3].values())


# ---- the optimizer by itself -------------------------------------------------------------------------------------------


def test_a_tiny_step_moves_a_master_and_would_not_move_a_bfloat16_weight():
    """At 1.0 the spacing of bfloat16 is 2^-7; a step of 1e-6 vanishes there 1,000 times and adds up to 1e-3 in the master."""
    weight = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([weight], lr=1e-6)
    masters = MasterWeights(optimizer)
    for _ in range(1000):
        weight.grad = None
        (weight.sum()).backward()
        optimizer.step()
    (_, master) = masters.pairs[0]
    torch.testing.assert_close(master.detach(), torch.full((4,), 0.999), rtol=0, atol=2e-5)
    assert torch.equal(weight.detach(), torch.ones(4, dtype=torch.bfloat16))
    for _ in range(3000):
        weight.sum().backward()
        optimizer.step()
    # 0.996 rounded to its spacing.
    assert torch.equal(weight.detach(), torch.full((4,), 0.99609375, dtype=torch.bfloat16))


def test_micro_batches_add_up_in_float32():
    """256 gradients of 1 + 2^-9: in bfloat16 each is 1.0 and the sum stops growing at 256; the float32 sum of what autograd
    hands over is exact."""
    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    masters = MasterWeights(torch.optim.SGD([weight], lr=1.0))
    for _ in range(300):
        weight.sum().backward()
    assert weight.grad is None
    assert masters.pairs[0][1].grad.item() == 300.0  # bfloat16 holds no integer between 256 and 258


def test_clip_is_torch_clip_and_flag_follows_norm_and_loss():
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True)
    finite = FiniteSteps(optimizer)
    assert finite.on_device
    weight.grad = torch.tensor([3.0, 4.0])
    assert finite.clip(1.0, torch.tensor(0.5), "a").item() == 5.0
    torch.testing.assert_close(weight.grad, torch.tensor([0.6, 0.8]), rtol=1e-5, atol=0)
    optimizer.step()
    moved = weight.detach().clone()
    weight.grad = torch.tensor([1.0, 1.0])
    finite.clip(1.0, torch.tensor(math.inf), "b")
    optimizer.step()
    assert torch.equal(weight.detach(), moved)
    assert finite.finished() == [("a", False), ("b", True)]
