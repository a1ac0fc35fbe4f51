"""Mixtures of experts with Liger's kernels on a CUDA device: the first step does not search for configurations."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest
import torch

from posttrain.core.sample import Sample
from posttrain.data.collate import collate
from posttrain.models.layers.kernels import COMPILED, LIGER, PLAIN
from posttrain.models.load.model import LoadOptions, load_model
from posttrain.models.scoring.token_scores import score_tokens
from tests import tiny

CUDA = torch.device("cuda")
SHAPE = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "moe_intermediate_size": 128}

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


@pytest.mark.parametrize("kernels", [LIGER, COMPILED])
def test_routers_are_balanced_with_any_kernels(kernels):
    if kernels == LIGER and importlib.util.find_spec("liger_kernel") is None:
        pytest.skip("needs liger-kernel")
    batch = collate([(Sample([*range(5, 5 + n)], [False] + [True] * (n - 1)),) for n in (40, 200, 9)], ("text",)).to(
        "cuda"
    )
    found = []
    for one in (PLAIN, kernels):
        model = tiny.causal_lm(family="qwen3_moe", dtype=torch.bfloat16, **SHAPE).train().cuda()
        assert load_model(model, LoadOptions(layer_kernels=(one,), device=CUDA)).router_loss_weight == 0.001
        loss = score_tokens(model, batch, router_loss=True).aux_loss
        loss.backward()
        found.append((loss.item(), model.model.layers[0].mlp.gate.weight.grad.float().flatten()))
    assert abs(found[0][0] - found[1][0]) < 0.02 * found[0][0]
    assert torch.nn.functional.cosine_similarity(found[0][1], found[1][1], dim=0) > 0.98
