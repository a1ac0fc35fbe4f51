"""What only a CUDA device can show. Skipped elsewhere; CI has no GPU, so these are run by hand on one:

python -m pytest tests/gpu
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, Qwen2Config, TrainerCallback

from posttrain import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, Sample, SFTConfig, SFTTrainer
from posttrain.data.collate import collate
from posttrain.models.load import LoadOptions, load_model
from posttrain.models.token_scores import score_tokens
from tests import tiny

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

WIDE = {"hidden_size": 64, "intermediate_size": 128}  # heads of 16: torch's flash kernel wants multiples of 8


def model(dtype):
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=4096, hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).to("cuda", dtype)


def units():
    rng = np.random.default_rng(0)
    return [(Sample(rng.integers(0, 4096, n), np.arange(n) > n // 3),) for n in rng.integers(16, 512, 8)]


@pytest.mark.parametrize(("dtype", "logps", "gradient"), [(torch.float32, 1e-4, 1e-5), (torch.bfloat16, 0.05, 0.03)])
def test_varlen_flash_and_every_other_way_give_the_float32_padded_answer(dtype, logps, gradient):
    found = {}
    for case_dtype in {torch.float32, dtype}:
        made = model(case_dtype)
        assert load_model(made, LoadOptions()).layout == "ragged"
        for layout in ("ragged", "padded"):
            for summed in (False, True):
                batch = collate(units(), ("text",), layout).to("cuda")
                made.zero_grad()
                scores = score_tokens(made, batch, summed=summed)
                (scores.nll_sum if summed else -scores.logps.sum()).div(batch.num_trained).backward()
                gradients = torch.cat([p.grad.float().flatten() for p in made.parameters()])
                found[case_dtype, layout, summed] = (scores.logps.float().detach(), gradients)
    truth = found[torch.float32, "padded", False]
    for layout in ("ragged", "padded"):
        for summed in (False, True):
            mine = found[dtype, layout, summed]
            assert (mine[0] - truth[0]).abs().max() < logps
            assert (mine[1] - truth[1]).norm() / truth[1].norm() < gradient


class NoSync(TrainerCallback):
    """From the fifth step on, any operation that makes the host wait for the device is an error."""

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step >= 4:
            torch.cuda.set_sync_debug_mode("error")

    def on_step_end(self, args, state, control, **kwargs):
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("method", ["sft", "dpo", "reward"])
def test_ordinary_steps_do_not_synchronise(tmp_path, method):
    """bfloat16 with masters, finite check, accumulation: torch's sync debug mode sees none. (A log reads the device, of course.)"""
    trainer, config = {
        "sft": (SFTTrainer, SFTConfig),
        "dpo": (DPOTrainer, DPOConfig),
        "reward": (RewardTrainer, RewardConfig),
    }[method]
    made = (
        tiny.reward_model(dtype=torch.bfloat16, **WIDE)
        if method == "reward"
        else tiny.causal_lm(dtype=torch.bfloat16, **WIDE)
    )
    args = config(
        output_dir=str(tmp_path), max_steps=10, logging_steps=100, per_device_train_batch_size=4, gradient_accumulation_steps=2,
        report_to="none", save_strategy="no", learning_rate=1e-3, bf16=True,
    )  # fmt: skip
    rows = tiny.chats(40) if method == "sft" else tiny.pairs(40)
    made = trainer(
        model=made, args=args, train_dataset=Dataset.from_list(rows), processing_class=tiny.tokenizer(), callbacks=[NoSync()]
    )  # fmt: skip
    try:
        made.train()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert made.loaded.layout == "ragged"
    assert made.masters is not None
    assert made.finite.on_device
    assert made.state.global_step == 10


def test_a_nan_gradient_on_the_device_is_skipped_and_heard_of_later(tmp_path):
    class Poison(TrainerCallback):
        def on_step_begin(self, args, state, control, model=None, **kwargs):
            self.handle = None
            if state.global_step == 2:
                self.handle = next(model.parameters()).register_hook(lambda gradient: gradient * float("nan"))

        def on_step_end(self, args, state, control, **kwargs):
            if self.handle is not None:
                self.handle.remove()

    args = SFTConfig(
        output_dir=str(tmp_path), max_steps=8, logging_steps=2, per_device_train_batch_size=4, report_to="none", save_steps=4,
        learning_rate=1e-3, bf16=True,
    )  # fmt: skip
    made = SFTTrainer(
        tiny.causal_lm(dtype=torch.bfloat16, **WIDE), args, train_dataset=Dataset.from_list(tiny.chats(40)),
        processing_class=tiny.tokenizer(), callbacks=[Poison()],
    )  # fmt: skip
    made.train()
    assert made.run_state.skipped_total == 1
    assert (tmp_path / "skipped_steps.jsonl").read_text().startswith('{"step": 3')
    assert all(torch.isfinite(p).all() for p in made.model.parameters())
