"""Sample: numbers stay aligned with their tokens, whatever is appended or cut."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.core.sample import KEEP_END, KEEP_START, ImageSpan, Sample


def numbered(length: int, **fields) -> Sample:
    """Token t is 100 + t, its number is t; every second token is trained."""
    return Sample(
        100 + np.arange(length),
        np.arange(length) % 2 == 1,
        {"logps": np.arange(length, dtype=np.float32)},
        **fields,
    )


def test_of_text_trains_the_completion_only():
    sample = Sample.of_text([5, 6], [7, 8, 9], row=3, margin=0.5)
    assert sample.input_ids.tolist() == [5, 6, 7, 8, 9]
    assert sample.trained.tolist() == [False, False, True, True, True]
    assert sample.scalars == {"margin": 0.5}
    assert (sample.row, len(sample), sample.num_trained) == (3, 5, 3)


def test_the_first_token_is_never_predicted():
    """Three tokens are marked, but nothing comes before the first of them."""
    assert Sample([1, 2, 3], [True, True, True]).num_trained == 2
    assert Sample.of_text([], [1, 2, 3]).num_trained == 2
    assert Sample([1], [True]).num_trained == 0
    assert Sample([], []).num_trained == 0


def test_dtypes_are_settled_at_construction():
    sample = Sample([1, 2], [0, 1], {"advantages": [0.5, 1.5]})
    assert sample.input_ids.dtype == np.int32
    assert sample.trained.dtype == bool
    assert isinstance(sample.per_token["advantages"], np.ndarray)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"trained": [True]}, "Sample of row 9: 'trained' has 1 entries for 2 tokens"),
        ({"trained": [True, True], "per_token": {"logps": [1.0]}}, "'logps' has 1 entries for 2 tokens"),
    ],
)
def test_a_number_without_its_token_is_an_error_that_names_the_row(fields, message):
    with pytest.raises(ValueError, match=message):
        Sample([1, 2], row=9, **fields)


def test_append_fills_missing_numbers_with_zero():
    sample = numbered(2, row=4, group=1).append([7, 8], trained=True, advantages=[0.5, 0.25])
    assert sample.input_ids.tolist() == [100, 101, 7, 8]
    assert sample.trained.tolist() == [False, True, True, True]
    assert sample.per_token["logps"].tolist() == [0, 1, 0, 0]
    assert sample.per_token["advantages"].tolist() == [0, 0, 0.5, 0.25]
    assert (sample.row, sample.group) == (4, 1)


def test_append_leaves_the_original_alone():
    original = numbered(3, scalars={"reward": 1.0})
    longer = original.append([7], trained=False)
    longer.scalars["reward"] = 2.0
    assert len(original) == 3
    assert original.scalars == {"reward": 1.0}


def test_truncation_keeps_the_start_or_the_end():
    assert numbered(5).truncate(3).input_ids.tolist() == [100, 101, 102]
    end = numbered(5, row=2, scalars={"margin": 1.0}, policy_version=7).truncate(3, KEEP_END)
    assert end.input_ids.tolist() == [102, 103, 104]
    assert end.per_token["logps"].tolist() == [2, 3, 4]
    assert (end.row, end.scalars, end.policy_version) == (2, {"margin": 1.0}, 7)


def test_keeping_the_end_may_cost_a_trained_token():
    """Tokens 3 to 5 are trained; cut to the last 3, token 3 comes first and cannot be predicted any more."""
    sample = Sample.of_text([1, 2, 3], [4, 5, 6])
    assert sample.num_trained == 3
    assert sample.truncate(3, KEEP_END).num_trained == 2
    assert sample.truncate(3, KEEP_START).num_trained == 0


def test_a_short_sample_or_no_limit_is_returned_as_it_is():
    sample = numbered(4)
    assert sample.truncate(4) is sample
    assert sample.truncate(None) is sample


def test_an_unknown_way_to_cut_is_refused():
    with pytest.raises(ValueError, match="'keep_start' or 'keep_end', not by 'middle'"):
        numbered(4).truncate(2, "middle")


@settings(max_examples=100, deadline=None)
@given(length=st.integers(0, 12), limit=st.integers(1, 12), mode=st.sampled_from([KEEP_START, KEEP_END]))
def test_cutting_keeps_every_number_on_its_token(length, limit, mode):
    cut = numbered(length).truncate(limit, mode)
    assert len(cut) == min(length, limit)
    assert (cut.per_token["logps"] == cut.input_ids - 100).all()
    assert (cut.trained == ((cut.input_ids - 100) % 2 == 1)).all()


@settings(max_examples=100, deadline=None)
@given(length=st.integers(0, 12), at=st.integers(0, 12))
def test_slices_put_together_are_the_whole(length, at):
    whole = numbered(length)
    at = min(at, length)
    head, tail = whole.slice(0, at), whole.slice(at, length)
    assert np.concatenate([head.input_ids, tail.input_ids]).tolist() == whole.input_ids.tolist()
    assert np.concatenate([head.trained, tail.trained]).tolist() == whole.trained.tolist()
    assert np.concatenate([head.per_token["logps"], tail.per_token["logps"]]).tolist() == list(range(length))


# ---- images -------------------------------------------------------------------------------------------------------------


def span(start: int, stop: int, letter: bytes = b"a") -> ImageSpan:
    return ImageSpan(start, stop, letter * 16, (8, 8), (1,))


def test_a_slice_keeps_whole_images_and_moves_them():
    sample = numbered(10, images=(span(1, 3), span(5, 8, b"b")), positions=np.arange(30, dtype=np.int32).reshape(3, 10))
    part = sample.slice(4, 9)
    assert part.images == (span(1, 4, b"b"),)
    assert part.positions.tolist() == [[4, 5, 6, 7, 8], [14, 15, 16, 17, 18], [24, 25, 26, 27, 28]]
    assert sample.slice(0, 3).images == (span(1, 3),)
    assert sample.slice(3, 5).images == ()


@pytest.mark.parametrize(("start", "stop"), [(0, 2), (2, 10), (0, 6), (0, 7), (6, 10), (2, 7)])
def test_no_cut_splits_an_image(start, stop):
    with pytest.raises(ValueError, match="would split the image"):
        numbered(10, images=(span(1, 3), span(5, 8))).slice(start, stop)


def test_what_is_appended_brings_its_images():
    sample = numbered(4, images=(span(1, 3),)).append([7, 8, 9], False, images=(span(0, 2, b"b"),))
    assert sample.images == (span(1, 3), span(4, 6, b"b"))
    assert sample.positions is None


@pytest.mark.parametrize("images", [(span(1, 3), span(2, 4)), (span(3, 4), span(1, 2)), (span(2, 5),)])
def test_images_that_overlap_or_lie_outside_are_refused(images):
    with pytest.raises(ValueError, match="overlap, or lie outside of 4 tokens"):
        numbered(4, images=images)


def test_positions_of_another_length_are_refused():
    with pytest.raises(ValueError, match=r"positions of shape \(3, 2\) for 4 tokens"):
        numbered(4, positions=np.zeros((3, 2), np.int32))
