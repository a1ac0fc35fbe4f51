"""Augmented images in training: drawn anew in every epoch, the same whoever loads them and after a resume; never in evaluation."""

from __future__ import annotations

import sys

import datasets
import pytest
import torch

from posttrain.methods.table import METHODS
from tests.trainer.vision_runs import PICTURES, rows_of, trainer_of

FAMILIES = ("qwen2_5_vl", "llava_next", "smolvlm", "gemma3")


def _pixels(trainer, epoch=0, **options):
    """Bytes of the encoder's arguments of an epoch's batches, and how many spans they show."""
    for name, value in options.items():
        setattr(trainer.args, name, value)
    loader = trainer.get_train_dataloader()
    loader.set_epoch(epoch)
    return [
        [argument.numpy().tobytes() for argument in batch.images.encoder.values()] for batch in loader if batch.images
    ]


@pytest.mark.parametrize("method", ["sft", "dpo", "kto"])
def test_training_images_are_drawn_anew_in_every_epoch_and_others_never(method, tmp_path):
    options = {"per_device_train_batch_size": 5, "eval_strategy": "no", "train_sampling_strategy": "sequential"}
    rows = rows_of(method)
    trainer = trainer_of(method, "llava_next", tmp_path, image_augmentation="light", eval_dataset=rows, **options)
    plain = _pixels(trainer_of(method, "llava_next", tmp_path, **options))
    first, second = _pixels(trainer, 0), _pixels(trainer, 1)
    assert first != plain
    assert first != second
    # Rows show their own draws.
    assert [[*map(len, batch)] for batch in first] >= [[*map(len, batch)] for batch in plain]
    assert _pixels(trainer, 0) == first
    assert _pixels(trainer, 1, dataloader_num_workers=2, dataloader_persistent_workers=True) == second
    trainer.args.dataloader_num_workers, trainer.args.dataloader_persistent_workers = 0, False
    trainer.args.per_device_eval_batch_size = 5
    seen = [[a.numpy().tobytes() for a in b.images.encoder.values()] for b in trainer.get_eval_dataloader() if b.images]
    assert seen == plain


def test_both_sides_of_a_pair_show_one_draw_of_their_image(tmp_path):
    trainer = trainer_of("dpo", "llava_next", tmp_path, image_augmentation="light", per_device_train_batch_size=1)
    for batch in trainer.get_train_dataloader():
        if batch.images and batch.rows[0] == 0:
            assert len(batch.images.tiles) == 1
            assert set(batch.images.shown) == {0}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_resumed_run_draws_what_the_whole_run_did(family, tmp_path):
    options = {
        "image_augmentation": "light",
        "max_steps": 6,
        "save_strategy": "steps",
        "save_steps": 2,
        "learning_rate": 1e-2,
    }
    whole = trainer_of("sft", family, tmp_path, **options)
    whole.train()
    folder = str(tmp_path / "run" / "checkpoint-4")  # in the second epoch
    resumed = trainer_of("sft", family, tmp_path, dataloader_num_workers=1, **options)
    resumed.train(resume_from_checkpoint=folder)
    for (name, one), other in zip(whole.model.named_parameters(), resumed.model.parameters()):
        assert torch.equal(one, other), name
    plain = trainer_of("sft", family, tmp_path, **options | {"image_augmentation": "document"})
    with pytest.raises(ValueError, match="image_augmentation"):
        plain.train(resume_from_checkpoint=folder)


def test_a_resume_is_refused_when_the_function_behind_an_import_path_was_edited(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    options = {"image_augmentation": "edited_turns:turn", "max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    for angle in (5, 15):
        (tmp_path / "edited_turns.py").write_text(f"def turn(picture):\n    return picture.rotate({angle})\n")
        sys.modules.pop("edited_turns", None)
        trainer = trainer_of("sft", "llava", tmp_path, **options)
        if angle == 5:
            trainer.train()
    with pytest.raises(ValueError, match=r"image_augmentation: 'edited_turns:turn \w+' -> 'edited_turns:turn \w+'"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))


def test_a_picture_that_cannot_be_augmented_is_named_whatever_bad_rows_are(tmp_path):
    crop = [{"name": "RandomCrop", "size": 500}]
    trainer = trainer_of("sft", "llava", tmp_path, image_augmentation=crop, on_bad_rows="drop")
    with pytest.raises(ValueError, match=r"^train, row \d, column '\w+': .*`image_augmentation`: .*RandomCrop"):
        list(trainer.get_train_dataloader())


def test_augmentation_is_refused_where_it_would_be_wrong(tmp_path):
    with pytest.raises(ValueError, match="keeps the reference's numbers about plain images"):
        trainer_of("dpo", "llava_next", tmp_path, image_augmentation="light", precompute_ref_log_probs=True)
    rows = [row | {"ref_chosen_logps": -1.0, "ref_rejected_logps": -2.0} for row in rows_of("dpo")]
    with pytest.raises(ValueError, match="`image_augmentation` cannot go with them"):
        trainer_of("dpo", "llava_next", tmp_path, image_augmentation="light", train_dataset=rows)
    with pytest.raises(ValueError, match=r"image_augmentation.*one and the same picture"):
        METHODS["grpo"].config_class(output_dir=str(tmp_path), image_augmentation="light", report_to="none")


def test_images_of_a_stream_are_drawn_by_epoch_without_a_thread(tmp_path):
    rows = datasets.Dataset.from_list(
        [
            {"images": [picture], "prompt": f"<image>What is {i}?", "completion": f" It is {i}."}
            for i, picture in enumerate(PICTURES)
        ],
        features=datasets.Features(
            images=datasets.List(datasets.Image()), prompt=datasets.Value("string"), completion=datasets.Value("string")
        ),
    )
    trainer = trainer_of(
        "sft", "llava_next", tmp_path, train_dataset=rows.to_iterable_dataset(), image_augmentation="light"
    )
    first, second = _pixels(trainer, 0), _pixels(trainer, 1)
    assert first
    assert first != second
    assert _pixels(trainer, 0) == first
    assert not trainer.get_train_dataloader().dataset.reads_ahead
