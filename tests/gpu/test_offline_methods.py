"""CPO, ORPO, TPO, KTO, BCO and process reward models on a GPU: the losses of the CPU, in float32."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset

from posttrain.methods.table import METHODS
from tests import tiny
from tests.methods.test_offline_methods import DATA

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

METHODS_HERE = ("cpo", "orpo", "tpo", "kto", "bco", "prm")
ROWS = {**DATA, "prm": tiny.steps}


def losses(method, folder, **options):
    shared = {"max_steps": 3, "logging_steps": 1, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    shared |= {"learning_rate": 1e-3, "save_strategy": "no", "report_to": "none", "optim": "adamw_torch"}
    trainer = METHODS[method].trainer_class(
        model=tiny.process_reward_model() if method == "prm" else tiny.causal_lm(),
        args=METHODS[method].config_class(output_dir=str(folder), **shared, **options),
        train_dataset=Dataset.from_list(ROWS.get(method, tiny.pairs)()),
        eval_dataset=Dataset.from_list(ROWS.get(method, tiny.pairs)(3)),
        processing_class=tiny.tokenizer(),
    )
    trainer.train()
    evaluated = trainer.evaluate()
    assert trainer.model.device.type == ("cpu" if options.get("use_cpu") else "cuda")
    return [line["loss"] for line in trainer.state.log_history if "loss" in line] + [evaluated["eval_loss"]]


@pytest.mark.parametrize("method", METHODS_HERE)
def test_losses_are_those_of_the_cpu(method, tmp_path):
    found = losses(method, tmp_path / "gpu", bf16=False)
    expected = losses(method, tmp_path / "cpu", use_cpu=True)
    assert found == pytest.approx(expected, rel=2e-3, abs=2e-4)


@pytest.mark.parametrize("method", METHODS_HERE)
def test_bfloat16_trains(method, tmp_path):
    found = losses(method, tmp_path)
    assert torch.isfinite(torch.tensor(found)).all()
    assert found[2] < found[0] + 0.05
