"""Rows with images: every way to say where they are gives the same conversation, and whatever is wrong is said before any model."""

from __future__ import annotations

import base64
import json
import os
import struct

import datasets
import pytest
from PIL import Image

from posttrain.data.images.limits import ImageLimits
from posttrain.data.options import PrepareOptions
from posttrain.data.render.renderer import Renderer
from posttrain.data.rows.checks import BadRowsError
from posttrain.data.rows.row_images import row_images
from posttrain.data.store.audit import StoredUnits
from posttrain.data.store.prepare import prepare_dataset
from tests import tiny
from tests.data.picture_files import HEIC, SVG, chunk, encoded, noise
from tests.data.vision_rows import DPO, GRPO, KTO, REWARD, SFT, assistant, prepared, shown, user

TALL, WIDE = noise(60, 40), noise(30, 90, seed=1)
PNG, JPEG, OTHER = encoded(TALL), encoded(TALL, "JPEG"), encoded(WIDE)
ANSWER = assistant("A dog.")
ASK = {"type": "text", "text": "What is it?"}
HOLE = {"type": "image"}
WANTED = "<|im_start|>user\n{60 x 40}What is it?<|im_end|>\n<|im_start|>assistant\nA dog.<|im_end|>\n"


def part(**payload):
    return {"type": "image", **payload}


def chat(*parts):
    return [user(list(parts)), ANSWER]


# ---- where images are ------------------------------------------------------------------------------------------------------

ONE_IMAGE = {
    "column of many": {"images": [PNG], "messages": chat(HOLE, ASK)},
    "column of one": {"image": PNG, "messages": chat(HOLE, ASK)},
    "no place": {"image": PNG, "messages": [user("What is it?"), ANSWER]},
    "no place, parts": {"image": PNG, "messages": chat(ASK)},
    "inside, PIL": {"messages": chat(part(image=Image.fromarray(TALL)), ASK)},
    "inside, bytes": {"messages": chat(part(bytes=PNG), ASK)},
    "inside, as Arrow has it": {
        "messages": chat(part(image={"bytes": PNG, "path": None}, text=None), {**ASK, "image": None})
    },
    "inside, base64": {"messages": chat(part(base64=base64.b64encode(PNG).decode()), ASK)},
    "inside, data URL": {"messages": chat(part(url="data:image/png;base64," + base64.b64encode(PNG).decode()), ASK)},
    "OpenAI's": {
        "messages": chat(
            {"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64.b64encode(PNG).decode()}}, ASK
        )
    },
    "input_image": {
        "messages": chat({"type": "input_image", "image_url": "data:;base64," + base64.b64encode(PNG).decode()}, ASK)
    },
    "array": {"images": [TALL], "messages": chat(HOLE, ASK)},
    "channels first": {"images": [TALL.transpose(2, 0, 1)], "messages": chat(HOLE, ASK)},
    "marker": {"image": PNG, "messages": [user("<image>What is it?"), ANSWER]},
    "marker in a part": {"images": [PNG], "messages": chat({"type": "text", "text": "<image>What is it?"})},
    "ShareGPT": {
        "image": PNG,
        "conversations": [{"from": "human", "value": "<image>What is it?"}, {"from": "gpt", "value": "A dog."}],
    },
    "JSON text": {"image": PNG, "messages": json.dumps(chat(HOLE, ASK))},
    "prompt and completion": {"image": PNG, "prompt": [user("What is it?")], "completion": [ANSWER]},
    "Alpaca": {"image": PNG, "instruction": "<image>What is it?", "output": "A dog."},
}


@pytest.mark.parametrize("row", ONE_IMAGE.values(), ids=ONE_IMAGE)
def test_one_conversation_however_it_is_written(row, tmp_path):
    (unit,) = prepared([row], tmp_path)
    assert shown(unit[0]) == WANTED


def test_a_path_is_relative_to_the_root(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.png").write_bytes(PNG)
    row = {"messages": chat(part(path="a.png"), ASK)}
    (unit,) = prepared([row], tmp_path / "cache", limits=ImageLimits(root=tmp_path / "data"))
    assert shown(unit[0]) == WANTED


@pytest.mark.parametrize("nested", [False, True])
def test_arrow_tables_are_read_without_decoding(tmp_path, monkeypatch, nested):
    """Also a PIL image inside of messages, of which Arrow makes a struct without an Image around it."""
    picture = Image.fromarray(TALL)
    words = [{"type": "text", "text": text, "image": None} for text in ("What is it?", "A dog.")]
    rows = [{"messages": [user([part(image=picture, text=None), words[0]]), assistant(words[1:])]}]
    if not nested:
        rows = [{"images": [picture], "messages": [user("What is it?"), ANSWER]}]
    table = datasets.Dataset.from_list(rows)
    monkeypatch.setattr(datasets.Image, "decode_example", None)  # whoever decodes fails
    (unit,) = prepared(table, tmp_path, limits=ImageLimits(check="header"))
    assert shown(unit[0]) == WANTED


def test_several_images_and_none(tmp_path):
    second = {"type": "text", "text": "And?"}
    rows = [
        {
            "images": [PNG, OTHER],
            "messages": [user([HOLE, ASK]), assistant("A."), user([HOLE, second]), assistant("B.")],
        },
        {"images": [PNG, OTHER, PNG], "messages": chat(HOLE, HOLE, HOLE)},
        {"images": None, "messages": [user("Hello."), assistant("Hi.")]},
        {"images": [], "messages": [user("Hello."), assistant("Hi.")]},
        {
            "images": [PNG, OTHER],
            "messages": [{"role": "system", "content": "Be brief."}, user("Which?"), assistant("B.")],
        },
        {"images": [OTHER], "messages": chat(part(bytes=PNG), HOLE, ASK)},
    ]
    units = list(prepared(rows, tmp_path))
    sizes = [[image.size for image in unit[0].images] for unit in units]
    tall, wide = (60, 40), (30, 90)
    assert sizes == [[tall, wide], [tall, wide, tall], [], [], [tall, wide], [tall, wide]]
    assert shown(units[4][0]).startswith(
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n{60 x 40}{30 x 90}Which?"
    )
    assert units[1][0].images[0].key == units[1][0].images[2].key


def test_a_typed_marker_is_text_where_counts_differ(tmp_path):
    """One row of the first hundred whose text says <image> without having one: then none of them is a place."""
    rows = [
        {"image": PNG, "messages": [user("<image>What is it?"), ANSWER]},
        {"image": None, "messages": [user("What does <image> mean?"), ANSWER]},
    ]
    dataset = prepared(rows, tmp_path, family="qwen2_5_vl")
    texts = [shown(unit[0], "qwen2_5_vl") for unit in dataset]
    assert "<image>What is it?" in texts[0]
    assert "What does <image> mean?" in texts[1]
    assert "<image>" not in dataset.report.explanation
    with_places = prepared(rows[:1], tmp_path)
    assert "every '<image>' in its texts is read as the place of an image" in with_places.report.explanation


PAIR = {"chosen": [assistant("A dog.")], "rejected": [assistant("A cat.")]}
PAIRS = {
    "explicit prompt, place": {"images": [PNG], "prompt": [user([HOLE, ASK])], **PAIR},
    "explicit prompt, no place": {"images": [PNG], "prompt": [user("What is it?")], **PAIR},
    "explicit prompt, inside": {"prompt": [user([part(bytes=PNG), ASK])], **PAIR},
    "implicit prompt, places": {
        "images": [PNG],
        "chosen": [user([HOLE, ASK]), assistant("A dog.")],
        "rejected": [user([HOLE, ASK]), assistant("A cat.")],
    },
    "implicit prompt, no place": {
        "images": [PNG],
        "chosen": [user("What is it?"), assistant("A dog.")],
        "rejected": [user("What is it?"), assistant("A cat.")],
    },
    "sides repeat the prompt": {
        "images": [PNG],
        "prompt": [user("What is it?")],
        "chosen": [user("What is it?"), assistant("A dog.")],
        "rejected": [user("What is it?"), assistant("A cat.")],
    },
    "sides repeat the prompt and its place": {
        "images": [PNG],
        "prompt": [user([HOLE, ASK])],
        "chosen": [user([HOLE, ASK]), assistant("A dog.")],
        "rejected": [user([HOLE, ASK]), assistant("A cat.")],
    },
}


@pytest.mark.parametrize("row", PAIRS.values(), ids=PAIRS)
@pytest.mark.parametrize("accepted", [DPO, REWARD], ids=["DPO", "reward"])
def test_pairs(row, accepted, tmp_path):
    (unit,) = prepared([row], tmp_path, accepted)
    assert [shown(sample) for sample in unit] == [WANTED, WANTED.replace("dog", "cat")]
    assert unit[0].images == unit[1].images
    assert unit[0].num_trained > 0 or accepted is REWARD


def test_images_inside_answers(tmp_path):
    row = {
        "images": [PNG, OTHER],
        "prompt": [user("Draw it.")],
        "chosen": [assistant([HOLE, {"type": "text", "text": "so"}])],
        "rejected": [assistant([HOLE, {"type": "text", "text": "so"}])],
    }
    (unit,) = prepared([row], tmp_path, DPO)
    assert [[image.size for image in sample.images] for sample in unit] == [[(60, 40)], [(30, 90)]]
    for sample in unit:
        (image,) = sample.images
        assert not sample.trained[image.start : image.stop].any()


def test_other_formats(tmp_path):
    (prompt,) = prepared([{"image": PNG, "prompt": [user("What is it?")]}], tmp_path, GRPO)
    assert shown(prompt[0]) == "<|im_start|>user\n{60 x 40}What is it?<|im_end|>\n<|im_start|>assistant\n"
    assert not prompt[0].trained.any()
    rows = [
        {"image": PNG, "prompt": [user("What is it?")], "completion": [ANSWER], "label": label}
        for label in (True, False)
    ]
    labelled = prepared(rows, tmp_path, KTO)
    assert [(shown(unit[0]), unit[0].scalars["label"]) for unit in labelled] == [(WANTED, 1.0), (WANTED, 0.0)]


PLAIN = {
    "text": (SFT, {"image": PNG, "text": "<image>A dog."}, ["{60 x 40}A dog.<|im_end|>"]),
    "prompt and completion": (
        SFT,
        {"images": [PNG, OTHER], "prompt": "<image><image>Which?", "completion": " The first."},
        ["{60 x 40}{30 x 90}Which? The first.<|im_end|>"],
    ),
    "prompt": (GRPO, {"image": PNG, "prompt": "<image>What?"}, ["{60 x 40}What?"]),
    "pair": (
        DPO,
        {"image": PNG, "prompt": "<image>What?", "chosen": " A dog.", "rejected": " A cat."},
        ["{60 x 40}What? A dog.<|im_end|>", "{60 x 40}What? A cat.<|im_end|>"],
    ),
    "pair with pictures for answers": (
        DPO,
        {"images": [PNG, OTHER, PNG], "prompt": "<image>Which?", "chosen": "<image>!", "rejected": "<image>?"},
        ["{60 x 40}Which?{30 x 90}!<|im_end|>", "{60 x 40}Which?{60 x 40}?<|im_end|>"],
    ),
    "scored": (
        REWARD,
        {"image": PNG, "prompt": "<image>What?", "chosen": " A dog.", "rejected": " A cat."},
        ["{60 x 40}What? A dog.<|im_end|>", "{60 x 40}What? A cat.<|im_end|>"],
    ),
}


@pytest.mark.parametrize(("accepted", "row", "texts"), PLAIN.values(), ids=PLAIN)
def test_plain_texts_have_the_familys_own_placeholder(accepted, row, texts, tmp_path):
    (unit,) = prepared([row], tmp_path, accepted)
    assert [shown(sample) for sample in unit] == texts
    for sample in unit:
        assert not any(sample.trained[image.start : image.stop].any() for image in sample.images)


# ---- what is wrong ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def bad_rows(tmp_path):
    """B7: name -> (row, kind, column, what the sentence says)."""
    root, outside = tmp_path / "root", tmp_path / "secret.png"
    root.mkdir()
    outside.write_bytes(PNG)
    os.symlink(outside, root / "link.png")
    os.mkfifo(root / "fifo.png")
    (root / "text.png").write_text("not an image")

    def column(payload):
        return {"images": [PNG, payload], "messages": chat(HOLE, HOLE, ASK)}

    return root, {
        "null in a list": (column(None), "image_null", "images", "image 1: "),
        "wrong type": (column(3), "image_type", "images", "int"),
        "zero bytes": (column(b""), "image_empty", "images", "no bytes"),
        "truncated JPEG": (column(JPEG[: len(JPEG) // 2]), "image_truncated", "images", "cut off"),
        "truncated PNG": ({"messages": chat(ASK, part(bytes=PNG[:500]))}, "image_truncated", "messages", "message 0, part 1"),
        "text file": (column("text.png"), "image_format", "images", "text.png"),
        "SVG": (column(SVG), "image_format", "images", "SVG"),
        "HEIC": (column(HEIC), "image_format", "images", "HEIC"),
        "float pixels": (column(TALL / 255), "image_mode", "images", "float64"),
        "bomb": (column(bomb()), "image_bomb", "images", "decompression bomb"),
        "1 x 4000": (column(encoded(noise(1, 4000))), "image_too_small", "images", "1 x 4000"),
        "aspect": (column(encoded(noise(3, 900))), "image_aspect", "images", "200"),
        "path outside": (column("../secret.png"), "image_path_outside", "images", "image_root"),
        "symlink outside": (column("link.png"), "image_path_outside", "images", "link.png"),
        "FIFO": (column("fifo.png"), "image_not_a_file", "images", "pipe"),
        "missing file": (column("gone.png"), "image_missing", "images", "gone.png"),
        "URL while off": (column("https://a.example/b.png"), "image_url", "images", "allow_image_urls"),
        "URL to this machine": ({"image": "http://127.0.0.1/b.png", "messages": chat(ASK)}, "image_url", "image", "127.0.0.1"),
        "too few places": ({"images": [PNG, OTHER], "messages": chat(HOLE, ASK)}, "image_count", "images", "2 images"),
        "too many places": ({"images": [PNG], "messages": chat(HOLE, HOLE, ASK)}, "image_count", "images", "2 in 'messages'"),
        "a place and no column": ({"images": None, "messages": chat(HOLE, ASK)}, "image_count", "messages", "without an image"),
        "inside and in a column": ({"image": PNG, "messages": chat(part(bytes=PNG))}, "image_count", "image", "0 in 'messages'"),
        "video": ({"messages": chat({"type": "video", "video": "a.mp4"}, ASK)}, "media", "messages", "videos and audio"),
        "audio": ({"messages": chat({"type": "input_audio"}, ASK)}, "media", "messages", "videos and audio"),
    }  # fmt: skip


def bomb():
    """A PNG whose header says 50,000 x 50,000."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 50_000, 50_000, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", b"") + chunk(b"IEND")


def test_every_bad_image_is_named_with_row_and_column(bad_rows, tmp_path):
    root, cases = bad_rows
    good = {"images": [PNG], "messages": chat(HOLE, ASK)}
    rows = [row for bad, *_ in cases.values() for row in (good, bad)]
    with pytest.raises(BadRowsError) as caught:
        prepared(
            rows, tmp_path / "cache", limits=ImageLimits(root=root, max_aspect=200), bad_rows_file=tmp_path / "bad"
        )
    problems = [json.loads(line) for line in (tmp_path / "bad").read_text().splitlines()]
    assert caught.value.total == len(cases)
    for number, (name, (_, kind, column, words)) in enumerate(cases.items()):
        (problem,) = [p for p in problems if p["row"] == 2 * number + 1]
        assert (problem["kind"], problem["column"]) == (kind, column), name
        assert words in problem["reason"], name
    dropped = prepared(rows, tmp_path / "cache", limits=ImageLimits(root=root, max_aspect=200), on_bad_rows="drop")
    assert [unit[0].row for unit in dropped] == list(range(0, len(rows), 2))


def test_this_machine_is_not_asked_for_images(tmp_path):
    row = {"image": "http://127.0.0.1:9/b.png", "messages": chat(ASK)}
    limits = ImageLimits(allow_urls=True, download_folder=tmp_path / "downloads")
    with pytest.raises(BadRowsError, match=r"row 0, column 'image': .*127\.0\.0\.1") as caught:
        prepared([row], tmp_path, limits=limits)
    assert caught.value.problems[0].kind == "image_url"


def test_several_faults_of_one_row_are_all_said(tmp_path):
    row = {"images": [b"", None], "messages": [user([HOLE, HOLE, ASK]), user("Again?"), ANSWER]}
    with pytest.raises(BadRowsError) as caught:
        prepared([row], tmp_path)
    assert [problem.kind for problem in caught.value.problems] == ["image_empty", "image_null", "two_users"]


@pytest.mark.parametrize(
    ("row", "column"),
    [
        ({"image": PNG, "messages": [user("What is it?"), ANSWER]}, "image"),
        ({"images": [PNG], "text": "A dog."}, "images"),
        ({"messages": chat(part(bytes=PNG), ASK)}, "messages"),
    ],
)
def test_images_for_a_text_model_are_refused(row, column, tmp_path):
    with pytest.raises(BadRowsError, match="the model reads text only: choose one that sees images") as caught:
        prepare_dataset([row], SFT, Renderer(tiny.tokenizer()), PrepareOptions(cache_dir=tmp_path))
    (problem,) = caught.value.problems
    assert (problem.kind, problem.column) == ("images_for_text_model", column)


def test_rows_of_tokens_refuse_images(tmp_path):
    with pytest.raises(BadRowsError, match="which cannot have images"):
        prepared([{"image": PNG, "input_ids": [1, 2, 3]}], tmp_path, SFT)


def test_a_file_that_changed_is_prepared_again(tmp_path):
    """The table with its path is the same, and so would be the store."""
    path = tmp_path / "a.png"
    path.write_bytes(PNG)
    rows = datasets.Dataset.from_list([{"image": str(path), "messages": [user("What is it?"), ANSWER]}])
    first = prepared(rows, tmp_path / "cache")
    path.write_bytes(OTHER)
    second = prepared(rows, tmp_path / "cache")
    assert [one[0][0].images[0].size for one in (first, second)] == [(60, 40), (30, 90)]


def test_columns_of_videos_are_refused(tmp_path):
    row = {"images": [PNG], "videos": ["a.mp4"], "messages": [user("What is it?"), ANSWER]}
    with pytest.raises(ValueError, match="train has 'videos'; videos and audio are not supported"):
        prepared([row], tmp_path)


def test_equal_words_about_other_pictures_are_no_repeats(tmp_path):
    rows = [
        {"image": encoded(noise(20, 20, seed=seed)), "messages": [user("What is it?"), ANSWER]} for seed in range(9)
    ]
    found = StoredUnits(prepared(rows, tmp_path))
    assert len(set(found.whole.tolist())) == len(set(found.prompts.tolist())) == 9
    assert prepared([{"image": PNG, "text": "<image>A dog."}], tmp_path).report.control_token_rows == 0


def test_numbers_of_images_follow_one_order():
    """What the image table of a store counts by."""
    row = {"messages": chat(part(bytes=b"c"), HOLE), "image": b"a", "images": [b"b"], "prompt": [user([part(url="d")])]}
    assert row_images(row) == [b"a", b"b", b"c", "d"]
    assert row_images({"messages": [user("none")], "image": None}) == []
