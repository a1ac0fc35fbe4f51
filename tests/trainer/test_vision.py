"""Offline methods on rows with images: one gradient in every layout, and what a run says, freezes, saves and refuses."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor
from transformers import AutoProcessor

from posttrain import SFTConfig, SFTTrainer
from posttrain.core.batch import PADDED, RAGGED, SHARED
from posttrain.core.vision import LANGUAGE_MODEL, PROJECTOR, TOWER
from posttrain.models.load.image_models import WithHead
from posttrain.models.load.model import LoadOptions, innermost_model, load_model
from posttrain.models.scoring.heads import SEQUENCE_REWARD, score_sequences
from posttrain.models.vision.parts import part_of
from posttrain.trainer.options.base import DEEPSPEED, BaseConfig
from tests import tiny
from tests.tiny_vision import images, template, vision_model
from tests.trainer.vision_runs import METHODS_WITH_IMAGES, gradient, rows_of, trainer_of

FAMILIES = ("qwen2_5_vl", "llava_next", "smolvlm", "gemma3")


def largest_by_part(trainer: Any, gradients: dict[str, Tensor]) -> dict[str, float]:
    """Part of the model -> largest entry of its gradients; parts without any are left out."""
    innermost, found = innermost_model(trainer.model), {}
    for name, grad in gradients.items():
        part = part_of(innermost, trainer.vision.family, name)
        found[part] = max(found.get(part, 0.0), grad.abs().max().item())
    return found


def assert_one_gradient(trainer: Any, cells: list[tuple[str, int]]) -> dict[str, float]:
    """In each (layout, units of a micro-batch) the gradient of padded units alone, whose `largest_by_part` is returned."""
    alone = gradient(trainer, PADDED, 1)
    parts = largest_by_part(trainer, alone)
    for layout, split in cells:
        found = gradient(trainer, layout, split)
        assert found.keys() == alone.keys()
        apart = max((found[name] - alone[name]).abs().max() for name in alone) / max(parts.values())
        assert apart < 1e-6, (layout, split, float(apart))
    return parts


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", METHODS_WITH_IMAGES)
def test_one_gradient_in_every_layout_and_split(method, family, tmp_path):
    """Rows of one image, of two, of none, the same image again, and an image inside of one answer only."""
    trainer = trainer_of(method, family, tmp_path)
    assert trainer.loaded.layout in (RAGGED, SHARED), trainer.loaded.notes
    shared = (SHARED,) if trainer.loaded.layout == SHARED else ()
    cells = [(layout, split) for layout in (PADDED, RAGGED, *shared) for split in (2, 5)]
    # Of its layouts each method takes one cut with one family and the other with the next, SFT and DPO both with all.
    turn = METHODS_WITH_IMAGES.index(method) + FAMILIES.index(family)
    mine = [cell for number, cell in enumerate(cells) if method in ("sft", "dpo") or (number // 2 + number + turn) % 2]
    parts = assert_one_gradient(trainer, mine)
    assert parts[TOWER] > 1e-6 * max(parts.values())


@pytest.mark.parametrize(("method", "family"), [("dpo", "qwen2_5_vl"), ("kto", "llava_next"), ("bco", "gemma3")])
def test_reference_log_probs_can_be_computed_beforehand(method, family, tmp_path):
    """From images as the run shows them: those of other pictures under the same tokens would change the gradient."""
    rows = len(rows_of(method))
    # KTO's partners are the rows before, of the step or the dataset.
    options = {"train_sampling_strategy": "sequential"}
    trainers = [trainer_of(method, family, tmp_path, precompute_ref_log_probs=k, **options) for k in (False, True)]
    for trainer in trainers:  # the reference stays behind
        torch.nn.init.normal_(
            trainer.model.get_input_embeddings().weight, generator=torch.Generator().manual_seed(3), std=0.3
        )
    computed, known = (gradient(trainer, trainer.loaded.layout, rows) for trainer in trainers)
    largest = max(float(value.abs().max()) for value in computed.values())
    for name, value in computed.items():
        assert float((known[name] - value).abs().max()) < 1e-5 * largest, name


# ---- what is trained -----------------------------------------------------------------------------------------------------

LORA = {"peft_config": LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)}
PARTS_TRAINED = {
    "lora": (LORA, {LANGUAGE_MODEL}, "0 on the vision tower"),
    "lora-vision": (LORA | {"lora_vision": True}, {TOWER, PROJECTOR, LANGUAGE_MODEL}, "Adapters: "),
    "frozen-tower": ({"freeze_vision_tower": True}, {PROJECTOR, LANGUAGE_MODEL}, "Frozen: vision tower."),
    "frozen-language": ({"freeze_language_model": True}, {TOWER, PROJECTOR}, "Frozen: language model."),
}
"""Name -> (options, parts that have gradients, a sentence about it)."""


@pytest.mark.parametrize(
    ("method", "family"),
    [
        *(("sft", family) for family in ("qwen2_5_vl", "gemma3")),
        *((method, "qwen2_5_vl") for method in ("dpo", "reward")),
        *(pytest.param("sft", family, marks=pytest.mark.slow) for family in ("llava_next", "smolvlm")),
        *(
            pytest.param(method, family, marks=pytest.mark.slow)
            for method in ("dpo", "reward")
            for family in ("gemma3", "llava_next", "smolvlm")
        ),
    ],
)
@pytest.mark.parametrize("cell", PARTS_TRAINED)
def test_one_gradient_of_the_parts_that_are_trained_and_none_of_others(cell, method, family, tmp_path):
    options, trained, note = PARTS_TRAINED[cell]
    trainer = trainer_of(method, family, tmp_path, **copy.deepcopy(options))  # PEFT writes into its config
    assert any(note in sentence for sentence in trainer.loaded.notes), trainer.loaded.notes
    parts = assert_one_gradient(trainer, [(trainer.loaded.layout, 2)])
    if cell == "lora-vision" and family == "gemma3":  # its projector is a bare weight and a norm
        trained = trained - {PROJECTOR}
    if cell == "frozen-language" and method == "reward":  # its head is new, and is trained
        trained = trained | {LANGUAGE_MODEL}
    assert parts.keys() == trained
    assert min(parts.values()) > 0


@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_rows_without_images_train_the_language_model_alone(method, tmp_path):
    trainer = trainer_of(method, "qwen2_5_vl", tmp_path, train_dataset=rows_of(method)[2:3] * 3)
    assert "Frozen: vision tower, projector." in trainer.loaded.notes
    trained = {
        part_of(trainer.model, trainer.vision.family, name)
        for name, parameter in trainer.model.named_parameters()
        if parameter.requires_grad
    }
    assert trained == {LANGUAGE_MODEL}
    assert largest_by_part(trainer, gradient(trainer, PADDED, 2)).keys() == {LANGUAGE_MODEL}


# ---- what is saved -------------------------------------------------------------------------------------------------------

SHOWN_OTHERWISE = {
    "pixels": ("qwen2_5_vl", {"min_pixels": 784, "max_pixels": 3136}),
    "whole": ("smolvlm", {"image_processor_kwargs": {"do_image_splitting": False}}),
}


@pytest.mark.parametrize("case", SHOWN_OTHERWISE)
def test_a_saved_processor_shows_images_as_the_run_did(case, tmp_path):
    family, options = SHOWN_OTHERWISE[case]
    given = vision_model(family).processor
    picture = images((300, 200))[0]
    trainer = trainer_of("sft", family, tmp_path, processing_class=given, **options)
    trainer.save_model(str(tmp_path / "saved"))
    saved = AutoProcessor.from_pretrained(tmp_path / "saved")
    asked = {"text": [trainer.vision.family.written], "images": [[picture]], "return_tensors": "pt"}
    by_run = given(**asked, images_kwargs=trainer.vision.layouts.options)
    for name, found in saved(**asked).items():
        assert torch.equal(found, by_run[name]), name
    assert given(**asked)["input_ids"].shape != by_run["input_ids"].shape  # the processor that was given is as it was


def test_a_processor_whose_own_defaults_are_stronger_is_told_of(tmp_path, caplog):
    trainer_of("sft", "gemma3", tmp_path, image_processor_kwargs={"do_pan_and_scan": True}, verbosity="normal")
    assert "Gemma3Processor has a fixed default for do_pan_and_scan" in caplog.text


def test_the_template_of_a_run_is_saved_with_its_processor(tmp_path):
    path = tmp_path / "mine.jinja"
    path.write_text(template("<image>").replace("<|im_end|>\n", "<|im_end|>\n\n"), encoding="utf-8")
    trainer = trainer_of("sft", "llava", tmp_path, chat_template_path=str(path))
    trainer.save_model(str(tmp_path / "saved"))
    saved = AutoProcessor.from_pretrained(tmp_path / "saved")
    assert trainer.renderer.chat_template == saved.chat_template == saved.tokenizer.chat_template == path.read_text()


def test_values_that_an_image_processor_cannot_use_are_refused_in_a_sentence(tmp_path):
    with pytest.raises(ValueError, match=r"LlavaProcessor cannot use the options \{'size': 'big'\} of images: "):
        trainer_of("sft", "llava", tmp_path, image_processor_kwargs={"size": "big"})


# ---- reward models -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_reward_model_gives_equal_scores(family, tmp_path):
    trainer = trainer_of("reward", family, tmp_path, torch.float32, learning_rate=1e-2)
    before = trainer.model.score.weight.detach().clone()
    trainer.train()
    assert not torch.equal(trainer.model.score.weight, before)
    trainer.save_model(str(tmp_path / "saved"))
    batches = list(trainer.get_eval_dataloader(trainer.train_dataset))
    assert sum(batch.images is not None for batch in batches) > 0
    options = LoadOptions(task=SEQUENCE_REWARD, vision=trainer.vision.family)
    models = [trainer.model.eval(), load_model(str(tmp_path / "saved"), options).model.eval()]
    models.append(load_model(WithHead.from_pretrained(str(tmp_path / "saved"), 1), options).model.eval())
    with torch.no_grad():
        ours, *loaded = ([score_sequences(model, batch).rewards for batch in batches] for model in models)
    for scores in loaded:
        torch.testing.assert_close(scores, ours, rtol=0, atol=0)


# ---- what is refused -----------------------------------------------------------------------------------------------------


def test_rows_with_images_under_deepspeed_are_refused_before_a_model_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(BaseConfig, "sharding", DEEPSPEED)  # which is not installed here
    monkeypatch.setattr("posttrain.trainer.base.load_model", pytest.fail)
    with pytest.raises(ValueError, match=r"The train dataset has images, .* under DeepSpeed.* FSDP"):
        trainer_of("sft", "qwen2_5_vl", tmp_path)


@pytest.mark.parametrize(
    ("option", "value", "sentence"),
    [
        ("freeze_language_model", True, "nothing is left to train"),
        ("image_augmentation", "light", "no row has an image"),
    ],
)
def test_options_that_only_images_give_a_meaning_are_refused_on_texts(option, value, sentence, tmp_path):
    with pytest.raises(ValueError, match=f"`{option}` is set, .*{sentence}"):
        trainer_of("sft", "llava", tmp_path, train_dataset=rows_of("sft")[2:3], **{option: value})


UNUSED_RATES = {
    "frozen": ({"freeze_vision_tower": True, "freeze_multi_modal_projector": True}, "`freeze_vision_tower` and"),
    "text": ({"train_dataset": rows_of("sft")[2:3]}, "no row has an image"),
    "lora": (LORA, "`lora_vision=True`"),
    "given": ({"optimizers": (object(), None)}, "leave one of them out"),
}


@pytest.mark.parametrize("case", UNUSED_RATES)
def test_a_rate_of_parts_that_are_not_trained_is_refused(case, tmp_path):
    options, sentence = UNUSED_RATES[case]
    with pytest.raises(ValueError, match=r"`vision_learning_rate` is set") as error:
        trainer_of(
            "sft", "qwen2_5_vl", tmp_path, torch.float32, vision_learning_rate=1e-5, **copy.deepcopy(options)
        ).train()
    assert sentence in str(error.value)


def test_a_rate_of_vision_for_a_model_of_texts_is_refused(tmp_path):
    args = SFTConfig(str(tmp_path), vision_learning_rate=1e-5, report_to="none", use_cpu=True)
    with pytest.raises(ValueError, match=r"`vision_learning_rate` is set, and this model reads texts only"):
        SFTTrainer(tiny.causal_lm(), args, train_dataset=tiny.chats(4), processing_class=tiny.tokenizer())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3"])  # a projector inside of the tower, and a bare weight
def test_tower_and_projector_have_groups_of_their_own_rate(family, dtype, tmp_path):
    """With a rate of 0 they keep their values, while the language model moves; weight decay is where it was."""
    options = {"vision_learning_rate": 0.0, "learning_rate": 1e-2, "weight_decay": 0.1, "optim": "adamw_torch"}
    trainer = trainer_of("sft", family, tmp_path, dtype, bf16=dtype == torch.bfloat16, max_steps=2, **options)
    before = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    decayed = {*trainer.get_decay_parameter_names(trainer.model)}
    trainer.train()
    rates = [(group["initial_lr"], group["weight_decay"]) for group in trainer.optimizer.param_groups]
    assert rates == [(1e-2, 0.1), (1e-2, 0.0), (0.0, 0.1), (0.0, 0.0)]
    sizes = [sum(parameter.numel() for parameter in group["params"]) for group in trainer.optimizer.param_groups]
    wanted = dict.fromkeys(rates, 0)
    for name, parameter in trainer.model.named_parameters():
        is_text = part_of(trainer.model, trainer.vision.family, name) == LANGUAGE_MODEL
        if parameter.requires_grad:
            wanted[1e-2 if is_text else 0.0, 0.1 if name in decayed else 0.0] += parameter.numel()
        assert is_text or torch.equal(parameter, before[name])
    assert sizes == [*wanted.values()]
    embedding = trainer.model.get_input_embeddings().weight
    assert any(name.endswith("embed_tokens.weight") and not torch.equal(embedding, old) for name, old in before.items())
