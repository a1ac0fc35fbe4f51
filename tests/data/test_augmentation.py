"""Augmentation of images: what is named, sizes, and draws that depend on seed, epoch, row and image alone."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import ImageOps

from posttrain.core.sample import ImageSpan, Sample
from posttrain.data.loader import EpochBatches, UnitLoader
from posttrain.data.vision.augmentation import (
    BUILT_IN,
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
    ([{"name": "RandomRotation", "degree": 5}], "RandomRotation does not take"),
]


@pytest.mark.parametrize(("given_value", "words"), REFUSED)
def test_what_cannot_be_used_is_refused_in_words(given_value, words):
    with pytest.raises(ValueError, match=words.split("; it")[0]) as error:
        augmentation_of(given_value)
    assert "image_augmentation" in str(error.value)
    assert words in str(error.value)


def test_a_result_that_is_not_a_picture_is_refused():
    with pytest.raises(TypeError, match="gave back a ndarray"):
        augmentation_of(not_a_picture)(PICTURE, 0)


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
    raise RuntimeError


def test_the_generators_are_restored_after_an_error():
    torch.manual_seed(0)
    state = torch.get_rng_state()
    with pytest.raises(RuntimeError):
        augmentation_of(draws_and_fails)(PICTURE, 3)
    assert torch.equal(torch.get_rng_state(), state)
