"""Tower, projector, language model: frozen ones stay as they are, adapters go where they are meant, what cannot learn is found."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import peft
import pytest
import torch

from posttrain.core.batch import RAGGED
from posttrain.core.vision import LANGUAGE_MODEL, PROJECTOR, TOWER
from posttrain.models.layers.kernels import decoder_layers
from posttrain.models.load.model import LoadedModel, LoadOptions, load_model
from posttrain.models.scoring.token_scores import score_tokens
from posttrain.models.vision.features import image_features, set_family
from posttrain.models.vision.parts import (
    PARTS,
    adapters_by_part,
    freeze_parts,
    parameters_of,
    part_of,
    unreachable_parameters,
    without_vision,
)
from tests.tiny_vision import FAMILIES
from tests.vision_samples import Shown, image_probe, repeated_images


def shown_of(family: str) -> Shown:
    return Shown.of(family, torch.float32)


def load(shown: Shown, **options: Any) -> LoadedModel:
    return load_model(shown.tiny.model, LoadOptions(vision=shown.family, **options))


def backward(shown: Shown, model: Any) -> None:
    score_tokens(model, shown.batch(repeated_images(shown), RAGGED)).logps.sum().backward()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_has_a_part_and_every_part_has_some(family: str) -> None:
    shown = shown_of(family)
    model = shown.tiny.model
    found = {part_of(model, shown.family, name) for name, _ in model.named_parameters()}
    assert found == set(PARTS)
    whole = sum(1 for _ in model.parameters())
    assert sum(1 for _ in parameters_of(model, shown.family, *PARTS)) == whole
    assert part_of(model, shown.family, "score.weight") == LANGUAGE_MODEL


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("family", ["qwen3_vl", "llava_next", "smolvlm", "gemma3"])
def test_a_frozen_part_gets_no_gradient_and_the_others_do(family: str, part: str) -> None:
    shown = shown_of(family)
    loaded = load(shown, frozen_parts=(part,), image_probe=image_probe(shown), layout=RAGGED)
    model = loaded.model.train()
    backward(shown, model)
    for name, parameter in model.named_parameters():
        if part_of(model, shown.family, name) == part:
            assert parameter.grad is None, name
    left = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert {part_of(model, shown.family, name) for name in left} == set(PARTS) - {part}
    assert all(model.get_parameter(name).grad is not None for name in left)


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_that_are_compiled_are_those_of_the_text(family: str) -> None:
    """The tiny towers have two layers, as their language models have, and so do some real ones."""
    shown = shown_of(family)
    text = shown.tiny.model.get_submodule(shown.family.language_models[0])
    assert decoder_layers(shown.tiny.model) is text.layers


def test_nothing_left_to_train_is_refused() -> None:
    shown = shown_of("llava")
    with pytest.raises(ValueError, match="is left to train"):
        freeze_parts(shown.tiny.model, shown.family, PARTS)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava", "idefics3", "internvl", "gemma3"])
def test_a_frozen_tower_stays_in_eval_mode_and_keeps_no_graph(family: str) -> None:
    shown = shown_of(family)
    model = load(shown, frozen_parts=(TOWER, PROJECTOR)).model
    tower = model.get_submodule(shown.family.tower)
    for one in (model, copy.deepcopy(model)):
        one.train()
        assert one.training
        assert not any(module.training for module in one.get_submodule(shown.family.tower).modules())
    outputs = []
    tower.register_forward_hook(lambda module, given, output: outputs.append(output))
    batch = shown.batch(repeated_images(shown))
    picked = image_features(model, batch.images).pooler_output
    assert not any(one.requires_grad for one in ([picked] if torch.is_tensor(picked) else picked))
    assert not any(one.last_hidden_state.requires_grad for one in outputs)


ENCODINGS = [
    ({"peft_config": peft.LoraConfig(r=2)}, 1),
    ({"peft_config": peft.LoraConfig(r=2), "lora_vision": True}, 2),
    ({"frozen_parts": (TOWER, PROJECTOR)}, 1),
    ({"frozen_parts": (TOWER,)}, 2),
    ({}, 2),
]


@pytest.mark.parametrize(("options", "encodings"), ENCODINGS)
def test_a_reference_without_adapters_on_the_tower_takes_the_features_of_the_policy(
    options: dict[str, Any], encodings: int
) -> None:
    shown = shown_of("llava_next")
    model, calls = load(shown, **options).model, []
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    shown.tiny.model.get_submodule(shown.family.tower).register_forward_hook(lambda *_: calls.append(1))
    units = repeated_images(shown)
    batch = shown.batch(units)
    if encodings == 1:  # what was made in inference mode is not kept: no graph may hold it
        with torch.inference_mode():
            image_features(shown.tiny.model, batch.images)
    calls.clear()
    policy = score_tokens(model, batch).logps
    without = model.disable_adapter if "peft_config" in options else nullcontext
    with without(), torch.no_grad():
        reference = score_tokens(model, batch).logps
        assert len(calls) == encodings
        assert torch.equal(reference, score_tokens(model, shown.batch(units)).logps)
    assert ("peft_config" in options) == bool((policy - reference).abs().max() > 0.01)
    policy.sum().backward()
    calls.clear()
    score_tokens(copy.deepcopy(model), batch)  # another model makes its own, by a copy of the hook
    assert len(calls) == 1


def test_a_trained_projector_inside_of_a_frozen_tower_is_in_train_mode() -> None:
    """Qwen's merger lies inside of the tower."""
    shown = shown_of("qwen3_vl")
    model = load(shown, frozen_parts=(TOWER,)).model.train()
    visual = model.model.visual
    assert visual.merger.training
    assert visual.deepstack_merger_list[0].training
    assert not any(module.training for block in visual.blocks for module in block.modules())
    backward(shown, model)
    assert visual.merger.linear_fc1.weight.grad is not None


@pytest.mark.parametrize("family", FAMILIES)
def test_checkpointing_with_adapters_builds_no_graph_through_a_frozen_tower(family: str) -> None:
    """transformers makes the output of the tower's embedding require a gradient as well. The projector is trained beside the
    adapters, so that features are computed with a graph."""
    shown = shown_of(family)
    loaded = load(shown, peft_config=peft.LoraConfig(r=2))
    model = loaded.model
    for _, parameter in parameters_of(shown.tiny.model, shown.family, PROJECTOR):
        parameter.requires_grad_(True)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    hidden = []
    tower = shown.tiny.model.get_submodule(shown.family.tower)
    tower.register_forward_hook(lambda module, given, output: hidden.append(output.last_hidden_state))
    assert shown.tiny.model.get_input_embeddings()._forward_hooks
    score_tokens(model, shown.batch(repeated_images(shown), loaded.layout)).logps.sum().backward()
    assert [one.requires_grad for one in hidden] == [False]
    adapters = [p for name, p in model.named_parameters() if p.requires_grad]
    assert adapters
    assert all(p.grad is not None for p in adapters)
    model.disable_input_require_grads()
    assert not shown.tiny.model.get_input_embeddings()._forward_hooks


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_without_a_gradient_are_found_without_a_backward(family: str) -> None:
    shown = shown_of(family)
    model = shown.tiny.model
    set_family(model, shown.family)
    batch = shown.batch([(shown.sample("a", *_pictures(shown), "b"),)], "padded")
    found = unreachable_parameters(model, shown.family, batch.images)
    picked = image_features(model, batch.images)
    tensors = picked.pooler_output if not torch.is_tensor(picked.pooler_output) else [picked.pooler_output]
    tensors = [*tensors, *(one for depth in getattr(picked, "deepstack_features", None) or () for one in depth)]
    sum(one.square().sum() for one in tensors).backward()
    vision = parameters_of(model, shown.family, TOWER, PROJECTOR)
    assert found == [name for name, parameter in vision if parameter.grad is None]
    assert bool(found) == (family in ("llava", "llava_next", "paligemma"))


def _pictures(shown: Shown) -> list[Any]:
    repeated_images(shown)
    return list(shown.pictures.values())


LORA = [
    ("qwen2_5_vl", None, False, {TOWER: 0, PROJECTOR: 0}),
    ("qwen2_5_vl", "all-linear", True, {TOWER: 10, PROJECTOR: 2}),
    ("llava", ["q_proj", "v_proj"], False, {TOWER: 0, PROJECTOR: 0, LANGUAGE_MODEL: 4}),
    ("llava", ["q_proj", "v_proj"], True, {TOWER: 6, LANGUAGE_MODEL: 4}),
    ("llava", r".*vision_tower.*q_proj", False, {TOWER: 3, LANGUAGE_MODEL: 0}),
    ("llava", r"model\.(vision_tower|language_model).*q_proj", False, {TOWER: 3, LANGUAGE_MODEL: 2}),
    ("llava", ["q_proj", "multi_modal_projector.linear_1"], False, {TOWER: 0, PROJECTOR: 1, LANGUAGE_MODEL: 2}),
    ("llava", ["v_proj", "vision_tower.encoder.layers.0.self_attn.q_proj"], False, {TOWER: 1, LANGUAGE_MODEL: 2}),
    ("llava", ["q_proj", "fc1"], False, {TOWER: 0, LANGUAGE_MODEL: 2}),
    ("qwen2_vl", ["qkv"], False, {TOWER: 2, LANGUAGE_MODEL: 0}),
    ("smolvlm", r".*\.(q|v)_proj", False, {TOWER: 0, LANGUAGE_MODEL: 4}),
]


@pytest.mark.parametrize(("family", "targets", "lora_vision", "counts"), LORA)
def test_adapters_go_on_the_language_model_unless_the_pattern_means_the_tower(
    family: str, targets: Any, lora_vision: bool, counts: dict[str, int]
) -> None:
    shown = shown_of(family)
    loaded = load(shown, peft_config=peft.LoraConfig(r=2, target_modules=targets), lora_vision=lora_vision)
    found = adapters_by_part(shown.tiny.model, shown.family)
    assert {part: found[part] for part in counts} == counts
    assert f"{found[TOWER]} on the vision tower" in " ".join(loaded.notes)


def test_what_a_user_excludes_stays_excluded() -> None:
    for excluded in (["layers.0.self_attn.q_proj"], r".*language_model\.layers\.0.*"):
        shown = shown_of("llava")
        config = peft.LoraConfig(r=2, target_modules=["q_proj"], exclude_modules=excluded)
        loaded = load(shown, peft_config=config)
        assert "1 on the language model" in " ".join(loaded.notes)
        assert "0 on the vision tower" in " ".join(loaded.notes)


def test_a_quantised_base_leaves_tower_projector_and_head_as_they_are() -> None:
    from transformers import BitsAndBytesConfig

    family = shown_of("qwen2_5_vl").family
    changed = without_vision(BitsAndBytesConfig(load_in_8bit=True), family)
    assert changed.llm_int8_skip_modules == ["lm_head", "model.visual", "model.visual.merger"]
    own = without_vision(BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=["a"]), family)
    assert own.llm_int8_skip_modules == ["a", "model.visual", "model.visual.merger"]
