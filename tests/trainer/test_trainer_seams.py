"""Every private or public seam of transformers.Trainer that we override, so that an upgrade fails here, with the seam's name."""

from __future__ import annotations

import ast
import inspect
import sys

import pytest
import transformers

from posttrain.trainer.base import BaseTrainer
from posttrain.trainer.checkpoints.hub import PushedRun
from posttrain.trainer.checkpoints.persistence import ResumableRun
from posttrain.trainer.checkpoints.saving import SavedRun
from posttrain.trainer.online.log_completions import AnsweringRun
from posttrain.trainer.online.rollout_log import LoggedRun
from posttrain.trainer.online.run_engine import WritingRun
from posttrain.trainer.online.task_evals import EvaluatedRun
from posttrain.trainer.online.win_rate import JudgedRun
from posttrain.trainer.online_trainer import OnlineTrainer
from posttrain.trainer.report.display import ShownRun
from posttrain.trainer.report.model_card import DescribedRun
from posttrain.trainer.step.memory_fit import FittedRun

SEAMS = {
    # how a step is computed
    "compute_loss": "model inputs return_outputs num_items_in_batch",
    "training_step": "model inputs num_items_in_batch",
    "_prepare_inputs": "inputs",
    "_get_num_items_in_batch": "batch_samples device",
    # the optimizer
    "create_optimizer": "model",
    "get_optimizer_cls_and_kwargs": "args model",
    "_clip_grad_norm": "model",
    "_get_grad_norm": "model grad_norm",
    # data
    "get_train_dataloader": "",
    "get_eval_dataloader": "eval_dataset",
    "get_test_dataloader": "test_dataset",
    "get_total_train_batch_size": "args",
    # evaluation and logs
    "prediction_step": "model inputs prediction_loss_only ignore_keys",
    "evaluation_loop": "dataloader description prediction_loss_only ignore_keys metric_key_prefix",
    "log": "logs start_time",
    "_maybe_log_save_evaluate": None,  # all of it is handed on
    "floating_point_ops": "inputs",
    "_track_num_input_tokens": "inputs",
    # weights in pieces
    "create_accelerator_and_postprocess": "",
    "save_model": "output_dir _internal_call",
    # the hub
    "push_to_hub": "commit_message blocking token revision kwargs",
    "create_model_card": None,  # ours takes what push_to_hub hands on, by name
    # saving and resuming
    "train": "resume_from_checkpoint trial ignore_keys_for_eval",
    "_run_epoch": None,  # all of it is handed on
    "_save_checkpoint": "model trial",
    "_finalize_training": "trial num_train_samples start_time",
    "_save": "output_dir state_dict",
    "_load_optimizer_and_scheduler": "checkpoint",
    "_load_from_checkpoint": "resume_from_checkpoint model",
    "_load_best_model": "",
    "_load_rng_state": "checkpoint",
}
OURS_INSTEAD = ("_save_optimizer_and_scheduler", "_save_rng_state", "_push_from_checkpoint")
"""Parts of Trainer's own save and push, pickles among them. Nobody but the `_save_checkpoint` that we override may call them."""
TRAINERS = (BaseTrainer, OnlineTrainer)
PROTOCOLS = {
    SavedRun: "run", ResumableRun: "run", PushedRun: "run", ShownRun: "run", DescribedRun: "run", FittedRun: "run",
    LoggedRun: "run", EvaluatedRun: "trainer", AnsweringRun: "trainer", WritingRun: "trainer", JudgedRun: "trainer",
}  # fmt: skip
"""What an object reads of the run that it belongs to, and the name that it has for that run."""
ASKED_WHERE_THERE_IS_ONE = {"engine", "weight_sync", "live", "stop_ids", "teacher"}
"""Read behind a `hasattr` or `getattr`: not every trainer has them."""
RELIED_ON = ("_tr_loss", "_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step")
"""Attributes of Trainer's loop that a resume restores."""


@pytest.mark.parametrize("name", SEAMS)
def test_the_seam_is_as_we_know_it(name):
    theirs = inspect.signature(getattr(transformers.Trainer, name))
    if SEAMS[name] is not None:
        assert [p for p in theirs.parameters if p != "self"] == SEAMS[name].split()


def test_no_override_is_missing_from_the_list():
    own = {
        name
        for cls in TRAINERS
        for name, value in vars(cls).items()
        if callable(value) and hasattr(transformers.Trainer, name) and not name.startswith("__")
    }
    assert own == set(SEAMS)


def test_between_a_trainer_and_transformers_is_no_other_class():
    assert BaseTrainer.__bases__ == (transformers.Trainer,)
    assert OnlineTrainer.__bases__ == (BaseTrainer,)


@pytest.mark.parametrize("name", OURS_INSTEAD)
def test_what_trainers_own_save_calls_is_called_by_nothing_else(name):
    calls = inspect.getsource(transformers.Trainer).count(f"self.{name}(")
    assert calls == inspect.getsource(transformers.Trainer._save_checkpoint).count(f"self.{name}(") == 1


def test_the_loop_still_keeps_its_sums_where_resume_puts_them():
    source = inspect.getsource(transformers.Trainer)
    for name in RELIED_ON:
        assert f"self.{name}" in source, name
    loop = inspect.getsource(transformers.Trainer._inner_training_loop)
    assert loop.index("self._tr_loss =") < loop.index("on_train_begin")


def test_a_resumed_epoch_is_still_skipped_by_the_function_that_we_stand_in_for():
    assert callable(transformers.trainer.skip_first_batches)
    assert "skip_first_batches(train_dataloader" in inspect.getsource(transformers.Trainer._run_epoch)


# ---- what objects read of a run --------------------------------------------------------------------------------------------


def read_of_the_run(module, name):
    """Attributes of `name` and of `self.name` in a module's source."""
    found = set()
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.Attribute):
            of = node.value
            is_run = isinstance(of, ast.Name) and of.id == name
            is_own = isinstance(of, ast.Attribute) and of.attr == name and getattr(of.value, "id", "") == "self"
            if is_run or is_own:
                found.add(node.attr)
        is_asked = isinstance(node, ast.Call) and getattr(node.func, "id", "") == "getattr" and len(node.args) > 1
        if is_asked and getattr(node.args[0], "id", "") == name:
            found.add(node.args[1].value)
    return found


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda protocol: protocol.__name__)
def test_a_protocol_names_exactly_what_its_module_reads(protocol):
    read = read_of_the_run(sys.modules[protocol.__module__], PROTOCOLS[protocol])
    assert read - ASKED_WHERE_THERE_IS_ONE == set(protocol.__annotations__) - ASKED_WHERE_THERE_IS_ONE


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda protocol: protocol.__name__)
def test_what_a_protocol_calls_is_a_function_of_the_trainer(protocol):
    called = [name for name, kind in protocol.__annotations__.items() if str(kind).startswith("Callable")]
    assert [name for name in called if not hasattr(OnlineTrainer, name)] == []
