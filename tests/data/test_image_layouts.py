"""What an image becomes, from its size alone: equal to what the family's processor makes of an image with pixels."""

from __future__ import annotations

import logging
import random
import subprocess
import sys
from typing import Any

import pytest

from posttrain.data.vision.families import vision_family
from posttrain.data.vision.formulas import FORMULAS, ImageSizeError
from posttrain.data.vision.layouts import ImageLayouts, image_options
from tests.tiny_vision import FAMILIES, QWEN, images, tiny_processor

SPLIT_LESS = {"do_image_splitting": False}
SCAN = {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 20, "pan_and_scan_max_num_crops": 6}
OPTIONS: dict[str, list[dict[str, Any]]] = {
    **{family: [{"max_pixels": 300 * 300}, {"min_pixels": 200 * 200, "max_pixels": 400 * 400}] for family in QWEN},
    "llava": [{"crop_size": {"height": 56, "width": 42}}, {"do_center_crop": False}],
    "llava_next": [{"do_center_crop": False}],
    "gemma3": [{"do_pan_and_scan": True}, {**SCAN, "pan_and_scan_min_ratio_to_activate": 1.1}],
    "idefics3": [SPLIT_LESS, {"size": {"longest_edge": 200}}],
    "smolvlm": [SPLIT_LESS, {"size": {"longest_edge": 200}}],
    "internvl": [{"crop_to_patches": False}, {"max_patches": 12}, {"min_patches": 3, "max_patches": 6}],
    "paligemma": [],
}
CASES = [(family, options) for family in FAMILIES for options in ({}, *OPTIONS[family])]
# As the families' checkpoints have them.
REAL: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {"min_pixels": 56 * 56, "max_pixels": 28 * 28 * 1280},
    "llava_next": {
        "size": {"shortest_edge": 336},
        "crop_size": {"height": 336, "width": 336},
        "image_grid_pinpoints": [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]],
    },
    "idefics3": {"size": {"longest_edge": 1456}, "max_image_size": {"longest_edge": 364}},
    "smolvlm": {"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}},
    "internvl": {"size": {"height": 448, "width": 448}, "max_patches": 12},
}


def layouts(family: str, options: dict[str, Any] | None = None, **constructor: Any) -> ImageLayouts:
    processor = tiny_processor(family, **constructor)
    bound, others = vision_family(family, processor), dict(options or {})
    limits = {name: others.pop(name) for name in ("min_pixels", "max_pixels") if name in others}
    return ImageLayouts(bound, processor, image_options(bound, processor, **limits, others=others))


def sizes(count: int, seed: int, largest: int = 400) -> list[tuple[int, int]]:
    """Heights and widths, as many small as large, no more than 100 times as long as wide."""
    source = random.Random(seed)
    drawn = [tuple(int(4 * (largest / 4) ** source.random()) for _ in "hw") for _ in range(count)]
    return [(height, width) for height, width in drawn]


def compare_with_processor(made: ImageLayouts, drawn: list[tuple[int, int]]) -> None:
    """Two images of noise in one text, so that nothing may depend on an image's place."""
    family, processor = made.family, made.processor
    for pair in zip(drawn[::2], drawn[1::2], strict=True):
        text = f"a{family.written}b{family.written}c"
        inputs = processor(
            text=[text],
            images=[images(*pair)],
            images_kwargs=made.options,
            return_text_replacement_offsets=True,
        )
        found = [made.layout(*size) for size in pair]
        written = [offset["replacement"] for offset in inputs["text_replacement_offsets"][0]]
        assert [layout.text for layout in found] == written, pair
        count = list(inputs["input_ids"][0]).count(family.placeholder_id)
        assert sum(layout.placeholders for layout in found) == count, pair
        rows = [family.pixel_rows(layout.grid) for layout in found]
        assert rows == rows_of_pixels(inputs, rows, family), pair
        if family.grid_of == "patches":
            assert [list(layout.grid) for layout in found] == [[int(n) for n in g] for g in inputs["image_grid_thw"]]


def rows_of_pixels(inputs: Any, expected: list[int], family: Any) -> list[int]:
    """Rows that belong to each image as the processor's output tells them, where it does; else as many as expected in all."""
    pixels = inputs["pixel_values"]
    if family.model_type == "llava_next":  # padded with tiles of zeros to the image with most of them
        return [int((abs(image).reshape(len(image), -1).max(-1) > 0).sum()) for image in map(as_numpy, pixels)]
    total = len(pixels[0]) if family.pixels_in_one_row else len(pixels)
    return expected if sum(expected) == total else [total]


def as_numpy(array: Any) -> Any:
    return array.numpy() if hasattr(array, "numpy") else array


@pytest.mark.parametrize(("family", "options"), CASES)
def test_layouts_equal_the_processors(family: str, options: dict[str, Any]) -> None:
    made = layouts(family, options)
    assert bool(made.why_measured) == (options == {"do_center_crop": False})  # every other set of options has a formula
    compare_with_processor(made, sizes(40, seed=1))


@pytest.mark.slow
@pytest.mark.parametrize(("family", "options"), CASES)
def test_layouts_of_500_sizes_equal_the_processors(family: str, options: dict[str, Any]) -> None:
    compare_with_processor(layouts(family, options), sizes(500, seed=2, largest=700))


@pytest.mark.slow
@pytest.mark.parametrize("family", REAL)
def test_layouts_at_the_sizes_of_real_checkpoints(family: str) -> None:
    made = layouts(family, **REAL[family])
    assert made.why_measured is None
    compare_with_processor(made, sizes(40, seed=3, largest=2000))


def test_a_formula_that_is_wrong_is_found_at_the_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Off for images over 1,900 pixels only: the blank images must contain such a one."""
    right = FORMULAS["idefics3"]

    def wrong(height: int, width: int, read: Any) -> Any:
        return right(height, width, read) if max(height, width) < 1900 else right(50, 50, read)

    monkeypatch.setitem(FORMULAS, "idefics3", wrong)
    with caplog.at_level(logging.WARNING):
        made = layouts("idefics3")
    assert "Blank images are run through the processor" in caplog.text
    assert made.why_measured is not None
    assert "64 x 2000" in made.why_measured
    compare_with_processor(made, [(64, 2000), (100, 30)])


def test_a_family_without_a_formula_is_measured_once_per_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(FORMULAS, "llava_next")
    made = layouts("llava_next")
    runs: list[tuple[int, int]] = []
    measured = made.measured
    monkeypatch.setattr(made, "measured", lambda *size: runs.append(size) or measured(*size))
    assert made.layout(30, 90) == made.layout(30, 90)
    assert made.layout(31, 93) is made.layout(30, 90)  # one text in memory for all sizes that share it
    assert runs == [(30, 90), (31, 93)]


def test_pan_and_scan_by_hand_and_for_who_asked_for_it_alone() -> None:
    """160 / 40 = 4 crops of 40 x 40 beside the whole image, four placeholders each, in the sentence that Gemma writes."""
    processor = tiny_processor("gemma3")
    family = vision_family("gemma3", processor)
    layout = ImageLayouts(family, processor, {**SCAN, "pan_and_scan_min_ratio_to_activate": 1.2}).layout(40, 160)
    assert layout.grid == (5,)
    assert layout.placeholders == 5 * 4
    assert layout.text.startswith("Here is the original image \n\n<start_of_image><image_soft_token>")
    assert ImageLayouts(family, processor).layout(40, 160).grid == (1,)


def test_tiles_by_hand() -> None:
    """90 x 30 becomes 112 x 38, then 112 x 56: two tiles below each other, and the whole image."""
    layout = layouts("idefics3").layout(90, 30)
    assert layout.grid == (2, 1)
    assert layout.placeholders == 3 * 4
    tile = "<image>" * 4
    fake = "<fake_token_around_image>"
    rows = f"{fake}<row_1_col_1>{tile}\n{fake}<row_2_col_1>{tile}\n"
    assert layout.text == f"{rows}\n{fake}<global-img>{tile}{fake}"


def test_a_side_of_more_than_4096_is_cut_by_hand() -> None:
    """100 x 50 at a longest edge of 5000 is 5000 x 2500, cut to 4096 x 2048: 4 x 2 tiles of 1024 and not 5 x 3."""
    settings = {"size": {"longest_edge": 5000}, "max_image_size": {"longest_edge": 1024}}
    read = {**settings, "do_image_splitting": True, "do_resize": True}.get
    divided = FORMULAS["idefics3"](100, 50, read)
    assert divided is not None
    assert divided[0] == (4, 2)


def test_options_are_checked() -> None:
    processor = tiny_processor("gemma3")
    family = vision_family("gemma3", processor)
    with pytest.raises(ValueError, match="max_pixels do not exist for models of type 'gemma3'"):
        image_options(family, processor, max_pixels=1000)
    with pytest.raises(ValueError, match="'do_pan_scan', which Gemma3ImageProcessor"):
        image_options(family, processor, others={"do_pan_scan": True})
    assert image_options(family, processor, others={"do_pan_and_scan": True}) == {"do_pan_and_scan": True}


def test_pixel_limits_become_the_size_of_the_call() -> None:
    processor = tiny_processor("qwen2_5_vl")
    family = vision_family("qwen2_5_vl", processor)
    expected = {"size": {"shortest_edge": 3136, "longest_edge": 5000}}
    assert image_options(family, processor, max_pixels=5000) == expected
    assert image_options(family, processor, others={"max_pixels": 5000}) == expected


def test_an_image_that_the_processor_refuses_is_refused_in_words() -> None:
    made = layouts("qwen2_5_vl")
    for refuse in (made.layout, made.measured):
        with pytest.raises(ImageSizeError, match="2 x 500 pixels"):
            refuse(2, 500)


def test_layouts_import_no_image_library() -> None:
    script = "import posttrain.data.vision.layouts, posttrain.data.vision.positions, sys; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert not {"PIL", "torchvision", "transformers", "torch"} & set(loaded)
