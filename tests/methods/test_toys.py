"""Methods to come, in small: a head at tokens and a teacher. Their step does not depend on how rows are laid out and split."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import nn

from tests import tiny
from tests.methods.toy_teacher import TeacherConfig, TeacherTrainer
from tests.methods.toy_token_head import TokenHeadConfig, TokenHeadTrainer

SPLITS = {
    "one row after the other": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 6},
    "padded": {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2, "padding_free": False},
    "chunks of 5": {"per_device_train_batch_size": 6, "chunk_tokens": 5},
    "several passes": {"per_device_train_batch_size": 6, "max_tokens_per_pass": 40},
}


def exact_model(seed: int = 0) -> nn.Module:
    return tiny.with_exact_norms(tiny.causal_lm(seed, torch.float64))


def with_heads(model: nn.Module) -> nn.Module:
    torch.manual_seed(3)
    for name, outputs in (("v_head", 1), ("label_head", 2)):
        setattr(model, name, nn.Linear(model.config.hidden_size, outputs, dtype=torch.float64))
    return model


TOYS: dict[str, Any] = {
    "token head": lambda args, **named: TokenHeadTrainer(with_heads(exact_model()), TokenHeadConfig(**args), **named),
    "teacher": lambda args, **named: TeacherTrainer(
        exact_model(), TeacherConfig(**args), teacher=exact_model(7), **named
    ),
}


def step(toy: str, folder: Any, **options: Any) -> tuple[dict[str, torch.Tensor], float]:
    """(weights after one step of plain gradient descent with six rows of different lengths, the loss)."""
    args = {"output_dir": str(folder), "max_steps": 1, "optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0}
    args |= {
        "lr_scheduler_type": "constant",
        "report_to": "none",
        "use_cpu": True,
        "save_strategy": "no",
        "logging_steps": 1,
    }
    rows = Dataset.from_list(tiny.chats(6))
    trainer = TOYS[toy](args | options, train_dataset=rows, processing_class=tiny.tokenizer())
    trainer.train()
    return {name: p.detach() for name, p in trainer.model.named_parameters()}, trainer.state.log_history[0]["loss"]


@pytest.mark.parametrize("toy", TOYS)
def test_a_step_is_the_same_however_rows_are_laid_out(toy, tmp_path):
    weights, loss = step(toy, tmp_path / "whole", per_device_train_batch_size=6)
    before = dict((with_heads(exact_model()) if toy == "token head" else exact_model()).named_parameters())
    assert all(
        (weights[name] != before[name]).any() for name in before if name.endswith(("head.weight", "q_proj.weight"))
    )
    for name, split in SPLITS.items():
        found, found_loss = step(toy, tmp_path / name, **split)
        assert found_loss == pytest.approx(loss, rel=1e-6), name
        for parameter, expected in weights.items():
            torch.testing.assert_close(found[parameter], expected, rtol=0, atol=1e-10, msg=f"{name}: {parameter}")


def test_the_student_that_is_its_teacher_has_nothing_to_learn(tmp_path):
    args = {
        "output_dir": str(tmp_path),
        "max_steps": 1,
        "report_to": "none",
        "use_cpu": True,
        "save_strategy": "no",
        "logging_steps": 1,
    }
    rows = Dataset.from_list(tiny.chats(6))
    trainer = TeacherTrainer(
        exact_model(),
        TeacherConfig(**args),
        teacher=exact_model(),
        train_dataset=rows,
        processing_class=tiny.tokenizer(),
    )
    trainer.train()
    assert abs(trainer.state.log_history[0]["loss"]) < 1e-9
    assert trainer.state.log_history[0]["grad_norm"] < 1e-9
