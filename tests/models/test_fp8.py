"""Products in 8 bits: what they round, what they leave alone, and that nothing but their own row decides."""

from __future__ import annotations

import copy
import re
import types

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from torch import nn

from posttrain import GRPOConfig, SFTConfig, SFTTrainer
from posttrain.core.batch import RAGGED, SHARED
from posttrain.models.layers import fp8
from posttrain.models.load.model import LoadOptions, load_model
from scripts.families import small_model
from tests import tiny
from tests.mixers import answers
from tests.rollout import families


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def test_a_row_is_scaled_by_its_own_largest_value():
    x = torch.tensor([[1.0, -448.0, 0.0], [2.0, 1.0, -0.5], [0.0, 0.0, 0.0]], dtype=torch.bfloat16)
    rounded, scale = fp8.scaled(x)
    assert rounded.dtype == torch.float8_e4m3fn
    assert scale[:2, 0].tolist() == pytest.approx([1.0, 2.0 / 448])
    torch.testing.assert_close((rounded.float() * scale)[:2], x.float()[:2])
    assert not rounded[2].float().any()


@pytest.mark.parametrize("tokens", [1, 16, 37])
def test_the_three_products_are_near_those_in_float64(tokens):
    """Two operands of 3 bits behind the point are off by 2^-4 at most, evenly spread: by about 2^-4 / sqrt(3) each."""
    linear = nn.Linear(64, 48).bfloat16()
    linear.weight.data = drawn(48, 64, seed=1)
    exact = copy.deepcopy(linear).double()
    linear.forward = fp8._forward.__get__(linear)
    found, flows = [], drawn(2, tokens, 48, seed=2)
    for one in (linear, exact):
        hidden = drawn(2, tokens, 64).to(one.weight.dtype).requires_grad_()
        output = one(hidden)
        output.backward(flows.to(output.dtype))
        found.append([output, hidden.grad, one.weight.grad, one.bias.grad])
    for ours, wanted in zip(*found, strict=True):
        apart = ((ours.double() - wanted).norm() / wanted.norm()).item()
        assert apart < 0.045, apart
    assert ((found[0][3].double() - found[1][3]).norm() / found[1][3].norm()) < 0.01  # a bias is a sum, not a product


def product(a, b):
    return fp8.scaled_product(fp8.by_rows(a), fp8.by_rows(b), a.dtype)


def test_operators_are_what_compilers_take_them_for():
    for operator in (fp8.by_rows, fp8.by_columns, fp8.BOTH):
        torch.library.opcheck(operator, (drawn(37, 32),), test_utils=("test_schema", "test_faketensor"))


def test_columns_are_rows_of_the_transpose_filled_up_with_zeros():
    x = drawn(37, 32)
    turned, scales = fp8.by_columns(x)
    wanted, of_wanted = fp8.scaled(x.t())
    assert turned.shape == (32, 48)
    assert torch.equal(turned[:, :37].float(), wanted.float())
    assert not turned[:, 37:].float().any()
    assert torch.equal(scales, of_wanted)
    for found, wanted in zip(fp8.BOTH(x), (turned, scales, *fp8.scaled(x)), strict=True):
        assert torch.equal(found.float(), wanted.float())


def test_another_row_changes_nothing():
    a, b = drawn(7, 32), drawn(16, 32, seed=1)
    whole = product(a, b)
    a[3:] *= 1000
    torch.testing.assert_close(product(a, b)[:3], whole[:3], rtol=0, atol=0)


def model(**changes):
    return families.model_of("llama", hidden_size=64, intermediate_size=96, **changes).bfloat16()


def test_linear_layers_of_the_decoder_compute_in_8_bits():
    loaded = load_model(model(), LoadOptions(fp8=True, share_prefixes=True))
    assert loaded.layout == SHARED, loaded.notes  # a row's scale depends on that row alone
    assert any("of 14 linear layers are computed in 8 bits" in note for note in loaded.notes)
    copied = copy.deepcopy(loaded.model)
    assert copied.model.layers[0].mlp.up_proj.forward.__self__ is copied.model.layers[0].mlp.up_proj
    assert "forward" not in vars(loaded.model.lm_head)


@pytest.mark.parametrize("family", ["granitemoe", "mixtral", "qwen2_moe"])
def test_routers_choose_experts_as_ever(family):
    made = load_model(small_model(family).bfloat16(), LoadOptions(fp8=True)).model
    rounded = {name for name, part in made.named_modules() if isinstance(vars(part).get("forward"), types.MethodType)}
    assert any(name.endswith("q_proj") for name in rounded)
    assert not any("gate" in name.split(".") or "router" in name or "shared_expert_gate" in name for name in rounded)


def test_log_probs_and_gradients_are_near_those_of_bfloat16():
    found = [
        answers(load_model(model(vocab_size=260), LoadOptions(layout=RAGGED, fp8=rounds)).model, RAGGED)
        for rounds in (False, True)
    ]
    (wanted, of_wanted), (logps, gradients) = found
    assert 0 < (logps - wanted).abs().mean() < 0.1
    flat = [torch.cat([g.flatten().float() for g in of.values()]) for of in (of_wanted, gradients)]
    assert nn.functional.cosine_similarity(*flat, dim=0) > 0.98


def test_compiled_layers_compute_the_same():
    """Traced for any number of tokens and differentiated, as on a GPU; each traced operation is then run by itself."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(32, 48), nn.SiLU(), nn.Linear(48, 32)).bfloat16()
    for linear in (layers[0], layers[2]):
        linear.forward = types.MethodType(fp8._forward, linear)
    compiled = torch.compile(layers, dynamic=True, backend="aot_eager", fullgraph=True)
    for tokens in (37, 16):
        found = []
        for one in (layers, compiled):
            hidden = drawn(1, tokens, 32).requires_grad_()
            output = one(hidden)
            gradients = torch.autograd.grad(output, [hidden, *layers.parameters()], drawn(1, tokens, 32, seed=1))
            found.append([output, *gradients])
        for ours, wanted in zip(*found, strict=True):
            torch.testing.assert_close(ours, wanted, rtol=0, atol=0)


@pytest.mark.slow
def test_a_run_learns_as_in_bfloat16(tmp_path):
    """200 steps of SFT: over windows of 20 steps the losses are within 2 % of the first loss."""
    losses = []
    for rounds in (False, True):
        args = SFTConfig(
            output_dir=str(tmp_path / str(rounds)), max_steps=200, per_device_train_batch_size=8, learning_rate=3e-3, bf16=True,
            fp8=rounds, logging_steps=1, report_to="none", save_strategy="no", use_cpu=True, verbosity="quiet",
        )  # fmt: skip
        made = SFTTrainer(
            model(vocab_size=260),
            args,
            train_dataset=Dataset.from_list(tiny.chats(64)),
            processing_class=tiny.tokenizer(),
        )
        made.train()
        losses.append(np.array([entry["loss"] for entry in made.state.log_history if "loss" in entry]))
    windows = [some.reshape(-1, 20).mean(1) for some in losses]
    print(windows)
    assert windows[0][-1] < 0.2 * losses[0][0]
    assert np.abs(windows[1] - windows[0]).max() < 0.02 * losses[0][0]
    assert not np.array_equal(*losses)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bf16": False}, "`fp8` rounds the operands of products in bfloat16 of whole weights; `bf16` is off"),
        ({"bf16": True, "fsdp": "full_shard"}, "holds the weights in pieces"),
    ],
)
def test_where_it_cannot_be_honoured(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        SFTConfig(output_dir=str(tmp_path), fp8=True, use_cpu=True, **options)


def test_not_with_adapters_nor_for_completions_nor_for_odd_sizes(tmp_path, monkeypatch):
    with pytest.raises(
        ValueError, match="`fp8` cannot be honoured: weights that are not trained themselves gain nothing"
    ):
        load_model(model(), LoadOptions(fp8=True, peft_config=LoraConfig(r=2, target_modules=["q_proj"])))
    with pytest.raises(ValueError, match="`fp8` rounds a weight anew in every call"):
        GRPOConfig(output_dir=str(tmp_path), fp8=True, bf16=True, use_cpu=True)
    odd = families.model_of(
        "llama", hidden_size=36, intermediate_size=50, num_attention_heads=2, head_dim=18
    ).bfloat16()
    with pytest.raises(ValueError, match="no linear layers whose sizes are multiples of 16"):
        load_model(odd, LoadOptions(fp8=True))
    monkeypatch.setattr(fp8, "_host_scales_rows", lambda: False)
    with pytest.raises(
        ValueError, match=rf"torch {re.escape(torch.__version__)} computes 8-bit products on a CPU with one scale"
    ):
        load_model(model(), LoadOptions(fp8=True))
    monkeypatch.setattr(fp8, "why_not", lambda device: "A100 has no 8-bit products")
    with pytest.raises(ValueError, match=r"A100 has no 8-bit products\. Leave it out"):
        load_model(model(), LoadOptions(fp8=True))
