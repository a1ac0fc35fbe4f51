"""Killed and resumed, runs on rows with images end bit by bit as unbroken ones."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain.rollout.engines.native import engine as native
from tests.forked import Child
from tests.trainer.resumable_run import KillAfter, RowOrder, as_stream, checksum
from tests.trainer.vision_runs import chats, rows_of, trainer_of
from tests.trainer.vision_tools import CallGrammar, deadly_draw, draw, template_file, tool_trainer
from tests.trust.runs import differences

SHARED = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2, "logging_steps": 3, "learning_rate": 1e-3}
SHARED["save_in_background"] = False  # what is resumed is there when the kill comes
ONLINE: dict[str, Any] = {  # killed inside of a generation that feeds two steps, twice
    "train_dataset": [{"prompt": prompt} for prompt, _, _ in chats()[:2]],  # every window has images
    "reward_funcs": checksum,
    "per_device_train_batch_size": 4,
    "num_generations": 4,
    "max_completion_length": 5,
    "steps_per_generation": 2,
    "num_iterations": 2,
    "beta": 0.1,
    "reward_workers": 0,
}
RUNS: dict[str, tuple[str, torch.dtype, dict[str, Any]]] = {
    "sft": ("sft", torch.float32, {"vision_learning_rate": 1e-4, "weight_decay": 0.1}),
    "sft-bf16": ("sft", torch.bfloat16, {"vision_learning_rate": 1e-4, "bf16": True}),
    "grpo": ("grpo", torch.float32, ONLINE),
    "papo": ("papo", torch.float32, ONLINE | {"mask_type": "patch"}),
}
RUNS["grpo-stream"] = (*RUNS["grpo"][:2], RUNS["grpo"][2] | {"shuffle_dataset": False})
"""Name -> (method, dtype, options)."""


def train(name: str, folder: Path, kill_after: int | None = None, resume: bool = False) -> Child:
    def run() -> None:
        method, dtype, options = RUNS[name]
        if name.endswith("-stream"):
            options = options | {"train_dataset": as_stream(options["train_dataset"])}
        order = RowOrder(folder / "run")
        callbacks = [order, *([KillAfter(kill_after)] if kill_after else [])]
        trainer = trainer_of(method, "qwen2_5_vl", folder, dtype, callbacks=callbacks, **SHARED | options)
        order.trainer = trainer
        assert trainer.vision.datasets_with_images == ["train"]
        trainer.train(resume_from_checkpoint=resume)

    return Child(run, folder.with_name(f"{folder.name}.log"))


@pytest.mark.parametrize("name", [*list(RUNS)[:-1], pytest.param("grpo-stream", marks=pytest.mark.slow)])
def test_killed_and_resumed_is_bit_identical(name, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    started = [train(name, whole), train(name, killed, kill_after=3)]
    for child, code in zip(started, (0, -signal.SIGKILL)):
        assert child.wait() == code, child.output()
    assert (killed / "run" / "checkpoint-2").exists()
    resumed = train(name, killed, resume=True)
    assert resumed.wait() == 0, resumed.output()
    assert not differences(whole / "run", killed / "run")


WINDOWS = {"steps_per_generation": 2, "num_iterations": 2, "per_device_train_batch_size": 2, "weight_decay": 0.1}
WINDOWS["max_rollout_slots"] = (
    1  # who is decoded together depends on when tools answer, and log-probs in their last bits on that
)


def train_with_tools(
    folder: Path, kill_after: int | None = None, kill_at: int | None = None, resume: bool = False
) -> Child:
    """As `train`; `kill_at`: in the call of a tool with this number."""

    def run() -> None:
        native.Grammar = CallGrammar
        order = RowOrder(folder / "run")
        callbacks = [order, *([KillAfter(kill_after)] if kill_after else [])]
        tool = draw if kill_at is None else deadly_draw(kill_at)
        options = SHARED | WINDOWS | {"callbacks": callbacks, "tools": [tool]}
        options["chat_template_path"] = template_file("qwen2_5_vl", folder.parent)
        trainer = order.trainer = tool_trainer("qwen2_5_vl", folder, **options)
        trainer.train(resume_from_checkpoint=resume)

    return Child(run, folder.with_name(f"{folder.name}.log"))


@pytest.mark.slow
@pytest.mark.parametrize("kill", [{"kill_after": 3}, {"kill_at": 11}], ids=["inside of a window", "inside of a tool"])
def test_killed_while_tools_show_images(kill, tmp_path):
    """The window that is resumed shows images that no dataset has: they are found in the folder of the run."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    started = [train_with_tools(whole), train_with_tools(killed, **kill)]
    for child, code in zip(started, (0, -signal.SIGKILL)):
        assert child.wait() == code, child.output()
    assert any((killed / "run").glob("checkpoint-*"))
    resumed = train_with_tools(killed, resume=True)
    assert resumed.wait() == 0, resumed.output()
    assert not differences(whole / "run", killed / "run")
    drawn = [sorted(path.name for path in (folder / "run" / "media").iterdir()) for folder in (whole, killed)]
    assert len(drawn[0]) > 3
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("method", ["sft", "reward"])
def test_the_best_checkpoint_is_what_a_run_ends_with(method, tmp_path):
    """The loss of the row that is trained falls: by its largest value the first checkpoint is the best, and not the last."""
    rows = rows_of(method)
    options = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "learning_rate": 3e-2}
    options |= {"metric_for_best_model": "eval_loss", "greater_is_better": True}
    trainer = trainer_of(
        method, "qwen2_5_vl", tmp_path, torch.float32, train_dataset=rows[:1], eval_dataset=rows[:1], **SHARED | options
    )
    trainer.train()
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-2")
    found = type(trainer.model).from_pretrained(trainer.state.best_model_checkpoint)
    assert all(
        torch.equal(one, other) for one, other in zip(trainer.model.parameters(), found.parameters(), strict=True)
    )
