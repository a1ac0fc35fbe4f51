"""Rows with images on the command line: what `check` and `explain` say of them, and `posttrain images`."""

from __future__ import annotations

import json

import numpy as np
import pytest
import yaml
from PIL import Image

from tests.cli.runs import COMMON, posttrain
from tests.tiny_vision import images, vision_model

SIZES = ((60, 40), (30, 90), (50, 50))


@pytest.fixture(scope="module", params=["llava_next", "smolvlm", "qwen2_5_vl"])
def family(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    tiny = vision_model(request.param)
    tiny.model.save_pretrained(folder)
    tiny.processor.save_pretrained(folder)
    return folder


def dataset(folder, name="rows.jsonl"):
    """Six rows of one image each, as files beside."""
    (folder / "pictures").mkdir(exist_ok=True)
    rows = []
    for number in range(6):
        (picture,) = images(SIZES[number % 3], seed=number)
        picture.save(folder / "pictures" / f"{number}.png")
        turns = [("user", f"What is picture {number}?"), ("assistant", f"It is number {number}.")]
        messages = [{"role": role, "content": content} for role, content in turns]
        rows.append({"images": [str(folder / "pictures" / f"{number}.png")], "messages": messages})
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder / name


def test_check_shows_what_the_model_sees(family, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = {**COMMON, "model_name_or_path": str(family), "dataset_name": str(dataset(tmp_path)), "output_dir": "out"}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"method": "sft", **options}), encoding="utf-8")
    assert posttrain("check", "run.yaml", "--samples", "3", "--images", "seen") == 0
    shown = capsys.readouterr().out
    for row, (height, width) in ((0, SIZES[0]), (2, SIZES[2])):
        assert (
            f"[image 1] {height} x {width} (PNG, height x width), given to the processor as {height} x {width}: "
            in shown
        )
        assert (tmp_path / "seen" / f"train-row{row}-text-image1.png").is_file()
    assert " | '[image 1]" in shown  # one mark in the text instead of all placeholders
    assert shown.count("image_pad") + shown.count("<image>") == 0
    seen = np.asarray(Image.open(tmp_path / "seen" / "train-row0-text-image1.png"))
    assert seen.std() > 20  # noise, as it was


def test_explain_counts_images_and_their_tokens(family, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = {"model_name_or_path": str(family), "dataset_name": str(dataset(tmp_path)), "image_augmentation": "light"}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"method": "sft", **COMMON, **options}), encoding="utf-8")
    assert posttrain("explain", "run.yaml") == 0
    assert "6 images (6 rows with 1) of " in capsys.readouterr().out
