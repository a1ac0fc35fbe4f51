"""M-RoPE positions: by hand, and equal to what the models of three families compute."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.core.sample import Sample
from posttrain.data.vision.positions import image_positions
from tests.tiny_vision import QWEN, model_alone

MERGE = 2
GRIDS = st.tuples(st.just(1), *[st.integers(1, 6).map(lambda side: side * MERGE)] * 2)
# Texts before each image, and the image; templates write a control token on both sides of it, so texts are never empty.
PARTS = st.lists(st.tuples(st.integers(1, 9), GRIDS), max_size=4)
Parts = list[tuple[int, tuple[int, int, int]]]


def placeholders(grid: tuple[int, ...]) -> int:
    return int(np.prod(grid)) // MERGE**2


def row(parts: Parts, tail: int) -> np.ndarray:
    starts, tokens = [], 0
    for text, grid in parts:
        starts.append(tokens + text)
        tokens += text + placeholders(grid)
    return image_positions(tokens + tail, starts, [grid for _, grid in parts], MERGE)


@cache
def body(family: str) -> Any:
    return model_alone(family).model


def by_the_model(family: str, parts: Parts, tail: int, left: int = 0) -> np.ndarray:
    """`get_rope_index` of the model, in a row that is padded on the left."""
    types = [0] * left
    for text, grid in parts:
        types += [0] * text + [1] * placeholders(grid)
    token_types = torch.tensor([types + [0] * tail])
    grids = torch.tensor([grid for _, grid in parts]) if parts else None
    mask = (torch.arange(token_types.shape[1]) >= left).long()[None]
    positions, _ = body(family).get_rope_index(token_types, token_types, image_grid_thw=grids, attention_mask=mask)
    return positions[:, 0, left:].numpy()


def test_one_image_by_hand() -> None:
    """Two tokens of text, an image of 2 x 3 placeholders, two tokens of text."""
    expected = [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6],
    ]
    positions = image_positions(10, [2], [(1, 4, 6)], 2)
    assert positions.tolist() == expected
    assert positions.dtype == np.int32


def test_what_follows_begins_behind_the_largest_position_and_not_at_the_length() -> None:
    prompt = image_positions(8, [2], [(1, 4, 6)], 2)
    assert sample(prompt).append([0] * 3, True).positions[:, 8:].tolist() == [[5, 6, 7]] * 3
    assert sample(image_positions(4, [], [], 2)).append([0] * 2, True).positions.tolist() == [[0, 1, 2, 3, 4, 5]] * 3
    assert sample(np.empty((3, 0), np.int32)).append([0] * 2, True).positions.tolist() == [[0, 1]] * 3
    assert Sample([1, 2], [0, 0]).append([3], True).positions is None


def sample(positions: np.ndarray) -> Sample:
    tokens = positions.shape[1]
    return Sample(np.zeros(tokens), np.zeros(tokens), positions=positions)


@pytest.mark.parametrize("starts", [[3, 4], [5], [7]])
def test_images_that_overlap_or_reach_beyond_the_row_are_refused(starts: list[int]) -> None:
    with pytest.raises(ValueError, match="does not lie between"):
        image_positions(8, starts, [(1, 4, 4)] * len(starts), 2)


@pytest.mark.parametrize("family", QWEN)
@settings(max_examples=40)
@given(parts=PARTS, tail=st.integers(1, 9), left=st.integers(0, 3))
def test_positions_equal_the_models(family: str, parts: Parts, tail: int, left: int) -> None:
    assert (row(parts, tail) == by_the_model(family, parts, tail, left)).all()


@pytest.mark.parametrize("family", QWEN)
@settings(max_examples=25)
@given(prompt=PARTS, written=st.integers(1, 9), more=PARTS, tail=st.integers(1, 9))
def test_rows_that_grow_equal_rows_at_once(family: str, prompt: Parts, written: int, more: Parts, tail: int) -> None:
    """A prompt, a completion, and what a tool returned, with images of its own."""
    written_to = sample(row(prompt, 1)).append([0] * written, True)
    answered = row(more, tail)
    grown = written_to.append([0] * answered.shape[1], False, positions=answered).positions
    first, rest = (more[0][0], more[1:]) if more else (0, [])
    joined = [*prompt, (1 + written + first, more[0][1]), *rest] if more else prompt
    assert (grown == by_the_model(family, joined, tail if more else 1 + written + tail)).all()


@pytest.mark.slow
@pytest.mark.parametrize("family", QWEN)
@settings(max_examples=1000)
@given(parts=PARTS, tail=st.integers(1, 9), left=st.integers(0, 3))
def test_a_thousand_rows_equal_the_models(family: str, parts: Parts, tail: int, left: int) -> None:
    assert (row(parts, tail) == by_the_model(family, parts, tail, left)).all()
