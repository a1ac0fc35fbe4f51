"""Resuming a model whose tensors transformers saves under other names: Trainer alone would begin with the first weights again."""

from __future__ import annotations

import torch
from transformers import MixtralConfig, MixtralForCausalLM

from posttrain import SFTConfig, SFTTrainer
from tests import tiny

ROWS = [{"text": f"hello {i} world {i * i}"} for i in range(12)]


def trainer(folder):
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    model = MixtralForCausalLM(
        MixtralConfig(vocab_size=512, num_key_value_heads=2, num_local_experts=4, **shape, **ends)
    )
    options = {"max_steps": 6, "save_steps": 2, "per_device_train_batch_size": 3, "learning_rate": 1e-2}
    options |= {"report_to": "none", "use_cpu": True, "bf16": False, "dataset_cache_dir": str(folder / "cache")}
    args = SFTConfig(output_dir=str(folder / "run"), save_strategy="steps", **options)
    return SFTTrainer(model, args=args, processing_class=tiny.tokenizer(), train_dataset=ROWS)


def test_experts_are_resumed_in_float32(tmp_path):
    """There are no masters, which would have restored them."""
    whole, resumed = trainer(tmp_path), trainer(tmp_path)
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-4"))
    for (name, one), other in zip(whole.model.named_parameters(), resumed.model.parameters()):
        assert torch.equal(one, other), name
