"""Pixels of batches: equal to what the family's own processor makes of the same pictures, and never of others."""

from __future__ import annotations

import pickle

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from posttrain.core.sample import ImageSpan
from posttrain.data.collate import Collator
from posttrain.data.images.limits import BadImage, ImageLimits
from posttrain.data.pixels import PixelLoader
from posttrain.data.vision.families import vision_family
from tests.data.picture_files import chunk, encoded, exif, noise, png
from tests.data.vision_rows import assistant, prepared, renderer, user
from tests.tiny_vision import FAMILIES, tiny_processor

SIZES = ((60, 40), (30, 90), (150, 50), (50, 50), (200, 30))
PICTURES = [noise(*size, seed=seed) for seed, size in enumerate(SIZES)]


def rows_with(*pictures):
    return [{"images": [encoded(p) for p in pictures], "messages": [user("Which?"), assistant("This one.")]}]


def loader_for(dataset, rows, family="llava", **options):
    layouts = renderer(family).layouts
    loader = PixelLoader(layouts.family, layouts.processor, layouts.options, **options)
    loader.add(rows, dataset.store)
    return loader


def by_processor(processor, family, spans, pictures):
    """Arguments of the model for these pictures in one conversation, tiles that fill up an axis left out."""
    text = processor.apply_chat_template([user([{"type": "image"} for _ in pictures])])
    images = [[Image.fromarray(picture) for picture in pictures]]
    inputs = processor(text=[text], images=images, return_tensors="pt")
    expected = {key: inputs[key] for key in family.forward_keys}
    if expected["pixel_values"].ndim == 5 and not family.pixels_in_one_row:
        tiles = [family.pixel_rows(span.grid) for span in spans]
        expected["pixel_values"] = torch.cat([one[:count] for one, count in zip(expected["pixel_values"], tiles)])
    return expected


@pytest.mark.parametrize("family", FAMILIES)
def test_pixels_equal_the_processors(family, tmp_path):
    rows = rows_with(*PICTURES)
    dataset = prepared(rows, tmp_path, family=family)
    loader = loader_for(dataset, rows, family)
    spans = dataset[0][0].images
    assert [span.size for span in spans] == list(SIZES)
    for numbers in ([0, 1, 2, 3, 4], [2], [3, 0], [4, 1, 1]):
        chosen = [spans[number] for number in numbers]
        made = loader.load(chosen)
        expected = by_processor(
            loader_processor(family), loader.family, chosen, [PICTURES[number] for number in numbers]
        )
        assert made.keys() == expected.keys()
        for key, value in made.items():
            assert value.dtype == expected[key].dtype
            assert torch.equal(value, expected[key]), (family, key, numbers)


def loader_processor(family):
    return renderer(family).layouts.processor


def test_tiles_of_other_sizes_are_filled_up_to_the_largest():
    """Today's processors of Idefics3 and SmolVLM make squares of one size; the mask is there for those that do not."""
    loader = PixelLoader(*_parts("idefics3"))
    made = [
        {
            "pixel_values": torch.ones(tiles, 3, *size),
            "pixel_attention_mask": torch.ones(tiles, *size, dtype=torch.bool),
        }
        for tiles, size in ((2, (4, 6)), (1, (5, 3)))
    ]
    joined = loader._joined(made)
    pixels, mask = joined["pixel_values"], joined["pixel_attention_mask"]
    assert (pixels.shape, mask.shape, mask.dtype) == ((1, 3, 3, 5, 6), (1, 3, 5, 6), torch.bool)
    assert mask[0, :2, :4, :6].all()
    assert mask[0, 2, :5, :3].all()
    assert mask.sum() == 2 * 24 + 15
    assert torch.equal(pixels[0, :, 0] > 0, mask[0])


def test_options_of_the_processor_are_those_of_preparation(tmp_path):
    processor = tiny_processor("qwen2_5_vl")
    family = vision_family("qwen2_5_vl", processor)
    rows = rows_with(noise(200, 200))
    dataset = prepared(rows, tmp_path, family="qwen2_5_vl")
    loader = PixelLoader(family, processor, {"size": {"shortest_edge": 3136, "longest_edge": 3136}})
    loader.add(rows, dataset.store)
    with pytest.raises(
        RuntimeError, match="row 0, column 'images': image 0: the image processor makes 16 rows of pixels"
    ):
        loader.load(dataset[0][0].images)


def test_shrunk_and_cast(tmp_path):
    rows = rows_with(noise(100, 80))
    dataset = prepared(rows, tmp_path, limits=ImageLimits(max_pixels=2000))
    (span,) = dataset[0][0].images
    assert span.size == (50, 40)
    made = loader_for(dataset, rows, dtype=torch.bfloat16).load([span])
    assert made["pixel_values"].dtype == torch.bfloat16


def animation():
    frames = [Image.fromarray(noise(24, 16, seed=seed)).quantize(8) for seed in (1, 2)]
    return encoded(frames[0], "GIF", save_all=True, append_images=frames[1:]), frames[0].convert("RGB")


def right_pictures():
    """name -> (file, the picture by hand)"""
    rgb, alpha = noise(24, 16), noise(24, 16, 0, seed=3)
    cover = alpha[..., None] / 255
    on_white = np.round(rgb * cover + 255 * (1 - cover)).astype(np.uint8)
    grey = noise(24, 16, 0, seed=4)
    grey_on_white = np.round(grey * cover[..., 0] + 255 * (1 - cover[..., 0])).astype(np.uint8)
    wide = np.random.default_rng(5).integers(0, 65536, (24, 16), dtype=np.uint16)
    wide_png = png(24, 16, 16, 0, b"".join(b"\0" + row.astype(">u2").tobytes() for row in wide))
    colours, numbers = noise(1, 4)[0], np.random.default_rng(6).integers(0, 4, (24, 16), dtype=np.uint8)
    palette = chunk(b"PLTE", colours.tobytes()) + chunk(b"tRNS", b"\xff\xff\xff\0")
    painted = np.where(numbers[..., None] == 3, 255, colours[numbers]).astype(np.uint8)
    cmyk = Image.fromarray(rgb).convert("CMYK")
    gif, first = animation()
    return {
        "RGBA": (encoded(np.dstack([rgb, alpha])), on_white),
        "LA": (encoded(Image.fromarray(np.dstack([grey, alpha]), "LA")), np.repeat(grey_on_white[..., None], 3, 2)),
        "palette with transparency": (
            png(24, 16, 8, 3, b"".join(b"\0" + r.tobytes() for r in numbers), palette),
            painted,
        ),
        "16-bit": (wide_png, np.repeat(np.round(wide / 257).astype(np.uint8)[..., None], 3, 2)),
        "CMYK": (encoded(cmyk, "TIFF"), np.asarray(cmyk.convert("RGB"))),
        "EXIF": (encoded(rgb, exif=b"Exif\0\0" + exif(6)), np.rot90(rgb, -1)),
        "animation": (gif, np.asarray(first)),
    }


@pytest.mark.parametrize("name", right_pictures())
def test_the_model_is_shown_the_right_picture(name, tmp_path):
    data, picture = right_pictures()[name]
    check_shown([{"image": data, "messages": [user("What?"), assistant("That.")]}], picture, tmp_path)


def test_a_wrong_file_extension(tmp_path):
    (tmp_path / "a.gif").write_bytes(encoded(noise(24, 16)))
    row = {"image": str(tmp_path / "a.gif"), "messages": [user("What?"), assistant("That.")]}
    check_shown([row], noise(24, 16), tmp_path / "cache")


def check_shown(rows, picture, folder):
    dataset = prepared(rows, folder, family="qwen2_vl")
    loader = loader_for(dataset, rows, "qwen2_vl")
    spans = dataset[0][0].images
    assert spans[0].size == picture.shape[:2]
    expected = by_processor(loader_processor("qwen2_vl"), loader.family, spans, [np.ascontiguousarray(picture)])
    # Alpha is composed in whole numbers, by hand in floats: one step of 255, over a standard deviation of a quarter.
    assert (loader.load(spans)["pixel_values"] - expected["pixel_values"]).abs().max() < 1.1 / 255 / 0.25


# ---- finding them again ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("check", ["decode", "header"])
def test_a_file_that_changes_after_preparation_is_named(tmp_path, check):
    path = tmp_path / "a.png"
    path.write_bytes(encoded(noise(60, 40)))
    good = {"image": encoded(noise(50, 50)), "messages": [user("What?"), assistant("That.")]}
    rows = [good, {"image": str(path), "messages": [user("What?"), assistant("That.")]}]
    dataset = prepared(rows, tmp_path / "cache", limits=ImageLimits(check=check))
    loader = loader_for(dataset, rows)
    assert loader.load(dataset[1][0].images)["pixel_values"].shape[0] == 1
    path.write_bytes(encoded(noise(60, 40, seed=1)))
    with pytest.raises(BadImage, match=r"train, row 1, column 'image': .*prepare the dataset again") as caught:
        loader.load(dataset[1][0].images)
    assert caught.value.kind == "image_changed"


def test_a_file_that_is_broken_below_its_header(tmp_path):
    data = encoded(noise(60, 40), "JPEG")
    rows = [{"messages": [user([{"type": "image", "bytes": data[: len(data) // 2]}]), assistant("That.")]}]
    dataset = prepared(rows, tmp_path, limits=ImageLimits(check="header"))
    with pytest.raises(BadImage, match=r"train, row 0, column 'messages': message 0, part 0: .*cut off"):
        loader_for(dataset, rows).load(dataset[0][0].images)


def test_several_datasets(tmp_path):
    names, loader = ("train", "eval"), None
    spans = []
    for number, name in enumerate(names):
        rows = datasets.Dataset.from_list(rows_with(*PICTURES[2 * number : 2 * number + 2]))
        dataset = prepared(rows, tmp_path)
        loader = loader or loader_for(dataset, rows)
        loader.add(rows, dataset.store, name)
        spans += dataset[0][0].images
    made = loader.load(spans)
    expected = by_processor(loader_processor("llava"), loader.family, spans, PICTURES[:4])
    assert torch.equal(made["pixel_values"], expected["pixel_values"])
    stranger = ImageSpan(0, 1, bytes(16), (8, 8), (1,))
    with pytest.raises(LookupError, match="is in none of the datasets"):
        loader.load([stranger])


def test_the_cache_is_bounded(tmp_path):
    rows = rows_with(*PICTURES)
    dataset = prepared(rows, tmp_path)
    spans = dataset[0][0].images
    one = loader_for(dataset, rows).load(spans[:1])["pixel_values"].nbytes
    loader = loader_for(dataset, rows, cache_bytes=2 * one)
    opened = []
    made = loader._made
    loader._made = lambda spans: opened.extend(span.size for span in spans) or made(spans)
    for number in (0, 1, 0, 2, 0, 1):
        loader.load([spans[number]])
    assert opened == [SIZES[0], SIZES[1], SIZES[2], SIZES[1]]  # the second had not been used the longest time
    assert loader.cache.used == 2 * one
    assert len(pickle.loads(pickle.dumps(loader.cache))) == 0
    off = loader_for(dataset, rows)
    off.load(spans)
    assert len(off.cache) == 0


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_of_a_loader(context, tmp_path):
    rows = datasets.Dataset.from_list([row for picture in PICTURES for row in rows_with(picture)])
    dataset = prepared(rows, tmp_path)
    collate = Collator(("text",), 0, pixels=loader_for(dataset, rows))
    alone = [collate([dataset[number]]) for number in range(len(PICTURES))]
    loaded = list(DataLoader(dataset, 1, collate_fn=collate, num_workers=1, multiprocessing_context=context))
    for one, other in zip(alone, loaded, strict=True):
        assert torch.equal(one.images.encoder["pixel_values"], other.images.encoder["pixel_values"])
        assert torch.equal(one.input_ids, other.input_ids)


@pytest.mark.parametrize("family", FAMILIES)
def test_small_images_are_made_together_and_are_the_same_as_alone(family, tmp_path, monkeypatch):
    """Bit by bit: which images are in the cache, and so which are made together, is another after a resume."""
    rows = rows_with(*PICTURES, PICTURES[0][:, ::-1].copy())
    dataset = prepared(rows, tmp_path, family=family)
    loader, spans = loader_for(dataset, rows, family), dataset[0][0].images
    alone = [loader._made([span])[0] for span in spans]
    calls = []
    monkeypatch.setattr(loader, "image_processor", lambda given, **how: calls.append(given) or processor(given, **how))
    processor = tiny_processor(family).image_processor
    made = [one for run in loader._runs(spans) for one in loader._made(run)]
    assert all(torch.equal(mine[key], other[key]) for mine, other in zip(made, alone, strict=True) for key in mine)
    assert len(calls) == (1 if loader.family.tower_has_bounds else len(spans))
    monkeypatch.setattr("posttrain.data.pixels.PIXELS_AT_ONCE", 6000)
    assert max(map(len, loader._runs(spans))) == (2 if loader.family.tower_has_bounds else 1)


def test_the_dataset_is_not_copied_for_every_image(tmp_path, monkeypatch):
    """`with_format` copies and hashes a dataset, which took longer than the rest of reading a small image."""
    rows = datasets.Dataset.from_list(
        [{"image": {"bytes": encoded(p), "path": None}} | rows_with()[0] for p in PICTURES]
    )
    rows = rows.cast_column("image", datasets.Image()).remove_columns("images")
    dataset = prepared(rows, tmp_path)
    loader = loader_for(dataset, rows)
    monkeypatch.delattr(datasets.Dataset, "with_format")
    copied = pickle.loads(pickle.dumps(loader))
    for unit in map(dataset.__getitem__, range(len(PICTURES))):
        made = loader.load(unit[0].images)["pixel_values"]
        assert torch.equal(copied.load(unit[0].images)["pixel_values"], made)


def test_streams_carry_their_images(tmp_path):
    rows = datasets.Dataset.from_list([row for picture in PICTURES[:3] for row in rows_with(picture)])
    rows = rows.cast_column("images", datasets.List(datasets.Image()))
    stored = prepared(rows, tmp_path)
    stream = prepared(rows.to_iterable_dataset(), tmp_path)
    collate = Collator(("text",), 0, pixels=loader_for(stored, rows))
    streamed = Collator(("text",), 0, pixels=PixelLoader(*_parts("llava")))
    batch = streamed(list(stream))
    expected = collate([stored[number] for number in range(3)])
    assert torch.equal(batch.images.encoder["pixel_values"], expected.images.encoder["pixel_values"])
    assert torch.equal(batch.input_ids, expected.input_ids)
    for packed in prepared(rows.to_iterable_dataset(), tmp_path, packing="bfd", max_length=200):
        assert streamed([packed]).images is not None
    batches = list(DataLoader(stream, 3, collate_fn=streamed, num_workers=1, multiprocessing_context="fork"))
    assert torch.equal(batches[0].images.encoder["pixel_values"], expected.images.encoder["pixel_values"])


def _parts(family):
    layouts = renderer(family).layouts
    return layouts.family, layouts.processor


@pytest.mark.parametrize("check", ["decode", "header"])
def test_spans_carry_their_images_to_a_loader_without_datasets(tmp_path, check):
    """Also where the file is gone by then, and an image that is shown twice once."""
    path = tmp_path / "picture.png"
    path.write_bytes(encoded(PICTURES[2]))
    rows = [{"images": [str(path), str(path)], "messages": [user("Which?"), assistant("This one.")]}]
    dataset = prepared(rows, tmp_path / "cache", limits=ImageLimits(check=check))
    loader, spans = loader_for(dataset, rows), dataset[0][0].images
    wanted = loader.load(spans)
    sent = pickle.dumps((loader.without_datasets(), loader.carrying(spans)))
    assert sent.count(path.read_bytes()[:64]) == 1
    path.unlink()
    there, carried = pickle.loads(sent)
    assert carried == tuple(type(carried[0]).of(span, None, ImageLimits(), carried[0].place) for span in spans)
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in there.load(carried).items())
    with pytest.raises(LookupError, match="in none of the datasets"):
        there.load(spans)
