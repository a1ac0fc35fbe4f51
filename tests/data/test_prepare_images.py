"""Rows with images -> units: ids equal to the processor's, samples that survive the store, one decision for all workers."""

from __future__ import annotations

import datasets
import numpy as np
import pytest
from PIL import Image

from posttrain.core.sample import ImageSpan, Sample
from posttrain.data.images import opening
from posttrain.data.images.limits import DECODED_IN_AUTO, ImageLimits
from posttrain.data.options import PrepareOptions
from posttrain.data.render.renderer import Renderer
from posttrain.data.rows.examiner import RowExaminer
from posttrain.data.rows.row_images import row_images
from posttrain.data.store import building
from posttrain.data.store.image_survey import survey_images
from posttrain.data.store.prepare import prepare_dataset
from posttrain.data.store.token_store import StoreWriter, TokenStore, join_part, seal, sort_images
from posttrain.data.vision.positions import image_positions
from tests import tiny
from tests.data.picture_files import encoded, noise
from tests.data.vision_rows import DPO, SFT, assistant, prepared, renderer, user
from tests.tiny_vision import FAMILIES

TALL, WIDE = noise(60, 40), noise(30, 90, seed=1)
HOLE = {"type": "image"}


def row_of(*pictures, question="Which?", answer="This."):
    words = [{"type": "text", "text": text} for text in (question, answer)]
    messages = [user([*([HOLE] * len(pictures)), words[0]]), assistant(words[1:])]
    return {"images": [encoded(p) for p in pictures], "messages": messages}


# Whose processor edits the text.
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "paligemma"])
def test_ids_equal_the_processors(family, tmp_path):
    rows = [row_of(TALL, WIDE), row_of(question="Nothing to see?"), row_of(WIDE, answer="That.")]
    dataset = prepared(rows, tmp_path, family=family)
    processor = renderer(family).layouts.processor
    for (sample,), row, shown in zip(dataset, rows, ([TALL, WIDE], [], [WIDE]), strict=True):
        text = processor.apply_chat_template(row["messages"])
        images = [[Image.fromarray(picture) for picture in shown]] if shown else None
        assert sample.input_ids.tolist() == list(processor(text=[text], images=images)["input_ids"][0])
        assert [image.size for image in sample.images] == [picture.shape[:2] for picture in shown]
        assert not any(sample.trained[image.start : image.stop].any() for image in sample.images)
        assert sample.trained.sum() == len(sample) - sum(image.stop - image.start for image in sample.images)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "idefics3", "internvl"])
def test_samples_survive_the_store(family, tmp_path):
    """Spans, grids of one to three numbers, and positions, which are computed again."""
    rows = [row_of(TALL, WIDE, TALL), row_of(), row_of(WIDE)]
    dataset = prepared(rows, tmp_path, family=family)
    examiner = RowExaminer(dataset.detection, renderer(family), dataset.options)
    for (read,), (written,) in zip(dataset, examiner.examine(rows), strict=True):
        assert np.array_equal(read.input_ids, written.input_ids)
        assert np.array_equal(read.trained, written.trained)
        assert read.images == written.images
        assert all(type(number) is int for image in read.images for number in (image.start, *image.size, *image.grid))
        assert (read.positions is None) == (written.positions is None)
        if read.positions is not None:
            assert np.array_equal(read.positions, written.positions)
            assert read.positions.dtype == written.positions.dtype
    assert (dataset[0][0].positions is not None) == (family == "qwen2_5_vl")
    assert dataset[1][0].positions is None


def test_parts_of_a_store_are_joined_by_appending(tmp_path):
    """Counts and never offsets; keys end in order, also those that end in zeros."""
    keys = [bytes([number]) + bytes(15) for number in (7, 3, 5, 1)]

    def sample(row, *shown):
        spans = [ImageSpan(2 * at + 1, 2 * at + 2, key, (8, at + 9), (1, 2, 2)) for at, key in enumerate(shown)]
        tokens = 2 * len(spans) + 1
        positions = image_positions(tokens, [s.start for s in spans], [s.grid for s in spans], 2) if spans else None
        ids = np.where(np.isin(np.arange(tokens), [s.start for s in spans]), 99, 5)
        return Sample(ids, np.ones(tokens, bool), images=tuple(spans), positions=positions, row=row)

    units = [
        (sample(0, keys[0], keys[1]),),
        (sample(1),),
        (sample(2, keys[2]), sample(2)),
        (sample(3, keys[3], keys[0]),),
    ]
    tables = [[(keys[0], 0, 0), (keys[1], 0, 1)], [], [(keys[2], 2, 0)], [(keys[3], 3, 0), (keys[0], 3, 1)]]
    for number in range(0, 4, 2):
        writer = StoreWriter(tmp_path, f"part-{number}.", with_images=True)
        writer.add(units[number : number + 1], tables[number])
        writer.add(units[number + 1 : number + 2], tables[number + 1])
        writer.close()
    for number in range(0, 4, 2):
        join_part(tmp_path, f"part-{number}.")
    sort_images(tmp_path)
    seal(tmp_path, {"three_axis_positions": [99, 2]})
    store = TokenStore(tmp_path)
    for number, unit in enumerate(units):
        for read, written in zip(store.unit(number), unit, strict=True):
            assert read.images == written.images
            assert np.array_equal(read.input_ids, written.input_ids)
            assert (read.positions is None) == (written.positions is None)
            assert read.positions is None or np.array_equal(read.positions, written.positions)
    assert [store.find_image(key) for key in keys] == [(0, 0), (0, 1), (2, 0), (3, 0)]
    assert store.find_image(bytes(16)) is None
    assert store.find_image(b"\xff" * 16) is None


def test_workers_write_what_one_process_writes(tmp_path, monkeypatch):
    rows = [row_of(*[(TALL, WIDE)[i % 2] for i in range(number % 3)], answer=f"{number}.") for number in range(300)]
    alone = prepared(datasets.Dataset.from_list(rows), tmp_path / "one")
    monkeypatch.setattr(building, "ROWS_PER_WORKER", 100)
    options = PrepareOptions(max_length=None, image_limits=ImageLimits(), cache_dir=tmp_path / "two")
    several = prepare_dataset(datasets.Dataset.from_list(rows), SFT, renderer(), options, num_proc=2)
    assert several.fingerprint == alone.fingerprint
    names = {path.name for path in alone.store.folder.iterdir()}
    assert {"spans.bin", "span_counts.bin", "image_keys.bin", "image_places.bin"} <= names
    for path in alone.store.folder.glob("*.bin"):
        assert path.read_bytes() == (several.store.folder / path.name).read_bytes(), path.name


# ---- once for all workers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "decoded"), [(1, True), (DECODED_IN_AUTO + 1, False)])
def test_auto_is_decided_by_the_number_of_images(count, decoded, tmp_path, monkeypatch):
    rows = [row_of(TALL)]
    calls = []
    monkeypatch.setattr("posttrain.data.store.prepare.survey_images", lambda source, limits: (count, ""))
    monkeypatch.setattr(opening.ImageSource, "rgb", lambda self: calls.append(self))
    dataset = prepared(rows, tmp_path)
    assert dataset.options.image_limits.check == ("decode" if decoded else "header")
    assert bool(calls) == decoded
    assert dataset.store.facts["image_limits"]["check"] == dataset.options.image_limits.check


def survey(rows, columns=None):
    return survey_images(building.RowSource(rows, columns), ImageLimits())


TABLES = {
    "bytes": ([row_of(TALL, WIDE), row_of()], 2),
    "paths": ([{"image": "a.png", "messages": [user("?")]}, {"image": None, "messages": [user("?")]}], 1),
    "lists of paths": ([{"images": ["a.png", "https://a.example/b.png"], "text": "x"}, {"images": [], "text": "x"}], 2),
    "inside": (
        [{"messages": [user([{"type": "image", "path": "a.png"}])]}, {"messages": [user([{"type": "image"}])]}],
        1,
    ),
    "JSON": ([{"messages": '[{"role": "user", "content": [{"type": "image", "url": "a.png"}]}]'}], 1),
    "texts": ([{"messages": [user("?")]}], 0),
}


@pytest.mark.parametrize("name", TABLES)
def test_images_are_counted_in_tables_and_lists(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows, count = TABLES[name]
    table = datasets.Dataset.from_list(rows)
    assert survey(rows)[0] == survey(table)[0] == count
    assert sum(len(row_images(row)) for row in rows) == count
    before = [survey(rows)[1], survey(table)[1]]
    (tmp_path / "a.png").write_bytes(encoded(TALL))
    has_path = "a.png" in str(rows)
    assert [(now != then) for now, then in zip([survey(rows)[1], survey(table)[1]], before)] == [has_path, has_path]


def test_limits_are_part_of_what_a_store_is_found_by(tmp_path):
    rows = [row_of(noise(200, 100))]
    plain, shrunk = prepared(rows, tmp_path), prepared(rows, tmp_path, limits=ImageLimits(max_pixels=5000))
    assert plain.store.folder != shrunk.store.folder
    assert shrunk[0][0].images[0].size == (100, 50)
    assert plain[0][0].images[0].key != shrunk[0][0].images[0].key


# ---- texts as before -------------------------------------------------------------------------------------------------------


def test_text_models_pay_nothing(tmp_path):
    rows = [{"messages": [user("Which?"), assistant("This.")]}]
    dataset = prepare_dataset(rows, SFT, Renderer(tiny.tokenizer()), PrepareOptions(cache_dir=tmp_path))
    files = {path.stem for path in dataset.store.folder.glob("*.bin")}
    assert files == {"tokens", "lengths", "ranges", "range_counts", "unit_sizes", "rows"}
    assert "image_limits" not in dataset.store.facts
    assert dataset.report.images is None
    assert dataset[0][0].images == ()


def test_texts_for_a_vision_model_are_the_same_texts(tmp_path):
    rows = [{"messages": [user("Which?"), assistant("This.")]}, {"messages": [user("And?"), assistant("That.")]}]
    pairs = [{"prompt": "Which?", "chosen": " This.", "rejected": " That."}]
    for accepted, data in ((SFT, rows), (DPO, pairs)):
        seeing = prepared(data, tmp_path / "vision", accepted)
        plain = Renderer(renderer().layouts.processor)
        blind = prepare_dataset(data, accepted, plain, PrepareOptions(max_length=None, cache_dir=tmp_path / "text"))
        for one, other in zip(seeing, blind, strict=True):
            for a, b in zip(one, other, strict=True):
                assert np.array_equal(a.input_ids, b.input_ids)
                assert np.array_equal(a.trained, b.trained)


def test_decoded_columns_of_other_kinds_are_read_as_before(tmp_path):
    """An image column beside them makes rows be read from the table: features that are decoded must still be."""
    features = datasets.Features(
        {
            "image": datasets.Image(),
            "messages": datasets.List({"role": datasets.Value("string"), "content": datasets.Json()}),
        }
    )
    rows = [
        {
            "image": {"bytes": encoded(TALL), "path": None},
            "messages": [user([HOLE, {"type": "text", "text": "?"}]), assistant("A.")],
        }
    ]
    table = datasets.Dataset.from_list(rows, features=features)
    (unit,) = prepared(table, tmp_path)
    assert [image.size for image in unit[0].images] == [(60, 40)]
