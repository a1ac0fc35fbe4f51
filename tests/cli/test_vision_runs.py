"""Rows with images from the command line: files beside the data are found, others are not opened."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.runs import flags, posttrain
from tests.tiny_vision import images, vision_model


@pytest.fixture
def rows(tmp_path, monkeypatch) -> Path:
    """A model that sees, and a folder `data` with pictures and a file that names them."""
    monkeypatch.chdir(tmp_path)
    tiny = vision_model("llava")
    tiny.model.save_pretrained("model")
    tiny.processor.save_pretrained("model")
    (tmp_path / "data").mkdir()
    for number, picture in enumerate(images((60, 40), (30, 90), (50, 50), (40, 40))):
        picture.save(tmp_path / "data" / f"{number}.png")
    write(tmp_path / "data" / "rows.jsonl", [f"{number}.png" for number in range(4)])
    return tmp_path / "data" / "rows.jsonl"


def write(file: Path, names: list[str]) -> None:
    chats = ([{"role": "user", "content": "What?"}, {"role": "assistant", "content": f"It is {n}."}] for n in range(9))
    file.write_text("\n".join(json.dumps({"image": name, "messages": chat}) for name, chat in zip(names, chats)))


def options(file: Path) -> list[str]:
    shared = {"model_name_or_path": "model", "dataset_name": str(file), "max_steps": 1, "output_dir": "out"}
    shared |= {"per_device_train_batch_size": 4, "save_strategy": "no", "use_cpu": True, "dataset_cache_dir": "cache"}
    return flags(shared)


def test_pictures_beside_the_data_are_shown(rows, capsys):
    assert posttrain("sft", *options(rows)) == 0
    assert "4 images" in capsys.readouterr().out
    assert (rows.parent.parent / "out" / "processor_config.json").exists()


def test_pictures_elsewhere_are_not_opened(rows, capsys):
    (rows.parent / "0.png").rename(rows.parent.parent / "elsewhere.png")
    write(rows, ["../elsewhere.png", "1.png", "2.png", "3.png"])
    assert posttrain("sft", *options(rows)) != 0
    said = "".join(capsys.readouterr())
    assert "image_path_outside" in said or "outside" in said
    assert posttrain("sft", *options(rows), "--image_root", str(rows.parent.parent)) != 0  # not where the others lie
    write(rows, ["elsewhere.png", *(f"data/{number}.png" for number in (1, 2, 3))])
    assert posttrain("sft", *options(rows), "--image_root", str(rows.parent.parent)) == 0


def test_check_names_the_length_that_the_run_cuts_at(rows, capsys):
    """Which is the context of the model where rows have images and `max_length` is not set."""
    assert posttrain("check", "sft", *options(rows)) == 0
    assert "max_length is 4096" in capsys.readouterr().out
    assert posttrain("check", "sft", *options(rows), "--max_length", "2048") == 0
    assert "max_length is 2048" in capsys.readouterr().out
