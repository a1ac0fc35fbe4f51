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
    augmented = [{"name": "RandomRotation", "degrees": 5}, {"name": "RandomGrayscale"}]
    options = {
        "model_name_or_path": str(family),
        "dataset_name": str(dataset(tmp_path)),
        "image_augmentation": augmented,
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"method": "sft", **COMMON, **options}), encoding="utf-8")
    assert posttrain("explain", "run.yaml") == 0
    assert "6 images (6 rows with 1) of " in capsys.readouterr().out


# ---- posttrain images ------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    dataset(tmp_path)
    return tmp_path


def spoiled(folder):
    """Row 4 names a file that is cut off, row 5 one that is not there."""
    file = folder / "pictures" / "4.png"
    file.write_bytes(file.read_bytes()[:200])
    (folder / "pictures" / "5.png").unlink()


def state(folder):
    return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_check_counts_images_and_lists_the_bad_ones(folder, capsys):
    assert posttrain("images", "check", "rows.jsonl") == 0
    shown = capsys.readouterr().out
    assert "6 rows, 6 with images: 6, 6 distinct." in shown
    assert "the largest is 30 x 90 (height x width)" in shown
    spoiled(folder)
    assert posttrain("images", "check", "rows.jsonl", "--json", "found.json") == 1
    found = json.loads((folder / "found.json").read_text(encoding="utf-8"))
    assert [(one["row"], one["kind"]) for one in found["bad"]] == [(4, "image_truncated"), (5, "image_missing")]
    assert "2 bad images:\n  row 4, column 'images': image 0: " in capsys.readouterr().out


@pytest.mark.parametrize("format", ["webp", "jpeg", "png"])
def test_converted_rows_train_again_and_nothing_is_changed(folder, capsys, format):
    before = state(folder)
    words = ("images", "convert", "rows.jsonl", "--max-pixels", "1000", "--format", format, "--out", "small")
    assert posttrain(*words) == 0
    assert "--dataset_name small/rows.jsonl --image_root small" in capsys.readouterr().out
    after = state(folder)
    assert {file: after[file] for file in before} == before
    rows = [json.loads(line) for line in (folder / "small" / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["messages"][1]["content"] for row in rows] == [f"It is number {number}." for number in range(6)]
    for row in rows:
        with Image.open(folder / "small" / row["images"][0]) as picture:
            assert picture.format == format.upper()
            assert 800 < picture.width * picture.height <= 1000
    assert posttrain("images", "check", "small/rows.jsonl") == 0
    assert posttrain(*words) == 2
    assert "nothing is overwritten" in capsys.readouterr().err


def test_a_bad_image_ends_a_conversion_unless_its_row_may_be_left_out(folder, capsys):
    spoiled(folder)
    assert posttrain("images", "convert", "rows.jsonl", "--out", "small") == 2
    assert "row 4, column 'images': image 0: " in capsys.readouterr().err
    assert not (folder / "small" / "rows.jsonl").exists()
    kept = {file: file.stat().st_mtime_ns for file in (folder / "small" / "images").iterdir()}
    assert posttrain("images", "convert", "rows.jsonl", "--out", "small", "--skip-bad-rows") == 1
    assert "2 rows left out:" in capsys.readouterr().out
    assert len((folder / "small" / "rows.jsonl").read_text(encoding="utf-8").splitlines()) == 4
    assert all(file.stat().st_mtime_ns == when for file, when in kept.items())  # continued, not begun again


def test_images_inside_of_messages_and_of_parquet_files_are_converted(folder):
    import datasets

    pictures = [images(size, seed=number)[0] for number, size in enumerate(SIZES)]
    features = datasets.Features({"image": datasets.Image(), "prompt": datasets.Value("string")})
    rows = {"image": pictures, "prompt": ["a", "b", "c"]}
    datasets.Dataset.from_dict(rows, features=features).to_parquet(folder / "rows.parquet")
    assert posttrain("images", "convert", "rows.parquet", "--format", "png", "--out", "of-parquet") == 0
    content = [{"type": "text", "text": "What is it?"}, {"type": "image", "image": "pictures/0.png"}]
    chat = {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "A cat."}]}
    (folder / "chats.jsonl").write_text(json.dumps(chat) + "\n", encoding="utf-8")
    assert posttrain("images", "convert", "chats.jsonl", "--format", "png", "--out", "of-chats") == 0
    made = [
        json.loads(line) for line in (folder / "of-parquet" / "rows.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    for row, picture in zip(made, pictures):
        assert np.array_equal(np.asarray(Image.open(folder / "of-parquet" / row["image"][0])), np.asarray(picture))
    (row,) = map(json.loads, (folder / "of-chats" / "rows.jsonl").read_text(encoding="utf-8").splitlines())
    (part,) = (part for part in row["messages"][0]["content"] if part["type"] == "image")
    assert (folder / "of-chats" / part["image"]).is_file()


def test_rows_open_nothing_outside_of_their_folder(folder, tmp_path_factory, capsys):
    images((20, 20))[0].save(outside := tmp_path_factory.mktemp("outside") / "secret.png")
    (folder / "rows.jsonl").write_text(json.dumps({"image": str(outside), "prompt": "a"}) + "\n", encoding="utf-8")
    assert posttrain("images", "check", "rows.jsonl") == 1
    assert "is outside of" in capsys.readouterr().out
    assert posttrain("images", "check", "rows.jsonl", "--image-root", str(outside.parent)) == 0


def test_show_writes_a_contact_sheet(folder, capsys):
    assert posttrain("images", "show", "rows.jsonl", "--rows", "1:4", "--out", "sheet.png") == 0
    assert capsys.readouterr().out.splitlines()[0] == "1: row 1, column 'images': image 0: 30 x 90"
    assert Image.open(folder / "sheet.png").width > 3 * 256


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("check", "nothing.jsonl"), "There is no file or folder nothing.jsonl."),
        (("convert", "rows.jsonl"), "required: --out"),
        (("convert", "rows.jsonl", "--out", "x", "--format", "gif"), "invalid choice: 'gif'"),
        (("convert", "rows.jsonl", "--out", "x", "--max-pixels", "0"), "'0' is not a whole number above 0"),
        (("convert", "rows.jsonl", "--out", "x", "--quality", "200"), "not a whole number from 1 to 100"),
        (("show", "rows.jsonl", "--rows", "5:5", "--out", "x.png"), "'5:5' is not a range of rows"),
        (("show", "rows.jsonl", "--rows", "50:60", "--out", "x.png"), "show no image"),
        (("show", "rows.jsonl", "--out", "x.txt"), "ends in .png, .jpg or .webp"),
        (("turn", "rows.jsonl"), "invalid choice: 'turn'"),
    ],
)
def test_what_cannot_be_done_is_said_with_code_2(folder, capsys, words, sentence):
    assert posttrain("images", *words) == 2
    assert sentence in capsys.readouterr().err


def test_converted_rows_are_read_by_a_run(family, folder):
    assert posttrain("images", "convert", "rows.jsonl", "--max-pixels", "1500", "--out", "small") == 0
    named = ("--dataset_name", "small/rows.jsonl", "--image_root", "small", "--model_name_or_path", str(family))
    assert posttrain("check", "sft", *named, "--use_cpu", "--images", "seen") == 0
    assert len(list((folder / "seen").iterdir())) == 3
