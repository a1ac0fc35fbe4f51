"""Fused LoRA gives PEFT's outputs and gradients, saves less, forms no gradient of a frozen weight, and changes nothing else."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GemmaConfig, LlamaConfig, MistralConfig, Phi3Config, Qwen3Config

from posttrain.models.layers import fused_lora, lora_products
from posttrain.models.layers.checkpointing import allow_selective_checkpointing
from posttrain.models.layers.fused_lora import fuse_lora
from posttrain.models.load.adapters import adapter_in_use, freeze_copy_of_adapter
from posttrain.models.load.model import LoadOptions, load_model
from tests import tiny

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
EXACT = {"rtol": 1e-12, "atol": 1e-12}
MORE_FAMILIES = {
    "llama": LlamaConfig, "qwen3": Qwen3Config, "mistral": MistralConfig, "gemma": GemmaConfig, "phi3": Phi3Config,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _every_family(monkeypatch):
    monkeypatch.setattr(tiny, "FAMILIES", tiny.FAMILIES | MORE_FAMILIES)


def adapted(family="qwen2", dtype=torch.float64, seed=0, shape=None, **changes):
    """A PEFT model whose B is not 0: at its initialisation half of the gradients would be."""
    base = tiny.causal_lm(seed, dtype, family, **(shape or {}))
    for name, parameter in base.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_()
    settings = {"r": 3, "lora_alpha": 7, "target_modules": ALL, **changes}
    model = get_peft_model(base, LoraConfig(**settings), autocast_adapter_dtype=False)
    draw_adapters(model)
    return model.to(dtype)


def draw_adapters(model):
    torch.manual_seed(11)
    for name, parameter in model.named_parameters():
        if "lora_" in name and "magnitude" not in name:
            parameter.data = (0.3 * torch.randn(parameter.shape, dtype=torch.float64)).to(parameter.dtype)


def tokens(rows=3, width=7):
    return torch.randint(0, 250, (rows, width), generator=torch.Generator().manual_seed(5))


def answer(model, **kwargs):
    """(logits, gradients of everything that has one)."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(3)  # dropout
    logits = model(input_ids=tokens(), **kwargs).logits
    (logits.double() ** 2).mean().backward()
    return logits.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_equal_answers(fused, plain, tolerance=EXACT):
    (logits, gradients), (expected, expected_gradients) = answer(fused), answer(plain)
    torch.testing.assert_close(logits, expected, **tolerance)
    assert gradients.keys() == expected_gradients.keys()
    largest = max(g.abs().max() for g in expected_gradients.values())
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(gradients[name] / largest, gradient / largest, msg=name, **tolerance)


def both(**settings):
    plain = adapted(**settings)
    fused = copy.deepcopy(plain)
    return fused, plain, fuse_lora(fused)


class Calls:
    """Counts calls of the fused Functions, by their number of linears; 3 in a gated MLP count as "mlp"."""

    def __init__(self, monkeypatch):
        self.seen = []
        for module, name in ((fused_lora, "linears_of_one_input"), (fused_lora, "gated_mlp")):
            monkeypatch.setattr(module, name, self._counting(getattr(lora_products, name), name))

    def _counting(self, function, name):
        def call(x, *args):
            if x.shape[:-1] != (1, 2):  # the probe of `fuse_lora`
                self.seen.append("mlp" if name == "gated_mlp" else len(args[0]))
            return function(x, *args)

        return call


@pytest.fixture
def calls(monkeypatch):
    return Calls(monkeypatch)


# ---- the same numbers -------------------------------------------------------------------------------------------------

LAYER = [3, 1, "mlp"]  # q, k, v together; o; the MLP
ALONE = [1] * 4  # what remains of a layer whose MLP is not gated or has no adapter

CASES = {
    "qwen2 (bias on q, k, v)": ({}, 14, LAYER),
    "llama": ({"family": "llama"}, 14, LAYER),
    "qwen3 (norms on q and k)": ({"family": "qwen3"}, 14, LAYER),
    "mistral": ({"family": "mistral"}, 14, LAYER),
    "gemma (gelu)": ({"family": "gemma"}, 14, LAYER),
    "phi3 (gate and up are one linear)": (
        {"family": "phi3", "target_modules": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]}, 8, ALONE,
    ),
    "rsLoRA": ({"use_rslora": True}, 14, LAYER),
    "scale 1": ({"lora_alpha": 3}, 14, LAYER),
    "different ranks and scales": ({"rank_pattern": {"q_proj": 5, "up_proj": 2}}, 14, LAYER),
    "q, v and down only": ({"target_modules": ["q_proj", "v_proj", "down_proj"]}, 6, [2, "mlp"]),
    "attention only": ({"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}, 8, [3, 1]),
    "base biases trained": ({"bias": "lora_only"}, 14, LAYER),
    "on the head": ({"target_modules": [*ALL, "lm_head"]}, 15, LAYER),
    "with a module that is saved whole": ({"modules_to_save": ["lm_head"]}, 14, LAYER),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients_are_pefts(case, calls):
    settings, count, layer = CASES[case]
    fused, plain, found = both(**settings)
    assert found == count
    assert_equal_answers(fused, plain)
    assert calls.seen == layer * 2 + [1] * (case == "on the head")


FALLING_BACK = {
    "DoRA": {"use_dora": True},
    "dropout": {"lora_dropout": 0.3},
    "bias of the adapter": {"lora_bias": True, "target_modules": ["q_proj", "k_proj", "v_proj"]},
    "embedding": {"target_modules": ["embed_tokens"]},
}


@pytest.mark.parametrize("case", FALLING_BACK)
def test_what_cannot_be_fused_is_left_to_peft(case, calls):
    fused, plain, found = both(**FALLING_BACK[case])
    assert found == 0
    assert_equal_answers(fused, plain)
    assert calls.seen == []


def test_dropout_falls_back_in_training_and_is_fused_in_evaluation(calls):
    plain = adapted(lora_dropout=0.3).eval()
    fused = copy.deepcopy(plain)
    assert fuse_lora(fused) == 0  # of the layers that train
    assert_equal_answers(fused, plain)
    assert calls.seen == LAYER * 2
    assert_equal_answers(fused.train(), plain.train())
    assert calls.seen == LAYER * 2


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 0.02)])
def test_lower_precision_is_as_close_to_float64_as_peft_is(dtype, bound):
    """One layer's attention input and MLP over 6 inputs: root mean square of the relative errors of outputs and gradients."""
    plain = adapted(dtype=dtype, shape={"hidden_size": 64, "intermediate_size": 192})
    fused = copy.deepcopy(plain)
    assert fuse_lora(fused) == 14
    errors = {"peft": 0.0, "fused": 0.0}
    for seed in range(6):
        exact = layer_tensors(copy.deepcopy(plain).double(), seed)
        for name, model in (("peft", plain), ("fused", fused)):
            found = layer_tensors(model, seed)
            errors[name] += (
                sum(((f.double() - e).norm() / e.norm()) ** 2 for f, e in zip(found, exact)) / len(exact) / 6
            )
    assert errors["fused"] ** 0.5 <= 1.25 * errors["peft"] ** 0.5
    assert errors["fused"] ** 0.5 < bound


def layer_tensors(model, seed):
    """Outputs of q, k, v and of the MLP of the first layer, and the gradients of their input and adapters."""
    layer = model.base_model.model.model.layers[0]
    dtype = layer.mlp.gate_proj.weight.dtype
    torch.manual_seed(seed)
    x = torch.randn(1, 24, 64).to(torch.bfloat16).to(dtype).requires_grad_()
    outputs = [layer.self_attn.q_proj(x), layer.self_attn.k_proj(x), layer.self_attn.v_proj(x), layer.mlp(x)]
    weights = [torch.randn(output.shape).to(torch.bfloat16).to(dtype) for output in outputs]
    trained = [p for n, p in layer.named_parameters() if p.requires_grad and "o_proj" not in n]
    return [*outputs, *torch.autograd.grad(outputs, [x, *trained], weights)]


def test_adapters_of_another_dtype_and_autocast_are_left_to_peft(calls):
    plain = adapted(dtype=torch.bfloat16)
    for name, parameter in plain.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()
    fused = copy.deepcopy(plain)
    assert fuse_lora(fused) == 0
    fused, plain, found = both(dtype=torch.float32)
    assert found == 14
    with torch.autocast("cpu", torch.bfloat16):
        assert_equal_answers(fused, plain)
    assert calls.seen == []


@pytest.mark.parametrize("kwargs", [{"use_reentrant": False}, {"use_reentrant": True}, {"selective": True}])
def test_gradient_checkpointing(kwargs, calls):
    fused, plain, _ = both()
    allow_selective_checkpointing(fused.base_model.model)
    fused.base_model.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(kwargs))
    fused.enable_input_require_grads()
    fused.train()
    assert_equal_answers(fused, plain)
    assert calls.seen == LAYER * 4  # each layer forward and again, on autograd's own time


def test_no_grad_disabled_other_adapter_several_adapters_and_merged(calls):
    fused, plain, _ = both()
    for model in (fused, plain):
        name = freeze_copy_of_adapter(model)
        for key, parameter in model.named_parameters():
            if f".{name}." in key:
                parameter.data *= -0.5
    with torch.no_grad():
        for chosen, expected_calls in ((None, []), (name, LAYER * 2)):
            calls.seen.clear()
            with adapter_in_use(fused, chosen), adapter_in_use(plain, chosen):
                torch.testing.assert_close(fused(tokens()).logits, plain(tokens()).logits, **EXACT)
            assert calls.seen == expected_calls
    calls.seen.clear()
    assert_equal_answers(fused, plain)
    assert calls.seen == LAYER * 2
    for model in (fused, plain):
        model.base_model.set_adapter(["default", name])
    calls.seen.clear()
    assert_equal_answers(fused, plain)
    for model in (fused, plain):
        model.set_adapter("default")
        model.merge_adapter()
    torch.testing.assert_close(fused(tokens()).logits, plain(tokens()).logits, **EXACT)
    assert calls.seen == []
    for model in (fused, plain):
        model.unmerge_adapter()
    assert_equal_answers(fused, plain, {"rtol": 1e-10, "atol": 1e-10})
    assert calls.seen == LAYER * 2


def test_compiled_layers_give_the_same(calls):
    fused, plain, _ = both(shape={"num_hidden_layers": 1})
    for layer in fused.base_model.model.model.layers:
        layer.compile(backend="aot_eager")
    assert_equal_answers(fused, plain)


def test_quantised_base_is_left_to_peft():
    bnb = pytest.importorskip("bitsandbytes")
    base = tiny.causal_lm()
    for layer in base.model.layers:
        layer.mlp.down_proj = bnb.nn.Linear8bitLt(32, 16, bias=False, has_fp16_weights=False)
    model = get_peft_model(base, LoraConfig(target_modules=["down_proj", "q_proj"]))
    assert fuse_lora(model) == 2  # q of two layers


# ---- nothing else changes ---------------------------------------------------------------------------------------------


def test_state_dict_saving_and_merging_are_untouched(tmp_path):
    fused, plain, _ = both(dtype=torch.float32)
    assert list(fused.state_dict()) == list(plain.state_dict())
    fused.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(tiny.causal_lm(), tmp_path)
    for name, tensor in again.state_dict().items():
        if "lora_" in name:
            assert torch.equal(tensor, plain.state_dict()[name]), name
    merged, expected = fused.merge_and_unload(), plain.merge_and_unload()
    torch.testing.assert_close(merged(tokens()).logits, expected(tokens()).logits)
    assert not any("lora" in name for name, _ in merged.named_modules())


def test_a_deep_copy_answers_for_itself():
    fused, plain, _ = both()
    other = copy.deepcopy(fused)
    with torch.no_grad():
        for name, parameter in fused.named_parameters():
            if "lora_" in name:
                parameter.zero_()
    assert_equal_answers(other, plain)


def test_fusing_twice_changes_nothing(calls):
    fused, plain, _ = both()
    assert fuse_lora(fused) == 14
    assert_equal_answers(fused, plain)
    assert calls.seen == LAYER * 2


def test_hooks_on_a_part_are_still_called():
    fused, plain, _ = both()
    seen = []
    fused.base_model.model.model.layers[0].mlp.up_proj.register_forward_hook(lambda *_: seen.append("up"))
    fused.base_model.model.model.layers[0].self_attn.v_proj.base_layer.register_forward_hook(
        lambda *_: seen.append("v")
    )
    assert_equal_answers(fused, plain)
    assert sorted(seen) == ["up", "v"]


class CrossAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(8, 8, dtype=torch.float64) for _ in range(3))

    def forward(self, x, memory):
        return (self.q_proj(x) * self.k_proj(memory)).sum() + self.v_proj(memory).sum()


def test_siblings_on_different_inputs_each_answer_for_their_own(calls):
    torch.manual_seed(0)
    plain = get_peft_model(
        CrossAttention(), LoraConfig(target_modules=["q_proj", "k_proj", "v_proj"], init_lora_weights=False)
    ).double()
    fused = copy.deepcopy(plain)
    assert fuse_lora(fused) == 3
    x, memory = torch.randn(2, 4, 8, dtype=torch.float64), torch.randn(2, 4, 8, dtype=torch.float64)
    for _ in range(2):
        results = []
        for model in (fused, plain):
            model.zero_grad()
            model(x, memory).backward()
            results.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        torch.testing.assert_close(*results, **EXACT)
    assert calls.seen == [3] + [1] * 5  # the first question showed that they do not share their input


def test_an_mlp_of_another_formula_is_not_taken_for_a_gated_one(calls):
    plain = adapted()
    mlps = [layer.mlp for layer in plain.base_model.model.model.layers]
    kind = type("Doubled", (type(mlps[0]),), {"forward": lambda self, x: 2 * super(type(self), self).forward(x)})
    for mlp in mlps:
        mlp.__class__ = kind
    fused = copy.deepcopy(plain)
    fuse_lora(fused)
    assert_equal_answers(fused, plain)
    assert calls.seen == [3, 1, 2, 1] * 2


# ---- what is saved and what is computed -------------------------------------------------------------------------------


def saved_bytes(model, wide=None):
    """(bytes that the forward keeps, distinct storages counted once and parameters not; shapes of the tensors)."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in parameters:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(input_ids=tokens(4, 32)).logits
    del output
    return sum(t.untyped_storage().nbytes() for t in kept.values()), [tuple(t.shape) for t in kept.values()]


def test_the_mlp_keeps_two_tensors_of_its_width_where_peft_keeps_four():
    shape = {"hidden_size": 32, "intermediate_size": 256, "num_hidden_layers": 1}
    plain = adapted(dtype=torch.float32, shape=shape)
    fused = copy.deepcopy(plain)
    fuse_lora(fused)
    wide = {name: sum(s[-1] == 256 for s in saved_bytes(model)[1]) for name, model in (("f", fused), ("p", plain))}
    assert wide == {"f": 2, "p": 4}


def test_saved_bytes_are_at_most_065_of_pefts():
    shape = {
        "hidden_size": 32,
        "intermediate_size": 172,
        "num_hidden_layers": 4,
    }  # an MLP 5.4 times as wide, as in Qwen2.5 7B
    plain = adapted(dtype=torch.float32, shape=shape)
    fused = copy.deepcopy(plain)
    fuse_lora(fused)
    assert saved_bytes(fused)[0] <= 0.65 * saved_bytes(plain)[0]


class ProductShapes(TorchDispatchMode):
    """Shapes of the results of matrix products."""

    def __init__(self):
        super().__init__()
        self.shapes = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if "mm" in function.__name__:
            self.shapes.add(tuple(result.shape))
        return result


def test_no_gradient_of_a_frozen_weight_is_formed():
    """No product of the backward has the shape of a frozen weight."""
    fused, _, _ = both(dtype=torch.float32, shape={"intermediate_size": 40})
    loss = fused(tokens()).logits.square().mean()
    with ProductShapes() as products:
        loss.backward()
    assert (9, 16) in products.shapes  # dA of q, k and v in one product
    assert not products.shapes & {(16, 16), (8, 16), (40, 16), (16, 40)}


def test_load_model_fuses_and_says_so():
    config = LoraConfig(r=2, target_modules=ALL)
    loaded = load_model(tiny.causal_lm(), LoadOptions(peft_config=config))
    assert "14 LoRA linears are fused" in " ".join(loaded.notes)
    given = load_model(get_peft_model(tiny.causal_lm(), config), LoadOptions())
    assert "14 LoRA linears are fused" in " ".join(given.notes)
    mixed = load_model(tiny.causal_lm(), LoadOptions(peft_config=LoraConfig(r=2, target_modules=ALL, lora_dropout=0.1)))
    assert "14 LoRA layers run PEFT's own" in " ".join(mixed.notes)
    off = load_model(tiny.causal_lm(), LoadOptions(peft_config=config, fuse_lora=False))
    assert not any("fused" in note for note in off.notes)
    assert not any(hasattr(module, "_forward_of_peft") for module in off.model.modules())
