"""The proofs with images run to their verdicts on models that learn nothing in two steps; scenes and rewards are what they say."""

from __future__ import annotations

import json
import random

import pytest
import torch
from PIL import Image
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

from benchmarks.real_runs import handwritten_digits, images, scenes
from benchmarks.real_runs.small_llava import CHAT, UNUSED, answer_of, are_right, grafted, loss_on_text, row, words_of
from tests import tiny


@pytest.fixture(scope="module")
def text_model(tmp_path_factory):
    """With SmolLM2's form of chat template, and the token that becomes the placeholder."""
    folder, words = tmp_path_factory.mktemp("text"), words_of([*handwritten_digits.NAMES] * 10, UNUSED)
    words.chat_template = CHAT
    tiny.causal_lm(1, vocab_size=320, max_position_embeddings=512).save_pretrained(folder)
    words.save_pretrained(folder)
    return str(folder)


def run(name, model, folder, monkeypatch, **sizes):
    for key, value in sizes.items():
        monkeypatch.setattr(images, key, value)
    (found,) = images.results(
        [name], images.parser().parse_args([model, name, "--steps", "2", "--output", str(folder)])
    )
    return json.loads(json.dumps(found))


def test_a_text_model_that_is_given_eyes_keeps_its_words(text_model, tmp_path, monkeypatch):
    trained, held_out = handwritten_digits.rows(0)
    monkeypatch.setattr(handwritten_digits, "rows", lambda seed: (trained[:32], held_out[:8]))
    found = run("grafted", text_model, tmp_path, monkeypatch, BATCH=8, TEXT_LETTERS=1000)
    assert not found["holds"]
    assert found["text_loss_change_in_stage_1"] == found["largest_move_of_text_in_stage_1"] == 0
    assert {*found["stage_2"]} == {"held_out", "shuffled", "black", "text_loss"}


def test_scenes_run_to_their_verdict(tmp_path, monkeypatch):
    sizes = {"TEXT_WIDTH": 32, "TEXT_LAYERS": 1, "TOWER_WIDTH": 32, "SCENES": 40, "HELD_OUT_SCENES": 20, "COUNTED": 8}
    sizes |= {"SCENE_BATCH": 8, "GROUPS": 2, "GROUP": 4, "LOOKS": 1}
    found = run("scenes", "none", tmp_path, monkeypatch, **sizes)
    assert not found["holds"]
    assert {*found["held_out"]} == {"all", "count", "colour", "relation", "comparison"}
    assert found["grpo"]["own"]["steps"] == found["grpo"]["shuffled"]["steps"] == 1


def test_grafting_changes_no_answer_to_a_text(text_model, tmp_path):
    folder = grafted(text_model, images.TOWER, tmp_path, 0)
    plain, eyed = AutoModelForCausalLM.from_pretrained(text_model), AutoModelForImageTextToText.from_pretrained(folder)
    words, reader = AutoTokenizer.from_pretrained(text_model), AutoProcessor.from_pretrained(folder)
    assert loss_on_text(eyed, words, "seven " * 80, 32) == pytest.approx(loss_on_text(plain, words, "seven " * 80, 32))
    chat = [{"role": "user", "content": "seven?"}]
    assert reader.apply_chat_template(chat) == words.apply_chat_template(chat, tokenize=False)
    with torch.no_grad():
        eyed.lm_head.weight.zero_()  # says token 0, whatever it is shown
    asked = row([Image.new("RGB", (28, 28))], "?", words.decode([0] * 4))
    assert are_right(eyed, reader, [asked, asked | {"completion": [{"content": "x"}]}]) == [True, False]


def combinations(question):
    return {(a, b) for a, b in scenes.HELD_OUT if f"{a} {b}" in question}


def test_held_out_combinations_are_never_trained():
    draw = random.Random(0)
    trained = [scenes.counted(draw, scenes.TRAINING)[1] for _ in range(200)]
    assert not {what for one in trained for _, what in one.pieces} & {*scenes.HELD_OUT}
    held_out = [scenes.counted(draw, scenes.HELD_OUT_SCENES)[1] for _ in range(50)]
    assert all({what for _, what in one.pieces} & {*scenes.HELD_OUT} for one in held_out)
    for pool, named in ((scenes.TRAINING, False), (scenes.HELD_OUT_SCENES, True)):
        asked = [scenes.relation(draw, pool)["prompt"][0]["content"][-1]["text"] for _ in range(50)]
        assert all(bool(combinations(question)) == named for question in asked)
    pairs = [one for one in scenes.rows(25, scenes.TRAINING, 0) if one["kind"] == "comparison"]
    assert {len(one["images"]) for one in pairs} == {2}
    assert {answer_of(one) for one in pairs} <= {"first", "second", "neither"}
    described = [one for one in scenes.rows(25, scenes.TRAINING, 0, scenes.LESSONS) if one["kind"] == "description"]
    assert len(described) == 5
    assert not any(combinations(answer_of(one)) for one in described)


def test_left_is_left_in_the_picture():
    made = scenes.Scene(((0, ("red", "square")), (2, ("blue", "circle"))))
    assert made.has_left_of(("red", "square"), ("blue", "circle"))
    assert not made.has_left_of(("blue", "circle"), ("red", "square"))
    picture = made.drawn(random.Random(0))
    centres = [picture.getpixel((scenes.CELL * column + scenes.CELL // 2, scenes.CELL // 2)) for column in (0, 2)]
    assert [max(range(3), key=one.__getitem__) for one in centres] == [0, 2]  # red, blue


def test_who_does_not_look_earns_half_at_most():
    picture = Image.new("RGB", (scenes.SIDE, scenes.SIDE))
    paid = [
        sum(images.near_number([[{"content": said}]] * 4, [1, 2, 3, 4], [[picture]] * 4)) for said in scenes.NUMBERS
    ]
    assert [one / 4 for one in paid] == [0.375, images.BLIND, images.BLIND, 0.375]
    assert images.near_number([[{"content": "many"}]], [3], [[picture]]) == [0.0]


def test_shuffled_images_stay_with_their_kind():
    rows = scenes.rows(50, scenes.TRAINING, 0)
    mixed = images.shuffled(rows)
    assert [len(one["images"]) for one in mixed] == [len(one["images"]) for one in rows]
    assert sum(a["images"] is not b["images"] for a, b in zip(mixed, rows)) > 30
    assert [answer_of(one) for one in mixed] == [answer_of(one) for one in rows]
