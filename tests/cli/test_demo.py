"""`posttrain demo`: what it trains on, how long, and what it shows; with a tiny model here, with the real one in tests/slow."""

from __future__ import annotations

import json
import sys

import pytest

from posttrain.cli.commands import demo
from tests import tiny
from tests.forked import Child


@pytest.fixture
def tiny_model(tmp_path):
    folder = tmp_path / "model"
    tiny.causal_lm().save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("seconds", "steps"), [(1000.0, demo.STEPS), (0.0, demo.MIN_STEPS)])
def test_a_slow_machine_takes_the_fewest_steps_and_shows_the_same(tiny_model, tmp_path, seconds, steps):
    run = tmp_path / "run"
    words = ["--model", str(tiny_model), "--output", str(run), "--seconds", str(seconds)]
    child = Child(lambda: sys.exit(demo.main(words)), tmp_path / "log")  # it silences libraries for its whole process
    assert child.wait() == 0, child.output()
    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in logged if "loss" in line] == list(range(1, steps + 1))
    assert (run / "adapter_model.safetensors").exists()
    said = child.output()
    assert "Cards right to the letter: 0 of 8 before, 0 of 8 after." in said  # of two layers nobody expects more
    for title in ("asked", "before", "after", "training loss"):
        assert title in said


def test_held_out_sentences_share_no_name_town_or_job_with_the_examples():
    cards = {
        split: [
            {part.split(": ")[1] for part in row["completion"][0]["content"].split(" | ") if not part.startswith("age")}
            for row in demo.rows(split)
        ]
        for split in ("train", "test")
    }
    assert (len(cards["train"]), len(cards["test"])) == (64, 8)
    assert len(cards["train"]) >= demo.STEPS * demo.ROWS_PER_STEP
    assert not set.union(*cards["train"]) & set.union(*cards["test"])
    for row in demo.rows("test"):  # everything on a card is in its sentence
        for part in row["completion"][0]["content"].split(" | "):
            assert part.split(": ")[1] in row["prompt"][-1]["content"]


def test_an_answer_that_was_cut_says_so():
    tokenizer = tiny.tokenizer()
    ids = tokenizer("a card", add_special_tokens=False)["input_ids"]
    assert demo.written(tokenizer, [*ids, tokenizer.eos_token_id]) == "a card"
    assert demo.written(tokenizer, ids) == "a card ..."
