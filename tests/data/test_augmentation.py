"""Augmentation of images: what is named, sizes, and draws that depend on seed, epoch, row and image alone."""

from __future__ import annotations

import importlib
import pickle
import random
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import ImageEnhance, ImageFilter, ImageOps

from posttrain.core.sample import ImageSpan, Sample
from posttrain.data.loader import EpochBatches, UnitLoader
from posttrain.data.vision.augmentation import (
    BUILT_IN,
    AugmentationError,
    DrawnBatches,
    DrawnRows,
    DrawnStream,
    augmentation_of,
    described,
)
from tests.tiny_vision import images

PICTURE = images((24, 36), seed=3)[0]


def brighter(picture):
    """Draws from all generators that a function may know."""
    shift = random.random() + float(np.random.rand()) + float(torch.rand(()))
    return picture.point(lambda value: int(value * shift / 3))


def half(picture):
    return ImageOps.scale(picture, 0.5).convert("L")


def not_a_picture(picture):
    return np.asarray(picture)


@pytest.mark.parametrize(
    "named", [*BUILT_IN, f"{__name__}:brighter", brighter, [{"name": "RandomRotation", "degrees": 30}]]
)
def test_a_draw_decides_everything_and_leaves_no_trace(named):
    augment = augmentation_of(named)
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    state = torch.get_rng_state(), random.getstate(), np.random.get_state()[1]
    first = augment(PICTURE, 7).tobytes()
    assert torch.equal(torch.get_rng_state(), state[0])
    assert random.getstate() == state[1]
    assert (np.random.get_state()[1] == state[2]).all()
    torch.rand(3), random.random(), np.random.rand()
    assert augment(PICTURE, 7).tobytes() == first
    assert len({augment(PICTURE, draw).tobytes() for draw in range(6)}) > 1
    assert PICTURE.tobytes() == images((24, 36), seed=3)[0].tobytes()


@settings(max_examples=15, deadline=None)
@given(st.sampled_from([*BUILT_IN, half]), st.tuples(st.integers(2, 70), st.integers(2, 70)), st.integers(0, 2**63 - 1))
def test_the_size_is_kept(named, size, draw):
    (picture,) = images(size)
    made = augmentation_of(named)(picture, draw)
    assert (made.size, made.mode) == (picture.size, "RGB")


def test_a_transform_of_torchvision_is_taken_as_it_is():
    from torchvision.transforms import v2

    flip = v2.Compose([v2.RandomHorizontalFlip(1.0), v2.ToDtype(torch.float32, scale=True)])
    assert augmentation_of(flip)(PICTURE, 0).tobytes() == ImageOps.mirror(PICTURE).tobytes()
    assert "0x" not in described(flip)


REFUSED = [
    ("lightt", "'lightt'; it takes one of light, geometric, document"),
    ("no_such_module:f", "cannot be imported"),
    (f"{__name__}:nothing", "cannot be imported"),
    (f"{__name__}:PICTURE", "must be a function"),
    (5, "is 5; it takes"),
    (lambda picture: picture, "cannot be pickled"),
    ([{"name": "RandomRotatio", "degrees": 5}], "must be a transform of torchvision"),
    ([{"degrees": 5}], "must be a transform of torchvision"),
    ([{"name": "functional"}], "must be a transform of torchvision"),
    ([{"name": "ImageChops.invert"}], "or of Pillow's ImageOps, ImageFilter, ImageEnhance"),
    ([{"name": "ImageOps._lut"}], "or of Pillow's"),
    ([{"name": "ImageOps.functools"}], "or of Pillow's"),
    ([{"name": "ImageOps.Protocol"}], "or of Pillow's"),
    ([{"name": "RandomApply", "transforms": [{"name": "RandomRotatio"}]}], "has the entry {'name': 'RandomRotatio'}"),
    ([{"name": "RandomRotation", "degree": 5}], "RandomRotation does not take"),
]


@pytest.mark.parametrize(("given_value", "words"), REFUSED)
def test_what_cannot_be_used_is_refused_in_words(given_value, words):
    with pytest.raises(ValueError, match=words.split("; it")[0]) as error:
        augmentation_of(given_value)
    assert "image_augmentation" in str(error.value)
    assert words in str(error.value)


def test_a_result_that_is_not_a_picture_is_refused():
    with pytest.raises(AugmentationError, match=r"`image_augmentation`: not_a_picture gave back a ndarray"):
        augmentation_of(not_a_picture).try_out()


def named(name, **options):
    return {"name": name, **options}


def test_transforms_of_pillow_are_found_by_name():
    """With lists where Pillow wants tuples, and before and after those of torchvision."""
    listed = [
        named("ImageOps.autocontrast", cutoff=[2, 3]),
        named("ImageFilter.GaussianBlur", radius=1),
        named("ImageEnhance.Contrast", factor=1.2),
    ]
    expected = ImageOps.autocontrast(PICTURE, (2, 3)).filter(ImageFilter.GaussianBlur(1))
    expected = ImageEnhance.Contrast(expected).enhance(1.2)
    assert augmentation_of(listed)(PICTURE, 0).tobytes() == expected.tobytes()
    mixed = [named("RandomHorizontalFlip", p=1.0), *listed, named("RandomVerticalFlip", p=1.0)]
    assert augmentation_of(mixed)(PICTURE, 0).tobytes() == ImageOps.flip(ImageOps.mirror(expected)).tobytes()


def test_grey_pictures_may_stand_between_entries():
    """`colorize` takes no others."""
    listed = [named("ImageOps.grayscale"), named("ImageOps.colorize", black="red", white="white")]
    expected = ImageOps.colorize(PICTURE.convert("L"), "red", "white").tobytes()
    assert augmentation_of(listed)(PICTURE, 0).tobytes() == expected
    assert augmentation_of([named("Identity"), *listed])(PICTURE, 0).tobytes() == expected


def test_floats_that_are_a_little_over_do_not_begin_again_at_black():
    white = ImageOps.colorize(PICTURE.convert("L"), "white", "white")
    noisy = augmentation_of([named("ConvertImageDtype"), named("GaussianNoise", sigma=0.05, clip=False)])(white, 0)
    assert np.asarray(noisy).min() > 180


def test_entries_may_have_entries():
    """Which are drawn, and can be sent to the workers of a loader."""
    inner = [named("RandomRotation", degrees=[90, 90]), named("RandomOrder", transforms=[named("ImageOps.invert")])]
    augment = augmentation_of([named("RandomApply", p=0.5, transforms=inner)])
    turned = ImageOps.invert(PICTURE.rotate(90, fillcolor=0)).tobytes()
    found = [pickle.loads(pickle.dumps(augment))(PICTURE, draw).tobytes() for draw in range(12)]
    assert {*found} == {turned, PICTURE.tobytes()}


def test_pillow_is_enough_for_transforms_of_pillow(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision.transforms", None)
    made = augmentation_of([named("ImageOps.grayscale"), named("ImageOps.mirror")])
    made.try_out()
    assert made(PICTURE, 0).tobytes() == ImageOps.mirror(PICTURE.convert("L")).convert("RGB").tobytes()
    for given_value in ("light", [named("ImageOps.mirror"), named("RandomRotation", degrees=5)]):
        with pytest.raises(ValueError, match=r"`image_augmentation` names transforms of torchvision, which cannot be"):
            augmentation_of(given_value)


UNUSABLE = [
    (
        named("RandomCrop", size=5000),
        r"'size': 5000\} cannot be applied to a picture of 3072 x 4096 .*Required crop size",
    ),
    (named("Normalize", mean=[0.5], std=[0.5]), "'Normalize'.*should be a float tensor"),
    (named("RandomApply", transforms=[named("Normalize", mean=[0.5], std=[0.5])]), "'RandomApply'.*float tensor"),
    (named("FiveCrop", size=5), "'FiveCrop', 'size': 5} gave back a tuple"),
    (named("ImageOps.autocontrast", cutof=2), "unexpected keyword argument 'cutof'"),
    (named("ImageOps.exif_transpose", in_place=True), "gave back a NoneType"),
]


@pytest.mark.parametrize(("entry", "words"), UNUSABLE, ids=lambda one: one.get("name") if isinstance(one, dict) else "")
def test_what_cannot_be_applied_is_refused_when_it_is_tried(entry, words):
    with pytest.raises(AugmentationError, match=f"`image_augmentation`: .*{words}"):
        augmentation_of([named("RandomGrayscale"), entry]).try_out()


def test_a_crop_that_large_pictures_have_room_for_is_an_error_for_small_ones_alone():
    crop = augmentation_of([named("RandomCrop", size=500)])
    crop.try_out()
    with pytest.raises(
        AugmentationError, match=r"'RandomCrop', 'size': 500\} .* a picture of 24 x 36 \(height x width\)"
    ):
        crop(PICTURE, 0)


def test_normalised_pixels_are_not_taken_for_a_picture():
    """torchvision would show -1 as nearly white."""
    with pytest.raises(AugmentationError, match=r"makes pixels from -1 to 1, .* leave Normalize out"):
        augmentation_of([named("ConvertImageDtype"), named("Normalize", mean=[0.5], std=[0.5])]).try_out()


def test_what_a_function_raises_about_noise_is_said_and_no_error(caplog):
    augmentation_of(draws_and_fails).try_out()
    assert "draws_and_fails cannot be applied" in caplog.text
    assert "It was tried on noise" in caplog.text
    caplog.clear()
    augmentation_of(half).try_out()
    assert caplog.text == ""


class Compose:
    """As albumentations' is called and seeded, with a generator of its own."""

    __module__ = "albumentations.core.composition"

    def __init__(self):
        self.set_random_state(np.random.default_rng(), None)

    def set_random_state(self, random_generator, py_random):
        self.random_generator = random_generator

    def __call__(self, *, image):
        return {"image": self.random_generator.permutation(image)}


def test_transforms_of_albumentations_follow_the_draw(monkeypatch):
    monkeypatch.setattr(pickle, "dumps", repr)  # the class is not where its module says
    augment = augmentation_of(Compose())
    augment.try_out()
    found = [augment(PICTURE, draw).tobytes() for draw in range(3)]
    assert [augment(PICTURE, draw).tobytes() for draw in range(3)] == found
    assert len({*found}) == 3
    monkeypatch.delattr(Compose, "set_random_state")
    monkeypatch.setattr(Compose, "__init__", object.__init__)
    with pytest.raises(
        ValueError, match=r"`image_augmentation` is of a version of albumentations.*install albumentations 2"
    ):
        augmentation_of(Compose())


def test_transforms_of_an_installed_albumentations_follow_the_draw():
    albumentations = pytest.importorskip("albumentations")
    some = [albumentations.CoarseDropout(p=0.5), albumentations.RandomBrightnessContrast(p=0.5)]
    augment = augmentation_of(albumentations.Compose(some))
    found = [augment(PICTURE, draw).tobytes() for draw in range(6)]
    again = pickle.loads(pickle.dumps(augment))
    assert [again(PICTURE, draw).tobytes() for draw in range(6)] == found
    assert len({*found}) > 1
    with pytest.raises(AugmentationError, match="RandomCrop of albumentations cannot be applied"):
        augmentation_of(albumentations.RandomCrop(5000, 5000)).try_out()


def test_an_edited_function_behind_an_import_path_is_described_as_another(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    found = []
    for angle in (5, 15):
        (tmp_path / "edited_pictures.py").write_text(f"def turn(picture):\n    return picture.rotate({angle:3})\n")
        sys.modules.pop("edited_pictures", None)
        importlib.invalidate_caches()
        monkeypatch.setattr(sys, "dont_write_bytecode", True)
        found.append([described("edited_pictures:turn") for _ in range(2)])
    assert found[0][0] == found[0][1] != found[1][0]
    assert found[0][0].startswith("edited_pictures:turn ")


def test_a_function_is_described_by_name_and_source():
    assert described(brighter).startswith(f"{__name__}:brighter ")
    assert described(brighter).split()[1] != described(half).split()[1]
    assert (described("light"), described(None)) == ("light", None)


# ---- draws -----------------------------------------------------------------------------------------------------------------


def span(letter: bytes, start: int) -> ImageSpan:
    return ImageSpan(start, start + 1, letter * 16, (8, 8), (1,))


def pair(row: int) -> tuple[Sample, Sample]:
    """The same image on both sides, at another place and after another one in the second."""
    one = Sample(np.arange(4), np.ones(4), images=(span(b"a", 1),), row=row)
    twin = Sample(np.arange(3), np.ones(3), images=(span(b"a", 0),), row=row)
    other = Sample(np.arange(4), np.ones(4), images=(span(b"b", 0), span(b"a", 2)), row=row, twin=twin)
    return one, other


UNITS = [pair(row) for row in range(12)]


def draws(units) -> list[tuple[int, bytes, int]]:
    return sorted(
        {
            (s.row, image.key, image.draw)
            for unit in units
            for one in unit
            for s in (one, one.twin or one)
            for image in s.images
        }
    )


def epoch_draws(seed=0, epochs=(0, 1), world=1, workers=0, size=2):
    found = {epoch: [] for epoch in epochs}
    for rank in range(world):
        batches = DrawnBatches(EpochBatches(len(UNITS), size, rank=rank, world_size=world, seed=1))
        more = {"num_workers": workers, "persistent_workers": True} if workers else {}
        loader = UnitLoader(DrawnRows(UNITS, seed), batch_sampler=batches, collate_fn=list, **more)
        for epoch in epochs:
            loader.set_epoch(epoch)
            found[epoch] += [unit for batch in loader for unit in batch]
    return {epoch: draws(units) for epoch, units in found.items()}


def test_draws_are_those_of_seed_epoch_row_and_image():
    found = epoch_draws()
    assert len(found[0]) == 2 * len(UNITS)  # one for each image of a row, on both sides and in the twin
    every = [draw for epoch in found for *_, draw in found[epoch]]
    assert len(set(every)) == len(every)
    assert all(0 <= draw < 2**63 for draw in every)
    assert epoch_draws(seed=1)[0] != found[0]
    assert epoch_draws(epochs=(1,))[1] == found[1]  # as a resumed run has it
    assert epoch_draws(world=3, size=1) == found
    assert epoch_draws(workers=2) == found  # workers that outlive an epoch


def test_draws_of_a_stream():
    stream = DrawnStream(UNITS, 0)
    for epoch, expected in epoch_draws().items():
        stream.set_epoch(epoch)
        assert draws(stream) == expected


def draws_and_fails(picture):
    torch.rand(1)
    raise RuntimeError("no such page")


def test_the_generators_are_restored_after_an_error():
    torch.manual_seed(0)
    state = torch.get_rng_state()
    with pytest.raises(
        AugmentationError, match=r"draws_and_fails cannot be .* 24 x 36 .*: RuntimeError: no such page\."
    ):
        augmentation_of(draws_and_fails)(PICTURE, 3)
    assert torch.equal(torch.get_rng_state(), state)
