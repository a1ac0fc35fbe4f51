"""Mixtures of experts with Liger's kernels on a CUDA device: the first step does not search for configurations."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

STEP = """
import sys, torch
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen3MoeConfig
from posttrain.models.load.model import LoadOptions, load_model
shape = dict(vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4)
experts = {
    "mixtral": (MixtralConfig, dict(num_local_experts=4, num_key_value_heads=2)),
    "qwen3_moe": (Qwen3MoeConfig, dict(num_experts=8, moe_intermediate_size=256, num_key_value_heads=2)),
}
kind, more = experts[sys.argv[1]]
model = AutoModelForCausalLM.from_config(kind(**shape, num_experts_per_tok=2, **more)).to("cuda", torch.bfloat16)
loaded = load_model(model, LoadOptions(dtype=torch.bfloat16, layer_kernels=("liger",)))
print(*loaded.notes, sep="\\n")
ids = torch.arange(512, device="cuda")[None]
loaded.model.train()(input_ids=ids, use_cache=False).logits.float().square().mean().backward()
from liger_kernel.ops import fused_moe_kernels as kernels
tuned = [k for k in vars(kernels).values() if type(k).__name__ == "Autotuner"]
print("configurations", sorted({len(k.configs) for k in tuned}), "kernels", len(tuned) > 0)
"""


@pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is None, reason="needs liger-kernel")
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_kernels_for_experts_have_one_configuration_each(family):
    ended = subprocess.run(
        [sys.executable, "-c", STEP, family], capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "LIGER_FUSED_MOE_AUTOTUNE=1 in the environment tries all" in ended.stdout
    assert "configurations [1] kernels True" in ended.stdout
