"""`full_determinism=True` on CUDA: the same seed twice gives the same bits, killed and resumed or not. Run by hand:

python -m pytest tests/gpu/test_determinism.py
"""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset
from transformers import TrainerCallback

from posttrain import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer
from tests import tiny

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3}
TRAINERS = {"sft": (SFTTrainer, SFTConfig), "dpo": (DPOTrainer, DPOConfig), "reward": (RewardTrainer, RewardConfig)}


@pytest.fixture(autouse=True)
def _as_it_was():
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic = False


class StopAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            control.should_training_stop = control.should_save = True


def train(method, folder, bf16, resume=False, callbacks=None):
    trainer, config = TRAINERS[method]
    dtype = torch.bfloat16 if bf16 else torch.float32
    model = tiny.reward_model(dtype=dtype, **WIDE) if method == "reward" else tiny.causal_lm(dtype=dtype, **WIDE)
    args = config(
        output_dir=str(folder), max_steps=12, save_steps=6, logging_steps=5, per_device_train_batch_size=4,
        gradient_accumulation_steps=2, report_to="none", learning_rate=1e-3, bf16=bf16, full_determinism=True,
    )  # fmt: skip
    rows = tiny.chats(40) if method == "sft" else tiny.pairs(40)
    made = trainer(
        model=model,
        args=args,
        train_dataset=Dataset.from_list(rows),
        processing_class=tiny.tokenizer(),
        callbacks=callbacks,
    )
    made.train(resume_from_checkpoint=resume)
    return {name: parameter.detach().clone() for name, parameter in made.model.named_parameters()}


@pytest.mark.parametrize("bf16", [True, False], ids=["bf16", "fp32"])
@pytest.mark.parametrize("method", list(TRAINERS))
def test_the_same_seed_twice_and_a_resumed_run_are_bit_identical(tmp_path, method, bf16):
    one, other = train(method, tmp_path / "one", bf16), train(method, tmp_path / "other", bf16)
    assert all(torch.equal(one[name], other[name]) for name in one)
    train(method, tmp_path / "stopped", bf16, callbacks=[StopAt(7)])
    resumed = train(method, tmp_path / "stopped", bf16, resume=True)
    assert all(torch.equal(one[name], resumed[name]) for name in one)
