"""Which adapters vLLM can be given alone, and which one is."""

from __future__ import annotations

from types import SimpleNamespace

import peft
import pytest
import torch

from posttrain.models.load import weight_export
from posttrain.models.load.weight_export import active_adapters, exported_adapter, exported_adapter_specs
from posttrain.rollout.engines.vllm.adapter_files import AdapterFiles, why_not_by_adapter
from posttrain.serve.weights.adapters import check_modules
from tests import tiny

ATTENTION = ["q_proj", "v_proj"]


def adapted(adapter_name="default", **options):
    config = peft.LoraConfig(**{"r": 4, "target_modules": ATTENTION, **options})
    return peft.get_peft_model(tiny.causal_lm(), config, adapter_name=adapter_name)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, None),
        ({"use_rslora": True}, None),
        ({"bias": "all"}, "`bias='all'`"),
        ({"bias": "lora_only"}, "`bias='lora_only'`"),
        ({"trainable_token_indices": [1, 2]}, "`trainable_token_indices`"),
        ({"layer_replication": [(0, 1), (0, 1)]}, "`layer_replication`"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "changes the embeddings"),
        ({"use_dora": True}, "`use_dora`"),
    ],
)
def test_what_vllm_cannot_take_is_said(options, said):
    model = adapted(**options)
    for base_from_memory in (True, False):
        why_not = why_not_by_adapter(model, base_from_memory)
        assert why_not is None if said is None else said in why_not
    if said is None:
        check_modules([name for name, _ in exported_adapter(model)[1]], ATTENTION)


@pytest.mark.parametrize(
    ("init", "leaves_base"),
    [
        (True, True),
        ("gaussian", True),
        ("orthogonal", True),
        ("pissa", False),
        ("pissa_niter_2", False),
        ("olora", False),
    ],
)
def test_initialisations_that_change_the_base_need_the_base_in_memory(init, leaves_base, tmp_path):
    before = tiny.causal_lm().state_dict()["model.layers.0.self_attn.q_proj.weight"]
    model = adapted(init_lora_weights=init)
    after = model.get_base_model().model.layers[0].self_attn.q_proj.base_layer.weight
    assert torch.equal(before, after) == leaves_base
    assert why_not_by_adapter(model, base_from_memory=True) is None
    assert (why_not_by_adapter(model, base_from_memory=False) is None) == leaves_base
    if not leaves_base:
        with pytest.raises(ValueError, match="has changed the base weights"):
            AdapterFiles(tmp_path, model, base_from_memory=False)


def fill(model, adapter, number):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if f"lora_B.{adapter}" in name:
                parameter.fill_(number)


def numbers_sent(model):
    return {float(one) for name, tensor in exported_adapter(model)[1] if "lora_B" in name for one in tensor.unique()}


def test_an_adapter_may_have_any_name():
    model = adapted("policy")
    fill(model, "policy", 7.0)
    assert why_not_by_adapter(model) is None
    assert numbers_sent(model) == {7.0}
    assert all("policy" not in name for name, _ in exported_adapter(model)[1])


def test_the_active_one_of_two_adapters_is_sent_and_two_active_ones_are_not(tmp_path):
    model = adapted()
    model.add_adapter("second", peft.LoraConfig(r=4, target_modules=ATTENTION))
    fill(model, "default", 1.0)
    fill(model, "second", 7.0)
    model.set_adapter("second")
    assert active_adapters(model) == ["second"]
    assert numbers_sent(model) == {7.0}
    model.set_adapter("default")
    assert numbers_sent(model) == {1.0}
    assert why_not_by_adapter(model) is None
    model.base_model.set_adapter(["default", "second"])
    assert why_not_by_adapter(model) == "2 adapters are active (default, second), and vLLM is sent one."
    with pytest.raises(ValueError, match=r"One adapter is exported, and \['default', 'second'\] are active"):
        exported_adapter(model)
    assert exported_adapter(model, "second")[0]["r"] == 4


def test_an_adapter_that_is_handed_over_is_not_gathered_again(tmp_path, monkeypatch):
    """Under FSDP a gather is made by all processes or hangs; one of them may fail before it comes to this one."""
    model = adapted()
    tensors = [(name, tensor.clone()) for name, tensor in exported_adapter(model)[1]]
    specs = [(spec.name, spec.shape, spec.dtype) for spec in exported_adapter_specs(model)]
    assert specs == [(name, tuple(one.shape), str(one.dtype).removeprefix("torch.")) for name, one in tensors]
    monkeypatch.setattr(weight_export, "whole", lambda tensor: pytest.fail("it was gathered"))
    files, added = AdapterFiles(tmp_path, model), []
    files.replace(SimpleNamespace(add_adapter=added.append), tensors, 3)
    assert files.module_names == ("q_proj", "v_proj")
    assert [one.version for one in added] == [3]
    assert files.differing(5, tensors) == []
    fill(model, "default", 2.0)
    assert files.differing(1, [(name, tensor + 1) for name, tensor in tensors]) == [tensors[0][0]]
