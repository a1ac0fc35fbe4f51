"""Columns of images of a dataset: folders, paths, bytes, boxes; and rows of LLaVA and ShareGPT4V, which are read as they are."""

from __future__ import annotations

import json

import datasets
import numpy as np
import pytest
from PIL import Image

import posttrain.data.images
from posttrain.data.images import crop_by_boxes, embed_images, images_from_folder, paths_to_images, tile
from posttrain.data.images.limits import BadImage, ImageLimits
from tests.data.picture_files import encoded, noise
from tests.data.vision_rows import prepared, shown

FILES = {"coco/train2017/000000000009.jpg": encoded(noise(60, 40), "JPEG"), "b.png": encoded(noise(30, 90, seed=1))}


@pytest.fixture
def folder(tmp_path):
    for name, data in FILES.items():
        (tmp_path / "images" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "images" / name).write_bytes(data)
    return tmp_path / "images"


def raw(dataset, column="image"):
    kind = dataset.features[column]
    plain = datasets.Image(decode=False)
    return dataset.cast_column(column, datasets.List(plain) if isinstance(kind, datasets.List) else plain)[column]


@pytest.mark.parametrize("name", posttrain.data.images.__all__)
def test_public_names_are_there(name):
    assert callable(getattr(posttrain.data.images, name))


# ---- rows that need no conversion ------------------------------------------------------------------------------------------

LLAVA = [
    {  # LLaVA-Instruct, several turns
        "id": "000000033471",
        "image": "b.png",
        "conversations": [
            {"from": "human", "value": "<image>\nWhat are the colors of the bus in the image?"},
            {"from": "gpt", "value": "The bus in the image is white and red."},
            {"from": "human", "value": "What feature can be seen on the back of the bus?"},
            {"from": "gpt", "value": "The back of the bus features an advertisement."},
        ],
    },
    {  # ShareGPT4V: the image after the question
        "id": "000000000009",
        "image": "coco/train2017/000000000009.jpg",
        "conversations": [
            {"from": "human", "value": "What do you see happening in this image?\n<image>"},
            {"from": "gpt", "value": "In the center of the image, a blue lunch tray holds four containers."},
        ],
    },
    {  # both have rows of text among them
        "id": "wgByO4Y_0",
        "conversations": [{"from": "human", "value": "Hello."}, {"from": "gpt", "value": "Hello!"}],
    },
]


def test_rows_of_llava_and_sharegpt4v_are_read_as_they_are(folder, tmp_path):
    units = prepared(LLAVA, tmp_path / "cache", limits=ImageLimits(root=folder))
    several, after, text = (shown(unit[0]) for unit in units)
    assert "user\n{30 x 90}\nWhat are the colors of the bus" in several
    assert several.count("{") == 1
    assert several.index("white and red") < several.index("What feature") < several.index("an advertisement")
    assert "user\nWhat do you see happening in this image?\n{60 x 40}<|im_end|>" in after
    assert "{" not in text


# ---- columns ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_lists", [False, True])
def test_paths_become_images_that_stay_in_their_files_or_come_into_the_rows(folder, in_lists):
    names = [[*FILES], []] if in_lists else [*FILES, None]
    rows = datasets.Dataset.from_dict({"image": names, "n": [*range(len(names))]})
    outside, inside = paths_to_images(rows, root=folder), embed_images(rows, root=folder)
    for made in (outside, inside):
        pictures = made["image"][0] if in_lists else made["image"][:2]
        assert [picture.size for picture in pictures] == [(40, 60), (90, 30)]
        assert made[len(names) - 1]["image"] == ([] if in_lists else None)
        assert made["n"] == rows["n"]
    found = [raw(made)[0] if in_lists else raw(made)[:2] for made in (outside, inside)]
    assert [(one["bytes"], one["path"]) for one in found[0]] == [(None, str(folder / name)) for name in FILES]
    assert [one["bytes"] for one in found[1]] == [*FILES.values()]
    assert raw(embed_images(outside)) == raw(inside)


@pytest.mark.parametrize("convert", [paths_to_images, embed_images])
@pytest.mark.parametrize(
    ("name", "kind"), [("../secret.png", "image_path_outside"), ("c.png", "image_missing"), ("https://a.b/c.png", "image_url")]
)  # fmt: skip
def test_an_image_that_may_not_be_opened_is_named_with_its_row(folder, convert, name, kind):
    (folder.parent / "secret.png").write_bytes(FILES["b.png"])
    with pytest.raises(BadImage, match=r"^Row 1, column 'image': ") as error:
        convert(datasets.Dataset.from_dict({"image": ["b.png", name]}), root=folder)
    assert error.value.kind == kind


def test_a_folder_with_metadata_is_a_dataset(folder):
    """Whole, although a part of it has a name that `datasets` takes for a split."""
    captions = [{"file_name": name, "text": f"Caption of {name}."} for name in FILES]
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, captions)), encoding="utf-8")
    rows = images_from_folder(folder)
    assert {row["text"]: row["image"].size for row in rows} == {
        f"Caption of {name}.": size for name, size in zip(FILES, [(40, 60), (90, 30)])
    }
    assert all(one["bytes"] is None for one in raw(rows))


# ---- boxes -----------------------------------------------------------------------------------------------------------------


def test_boxes_of_coco_become_rows():
    """A row of CPPE-5, its objects flattened."""
    pixels = noise(50, 80)
    objects = {"id": [114, 115], "bbox": [[10.0, 5.0, 20.0, 30.0], [70.5, 40.0, 30.0, 8.2]], "category": [4, 1]}
    rows = datasets.Dataset.from_list([{"image_id": 15, "image": Image.fromarray(pixels), "objects": objects}])
    rows = rows.cast_column("image", datasets.Image()).flatten()
    made = crop_by_boxes(rows, "objects.bbox", form="xywh", beside=["objects.category", "objects.id"])
    assert np.array_equal(made[0]["image"], pixels[5:35, 10:30])
    assert np.array_equal(made[1]["image"], pixels[40:49, 70:80])  # cut off at the edge, broken pixels whole
    assert made["objects.category"] == [4, 1]
    assert made["objects.bbox"] == objects["bbox"]
    assert made["image_id"] == [15, 15]


def test_boxes_are_corners_unless_said_otherwise(folder):
    rows = datasets.Dataset.from_dict({"image": [str(folder / "b.png")], "boxes": [[[1, 2, 11, 22], [0, 0, 90, 30]]]})
    assert [picture.size for picture in crop_by_boxes(rows)["image"]] == [(10, 20), (90, 30)]
    wrong = datasets.Dataset.from_dict({"image": [str(folder / "b.png")], "boxes": [[[0, 0, 5, 5], [95, 0, 99, 9]]]})
    with pytest.raises(
        ValueError, match=r"Row 0, box 1 is \[95, 0, 99, 9\] \(xyxy\), which has nothing of a picture of 90 x 30"
    ):
        crop_by_boxes(wrong)
    with pytest.raises(ValueError, match="`form` is 'cxcywh'"):
        crop_by_boxes(wrong, form="cxcywh")
    uneven = rows.add_column("label", [["one"]])
    with pytest.raises(ValueError, match="Row 0: 'boxes', 'label' are not equally long"):
        crop_by_boxes(uneven, beside=["label"])


def test_tiles_are_cut_row_by_row():
    pixels = noise(50, 80)
    tiles = tile(Image.fromarray(pixels), 32)
    assert [one.size for one in tiles] == [(32, 32), (32, 32), (16, 32), (32, 18), (32, 18), (16, 18)]
    assert np.array_equal(np.vstack([np.hstack(tiles[:3]), np.hstack(tiles[3:])]), pixels)
    with pytest.raises(ValueError, match="`side` is 0"):
        tile(tiles[0], 0)
