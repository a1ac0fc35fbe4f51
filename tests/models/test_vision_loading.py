"""Models that see are loaded whole, saved with their processor, and exported under the names of their files."""

from __future__ import annotations

import json
from importlib import util
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file

from posttrain.core.batch import PADDED
from posttrain.core.vision import TOWER
from posttrain.models.load import image_models
from posttrain.models.load.image_models import sees_images
from posttrain.models.load.model import (
    LoadOptions,
    load_model,
    load_pretrained,
    load_processing_class,
    model_without_weights,
)
from posttrain.models.load.weight_export import exported_specs, exported_weights
from posttrain.models.scoring.heads import SEQUENCE_REWARD, score_sequences
from posttrain.models.scoring.token_scores import score_tokens
from tests.tiny import causal_lm
from tests.tiny_vision import FAMILIES, images
from tests.vision_samples import Shown, image_probe


def saved(shown: Shown, folder: Path) -> Path:
    shown.tiny.model.save_pretrained(folder)
    shown.tiny.processor.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_model_loads_whole_with_its_processor_and_says_the_same(family: str, tmp_path: Path) -> None:
    """`AutoModelForCausalLM` refuses nine of the ten."""
    shown = Shown.of(family, torch.float32)
    sample = shown.sample("a", *images((60, 40)), "b")
    own = shown.own_logps(sample)
    folder = saved(shown, tmp_path)
    processor = load_processing_class(folder, None, False)
    assert type(processor) is type(shown.tiny.processor)
    processor.tokenizer.pad_token = processor.tokenizer.eos_token
    processor.save_pretrained(tmp_path / "again")  # saving the processor saves what was set on its tokenizer
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "again").pad_token == processor.tokenizer.eos_token
    loaded = load_model(folder, LoadOptions(vision=shown.family, layout=PADDED))
    assert type(loaded.model) is type(shown.tiny.model)
    logps = score_tokens(loaded.model, shown.batch([(sample,)], PADDED)).logps
    assert (logps - own).abs().max() < 1e-4
    bare = model_without_weights(folder, LoadOptions(vision=shown.family))
    assert {name for name, _ in bare.named_parameters()} == {name for name, _ in loaded.model.named_parameters()}


@pytest.mark.parametrize("with_adapters", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_exported_names_are_those_of_the_file(family: str, with_adapters: bool, tmp_path: Path) -> None:
    """Most families' tensors are renamed when they are saved; engines load the names of the files."""
    shown = Shown.of(family, torch.float32)
    saved(shown, tmp_path)
    config = peft.LoraConfig(r=2, target_modules="all-linear") if with_adapters else None
    for model in (shown.tiny.model, load_pretrained(tmp_path, LoadOptions())):  # built, and from a checkpoint
        loaded = load_model(
            model, LoadOptions(vision=shown.family, peft_config=config, lora_vision=True, layout=PADDED)
        )
        mine, theirs = dict(exported_weights(loaded.model)), load_file(tmp_path / "model.safetensors")
        assert sorted(mine) == sorted(theirs)
        assert sorted(spec.name for spec in exported_specs(loaded.model)) == sorted(theirs)
        assert all(torch.equal(mine[name], tensor) for name, tensor in theirs.items())  # a new adapter changes nothing


def test_a_trained_adapter_of_the_tower_is_in_what_is_exported(tmp_path: Path) -> None:
    shown = Shown.of("llava", torch.float32)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"])
    model = load_model(shown.tiny.model, LoadOptions(vision=shown.family, peft_config=config, lora_vision=True)).model
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    mine = dict(exported_weights(model))
    model.merge_and_unload().save_pretrained(tmp_path)
    theirs = load_file(tmp_path / "model.safetensors")
    assert sorted(mine) == sorted(theirs)
    assert max((mine[name] - tensor).abs().max() for name, tensor in theirs.items()) < 1e-5


def test_a_text_model_is_loaded_as_ever(tmp_path: Path) -> None:
    causal_lm().save_pretrained(tmp_path)
    assert type(load_pretrained(tmp_path, LoadOptions())) is type(causal_lm())
    assert not sees_images({"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"]})
    assert not sees_images({"model_type": "llama4", "architectures": ["Llama4ForCausalLM"]})
    assert sees_images({"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"]})
    assert sees_images({"model_type": "llava"})


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "mllama", "architectures": ["MllamaForConditionalGeneration"]}, "cross-attention"),
        ({"model_type": "florence2", "architectures": ["Florence2ForConditionalGeneration"]}, "encoder-decoders"),
    ],
)
def test_families_that_see_otherwise_are_refused_by_name(config: dict[str, Any], words: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    for load in (load_pretrained, model_without_weights):
        with pytest.raises(ValueError, match=f"{config['model_type']}.*{words}"):
            load(tmp_path, LoadOptions())
    with pytest.raises(ValueError, match=words):
        load_processing_class(tmp_path, None, False)


def test_a_family_that_is_not_known_reads_texts_with_a_line() -> None:
    loaded = load_model(Shown.of("llava", torch.float32).tiny.model, LoadOptions())
    assert any("it is loaded for texts only" in note for note in loaded.notes)


@pytest.mark.parametrize("missing", [["torchvision"], ["num2words"], ["torchvision", "num2words"]])
def test_what_processors_need_is_named_where_it_is_missing(
    missing: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(Shown.of("smolvlm", torch.float32), tmp_path)

    def fails(*args: Any, **kwargs: Any) -> None:
        raise AttributeError("'VIDEO_PROCESSOR_MAPPING' has no attribute '_extra_content'")

    found = util.find_spec
    monkeypatch.setattr(image_models.util, "find_spec", lambda name: None if name in missing else found(name))
    monkeypatch.setattr(transformers.AutoProcessor, "from_pretrained", fails)
    with pytest.raises(ImportError, match=" and ".join(missing) + r'.*pip install "posttrain\[vision\]"'):
        load_processing_class(tmp_path, None, False)


def test_a_quantised_model_spares_the_tower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Shown.of("llava", torch.float32)
    saved(shown, tmp_path)
    given: dict[str, Any] = {}
    monkeypatch.setattr(
        transformers.models.auto.AutoModelForImageTextToText,
        "from_pretrained",
        lambda path, **kwargs: given.update(kwargs),
    )
    quantised = transformers.BitsAndBytesConfig(load_in_8bit=True)
    load_pretrained(tmp_path, LoadOptions(vision=shown.family, quantization_config=quantised))
    assert shown.family.tower in given["quantization_config"].llm_int8_skip_modules
    assert quantised.llm_int8_skip_modules is None
    assert shown.family.part_of(f"{shown.family.tower}.x") == TOWER


@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava", "smolvlm", "gemma3"])
def test_a_reward_model_of_images_scores_the_same_after_it_was_saved(family: str, tmp_path: Path) -> None:
    """Of the ten families Gemma 3 alone has a classifier of its own."""
    shown = Shown.of(family, torch.float32)
    saved(shown, tmp_path / "policy")
    options = LoadOptions(vision=shown.family, task=SEQUENCE_REWARD, image_probe=image_probe(shown))
    model = load_model(tmp_path / "policy", options).model
    batch = shown.batch([(shown.sample("a", *images((60, 40)), "b"),), (shown.sample("Hello?"),)])
    score_sequences(model, batch).rewards.sum().backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if p.requires_grad), family
    assert model.score.weight.shape == (1, 32)
    model.save_pretrained(tmp_path / "reward")
    again = load_model(tmp_path / "reward", options).model
    assert torch.equal(score_sequences(again, batch).rewards, score_sequences(model, batch).rewards)
    assert json.loads((tmp_path / "reward" / "config.json").read_text())["architectures"] == [type(model).__name__]
    names = load_file(tmp_path / "reward" / "model.safetensors")
    assert sorted(name for name, _ in exported_weights(model)) == sorted(names)
    bare = model_without_weights(tmp_path / "reward", options)
    assert {name for name, _ in bare.named_parameters()} == {name for name, _ in model.named_parameters()}


def test_a_loaded_model_without_a_head_is_not_asked_for_num_labels() -> None:
    """Its class has no such argument: `AutoModelForImageTextToText` makes it, whatever the number."""
    shown = Shown.of("llava", torch.float32)
    options = LoadOptions(task=SEQUENCE_REWARD, vision=shown.family)
    with pytest.raises(ValueError, match=r"a LlavaForConditionalGeneration, has no head .* Give its name or the path"):
        load_model(shown.tiny.model, options)
