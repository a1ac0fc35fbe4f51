"""Features of images: picked in order, counted, and made by a tower that gets nothing meant for the text."""

from __future__ import annotations

import copy
import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

from posttrain.core.batch import PADDED, RAGGED, BatchImages, TokenBatch
from posttrain.data.vision.families import FAMILIES as TABLE
from posttrain.models.attention.image_blocks import ImageBlocks
from posttrain.models.attention.ragged import segment_attention
from posttrain.models.load.model import LoadOptions, load_model
from posttrain.models.scoring.token_scores import score_tokens
from posttrain.models.vision import features, tower
from posttrain.models.vision.features import family_of, image_features, pick, set_family
from posttrain.models.vision.tower import TOWER_ATTENTION, install_tower_attention
from tests.tiny_vision import FAMILIES, QWEN, images, model_alone
from tests.vision_samples import RAGGED_FAMILIES, Shown, repeated_images


def loaded(family: str, dtype: torch.dtype = torch.float64, **options: Any) -> Shown:
    shown = Shown.of(family, dtype)
    load_model(shown.tiny.model, LoadOptions(dtype, vision=shown.family, **options))
    return shown


def with_other_images(batch: TokenBatch, **changes: Any) -> TokenBatch:
    return replace(batch, images=replace(batch.images, **changes))


@pytest.mark.parametrize("family", FAMILIES)
def test_placeholders_that_were_cut_are_refused_before_the_text_is_read(family: str) -> None:
    """Idefics3 and SmolVLM would give what is left over to the next image, or to the next row."""
    shown = loaded(family)
    first, second = images((60, 40), (30, 90))
    batch = shown.batch([(shown.sample("a", first, "b", second),)], PADDED)
    cut = (batch.images.placeholders[0] - 1, batch.images.placeholders[1])
    with pytest.raises(ValueError, match=f"place 0, whose placeholders are {cut[0]}"):
        score_tokens(shown.tiny.model, with_other_images(batch, placeholders=cut))


def test_an_image_that_the_model_takes_for_padding_is_refused() -> None:
    """SmolVLM drops tiles whose pixels are all zero."""
    shown = loaded("smolvlm")
    first, second = images((60, 40), (30, 90))
    batch = shown.batch([(shown.sample("a", first, "b", second),)])
    pixels = batch.images.encoder["pixel_values"].clone()
    pixels[:, : batch.images.tiles[0]] = 0
    dark = with_other_images(batch, encoder=batch.images.encoder | {"pixel_values": pixels})
    with pytest.raises(ValueError, match="tiles were encoded, and the batch has"):
        score_tokens(shown.tiny.model, dark)


@pytest.mark.parametrize("family", QWEN)
def test_positions_of_one_axis_are_refused_with_images(family: str) -> None:
    """Models accept them, and log-probs move: images would have no rows."""
    shown = loaded(family)
    batch = shown.batch([(shown.sample("a", *images((60, 40)), "b"),)])
    assert batch.position_ids.shape[0] == 4
    with pytest.raises(ValueError, match=r"Sample\.positions"):
        score_tokens(shown.tiny.model, replace(batch, position_ids=batch.position_ids[0]))


def test_a_model_that_was_loaded_for_texts_refuses_images() -> None:
    shown = Shown.of("llava", torch.float32)
    load_model(shown.tiny.model, LoadOptions())
    with pytest.raises(ValueError, match="loaded for texts only"):
        score_tokens(shown.tiny.model, shown.batch([(shown.sample("a", *images((60, 40))),)]))


def test_an_old_transformers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Shown.of("llava", torch.float32)
    monkeypatch.setattr(features, "installed_transformers", "5.17.2")
    with pytest.raises(ImportError, match=r'pip install "posttrain\[vision\]"'):
        set_family(shown.tiny.model, shown.family)


def test_a_copy_knows_its_family_and_deltas_of_another_batch_are_forgotten() -> None:
    shown = Shown.of("qwen2_5_vl", torch.float32)
    shown.tiny.logits(*images((60, 40)))
    assert shown.tiny.model.model.rope_deltas is not None
    load_model(shown.tiny.model, LoadOptions(vision=shown.family))
    assert shown.tiny.model.model.rope_deltas is None
    assert family_of(copy.deepcopy(shown.tiny.model)) == shown.family


@pytest.mark.parametrize("family", RAGGED_FAMILIES)
def test_nothing_meant_for_the_text_reaches_the_tower(family: str) -> None:
    shown, given = loaded(family, layout=RAGGED), []
    module = shown.tiny.model.get_submodule(shown.family.tower)
    module.register_forward_pre_hook(lambda _, args, kwargs: given.append(set(kwargs)), with_kwargs=True)
    score_tokens(shown.tiny.model, shown.batch(repeated_images(shown), "shared"))
    (names,) = given
    own = {"pixel_values", "grid_thw", "patch_attention_mask", "return_dict", "output_hidden_states"}
    assert names <= own, names - own


@pytest.mark.parametrize("family", QWEN)
def test_one_call_of_a_towers_attention_per_layer(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers calls it once for every image, and every window of Qwen2.5-VL."""
    shown = Shown.of(family)
    model = shown.tiny.model
    set_family(model, shown.family)
    batch = shown.batch([(shown.sample(*images((60, 40), (112, 112), (30, 90)), "?"),)])
    sdpa, ours = [], []
    own = transformers.AttentionInterface()["sdpa"]
    monkeypatch.setitem(
        transformers.AttentionInterface._global_mapping, "sdpa", lambda *a, **k: sdpa.append(1) or own(*a, **k)
    )
    theirs = image_features(model, batch.images)
    single = tower.tower_attention
    monkeypatch.setattr(tower, "tower_attention", lambda *a, **k: ours.append(1) or single(*a, **k))
    before = len(sdpa)
    assert install_tower_attention(model, shown.family)
    assert model.config.vision_config._attn_implementation == TOWER_ATTENTION
    assert model.config.text_config._attn_implementation == "sdpa"
    mine = image_features(model, batch.images)
    assert (len(ours), len(sdpa) - before) == (2, 0)
    assert before >= 6
    assert all(torch.equal(one, other) for one, other in zip(mine.pooler_output, theirs.pooler_output, strict=True))


def test_towers_of_one_size_keep_their_attention() -> None:
    shown = Shown.of("llava", torch.float32)
    assert not install_tower_attention(shown.tiny.model, shown.family)
    assert shown.tiny.model.config.vision_config._attn_implementation == "sdpa"


def test_features_that_are_shown_once_in_order_are_not_copied() -> None:
    shown = loaded("internvl")
    made = torch.randn(3, 4, 8)
    once = BatchImages({}, (1, 2), (0, 1), (4, 8))
    assert pick(made, once, shown.family) is made
    again = pick(made, replace(once, shown=(1, 0, 1), placeholders=(8, 4, 8)), shown.family)
    assert torch.equal(again, torch.cat([made[1:], made[:1], made[1:]]))


@pytest.mark.parametrize("window", [None, 3])
def test_images_see_themselves_whole_in_ragged_segments(window: int | None) -> None:
    """Causal and within the window, or of one image: by a mask made by hand. A number is nobody's in two segments."""
    torch.manual_seed(0)
    lengths, blocks = (7, 5), torch.tensor([-1, 0, 0, 0, 0, -1, -1, 1, 1, -1, 2, 2])
    q, k, v = (torch.randn(1, heads, 12, 8, dtype=torch.float64) for heads in (4, 2, 2))
    bounds = torch.tensor([0, 7, 12], dtype=torch.int32)
    mine = segment_attention(
        q, k, v, bounds, 7, None, sliding_window=window, image_blocks=ImageBlocks.of(blocks, bounds)
    )
    seen = torch.zeros(12, 12, dtype=torch.bool)
    segment = [number for number, length in enumerate(lengths) for _ in range(length)]
    for i in range(12):
        for j in range(12):
            causal = j <= i and (window is None or i - j < window)
            whole = blocks[i] == blocks[j] and blocks[i] >= 0
            seen[i, j] = segment[i] == segment[j] and (causal or bool(whole))
    theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
    assert (mine - theirs.transpose(1, 2)).abs().max() < 1e-12
    plain = segment_attention(q, k, v, bounds, 7, None, sliding_window=window)
    assert (mine - plain).abs().max() > 1e-2


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_called_of_transformers_is_there(name: str) -> None:
    """An upgrade that moves one of these seams fails here, by its name."""
    model = model_alone(name)
    family, body = TABLE[name], getattr(model, model.base_model_prefix)
    encoder = inspect.signature(body.get_image_features).parameters
    assert set(family.forward_keys) <= set(encoder)
    assert "mm_encoder_outputs" in inspect.signature(body.forward).parameters
    assert family.token_types_key in (None, *inspect.signature(body.forward).parameters)
    assert {"text_config", "vision_config"} <= set(model.config.sub_configs)
    assert model._no_split_modules
    assert model.get_decoder() is model.get_submodule(family.language_models[0])
