"""Exported weights are, name by name and bit by bit, what save_pretrained writes; adapters are merged into copies."""

import json

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from posttrain.models.layers.fused_lora import fuse_lora
from posttrain.models.load.adapters import keep_trainable
from posttrain.models.load.weight_export import (
    exported_adapter,
    exported_specs,
    exported_weights,
    untied_weights,
    weights_in_place,
)
from posttrain.models.load.weights import weights_fingerprint
from tests.rollout.families import FAMILIES, model_of

IDS = torch.tensor([[2, 5, 9, 100, 31, 7]])
ATTENTION = ["q_proj", "v_proj"]


def saved(model, folder):
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def assert_same(mine, theirs):
    assert sorted(mine) == sorted(theirs)
    for name, tensor in theirs.items():
        assert mine[name].dtype == tensor.dtype, name
        assert torch.equal(mine[name], tensor), name


@pytest.mark.parametrize("family", FAMILIES)
def test_names_and_bits_of_save_pretrained(family, tmp_path):
    model = model_of(family)
    mine = dict(exported_weights(model))
    assert_same(mine, saved(model, tmp_path))
    assert [(s.name, s.shape, s.dtype) for s in exported_specs(model)] == [
        (name, tuple(tensor.shape), "float32") for name, tensor in mine.items()
    ]
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path)  # its conversions come from the checkpoint
    assert_same(dict(exported_weights(reloaded)), mine)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_written_in_place_is_what_is_exported(family):
    """Also of experts, which are taken apart when they are sent."""
    model = model_of(family)
    places = weights_in_place(model)
    assert_same(places, dict(exported_weights(model)))
    with torch.no_grad():
        for number, tensor in enumerate(places.values()):
            tensor.fill_(number)
    for number, (name, tensor) in enumerate(exported_weights(model)):
        assert (tensor == number).all(), name


def test_order_is_the_same_every_time_and_nothing_is_gathered_for_the_specs():
    model = model_of("mixtral")
    names = [name for name, _ in exported_weights(model)]
    assert names == [spec.name for spec in exported_specs(model)] == [name for name, _ in exported_weights(model)]
    first = next(exported_weights(model))[1]
    assert first.data_ptr() == dict(model.named_parameters())[names[0]].data_ptr()


def test_the_dtype_of_the_wire():
    model = model_of("qwen2")
    assert {spec.dtype for spec in exported_specs(model, torch.bfloat16)} == {"bfloat16"}
    for name, tensor in exported_weights(model, torch.bfloat16):
        assert torch.equal(tensor, model.state_dict()[name].to(torch.bfloat16))


def test_wrappers_leave_no_trace():
    model = model_of("llama")
    plain = dict(exported_weights(model))
    assert_same(dict(exported_weights(torch.compile(model))), plain)
    model.model.layers[0] = torch.compile(model.model.layers[0])
    assert_same(dict(exported_weights(model)), plain)


ADAPTERS = {
    "lora": {"target_modules": ATTENTION, "lora_dropout": 0.5},
    "rslora": {"target_modules": ATTENTION, "use_rslora": True},
    "dora": {"target_modules": ATTENTION, "use_dora": True},
    "all": {"target_modules": "all-linear", "lora_alpha": 3},
    "bias": {"target_modules": ATTENTION, "lora_bias": True},
    "saved": {"target_modules": ATTENTION, "modules_to_save": ["lm_head"]},
    "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "tokens": {"target_modules": ATTENTION, "trainable_token_indices": [3, 9]},
}


def adapted(family, changes):
    model = peft.get_peft_model(model_of(family), peft.LoraConfig(r=4, **changes))
    disturb(model)
    return model.train()


def disturb(model, seed=1):
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.05)


def logits_of_export(model, family, **changes):
    """Those of a plain model that holds the exported weights."""
    plain = model_of(family, **changes)
    state = dict(exported_weights(model))
    if plain.config.tie_word_embeddings:
        assert "lm_head.weight" not in state
    missing = plain.load_state_dict(state, strict=False)
    assert not missing.unexpected_keys
    assert set(missing.missing_keys) <= {"lm_head.weight"}
    return plain(IDS).logits


@pytest.mark.parametrize("kind", ADAPTERS)
@torch.no_grad()
def test_merged_copies_compute_what_the_adapted_model_computes(kind):
    model = adapted("qwen2", ADAPTERS[kind])
    before = weights_fingerprint(model)
    merged = logits_of_export(model, "qwen2")
    assert weights_fingerprint(model) == before
    expected = model.eval()(IDS).logits
    with model.disable_adapter():
        base = model(IDS).logits
        torch.testing.assert_close(logits_of_export(model, "qwen2"), base, atol=0, rtol=0)
    assert (expected - base).abs().max() > 0.05
    torch.testing.assert_close(merged, expected, atol=2e-5, rtol=1e-5)


@torch.no_grad()
def test_two_adapters_a_fused_one_and_one_merged_by_the_user():
    model = adapted("qwen2", ADAPTERS["lora"])
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=ATTENTION, init_lora_weights=False))
    model.eval()
    for active in ("default", "other", ["default", "other"]):
        model.base_model.set_adapter(active)
        torch.testing.assert_close(logits_of_export(model, "qwen2"), model(IDS).logits, atol=2e-5, rtol=1e-5)
    fuse_lora(model)
    torch.testing.assert_close(logits_of_export(model, "qwen2"), model(IDS).logits, atol=2e-5, rtol=1e-5)
    model.merge_adapter()
    torch.testing.assert_close(logits_of_export(model, "qwen2"), model(IDS).logits, atol=2e-5, rtol=1e-5)


@torch.no_grad()
def test_another_method_is_merged_by_peft_into_a_copy():
    config = peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])
    model = peft.get_peft_model(model_of("llama"), config)
    disturb(model)
    before = weights_fingerprint(model)
    torch.testing.assert_close(logits_of_export(model, "llama"), model.eval()(IDS).logits, atol=2e-5, rtol=1e-5)
    assert weights_fingerprint(model) == before


@torch.no_grad()
def test_lora_on_stacked_experts_arrives_in_every_expert(tmp_path):
    config = peft.LoraConfig(
        r=4, target_modules=ATTENTION, target_parameters=["experts.gate_up_proj", "experts.down_proj"]
    )
    model = peft.get_peft_model(model_of("mixtral"), config)
    disturb(model)
    state = dict(exported_weights(model))
    twin = peft.get_peft_model(model_of("mixtral"), config)
    twin.load_state_dict(model.state_dict())
    theirs = saved(twin.merge_and_unload(), tmp_path)
    assert sorted(state) == sorted(theirs)
    assert any(".experts." in name for name in theirs)
    for name, tensor in theirs.items():
        torch.testing.assert_close(state[name], tensor, atol=1e-6, rtol=1e-5)


def test_a_tie_that_an_adapter_broke_is_said():
    model = model_of("smollm")
    assert "lm_head.weight" not in dict(exported_weights(model))
    assert untied_weights(model) == []
    tokens = adapted("smollm", ADAPTERS["tokens"])  # PEFT keeps these tied
    assert untied_weights(tokens) == []
    broken = adapted("smollm", ADAPTERS["embedding"])
    assert untied_weights(broken) == ["lm_head.weight"]
    state = dict(exported_weights(broken))
    assert not torch.equal(state["lm_head.weight"], state["model.embed_tokens.weight"])
    assert torch.equal(state["lm_head.weight"], broken.get_base_model().lm_head.weight)


@torch.no_grad()
def test_a_4_bit_base_is_dequantised():
    bnb = pytest.importorskip("bitsandbytes")
    model = model_of("llama", hidden_size=64, intermediate_size=64)
    for layer in model.model.layers:
        linear = layer.self_attn.q_proj
        quantised = bnb.nn.Linear4bit(64, 64, bias=False, compute_dtype=torch.float32, quant_type="nf4")
        quantised.load_state_dict(linear.state_dict())
        layer.self_attn.q_proj = quantised.to("cpu")
    model.is_loaded_in_4bit = True
    keep_trainable(model)  # evaluated in bfloat16 else, on a CPU that has it
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    disturb(wrapped)
    merged = logits_of_export(wrapped, "llama", hidden_size=64, intermediate_size=64)
    torch.testing.assert_close(merged, wrapped.eval()(IDS).logits, atol=1e-3, rtol=1e-3)
    assert {spec.shape for spec in exported_specs(wrapped) if "q_proj.weight" in spec.name} == {(64, 64)}


@pytest.mark.parametrize("kind", ["lora", "dora", "saved"])
def test_the_adapter_alone_is_what_peft_saves(kind, tmp_path):
    model = adapted("qwen2", ADAPTERS[kind])
    config, tensors = exported_adapter(model)
    model.save_pretrained(tmp_path)
    assert_same(dict(tensors), load_file(tmp_path / "adapter_model.safetensors"))
    theirs = json.loads((tmp_path / "adapter_config.json").read_text())
    others = set(config) - {"target_modules", "auto_mapping"}
    assert {name: config[name] for name in others} == {name: theirs[name] for name in others}
    assert set(config) == set(theirs)
    assert config["auto_mapping"] is None  # it names code, which a server must not be told to run
    assert sorted(config["target_modules"]) == sorted(theirs["target_modules"])
    assert model.peft_config["default"].inference_mode is False


def test_sharded_and_distributed_models_say_the_same():
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = adapted("llama", ADAPTERS["lora"])
    plain = {name: tensor.clone() for name, tensor in exported_weights(model)}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert_same(dict(exported_weights(torch.nn.parallel.DistributedDataParallel(model))), plain)
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        assert_same(dict(exported_weights(model)), plain)
    finally:
        dist.destroy_process_group()


def test_what_cannot_be_exported_says_so():
    tuned = peft.get_peft_model(model_of("llama"), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with pytest.raises(ValueError, match="virtual tokens"):
        next(exported_weights(tuned))
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(model_of("llama").config)
    with pytest.raises(ValueError, match="not in memory"):
        next(exported_weights(empty))
    with pytest.raises(ValueError, match="has no PEFT adapter"):
        exported_adapter(model_of("llama"))
    with pytest.raises(ValueError, match="no adapter 'ref'"):
        exported_adapter(adapted("llama", ADAPTERS["lora"]), "ref")
