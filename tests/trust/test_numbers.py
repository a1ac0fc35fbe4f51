"""No false alarm in ten thousand clean steps, and the same seed twice gives the same bits."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset

from posttrain import SFTConfig, SFTTrainer
from tests import tiny
from tests.trust import runs


@pytest.mark.parametrize(
    "steps", [pytest.param(300, id="short"), pytest.param(10_000, id="long", marks=pytest.mark.trust)]
)
def test_clean_steps_raise_no_alarm_of_the_finite_check(tmp_path, steps, figure):
    """Every gradient is looked at; a learning rate of 1e-3 keeps the weights moving to the last step."""
    shape = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
    }
    args = SFTConfig(
        output_dir=str(tmp_path), max_steps=steps, per_device_train_batch_size=1, learning_rate=1e-3, lr_scheduler_type="constant",
        logging_steps=steps // 10, save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    rows = [{"text": chr(97 + i % 26) * (1 + i % 3)} for i in range(50)]
    trainer = SFTTrainer(
        tiny.causal_lm(**shape), args, train_dataset=Dataset.from_list(rows), processing_class=tiny.tokenizer()
    )
    looked_at = 0
    original = trainer.skipped.record

    def record(step, rows, was_skipped, state):
        nonlocal looked_at
        looked_at += 1
        original(step, rows, was_skipped, state)

    trainer.skipped.record = record
    trainer.train()
    trainer.settle_skipped_steps(wait=True)
    assert trainer.state.global_step == steps == looked_at
    assert trainer.checkpoints.run_state.skipped_total == 0
    assert not (tmp_path / "skipped_steps.jsonl").exists()
    assert all(torch.isfinite(parameter).all() for parameter in trainer.model.parameters())
    figure("none: clean steps", steps, "0 false alarms of the finite check", "0")


@pytest.mark.parametrize(
    "method",
    ["sft", *(pytest.param(m, marks=pytest.mark.trust) for m in ("dpo", "reward", "sft-bf16-lora", "dpo-lora"))],
)
def test_the_same_seed_twice_is_bit_identical(tmp_path, method, figure):
    for name in ("one", "other"):
        runs.finish(method, tmp_path / name)
    assert not runs.differences(tmp_path / "one", tmp_path / "other")
    runs.finish(method, tmp_path / "another", seed=7)
    assert "row_order.jsonl differs" in runs.differences(tmp_path / "one", tmp_path / "another")
    figure(f"none: same seed twice, {method}", 2, "bit-identical", "bit-identical")
