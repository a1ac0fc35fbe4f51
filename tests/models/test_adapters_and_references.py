"""Adapters of every kind train; references are what they say; a reward model keeps its scores when it is saved."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import IA3Config, LoraConfig, PeftModel, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from transformers import AutoModelForSequenceClassification, BitsAndBytesConfig

from posttrain import (
    DPOConfig,
    DPOTrainer,
    ModelConfig,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
    get_peft_config,
)
from posttrain.core.batch import PADDED, RAGGED
from posttrain.models.load.adapters import adapter_in_use, add_adapter, freeze_copy_of_adapter
from posttrain.models.load.reference import create_reference_model, frozen_copy
from tests import tiny

LINEAR = ["q_proj", "v_proj", "down_proj"]
ADAPTERS = {
    "lora": LoraConfig(r=4, target_modules=LINEAR, task_type="CAUSAL_LM"),
    "dora": LoraConfig(r=4, target_modules=LINEAR, use_dora=True, task_type="CAUSAL_LM"),
    "lora-on-head": LoraConfig(r=4, target_modules=[*LINEAR, "lm_head"], task_type="CAUSAL_LM"),
    "ia3": IA3Config(target_modules=LINEAR, feedforward_modules=["down_proj"], task_type="CAUSAL_LM"),
    "prompt": PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
    "prefix": PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
}


def options(tmp_path, **changes):
    return {
        "output_dir": str(tmp_path),
        "max_steps": 3,
        "logging_steps": 1,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        **changes,
    }


def sft(tmp_path, model=None, **given):
    settings = given.pop("settings", {})
    return SFTTrainer(
        model or tiny.causal_lm(),
        SFTConfig(**options(tmp_path, **settings)),
        train_dataset=Dataset.from_list(tiny.chats(12)),
        processing_class=tiny.tokenizer(),
        **given,
    )


@pytest.mark.parametrize("kind", ADAPTERS)
def test_every_kind_of_adapter_trains_and_the_base_stays(tmp_path, kind):
    trainer = sft(tmp_path, peft_config=ADAPTERS[kind], settings={"per_device_train_batch_size": 12})
    assert trainer.loaded.layout == (PADDED if kind in ("prompt", "prefix") else RAGGED)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert losses[-1] < losses[0]
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(before[name], parameter) == (not parameter.requires_grad), name
    trainer.save_model()
    assert (tmp_path / "adapter_config.json").exists()


def test_prompt_tuning_reads_the_positions_behind_its_virtual_tokens(tmp_path):
    """The nll of a row equals what the model's own forward gives for labels on that row."""
    trainer = sft(tmp_path, peft_config=ADAPTERS["prompt"])
    trainer.model.eval()
    unit = trainer.train_dataset[0]
    scores = trainer.score(trainer.model, trainer.data_collator([unit]), ())
    ids = torch.from_numpy(unit[0].input_ids.astype(np.int64))[None]
    labels = torch.where(torch.from_numpy(unit[0].trained)[None], ids, -100)
    labels[:, 0] = -100  # a virtual token could predict it; no token of the row does, and it does not count
    expected = trainer.model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels).loss
    torch.testing.assert_close(-scores.logps.mean(), expected, rtol=1e-5, atol=1e-6)


def test_dtype_and_trainability_survive_a_visit_to_another_adapter():
    model = get_peft_model(tiny.causal_lm(), ADAPTERS["lora"])
    name = freeze_copy_of_adapter(model)
    before = {n: (p.dtype, p.requires_grad) for n, p in model.named_parameters()}
    for adapter in (name, None):
        with adapter_in_use(model, adapter):
            pass
        assert before == {n: (p.dtype, p.requires_grad) for n, p in model.named_parameters()}
    assert model.active_adapter == "default"


def dpo(tmp_path, model=None, **given):
    settings = given.pop("settings", {})
    return DPOTrainer(
        model or tiny.causal_lm(),
        args=DPOConfig(**options(tmp_path, **settings)),
        train_dataset=Dataset.from_list(tiny.pairs(12)),
        eval_dataset=Dataset.from_list(tiny.pairs(6)),
        processing_class=tiny.tokenizer(),
        **given,
    )


def reference_logps(trainer):
    return trainer.reference.scores(trainer.data_collator([trainer.train_dataset[i] for i in range(4)])).logps


def policy_logps(trainer):
    batch = trainer.data_collator([trainer.train_dataset[i] for i in range(4)])
    with torch.no_grad():
        return trainer.score(trainer.model.eval(), batch, ()).logps


@pytest.mark.parametrize("kind", ["copy", "adapter off", "ref adapter", "precomputed", "precomputed adapter off"])
def test_every_kind_of_reference_is_the_policy_at_the_start_and_stays_there(tmp_path, kind):
    given = {"settings": {"dataset_cache_dir": str(tmp_path / "cache")}}
    if "adapter off" in kind:
        given["peft_config"] = ADAPTERS["lora"]
    if kind == "ref adapter":
        given["model"] = get_peft_model(
            tiny.causal_lm(), LoraConfig(r=4, target_modules=LINEAR, init_lora_weights=False)
        )
    if "precomputed" in kind:
        given["settings"]["precompute_ref_log_probs"] = True
    trainer = dpo(tmp_path, **given)
    at_start = reference_logps(trainer)
    torch.testing.assert_close(at_start, policy_logps(trainer), rtol=1e-5, atol=1e-5)
    trainer.train()
    assert not torch.allclose(policy_logps(trainer), at_start, atol=1e-3)
    torch.testing.assert_close(reference_logps(trainer), at_start)
    assert trainer.state.log_history[0]["loss"] == pytest.approx(np.log(2), abs=1e-5)


def test_the_reference_moves_by_the_share_it_is_told(tmp_path):
    """TR-DPO: reference = 0.25 policy + 0.75 reference, after steps 2 of 3."""
    model = tiny.causal_lm()
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    settings = {"sync_ref_model": True, "ref_model_mixup_alpha": 0.25, "ref_model_sync_steps": 2, "max_steps": 2}
    trainer = dpo(tmp_path, model, settings=settings)
    trainer.train()
    policy = dict(trainer.model.named_parameters())
    for name, parameter in trainer.reference.model.named_parameters():
        torch.testing.assert_close(parameter, 0.25 * policy[name].detach() + 0.75 * start[name])


def test_sync_needs_a_reference_of_its_own(tmp_path):
    with pytest.raises(ValueError, match="the base model under the adapter"):
        dpo(tmp_path, peft_config=ADAPTERS["lora"], settings={"sync_ref_model": True, "ref_model_sync_steps": 1})


def test_reference_model_shares_the_layers_it_is_told_to():
    model = tiny.causal_lm()
    other = create_reference_model(model, num_shared_layers=1)
    own = dict(model.named_parameters())
    for name, parameter in other.named_parameters():
        shared = "layers.0." in name or "embed_tokens" in name
        assert (parameter is own[name]) == shared, name
        assert not parameter.requires_grad
    assert own["model.layers.1.self_attn.q_proj.weight"].requires_grad
    with pytest.raises(ValueError, match="No layer 7"):
        create_reference_model(model, num_shared_layers=7)
    assert frozen_copy(create_reference_model(model)).model.training is False


def test_a_saved_reward_model_loads_in_the_auto_class_with_equal_scores(tmp_path):
    trainer = RewardTrainer(
        tiny.reward_model(),
        RewardConfig(**options(tmp_path)),
        train_dataset=Dataset.from_list(tiny.pairs(12)),
        processing_class=tiny.tokenizer(),
    )
    trainer.train()
    trainer.save_model()
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    units = [trainer.train_dataset[i] for i in range(4)]
    ours = trainer.score(trainer.model.eval(), trainer.data_collator(units), ()).rewards
    for sample, score in zip((s for unit in units for s in unit), ours):
        ids = torch.from_numpy(sample.input_ids.astype(np.int64))[None]
        torch.testing.assert_close(again(input_ids=ids).logits[0, 0], score, rtol=1e-5, atol=1e-6)


def test_an_adapter_that_is_saved_loads_again(tmp_path):
    trainer = sft(tmp_path, peft_config=ADAPTERS["lora"])
    trainer.train()
    trainer.save_model()
    batch = trainer.data_collator([trainer.train_dataset[0]])
    again = PeftModel.from_pretrained(tiny.causal_lm(), tmp_path).eval()
    ids = batch.input_ids
    torch.testing.assert_close(again(input_ids=ids).logits, trainer.model.eval()(input_ids=ids).logits)


def test_two_adapters_or_the_wrong_type_are_refused(tmp_path):
    with pytest.raises(ValueError, match="has an adapter already"):
        sft(tmp_path, get_peft_model(tiny.causal_lm(), ADAPTERS["lora"]), peft_config=ADAPTERS["lora"])
    with pytest.raises(TypeError, match=r"peft\.PeftConfig"):
        sft(tmp_path, peft_config={"r": 4})
    with pytest.raises(ValueError, match="loaded already"):
        sft(tmp_path, quantization_config=BitsAndBytesConfig(load_in_4bit=True))


def test_a_reward_head_is_trained_and_saved_with_its_adapter(tmp_path):
    """No task type is given: the head is new, so an adapter without it would be worth nothing."""
    trainer = RewardTrainer(
        tiny.reward_model(),
        RewardConfig(**options(tmp_path)),
        train_dataset=Dataset.from_list(tiny.pairs(12)),
        processing_class=tiny.tokenizer(),
        peft_config=LoraConfig(r=4, target_modules=LINEAR),
    )
    trainer.train()
    trainer.save_model()
    batch = trainer.data_collator([trainer.train_dataset[0]])
    ours = trainer.score(trainer.model.eval(), batch, ()).rewards
    again = PeftModel.from_pretrained(tiny.reward_model(seed=0), tmp_path).eval()
    with torch.no_grad():
        for p in again.base_model.model.score.original_module.parameters():
            p.zero_()  # whatever head the base came with
    ids = torch.from_numpy(trainer.train_dataset[0][0].input_ids.astype(np.int64))[None]
    torch.testing.assert_close(again(input_ids=ids).logits[0, 0], ours[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bits", [4, 8])
def test_an_adapter_trains_on_a_quantised_base_that_stays_as_it_is(tmp_path, bits):
    """QLoRA, with bitsandbytes' CPU kernels: the base keeps its packed bytes, the adapter learns, what is saved loads again."""
    tiny.causal_lm(hidden_size=64, intermediate_size=128).save_pretrained(tmp_path / "base")
    packed = {
        4: BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32),
        8: BitsAndBytesConfig(load_in_8bit=True),
    }[bits]
    trainer = sft(
        tmp_path / "run",
        str(tmp_path / "base"),
        quantization_config=packed,
        peft_config=ADAPTERS["lora"],
        settings={"per_device_train_batch_size": 12},
    )
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if not p.requires_grad}
    assert any(p.dtype in (torch.uint8, torch.int8) for p in before.values())
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert losses[-1] < losses[0]
    for name, parameter in trainer.model.named_parameters():
        assert parameter.requires_grad or torch.equal(before[name], parameter), name
    trainer.save_model()
    assert (tmp_path / "run" / "adapter_model.safetensors").exists()


def test_a_quantised_base_without_an_adapter_is_refused(tmp_path):
    tiny.causal_lm(hidden_size=64, intermediate_size=128).save_pretrained(tmp_path / "base")
    with pytest.raises(ValueError, match="adapter"):
        sft(tmp_path, str(tmp_path / "base"), quantization_config=BitsAndBytesConfig(load_in_8bit=True))


@pytest.mark.parametrize("family", ["qwen2", "llama", "qwen3_moe"])
def test_a_lora_that_names_no_layers_goes_on_all_linear_ones(family):
    """PEFT would take queries and values, and refuse an architecture that its table lacks; the head is left alone."""
    config = LoraConfig(r=2)
    model = add_adapter(tiny.causal_lm(family=family), config, torch.float32)
    trained = {name.split(".lora_")[0] for name, parameter in model.named_parameters() if parameter.requires_grad}
    kinds = {name.split(".")[-1] for name in trained}
    assert kinds >= {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert kinds >= ({"experts"} if "moe" in family else {"gate_proj", "up_proj", "down_proj"})
    assert not any("lm_head" in name or "embed" in name for name in trained)
    assert config.target_modules is None  # the user's object is as it was


def test_what_is_named_is_taken():
    model = add_adapter(tiny.causal_lm(), LoraConfig(r=2, target_modules=["q_proj"]), torch.float32)
    assert model.peft_config["default"].target_modules == {"q_proj"}
    options = ModelConfig(use_peft=True, lora_target_modules=["q_proj", "v_proj"])
    assert add_adapter(tiny.causal_lm(), get_peft_config(options), torch.float32).peft_config[
        "default"
    ].target_modules == {"q_proj", "v_proj"}
