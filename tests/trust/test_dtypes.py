"""No phase of a run changes the type of a parameter, what is trained, or the mode of the model for good."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import TrainerCallback

from posttrain import BEMACallback
from posttrain.methods.table import METHODS
from tests import tiny

AXES = {
    "method": ("sft", "dpo", "reward"),
    "bf16": (False, True),
    "lora": (False, True),
    "checkpointing": (False, True, "selective"),
    "padding_free": (True, False),
    "extra": ("none", "bema", "precomputed", "sync", "offload", "best"),
}
ONLY_DPO = ("precomputed", "sync")


def cells(count: int | None) -> list[dict[str, Any]]:
    """Some cells of the matrix; without `count`, so many that every possible pair of two options occurs."""
    possible = [dict(zip(AXES, values)) for values in itertools.product(*AXES.values())]
    possible = [cell for cell in possible if is_possible(cell)]
    random.Random(0).shuffle(possible)
    if count is not None:
        return possible[:count]
    chosen, missing = [], set().union(*map(pairs_of, possible))
    while missing:
        chosen.append(max(possible, key=lambda cell: len(pairs_of(cell) & missing)))
        missing -= pairs_of(chosen[-1])
    return chosen


def pairs_of(cell: dict[str, Any]) -> set[Any]:
    return set(itertools.combinations(sorted(cell.items(), key=lambda item: item[0]), 2))


def is_possible(cell: dict[str, Any]) -> bool:
    if cell["extra"] in ONLY_DPO and cell["method"] != "dpo":
        return False
    return not (cell["extra"] == "sync" and cell["lora"])  # the reference is then no model of its own


def map_of(model: torch.nn.Module) -> dict[str, tuple[torch.dtype, bool, torch.Size]]:
    return {name: (p.dtype, p.requires_grad, p.shape) for name, p in model.named_parameters()}


class Watch(TrainerCallback):
    """Compares at the end of every phase."""

    def __init__(self) -> None:
        self.before: dict[str, Any] = {}
        self.trainer: Any = None
        self.looked: set[str] = set()

    def look(self, phase: str) -> None:
        self.looked.add(phase)
        now = map_of(self.trainer.model)
        changed = {
            name: (self.before[name], now.get(name)) for name in self.before if now.get(name) != self.before[name]
        }
        assert not changed, f"after {phase}: {changed}"
        assert now.keys() == self.before.keys(), phase

    def on_step_end(self, args, state, control, **kwargs) -> None:
        assert self.trainer.model.training
        self.look("step")

    def on_evaluate(self, args, state, control, **kwargs) -> None:
        self.look("evaluation")

    def on_save(self, args, state, control, **kwargs) -> None:
        self.look("save")

    def on_train_end(self, args, state, control, **kwargs) -> None:
        self.look("training")


def options(cell: dict[str, Any]) -> dict[str, Any]:
    found = {
        "gradient_checkpointing": bool(cell["checkpointing"]),
        "padding_free": cell["padding_free"],
        "bf16": cell["bf16"],
    }
    if cell["checkpointing"] == "selective":
        found["gradient_checkpointing_kwargs"] = {"use_reentrant": False, "selective": True}
    return (
        found
        | {
            "none": {},
            "bema": {},
            "precomputed": {"precompute_ref_log_probs": True},
            "sync": {"sync_ref_model": True, "ref_model_sync_steps": 1},
            "offload": {"activation_offloading": True},
            "best": {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss"},
        }[cell["extra"]]
    )


def trainer_of(cell: dict[str, Any], folder: Any, max_steps: int) -> tuple[Any, Watch]:
    method = METHODS[cell["method"]]
    args = method.config_class(
        output_dir=str(folder), max_steps=max_steps, save_steps=1, eval_strategy="steps", eval_steps=1, report_to="none",
        per_device_train_batch_size=2, learning_rate=1e-3, use_cpu=True, disable_tqdm=True, **options(cell),
    )  # fmt: skip
    dtype = torch.bfloat16 if cell["bf16"] else torch.float32
    model = tiny.reward_model(dtype=dtype) if cell["method"] == "reward" else tiny.causal_lm(dtype=dtype)
    rows = tiny.chats(6) if cell["method"] == "sft" else tiny.pairs(6)
    watch = Watch()
    trainer = method.trainer_class(
        model=model,
        args=args,
        train_dataset=Dataset.from_list(rows),
        eval_dataset=Dataset.from_list(rows[:2]),
        processing_class=tiny.tokenizer(),
        callbacks=[watch, *([BEMACallback(update_freq=1)] if cell["extra"] == "bema" else [])],
        peft_config=LoraConfig(r=2, target_modules=["q_proj", "v_proj"]) if cell["lora"] else None,
    )
    watch.trainer, watch.before = trainer, map_of(trainer.model)
    return trainer, watch


def examine(cell: dict[str, Any], folder: Any) -> None:
    trainer, watch = trainer_of(cell, folder, 2)
    trainer.train()
    watch.look("train()")
    trainer.evaluate()
    watch.look("evaluate()")
    trainer.save_model(str(folder / "model"))
    watch.look("save_model()")
    resumed, after = trainer_of(cell, folder, 3)
    assert after.before == watch.before
    resumed.train(resume_from_checkpoint=True)
    after.look("resume")
    assert {"step", "evaluation", "save", "training"} <= watch.looked & after.looked


@pytest.mark.parametrize("count", [pytest.param(3, id="short"), pytest.param(None, id="long", marks=pytest.mark.trust)])
def test_dtypes_and_requires_grad_are_the_same_after_every_phase(tmp_path, count, figure):
    chosen = cells(count)
    for number, cell in enumerate(chosen):
        try:
            examine(cell, tmp_path / str(number))
        except AssertionError as error:
            raise AssertionError(f"{cell}: {error}") from error
    figure("none: option matrix", len(chosen), "dtypes and requires_grad unchanged in all", "all")
