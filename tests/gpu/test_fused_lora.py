"""Fused LoRA on a CUDA device: the Triton kernels, bfloat16 accuracy, memory and time against PEFT."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Qwen2Config

from posttrain.models.layers.checkpointing import allow_selective_checkpointing
from posttrain.models.layers.fused_lora import fuse_lora
from posttrain.models.layers.kernels import APPLY, _module_kept
from posttrain.models.layers.lora_products import activate_and_multiply, gradients_of_product

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 8e-3)])
@pytest.mark.parametrize("shape", [(1, 1), (7, 33), (1000, 4864)])
def test_silu_kernels_give_the_float64_numbers(dtype, bound, shape):
    gate, up, gradient = (torch.randn(shape, device="cuda", dtype=dtype) for _ in range(3))
    exact = [tensor.double() for tensor in (gate, up, gradient)]
    silu = torch.nn.SiLU()
    assert_near(activate_and_multiply(silu, gate, up), silu(exact[0]) * exact[1], bound)
    expected = gradients_of_product(silu, *(tensor.clone() for tensor in exact))  # float64: the plain torch way
    for found, right in zip(gradients_of_product(silu, gate, up, gradient.clone()), expected):
        assert_near(found, right, bound)


def assert_near(found, expected, bound):
    assert (found.double() - expected).norm() <= bound * expected.norm()


def adapted(dtype, layers=2):
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=1024, hidden_size=512, intermediate_size=2752, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=2,
    )  # fmt: skip
    base = AutoModelForCausalLM.from_config(config).to("cuda", dtype)
    model = get_peft_model(base, LoraConfig(r=16, target_modules=ALL), autocast_adapter_dtype=False).to(dtype)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    return model


def gradients(model, tokens=2048):
    ids = torch.arange(tokens, device="cuda")[None] % 1000
    model.zero_grad(set_to_none=True)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    hidden = model.base_model.model.model(input_ids=ids, use_cache=False).last_hidden_state
    # Not the sum of squares, which is a constant after the last norm.
    (hidden * torch.arange(hidden.shape[-1], device="cuda").cos().to(hidden.dtype)).sum().backward()
    peak = torch.cuda.max_memory_allocated() - before
    return torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None]), peak


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
@pytest.mark.parametrize("checkpointing", [None, {"use_reentrant": False}, {"selective": True}])
@pytest.mark.parametrize("kernels", ["liger", "plain"])
def test_gradients_are_pefts(dtype, bound, checkpointing, kernels):
    """Liger's rotary embedding works in place, on the products that selective checkpointing keeps."""
    plain = adapted(dtype)
    exact, _ = gradients(copy.deepcopy(plain).double())
    fused = copy.deepcopy(plain)
    with _module_kept(fused.base_model.model):
        APPLY[kernels](fused.base_model.model)
        compare_with_peft(fused, plain, exact, bound, checkpointing)


def compare_with_peft(fused, plain, exact, bound, checkpointing):
    assert fuse_lora(fused) == 14
    if checkpointing:
        allow_selective_checkpointing(fused.base_model.model)
        fused.base_model.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(checkpointing))
        fused.enable_input_require_grads()
        fused.train()
    found, _ = gradients(fused)
    expected, _ = gradients(plain)
    error, pefts = ((g - exact).norm() / exact.norm() for g in (found, expected))
    assert error < bound
    assert error <= 1.3 * pefts + 1e-7


def test_peak_memory_is_below_pefts():
    plain = adapted(torch.bfloat16, layers=8)
    fused = copy.deepcopy(plain)
    fuse_lora(fused)
    gradients(plain), gradients(fused)  # warm up
    (_, with_peft), (_, with_fusion) = gradients(plain, 8192), gradients(fused, 8192)
    print(f"peak beside the weights: PEFT {with_peft / 2**20:.0f} MiB, fused {with_fusion / 2**20:.0f} MiB")
    assert with_fusion <= 0.75 * with_peft
