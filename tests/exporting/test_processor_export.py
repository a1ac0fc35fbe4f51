"""Exports of models that see: their processor comes with them, and what they say after a picture is what the run says."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

from posttrain import MergeConfig, merge_models
from posttrain.exporting import export as exporting
from posttrain.exporting import model_merging as merging
from posttrain.exporting.verification import ExportRefused
from posttrain.models.load.model import LoadOptions, load_pretrained
from posttrain.models.load.saved_model import find_saved
from posttrain.models.scoring.heads import SEQUENCE_REWARD
from tests.cli.runs import posttrain
from tests.tiny_vision import images, vision_model

PROCESSOR = "processor_config.json"
CHANGED = {"qwen2_5_vl": {"max_pixels": 84 * 84}, "llava": {"image_mean": [0.3, 0.4, 0.5]}}
"""What a run has changed of its processor."""


@pytest.fixture(scope="module", params=CHANGED)
def run(request, tmp_path_factory):
    """The folder of a run with adapters on the text part and on the tower, beside the folder `base`."""
    folder = tmp_path_factory.mktemp(request.param)
    tiny = vision_model(request.param)
    tiny.model.save_pretrained(folder / "base")
    tiny.processor.save_pretrained(folder / "base")
    model = AutoModelForImageTextToText.from_pretrained(folder / "base")
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", exclude_modules=["lm_head"]))
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1)
    adapted.save_pretrained(folder / "run")
    vision_model(request.param, **CHANGED[request.param]).processor.save_pretrained(folder / "run")
    return folder / "run"


def shown(processor):
    """What a user gives the model."""
    content = [{"type": "image"}, {"type": "text", "text": "What is in this picture?"}]
    text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    return processor(text=[text], images=[images((130, 170))], return_tensors="pt")


def logps(model, inputs):
    with torch.no_grad():
        return model.eval()(**inputs).logits.log_softmax(-1)


def trained(run, adapter=None):
    """Log-probs of the run, or of another adapter, on its base, after what the adapter's processor makes of a picture."""
    base = AutoModelForImageTextToText.from_pretrained(run.parent / "base")
    model = PeftModel.from_pretrained(base, adapter or run)
    return logps(model, shown(AutoProcessor.from_pretrained(adapter or run)))


def test_merged_is_loaded_with_its_processor_and_says_the_same_after_a_picture(run, tmp_path, capsys):
    assert posttrain("export", str(run), "--to", "merged", "--output", str(tmp_path / "m")) == 0
    assert "picture     same ids and pixels" in capsys.readouterr().out
    merged = AutoModelForImageTextToText.from_pretrained(tmp_path / "m")
    found = logps(merged, shown(AutoProcessor.from_pretrained(tmp_path / "m")))
    torch.testing.assert_close(found, trained(run), rtol=0, atol=1e-4)
    of_base = shown(AutoProcessor.from_pretrained(run.parent / "base"))
    before = logps(AutoModelForImageTextToText.from_pretrained(run.parent / "base"), of_base)
    assert before.shape != found.shape or (before - found).abs().max() > 0.1


def test_adapter_is_loaded_with_its_processor_and_says_the_same_after_a_picture(run, tmp_path):
    assert posttrain("export", str(run), "--to", "adapter", "--output", str(tmp_path / "a")) == 0
    torch.testing.assert_close(trained(run, tmp_path / "a"), trained(run), rtol=0, atol=0)


def test_an_adapter_without_a_processor_has_that_of_its_base_with_its_own_template(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run" / PROCESSOR).unlink()
    (tmp_path / "run" / "chat_template.jinja").write_text("{{ messages[0].content[1].text }}", encoding="utf-8")
    assert posttrain("export", str(tmp_path / "run"), "--to", "merged", "--output", str(tmp_path / "m")) == 0
    found, of_base = (AutoProcessor.from_pretrained(folder) for folder in (tmp_path / "m", run.parent / "base"))
    assert found.chat_template == "{{ messages[0].content[1].text }}"
    found.chat_template = of_base.chat_template
    ours, theirs = shown(found), shown(of_base)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_gguf_file_would_be_blind(run, tmp_path, capsys):
    assert posttrain("export", str(run), "--to", "gguf", "--output", str(tmp_path / "g")) == 2
    assert "a GGUF file would hold its text part alone" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


# ---- refusals --------------------------------------------------------------------------------------------------------------


def other_pixels(file):
    config = json.loads(file.read_text(encoding="utf-8"))
    config["image_processor"]["image_std"] = [0.9, 0.9, 0.9]
    file.write_text(json.dumps(config), encoding="utf-8")


def cut_off(file):
    file.write_text(file.read_text(encoding="utf-8")[:100], encoding="utf-8")


DAMAGES = {
    "it makes other `pixel_values` of a picture": other_pixels,
    "it fails with ": cut_off,
    "its folder has none": lambda file: file.unlink(),
}


def damaging(monkeypatch, damage):
    """Exports have damaged files of their processors."""
    original = exporting._write_companions

    def write(processing_class, innermost, folder):
        original(processing_class, innermost, folder)
        damage(folder / PROCESSOR)

    monkeypatch.setattr(exporting, "_write_companions", write)


@pytest.mark.parametrize("told", DAMAGES)
@pytest.mark.parametrize("to", ["merged", "adapter"])
def test_a_damaged_processor_is_found(run, tmp_path, monkeypatch, capsys, to, told):
    damaging(monkeypatch, DAMAGES[told])
    assert posttrain("export", str(run), "--to", to, "--output", str(tmp_path / "m")) == 1
    assert told in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


TOWER_FAULTS = {
    "linear": "is the first layer whose outputs differ",
    "patches": "The export, shown a picture, does not compute what was trained",
}


@pytest.mark.parametrize("kind", TOWER_FAULTS)
def test_a_wrong_tower_is_found(run, tmp_path, monkeypatch, capsys, kind):
    """Texts do not come to it: its linear layers are asked alone, and what lies before them by a picture."""
    original = exporting.exported_weights

    def wrong(model, dtype=None):
        for name, tensor in original(model, dtype):
            is_patches, in_tower = "patch_embed" in name, any(part in name for part in ("visual", "vision_tower"))
            hit = is_patches if kind == "patches" else in_tower and name.endswith(("fc1.weight", "mlp.up_proj.weight"))
            yield name, tensor * 1.5 if hit else tensor

    monkeypatch.setattr(exporting, "exported_weights", wrong)
    assert posttrain("export", str(run), "--to", "merged", "--output", str(tmp_path / "m")) == 1
    assert TOWER_FAULTS[kind] in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


# ---- model merging ---------------------------------------------------------------------------------------------------------


def test_a_merge_keeps_the_processor_of_its_policy(run, tmp_path):
    config = MergeConfig("linear", str(run), str(run.parent / "base"), policy_model_weight=1.0, target_model_weight=0.0)
    merge_models(config, tmp_path / "m")
    found = logps(
        AutoModelForImageTextToText.from_pretrained(tmp_path / "m"),
        shown(AutoProcessor.from_pretrained(tmp_path / "m")),
    )
    torch.testing.assert_close(found, trained(run), rtol=0, atol=1e-4)


def test_a_merge_with_a_damaged_processor_is_refused(run, tmp_path, monkeypatch):
    damaging(monkeypatch, other_pixels)
    with pytest.raises(ExportRefused, match="it makes other `pixel_values` of a picture"):
        merge_models(MergeConfig("linear", str(run), str(run.parent / "base")), tmp_path / "m")
    assert list(tmp_path.iterdir()) == []


def test_a_policy_in_memory_is_merged_with_its_processor(run, tmp_path):
    """As MergeModelCallback hands over the processor of a run."""
    policy, processor = find_saved(run).load(), AutoProcessor.from_pretrained(run)
    config = MergeConfig("linear", target_model_path=str(run.parent / "base"))
    merging.write_merge(config, policy, processor, tmp_path / "m")
    assert type(AutoProcessor.from_pretrained(tmp_path / "m")) is type(processor)
    assert AutoTokenizer.from_pretrained(tmp_path / "m").chat_template == processor.chat_template


def test_a_reward_model_that_sees_keeps_its_head(run, tmp_path):
    """Its config names the class of its family, which has no head for scores."""
    options = LoadOptions(dtype=torch.float32, task=SEQUENCE_REWARD)
    model = load_pretrained(run.parent / "base", options)
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(tmp_path / "run")
    AutoProcessor.from_pretrained(run).save_pretrained(tmp_path / "run")
    assert posttrain("export", str(tmp_path / "run"), "--to", "merged", "--output", str(tmp_path / "m")) == 0
    merged = load_pretrained(tmp_path / "m", options)
    assert find_saved(tmp_path / "m").task == SEQUENCE_REWARD
    assert torch.equal(merged.score.weight, model.score.weight)
