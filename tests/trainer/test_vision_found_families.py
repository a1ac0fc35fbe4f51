"""Models that see and are in no table of families: shown images by transformers' conventions, padded, or refused by name."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from posttrain.core.batch import PADDED
from posttrain.data.rows.checks import BadRowsError
from posttrain.rollout.engines.transformers import TransformersEngine
from posttrain.trainer import construction
from tests import tiny_vision
from tests.tiny_vision import TinyVision, vision_model
from tests.trainer.resumable_run import checksum
from tests.trainer.vision_runs import chats, gradient, rows_of, trainer_of
from tests.vision_samples import Shown


@pytest.fixture
def empty_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(construction, "FAMILIES", {})


def vip_llava(dtype: torch.dtype = torch.float64) -> TinyVision:
    """A family that nobody has looked at: features of several layers of the tower, and LLaVA's processor."""
    _, known, processor, mark = tiny_vision.BUILDERS["llava"]("llava", {})
    made = processor()
    config = transformers.VipLlavaConfig(
        vision_config=known.vision_config,
        text_config=known.text_config,
        image_token_index=known.image_token_id,
        vision_feature_layers=[-2, -1],
    )
    return built(transformers.VipLlavaForConditionalGeneration, config, made, mark, dtype)


def aya(dtype: torch.dtype = torch.float64) -> TinyVision:
    """Another: pictures in tiles, with marks between them, and another token in the template than in the place of features."""
    tiny_vision.needs_torchvision("internvl")
    marks = {"tile": "TILE", "tile_global": "TILE_GLOBAL", "begin": "<|START_OF_IMG|>", "end": "<|END_OF_IMG|>"}
    tok = tiny_vision.tokenizer(image_token="<image>", patch="<|IMG_PATCH|>", **marks)
    tower = tiny_vision.TOWER | {"model_type": "siglip_vision_model", "image_size": 56, "patch_size": 14}
    config = transformers.AyaVisionConfig(
        vision_config=tower,
        text_config=tiny_vision._text(tok, model_type="llama"),
        image_token_index=tok.convert_tokens_to_ids("<|IMG_PATCH|>"),
        downsample_factor=2,
        vision_feature_layer=-1,
    )
    made = transformers.AyaVisionProcessor(
        transformers.GotOcr2ImageProcessor(size={"height": 56, "width": 56}, max_patches=4, crop_to_patches=True),
        tok,
        patch_size=14,
        img_size=56,
        downsample_factor=2,
        chat_template=tiny_vision.template("<image>"),
    )
    return built(transformers.AyaVisionForConditionalGeneration, config, made, "<image>", dtype)


def built(model_class: Any, config: Any, processor: Any, mark: str, dtype: torch.dtype) -> TinyVision:
    torch.manual_seed(0)
    model = model_class(config).to(dtype).eval()
    with torch.no_grad():  # at the default initialisation images hardly move the logits
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6)
    tiny = TinyVision(model, processor, mark)
    tiny_vision.refuse_blind(tiny)
    return tiny


def given(tiny: TinyVision) -> dict[str, Any]:
    return {"model": tiny.model, "processing_class": tiny.processor}


@pytest.mark.parametrize("method", ["sft", "dpo"])
@pytest.mark.parametrize("family", ["llava", "llava_next", "internvl"])
def test_what_is_found_trains_as_what_is_known(family, method, tmp_path, monkeypatch):
    """Features per image, per tile, and with sizes: the gradient is that of the family's entry in the table."""
    known = trainer_of(method, family, tmp_path / "known")
    monkeypatch.setattr(construction, "FAMILIES", {})
    found = trainer_of(method, family, tmp_path / "found")
    assert found.vision.family.is_found
    assert not known.vision.family.is_found
    assert found.loaded.layout == PADDED
    assert any("in no table of families" in note for note in found.loaded.notes)
    assert set(found.vision.family.forbidden_ids) == set(known.vision.family.forbidden_ids) - {
        known.vision.processor.tokenizer.convert_tokens_to_ids("<video>")
    }
    one, other = (gradient(trainer, PADDED, 2) for trainer in (known, found))
    assert one.keys() == other.keys()
    assert max((one[name] - other[name]).abs().max() for name in one) < 1e-9


@pytest.mark.parametrize("make", [vip_llava, aya])
def test_a_family_that_nobody_has_looked_at_says_what_transformers_says(make, tmp_path):
    tiny = make()
    plain = Shown(TinyVision(copy.deepcopy(tiny.model), tiny.processor, tiny.mark), None)
    trainer = trainer_of("sft", "llava", tmp_path, **given(tiny))
    plain.family = trainer.vision.family
    assert plain.family.is_found
    samples = [trainer.train_dataset[number][0] for number in range(4)]
    batch = trainer.data_collator([(sample,) for sample in samples])
    with torch.no_grad():
        found = trainer.score(trainer.model.eval(), batch, ()).logps
        plain.pictures = {
            image.key: trainer.pixels.source(image)[0].rgb() for sample in samples for image in sample.images
        }
        wanted = torch.cat([plain.own_logps(sample) for sample in samples])
    assert (found - wanted).abs().max() < 1e-6
    trainer.train()


@pytest.mark.parametrize("make", [vip_llava, aya])
def test_it_writes_after_images(make, tmp_path):
    prompts = [{"prompt": prompt} for prompt, _, _ in chats()[:4]]
    options = {"num_generations": 2, "max_completion_length": 4, "per_device_train_batch_size": 8, "reward_workers": 0}
    tiny = make(dtype=torch.float32)
    trainer = trainer_of(
        "grpo", "llava", tmp_path, torch.float32, train_dataset=prompts, reward_funcs=checksum, **given(tiny), **options
    )
    assert isinstance(trainer.engine, TransformersEngine)
    trainer.train()


def test_from_a_folder_its_parts_are_found_without_its_weights(tmp_path):
    tiny = vip_llava(dtype=torch.float32)
    folder = tmp_path / "model"
    tiny.model.save_pretrained(folder)
    tiny.processor.save_pretrained(folder)
    trainer = trainer_of("sft", "llava", tmp_path, torch.float32, model=str(folder), processing_class=None)
    family = trainer.vision.family
    assert (family.tower, family.projectors) == ("model.vision_tower", ("model.multi_modal_projector",))
    assert family.language_models == ("model.language_model", "lm_head")
    trainer.train()
    trainer.save_model()
    assert (tmp_path / "run" / "processor_config.json").exists()


REFUSED = {
    "qwen2_5_vl": "have several axes",
    "paligemma": "also returns labels, token_type_ids",
}


@pytest.mark.parametrize("family", REFUSED)
@pytest.mark.usefixtures("empty_table")
def test_what_does_not_follow_the_conventions_is_trained_on_texts_alone(family, tmp_path, caplog):
    texts = [{"text": f"It is {number}."} for number in range(4)]
    trainer = trainer_of("sft", family, tmp_path, torch.float32, train_dataset=texts)
    assert trainer.vision is None
    assert REFUSED[family] in caplog.text
    trainer.train()
    with pytest.raises(BadRowsError, match="the model reads text only: choose one that sees images"):
        trainer_of("sft", family, tmp_path, torch.float32)


@pytest.mark.usefixtures("empty_table")
def test_a_model_that_cannot_be_shown_images_so_is_refused_when_it_is_loaded(tmp_path):
    with pytest.raises(ValueError, match="cannot be trained on images: shown one, it ends with ValueError"):
        trainer_of("sft", "idefics3", tmp_path, torch.float32)


@pytest.mark.usefixtures("empty_table")
def test_a_model_that_does_not_look_is_refused(tmp_path):
    tiny = vision_model("llava")
    with torch.no_grad():
        for parameter in tiny.model.model.multi_modal_projector.parameters():
            parameter.zero_()
    with pytest.raises(ValueError, match="does not see its images: another image changes none of its answers"):
        trainer_of("sft", "llava", tmp_path, torch.float32, **given(tiny))


@pytest.mark.usefixtures("empty_table")
def test_texts_alone_leave_the_tower_as_it_is(tmp_path: Path):
    texts = [{"text": f"It is {number}."} for number in range(4)]
    trainer = trainer_of("sft", "llava", tmp_path, torch.float32, train_dataset=texts)
    assert trainer.loaded.layout != PADDED
    assert not any(parameter.requires_grad for parameter in trainer.model.model.vision_tower.parameters())
    trainer.train()
    assert len(rows_of("sft")) == 5
