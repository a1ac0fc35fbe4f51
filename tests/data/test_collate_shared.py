"""The SHARED layout: samples of a unit that begin alike are laid out once up to where they part."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.core.batch import PADDED, RAGGED, SHARED
from posttrain.core.sample import ImageSpan, Sample
from posttrain.data.collate import collate, shared_prefix
from posttrain.data.vision.families import FAMILIES

ROLES = ("chosen", "rejected")


def pair(prompt, chosen, rejected):
    return tuple(Sample.of_text(prompt, answer, row=3) for answer in (chosen, rejected))


def test_a_pair_by_hand():
    """Prompt 7 8 9, answers 1 2 and 3: the prompt lies once, both answers are predicted from its last token."""
    batch = collate([pair([7, 8, 9], [1, 2], [3])], ROLES, SHARED)
    assert batch.input_ids.tolist() == [[7, 8, 9, 1, 2, 3]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 3]]
    assert batch.positions.tolist() == [2, 3, 2]
    assert batch.targets.tolist() == [1, 2, 3]
    assert batch.counts.tolist() == [2, 1]
    assert batch.ends.tolist() == [4, 5]
    assert batch.lengths.tolist() == [5, 4]
    assert batch.num_tokens == 9
    assert batch.cu_segments.tolist() == [0, 3, 5, 6]
    assert batch.prefixes.cu_prefixes.tolist() == [0, 3]
    assert batch.prefixes.cu_continuations.tolist() == [0, 3]
    assert (batch.prefixes.start, batch.prefixes.stop, batch.prefixes.num_prefix_tokens) == (3, 6, 3)


def test_prefixes_come_first_then_what_shares_nothing_then_continuations():
    units = [pair([7, 8], [1], [2, 3]), (Sample.of_text([4], [5]), Sample.of_text([6], [5])), pair([9], [1, 1], [2])]
    batch = collate(units, ROLES, SHARED, pad_token_id=0, pad_to_multiple_of=8)
    assert batch.input_ids.tolist() == [[7, 8, 9, 4, 5, 6, 5, 1, 2, 3, 1, 1, 2, 0, 0, 0]]
    assert batch.cu_segments.tolist() == [0, 2, 3, 5, 7, 8, 10, 12, 13, 16]
    assert (batch.prefixes.start, batch.prefixes.stop) == (7, 13)
    assert batch.prefixes.cu_continuations.tolist() == [0, 3, 6]


@pytest.mark.parametrize(
    ("unit", "expected"),
    [
        (pair([1, 2, 3], [4], [4, 5]), 3),  # the answers' own common beginning is trained
        ((Sample([1, 2, 3], [0, 1, 1]), Sample([1, 2, 3], [0, 1, 1])), 1),
        ((Sample([1, 2], [0, 0]), Sample([1, 2], [0, 0])), 1),  # each must go on by a token
        ((Sample([1], [1]), Sample([1, 2], [0, 1])), 0),
        ((Sample([1, 2], [0, 1]),), 0),
        (
            (Sample([1, 2, 3, 4], [0, 1, 1, 1]), Sample([1, 2, 3, 5], [0, 0, 0, 1])),
            3,
        ),  # one is trained on the prompt, too
    ],
)
def test_how_much_is_shared(unit, expected):
    assert shared_prefix(unit) == expected


def shows(*places: tuple[int, int, bytes]) -> Sample:
    """Six equal tokens of context and one that is trained, with images at (start, stop, letter)."""
    images = tuple(ImageSpan(start, stop, key * 16, (8, 8), (1,)) for start, stop, key in places)
    return Sample([1, 9, 9, 2, 9, 9, 3], [0] * 6 + [1], images=images)


@pytest.mark.parametrize(
    ("unit", "expected"),
    [
        ((shows((1, 3, b"a"), (4, 6, b"b")), shows((1, 3, b"a"), (4, 6, b"b"))), 6),
        ((shows((1, 3, b"a"), (4, 6, b"b")), shows((1, 3, b"a"), (4, 6, b"c"))), 4),  # another second image
        ((shows((1, 3, b"a")), shows((1, 3, b"b"))), 1),
        ((shows((1, 3, b"a")), shows((1, 3, b"a"), (4, 6, b"b"))), 4),  # one of them has no second image
        ((shows((1, 3, b"a")), shows((4, 6, b"a"))), 1),
        ((shows((4, 7, b"a")), shows((4, 7, b"a"))), 4),  # an image that the answer ends in is not split
        ((shows((1, 3, b"a")), shows((1, 3, b"a")), shows((1, 3, b"c"))), 1),
    ],
)
def test_a_prefix_ends_before_the_first_image_that_is_not_that_of_all(unit, expected):
    assert shared_prefix(unit) == expected


def test_where_nothing_is_shared_the_batch_is_ragged():
    units = [(Sample.of_text([1], [2]), Sample.of_text([3], [4]))]
    shared, ragged = (collate(units, ROLES, layout) for layout in (SHARED, RAGGED))
    assert shared.prefixes is None
    assert torch.equal(shared.cu_segments, ragged.cu_segments)


tokens = st.lists(st.integers(0, 3), min_size=1, max_size=6)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(tokens, tokens, tokens), min_size=1, max_size=4))
def test_every_layout_asks_the_same_questions(rows):
    """Following each sample's tokens through any layout gives its ids, its positions and its trained tokens."""
    units = [pair(np.array(p), np.array(c), np.array(r)) for p, c, r in rows]
    ragged, padded, shared = (collate(units, ROLES, layout) for layout in (RAGGED, PADDED, SHARED))
    for batch in (padded, shared):
        assert torch.equal(batch.targets, ragged.targets)
        assert torch.equal(batch.counts, ragged.counts)
        for name in ("input_ids", "position_ids"):
            for places in ("positions", "ends"):
                mine = getattr(batch, name).flatten()[getattr(batch, places)]
                assert torch.equal(mine, getattr(ragged, name).flatten()[getattr(ragged, places)])
    assert shared.input_ids.shape[1] == ragged.input_ids.shape[1] - sum(shared_prefix(unit) for unit in units)


class Unseen:
    """Pixels of a family whose placeholder is token 9; no test here makes any."""

    family = replace(FAMILIES["llava"], placeholder="<image>", placeholder_id=9)

    def load(self, images):
        return {"pixel_values": torch.zeros(len(images), 1)}


def test_a_placeholder_without_an_image_is_refused():
    """Some models would give it the features of the next image."""
    with pytest.raises(ValueError, match=r"row 3 has the placeholder of images \('<image>'\) at token 4"):
        collate([(replace(shows((1, 3, b"a")), row=3),)], ("text",), RAGGED, pixels=Unseen())
    batch = collate([(shows((1, 3, b"a"), (4, 6, b"b")),)], ("text",), RAGGED, pixels=Unseen())
    assert batch.images.placeholders == (2, 2)
