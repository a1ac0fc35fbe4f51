"""PAPO: what is hidden of a picture, what is compared, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from posttrain import PAPOConfig
from posttrain.data.vision.masking import MASKS, PictureMask
from posttrain.losses.perception import perception
from tests import tiny
from tests.losses.policy_oracle import token_batch
from tests.tiny_vision import images
from tests.trainer.resumable_run import checksum
from tests.trainer.vision_runs import chats, trainer_of

ONLINE = {"num_generations": 2, "max_completion_length": 4, "per_device_train_batch_size": 8, "reward_workers": 0}


# ---- masks ---------------------------------------------------------------------------------------------------------------


@given(
    st.sampled_from(sorted(MASKS)), st.integers(1, 500), st.integers(1, 500), st.floats(0.05, 0.95), st.integers(0, 2**63)
)  # fmt: skip
def test_the_same_draw_hides_the_same_share(kind, height, width, ratio, draw):
    mask = PictureMask(kind, ratio)
    hidden = mask.hidden(height, width, draw)
    assert hidden.shape == (height, width)
    assert np.array_equal(hidden, mask.hidden(height, width, draw))
    if kind != "random" and min(height, width) >= 160:  # cells at the edges are cut
        assert abs(hidden.mean() - ratio) < 0.12
    if kind == "random" and hidden.size > 10_000 and min(height, width) > 60:
        assert abs(hidden.mean() - ratio) < 0.05


@pytest.mark.parametrize("kind", MASKS)
def test_what_is_hidden_is_black_and_the_picture_is_left_as_it_is(kind):
    (picture,) = images((120, 90))
    before, mask = np.array(picture), PictureMask(kind, 0.4)
    masked, hidden = np.array(mask(picture, 7)), mask.hidden(120, 90, 7)
    assert not masked[hidden].any()
    assert np.array_equal(masked[~hidden], before[~hidden])
    assert np.array_equal(np.array(picture), before)
    assert not np.array_equal(masked, np.array(mask(picture, 8)))


def test_a_grid_is_even():
    """No row of squares is much more hidden than another."""
    hidden = PictureMask("grid", 0.3).hidden(320, 320, 3)[::20, ::20]
    assert hidden.shape == (16, 16)
    assert {int(row.sum()) for row in hidden} <= {4, 5}


# ---- the loss ------------------------------------------------------------------------------------------------------------


def test_the_divergence_is_bounded_and_completions_without_pictures_have_no_part(tmp_path):
    batch = token_batch([2, 2])
    logps, masked = torch.tensor([-1.0, -1.0, -1.0, -1.0]), torch.tensor([-1.5, -9.0, -9.0, -1.5])
    logps.requires_grad_()
    entropies = torch.ones(4), torch.full((4,), 2.0)
    args = PAPOConfig(output_dir=str(tmp_path), use_cpu=True, loss_type="dapo")
    made = perception(batch, (logps, masked), entropies, torch.tensor([1.0, 1.0, 0.0, 0.0]), args)
    (term,) = made.terms
    k3 = np.exp(-0.5) + 0.5 - 1
    assert term.values.tolist() == pytest.approx([-0.1 * k3 + 0.09, -0.1 * 0.2 + 0.09, 0, 0], rel=1e-5)
    term.values.sum().backward()
    assert logps.grad.tolist() == pytest.approx([-0.1 * (1 - np.exp(-0.5)), 0, 0, 0], rel=1e-5)
    assert made.metrics["perception/kl"].tolist() == pytest.approx([k3, np.exp(-8) + 8 - 1], rel=1e-5)


# ---- runs ----------------------------------------------------------------------------------------------------------------


def test_completions_of_a_prompt_share_masks_and_the_picture_s_own_pixels_stay(tmp_path):
    prompts = [{"prompt": prompt} for prompt, _, _ in chats()[:4]]
    trainer = trainer_of(
        "papo", "llava", tmp_path, torch.float32, train_dataset=prompts, reward_funcs=checksum, **ONLINE
    )
    window = [unit[0] for unit in trainer.get_train_dataloader().source.next_window()]
    draws = {}
    for sample in window:
        assert sample.twin.input_ids.tolist() == sample.input_ids.tolist()
        assert sample.scalars["shows_images"] == bool(sample.images)
        assert all(image.draw is None for image in sample.images)
        draws.setdefault(sample.group, set()).add(tuple(image.draw for image in sample.twin.images))
    assert all(len(of_group) == 1 for of_group in draws.values())
    assert len(set().union(*draws.values())) == 4  # row 0 and row 3 show one picture, hidden otherwise
    batch = trainer.data_collator([(next(sample for sample in window if sample.images),)])
    plain = batch.images.encoder["pixel_values"].clone()
    trainer.score(trainer.model, batch, ())
    assert torch.equal(batch.images.encoder["pixel_values"], plain)
    assert not torch.equal(batch.twin.images.encoder["pixel_values"], plain)


def test_evaluation_has_a_loss_and_its_perception(tmp_path):
    prompts = [{"prompt": prompt} for prompt, _, _ in chats()[:4]]
    data = {"train_dataset": prompts, "eval_dataset": prompts[:2], "reward_funcs": checksum}
    trainer = trainer_of("papo", "llava", tmp_path, torch.float32, **data, **ONLINE, per_device_eval_batch_size=4)
    found = trainer.evaluate()
    assert found["eval_perception/kl"] > 0
    assert np.isfinite(found["eval_loss"])


@pytest.mark.parametrize("sees", [True, False])
def test_rows_without_any_image_are_refused(sees, tmp_path):
    rows = {"train_dataset": [{"prompt": "Hello?"}] * 4, "reward_funcs": checksum}
    if not sees:
        rows |= {"model": tiny.causal_lm(), "processing_class": tiny.tokenizer()}
    with pytest.raises(ValueError, match="No row of the train dataset has an image, and PAPO compares"):
        trainer_of("papo", "llava", tmp_path, torch.float32, **rows, **ONLINE)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"mask_type": "blur"}, "`mask_type`"),
        ({"mask_ratio": 0.0}, "`mask_ratio`"),
        ({"mask_ratio": 1.5}, "`mask_ratio`"),
        ({"der_loss_weight1": -0.1}, "`der_loss_weight1`"),
        ({"perception_loss_weight": 0.0, "der_loss_weight2": 0.0}, "looked at for nothing"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, sentence, tmp_path):
    with pytest.raises(ValueError, match=sentence):
        PAPOConfig(output_dir=str(tmp_path), use_cpu=True, **options)


def test_defaults_are_trl_s(tmp_path):
    made = PAPOConfig(output_dir=str(tmp_path), use_cpu=True)
    assert (made.perception_loss_weight, made.mask_ratio, made.mask_type) == (0.1, 0.3, "random")
    assert (made.der_loss_weight1, made.der_loss_weight2) == (0.03, 0.03)
