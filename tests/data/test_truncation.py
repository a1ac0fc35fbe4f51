"""An image is whole or absent, at every max_length, in every mode, for every family; pairs are cut at the same image."""

from __future__ import annotations

from dataclasses import replace

import datasets
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.core.sample import ImageSpan, Sample
from posttrain.data.packing import PackedDataset
from posttrain.data.store.prepare import PreparedDataset
from posttrain.data.store.report import CUTS_IMAGES, TOO_LONG, UNTRAINED
from posttrain.data.truncation import window_of, windows_of_unit
from posttrain.data.unpaired import Partners
from tests.data.picture_files import encoded, noise
from tests.data.vision_rows import DPO, GRPO, assistant, prepared, renderer, user
from tests.tiny_vision import FAMILIES

MODES = ("keep_start", "keep_end", "drop")
TALL, WIDE = encoded(noise(60, 40)), encoded(noise(30, 90, seed=1))
HOLE = {"type": "image"}


def text(words):
    return {"type": "text", "text": words}


def placeholders(sample, family):
    return int((sample.input_ids == renderer(family).layouts.family.placeholder_id).sum())


@pytest.mark.parametrize("family", FAMILIES)
def test_no_image_is_cut_at_any_length(family, tmp_path):
    """B8: a row with images in a question, in an answer and at the end, and a neighbour, by spans and by counted ids."""
    rows = [
        {
            "images": [TALL, WIDE, TALL],
            "messages": [
                user([text("A"), HOLE, text("What is it?")]),
                assistant([text("Like"), HOLE, text("so")]),
                user("And?"),
                assistant([text("this"), HOLE]),
            ],
        },
        {"images": [WIDE], "messages": [user([HOLE, text("?")]), assistant("A.")]},
    ]
    whole = prepared(rows, tmp_path, family=family)
    (row,), (neighbour,) = whole[0], whole[1]
    tokens_of = {
        image.key: placeholders(sample.slice(image.start, image.stop), family)
        for sample in (row, neighbour)
        for image in sample.images
    }
    for mode in MODES:
        for limit in range(2, len(row) + 2):
            dataset = cut_to(whole, limit, mode)
            for (sample,) in dataset:
                original = row if sample.row == 0 else neighbour
                assert placeholders(sample, family) == sum(tokens_of[image.key] for image in sample.images)
                assert len(sample) <= limit
                begin = 0 if mode != "keep_end" else len(original) - len(sample)
                assert np.array_equal(sample.input_ids, original.input_ids[begin : begin + len(sample)])
                if sample.positions is not None:
                    assert np.array_equal(sample.positions, original.positions[:, begin : begin + len(sample)])
                if mode == "keep_end":
                    assert [image.key for image in sample.images] == [image.key for image in original.images]
                else:
                    kept = len(sample.images)
                    following = [image.start for image in original.images[kept:]]
                    assert len(sample) == min([limit, len(original), *following])
            if limit >= len(neighbour):
                (kept,) = [unit[0] for unit in dataset if unit[0].row == 1]
                assert np.array_equal(kept.input_ids, neighbour.input_ids)
            assert len(dataset) + sum(dataset.report.dropped.values()) == 2


def cut_to(whole, limit, mode):
    options = replace(whole.options, max_length=limit, truncation_mode=mode)
    return PreparedDataset(whole.store, whole.detection, options, "train", limit)


def test_counts_of_what_is_cut(tmp_path):
    rows = [
        {"images": [TALL, WIDE], "messages": [user([HOLE, text("?")]), assistant([text("A long answer."), HOLE])]},
        {"images": [TALL], "messages": [user([text("A long question before its picture."), HOLE]), assistant("B.")]},
        {"messages": [user("?"), assistant("C.")]},
    ]
    whole = prepared(rows, tmp_path, assistant_only_loss=True)
    image = whole[0][0].images[1]
    assert whole.report.images.rows_by_images == {0: 1, 1: 1, 2: 1}
    assert (whole.report.images.images, whole.report.images.longest) == (3, 4)
    assert whole.report.images.tokens == 12
    assert (
        "3 images (1 rows with 0, 1 rows with 1, 1 rows with 2) of 12 tokens, the longest of 4"
        in whole.report.summary()
    )
    cut = cut_to(whole, image.start + 2, "keep_start")
    assert [len(unit[0].images) for unit in cut if unit[0].row == 0] == [1]
    assert (cut.report.images.cut, cut.report.images.rows_cut) == (1, 1)
    assert "1 images are cut off with the end of 1 rows" in cut.report.summary()
    ends = cut_to(whole, len(whole[0][0]) - 12, "keep_end")
    assert ends.report.dropped == {CUTS_IMAGES: 1}
    before_answer = cut_to(whole, whole[0][0].images[0].start + 1, "keep_start")
    assert before_answer.report.dropped.keys() <= {UNTRAINED}


def test_a_prompt_does_not_lose_its_image(tmp_path):
    rows = [{"images": [TALL], "prompt": [user([text("What is in this picture?"), HOLE])]}]
    whole = prepared(rows, tmp_path, GRPO)
    cut = cut_to(whole, whole[0][0].images[0].start + 1, "keep_start")
    assert len(cut) == 0
    assert cut.report.dropped == {CUTS_IMAGES: 1}
    assert cut_to(whole, 3, "drop").report.dropped == {TOO_LONG: 1}


@pytest.mark.parametrize("mode", ["keep_start", "keep_end"])
def test_pairs_are_cut_at_the_same_image(mode, tmp_path):
    """Whatever is kept, both sides show the same images as before, or both lost the same ones."""
    answer = [text("Like this one, I think: "), HOLE, text("yes")]
    first = [HOLE, *answer[::2]]
    rows = [
        {"images": [TALL], "prompt": [user([HOLE, text("?")])], "chosen": [assistant("Yes, it.")], "rejected": [assistant("No")]},
        {"images": [WIDE], "prompt": [user("?")], "chosen": [assistant(answer)], "rejected": [assistant("No, no, no. " * 9)]},
        {
            "images": [WIDE, WIDE],
            "prompt": [user("?")],
            "chosen": [assistant(answer)],
            "rejected": [assistant([text("This one: "), *answer[1:]])],
        },
        {"images": [WIDE, TALL], "prompt": [user("?")], "chosen": [assistant(answer)], "rejected": [assistant(first)]},
    ]  # fmt: skip
    whole = prepared(rows, tmp_path, DPO)
    before = {unit[0].row: [[image.key for image in sample.images] for sample in unit] for unit in whole}
    seen = set()
    for limit in range(2, max(len(sample) for unit in whole for sample in unit) + 1):
        for unit in cut_to(whole, limit, mode):
            row, now = unit[0].row, [[image.key for image in sample.images] for sample in unit]
            lost = [one[len(rest) :] for one, rest in zip(before[row], now)]
            assert lost[0] == lost[1], (row, limit)
            seen.add((row, bool(lost[0])))
    assert (2, True) in seen or mode == "keep_end"
    assert not {(1, True), (3, True)} & seen


def test_packing_keeps_images_whole_or_is_refused(tmp_path):
    rows = [{"images": [TALL], "messages": [user("?"), assistant("A. " * number)]} for number in range(1, 9)]
    packed = prepared(rows, tmp_path, packing="bfd", max_length=60)
    assert isinstance(packed, PackedDataset)
    samples = [sample for block in packed for sample in block]
    assert len(samples) == 8
    assert all(placeholders(sample, "llava") == 4 for sample in samples)
    for strategy in ("bfd_split", "wrapped"):
        with pytest.raises(
            ValueError, match=f"rows with images, which packing_strategy='{strategy}' would cut in two: use 'bfd'"
        ):
            prepared(rows, tmp_path, packing=strategy, max_length=60)
        with pytest.raises(ValueError, match="would cut in two"):
            prepared(datasets.Dataset.from_list(rows).to_iterable_dataset(), tmp_path, packing=strategy, max_length=60)
        assert len(prepared([{"text": "words " * 40}], tmp_path, packing=strategy, max_length=60))


def test_streams_are_cut_by_the_same_rule(tmp_path):
    rows = [
        {"images": [TALL, WIDE], "messages": [user("Which is it, " * number), assistant("The second.")]}
        for number in (1, 3, 5)
    ]
    table = datasets.Dataset.from_list(rows)
    longest = max(len(unit[0]) for unit in prepared(table, tmp_path))
    for mode in ("keep_start", "keep_end"):
        for limit in range(2, longest, 3):
            how = {"max_length": limit, "truncation_mode": mode}
            stored, stream = prepared(table, tmp_path, **how), prepared(table.to_iterable_dataset(), tmp_path, **how)
            pairs = list(zip(stored, stream, strict=True))
            assert all(np.array_equal(one[0].input_ids, other[0].input_ids) for one, other in pairs)
            assert all([i.key for i in one[0].images] == [i.key for i in other[0].images] for one, other in pairs)
            assert stored.report.dropped == stream.report.dropped
            assert stored.report.images == stream.report.images


# ---- for all samples -------------------------------------------------------------------------------------------------------


@st.composite
def samples(draw):
    parts = draw(st.lists(st.tuples(st.booleans(), st.integers(1, 6)), min_size=1, max_size=8))
    spans, tokens = [], 0
    for is_image, length in parts:
        if is_image:
            key = bytes([draw(st.integers(0, 3))] * 16)
            spans.append(ImageSpan(tokens, tokens + length, key, (8, 8), (1,)))
        tokens += length
    return Sample(np.arange(tokens), np.ones(tokens, bool), images=tuple(spans))


@settings(max_examples=300, deadline=None)
@given(samples(), samples(), st.integers(1, 40), st.sampled_from(["keep_start", "keep_end"]))
def test_every_window_can_be_sliced(one, other, limit, mode):
    """`Sample.slice` raises where a cut would split an image."""
    window = window_of(one, limit, mode)
    if window is not None:
        kept = one.slice(*window)
        assert len(kept) <= limit
        assert mode != "keep_end" or len(kept.images) == len(one.images)
        assert window == (0, len(one)) or len(one) > limit
    found = windows_of_unit((one, other), limit, mode)
    if not found.refused.any():
        pair = [sample.slice(*edges) for sample, *edges in zip((one, other), found.starts, found.stops)]
        lost = [len(sample.images) - len(kept.images) for sample, kept in zip((one, other), pair)]
        assert lost == found.cut_images.tolist()
        if any(lost):
            assert len(pair[0].images) == len(pair[1].images)
            following = {sample.images[len(kept.images)].key for sample, kept in zip((one, other), pair)}
            assert len(following) == 1


@settings(max_examples=200, deadline=None)
@given(samples(), samples(), st.integers(2, 30), st.sampled_from(["keep_start", "keep_end"]))
def test_partners_are_cut_at_images_too(one, other, limit, mode):
    for sample in (one, other):
        sample.trained[: max(1, len(sample) // 2)] = False
        for image in sample.images:
            sample.trained[image.start : image.stop] = False
    if not (one.trained.any() and other.trained.any()):
        return
    for sample in (one, other):  # an answer does not begin inside of an image
        begin = int(sample.trained.argmax())
        assert not any(image.start < begin < image.stop for image in sample.images)
    twin = Partners(limit, mode).given(one, [other]).twin
    assert len(twin) <= max(limit, 1)
