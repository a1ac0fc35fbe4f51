"""Scripts written for TRL pass arguments by position: each lands where TRL has it, or is refused with a sentence."""

from __future__ import annotations

import inspect

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel
from transformers import TrainerCallback

from posttrain.data.collate import Collator
from posttrain.methods.table import METHODS
from tests import tiny

DATA = ("data_collator", "train_dataset", "eval_dataset", "processing_class")
OLDER = (
    "model",
    "args",
    *DATA,
    "model_init",
    "callbacks",
    "optimizers",
    "preprocess_logits_for_metrics",
    "peft_config",
)
ORDER = {
    "cpo": (*OLDER, "compute_metrics"),
    "orpo": (*OLDER, "compute_metrics"),
    "tpo": ("model", "args", *DATA, "compute_metrics", "callbacks", "optimizers", "peft_config"),
    "kto": (
        "model", "ref_model", "args", *DATA, "compute_metrics", "callbacks", "optimizers", "quantization_config", "peft_config",
    ),
    "bco": (
        "model", "ref_model", "args", *DATA[1:], "data_collator", "model_init", "callbacks", "optimizers",
        "preprocess_logits_for_metrics", "peft_config", "compute_metrics", "model_adapter_name", "ref_adapter_name",
        "embedding_func", "embedding_tokenizer",
    ),
    "prm": (
        "model", "args", *DATA, "model_init", "compute_metrics", "callbacks", "optimizers", "preprocess_logits_for_metrics",
        "peft_config",
    ),
}  # fmt: skip
"""The arguments of TRL's constructors (KTO, CPO, ORPO and TPO: 1.16; BCO and PRM: 1.10), in their order."""

MODEL = r"Trainer trains the model it is given: pass it, or its name, as `model`, and leave `model_init` out\. `posttrain sweep`"
LOGITS = r"Trainer keeps no logits that `preprocess_logits_for_metrics` could read: leave it out\. `compute_metrics` is given"
REFUSED = {
    **{(method, "model_init"): MODEL for method in ("cpo", "orpo", "bco", "prm")},
    **{(method, "preprocess_logits_for_metrics"): LOGITS for method in ("cpo", "orpo", "bco")},
    (
        "bco",
        "model_adapter_name",
    ): r"BCOTrainer trains the active adapter .* leave `model_adapter_name` out and call `model.set_a",
    (
        "bco",
        "ref_adapter_name",
    ): r"BCOTrainer compares a PeftModel with .* leave `ref_adapter_name` out\. Pass another reference",
}


def rows(method):
    if method == "prm":
        return tiny.steps(6)
    pairs = [{**row, "reference": row["chosen"]} for row in tiny.pairs(6)]
    return (
        pairs if method == "tpo" else [{name: row[name] for name in ("prompt", "chosen", "rejected")} for row in pairs]
    )


def metrics(given):
    return {}


def embed(input_ids, attention_mask):
    return torch.stack([attention_mask.sum(1), input_ids[:, 0]], 1).float()


def values(method, tmp_path):
    """A value for every argument that is not refused (a quantised model needs a GPU)."""
    model = tiny.process_reward_model() if method == "prm" else tiny.causal_lm()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return {
        "model": model, "ref_model": tiny.causal_lm(1), "data_collator": Collator(METHODS[method].trainer_class.roles, 0),
        "args": METHODS[method].config_class(
            output_dir=str(tmp_path), use_cpu=True, report_to="none", dataset_cache_dir=str(tmp_path / "cache")
        ),
        "train_dataset": Dataset.from_list(rows(method)), "eval_dataset": Dataset.from_list(rows(method)[:2]),
        "processing_class": tiny.tokenizer(), "compute_metrics": metrics, "callbacks": [TrainerCallback()],
        "optimizers": (optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer)), "preprocess_logits_for_metrics": metrics,
        "peft_config": LoraConfig(r=2, target_modules=["q_proj"]), "embedding_func": embed, "embedding_tokenizer": tiny.tokenizer(),
    }  # fmt: skip


@pytest.mark.parametrize("method", ORDER)
def test_every_position_has_its_argument(tmp_path, method):
    trainer_class = METHODS[method].trainer_class
    assert tuple(inspect.signature(trainer_class).parameters)[: len(ORDER[method])] == ORDER[method]
    known = values(method, tmp_path)
    given = [None if (method, name) in REFUSED else known.get(name) for name in ORDER[method]]
    trainer = trainer_class(*given)
    pairs_apart = 2 if method in ("kto", "bco") else 1
    assert isinstance(trainer.model, PeftModel)
    assert trainer.args is known["args"]
    assert trainer.data_collator is known["data_collator"]
    assert (len(trainer.train_dataset), len(trainer.eval_dataset)) == (6 * pairs_apart, 2 * pairs_apart)
    assert trainer.processing_class is known["processing_class"]
    assert trainer.compute_metrics is metrics
    assert known["callbacks"][0] in trainer.callback_handler.callbacks
    assert (trainer.optimizer, trainer.lr_scheduler) == known["optimizers"]
    assert trainer.preprocess_logits_for_metrics is (metrics if method == "prm" else None)
    if method == "bco":
        assert (trainer.embed, trainer.embedding_tokenizer) == (embed, known["embedding_tokenizer"])
    if "ref_model" in ORDER[method]:
        batch = trainer.data_collator([trainer.train_dataset[0]])
        own = trainer.score(trainer.model, batch, ()).logps
        assert not torch.allclose(trainer.reference.scores(batch).logps, own)  # another seed's weights


@pytest.mark.parametrize(("method", "name"), REFUSED)
@pytest.mark.parametrize("by_position", [True, False])
def test_arguments_that_cannot_be_honoured_are_refused(tmp_path, method, name, by_position):
    trainer_class, known = METHODS[method].trainer_class, {"model": tiny.causal_lm(), name: tiny.causal_lm}
    with pytest.raises(ValueError, match=REFUSED[method, name]):
        trainer_class(*map(known.get, ORDER[method])) if by_position else trainer_class(**known)


@pytest.mark.parametrize("method", ["cpo", "orpo", "bco", "prm"])
def test_a_missing_model_is_named(method):
    with pytest.raises(ValueError, match=MODEL):
        METHODS[method].trainer_class(train_dataset=rows(method))
