"""Mixtures keep every column of every part, and say so where types cannot be joined."""

from __future__ import annotations

import json

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from posttrain.data.options import PrepareOptions
from posttrain.data.render.renderer import Renderer
from posttrain.data.rows import formats
from posttrain.data.rows.checks import BadRowsError
from posttrain.data.sources.mixtures import load_mixture
from posttrain.data.sources.named import DatasetSource, SourceError
from posttrain.data.store.prepare import prepare_dataset
from tests import tiny

TOOL = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {"type": "object"}}}
WITH_TOOLS = (
    "{% if tools %}TOOLS {{ tools | length }}\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
)


def written(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def parquet(path, **columns):
    pq.write_table(pa.table(columns), path)
    return str(path)


def chat(word, **more):
    return {"messages": [{"role": "user", "content": word}, {"role": "assistant", "content": "Yes."}], **more}


def texts_of(dataset, folder, template=None):
    """The rendered rows of a dataset for SFT."""
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = template or tokenizer.chat_template
    prepared = prepare_dataset(
        dataset, (formats.LANGUAGE_MODELLING,), Renderer(tokenizer), PrepareOptions(cache_dir=folder)
    )
    return [tokenizer.decode(prepared[i][0].input_ids) for i in range(len(prepared))]


@pytest.mark.parametrize("mixing", ["concatenate", "interleave"])
def test_tools_of_one_part_are_rendered(tmp_path, mixing):
    tools = written(tmp_path / "tools.jsonl", [chat("a", tools=[TOOL])] * 8)
    plain = written(tmp_path / "plain.jsonl", [chat("b")] * 8)
    mixed = load_mixture([tools, plain], mixing=mixing)
    assert {(row["messages"][0]["content"], row["tools"] is None) for row in mixed} == {("a", False), ("b", True)}
    texts = texts_of(mixed, tmp_path / "cache", WITH_TOOLS)
    assert {("TOOLS 1" in text, "user\na" in text) for text in texts} == {(True, True), (False, False)}


def test_null_template_options_are_no_options(tmp_path):
    template = WITH_TOOLS + "{% if mood is defined %}MOOD {{ mood }}{% endif %}"
    a = written(tmp_path / "a.jsonl", [chat("a", chat_template_kwargs={"mood": "calm"})] * 2)
    b = written(tmp_path / "b.jsonl", [chat("b")] * 2)
    texts = texts_of(load_mixture([a, b]), tmp_path / "cache", template)
    assert sorted("MOOD calm" in text for text in texts) == [False, False, True, True]
    assert not any("MOOD None" in text for text in texts)


@pytest.mark.parametrize("streaming", [False, True])
def test_columns_for_rewards_are_none_where_a_part_has_none(tmp_path, streaming):
    a = written(tmp_path / "a.jsonl", [{"prompt": "p", "answer": "007"}] * 2)
    b = written(tmp_path / "b.jsonl", [{"prompt": "q", "level": 3}, {"prompt": "r", "level": "hard"}])
    rows = sorted(load_mixture([a, b], streaming=streaming), key=lambda row: row["prompt"])
    assert rows == [
        {"prompt": "p", "answer": "007", "level": None},
        {"prompt": "p", "answer": "007", "level": None},
        {"prompt": "q", "answer": None, "level": 3},
        {"prompt": "r", "answer": None, "level": "hard"},
    ]


@pytest.mark.parametrize("streaming", [False, True])
def test_a_pair_without_a_margin_has_the_margin_0(tmp_path, streaming):
    pair = {"prompt": "p", "chosen": " a", "rejected": " b"}
    a = written(tmp_path / "a.jsonl", [{**pair, "margin": 1.5}] * 3)
    b = written(tmp_path / "b.jsonl", [pair] * 2)
    mixed = load_mixture([a, b], streaming=streaming)
    assert sorted(row["margin"] for row in mixed) == [0, 0, 1.5, 1.5, 1.5]
    if not streaming:
        options = PrepareOptions(cache_dir=tmp_path / "cache")
        prepared = prepare_dataset(mixed, (formats.PREFERENCE,), Renderer(tiny.tokenizer()), options)
        assert sorted(prepared[i][0].scalars["margin"] for i in range(5)) == [0, 0, 1.5, 1.5, 1.5]


def test_a_prompt_of_one_part_is_not_lost(tmp_path):
    """It was, and its pairs were trained without a prompt."""
    a = written(tmp_path / "a.jsonl", [{"prompt": "p", "chosen": " a", "rejected": " b"}] * 3)
    b = written(tmp_path / "b.jsonl", [{"chosen": "so a", "rejected": "so b"}] * 3)
    with pytest.raises(BadRowsError, match="column 'prompt': is missing or null"):
        prepare_dataset(
            load_mixture([a, b]),
            (formats.PREFERENCE,),
            Renderer(tiny.tokenizer()),
            PrepareOptions(cache_dir=tmp_path / "cache"),
        )


def test_types_that_cannot_be_joined_are_named(tmp_path):
    texts = parquet(tmp_path / "texts.parquet", prompt=["p"], answer=["5"])
    numbers = parquet(tmp_path / "numbers.parquet", prompt=["p"], answer=[5])
    lists = parquet(tmp_path / "lists.parquet", prompt=["p"], answer=[[5]])
    with pytest.raises(
        SourceError, match=r"'answer'.*texts\.parquet it holds text, in .*numbers\.parquet it holds numbers"
    ):
        load_mixture([texts, numbers])
    with pytest.raises(
        SourceError, match=r"'answer'.*numbers\.parquet it holds numbers.*lists\.parquet it holds lists"
    ):
        load_mixture([numbers, lists])
    lines = written(tmp_path / "lines.jsonl", [{"prompt": "p", "answer": 5}])
    for streaming in (False, True):
        with pytest.raises(SourceError, match=r"'answer'.*texts\.parquet it holds text, in .*lines\.jsonl it holds"):
            load_mixture([texts, lines], streaming=streaming)


def test_types_that_say_the_same_are_joined(tmp_path):
    parts = [
        parquet(tmp_path / "a.parquet", text=["a"], n=pa.array([1], pa.int32()), tools=pa.array([None], pa.null())),
        parquet(tmp_path / "b.parquet", text=pa.array(["b"], pa.large_string()), n=[2], tools=[[{"name": "f"}]]),
        written(tmp_path / "c.jsonl", [{"text": "c", "n": 3, "tools": None}]),
        written(tmp_path / "d.jsonl", [{"text": "d", "n": 4.5, "tools": [{"name": "g", "k": 1}]}]),
    ]
    rows = sorted(load_mixture(parts), key=lambda row: row["text"])
    assert [(row["text"], row["n"]) for row in rows] == [("a", 1), ("b", 2), ("c", 3), ("d", 4.5)]
    assert [row["tools"] for row in rows] == [None, [{"name": "f"}], None, [{"name": "g", "k": 1}]]
    assert all(type(row["n"]) is kind for row, kind in zip(rows, (int, int, int, float)))


def test_a_saved_time_stands_beside_a_part_without_one(tmp_path):
    times = np.array(["2020-01-01"], dtype="datetime64[s]")
    a = parquet(tmp_path / "a.parquet", text=["a"], at=times)
    b = written(tmp_path / "b.jsonl", [{"text": "b", "at": None}, {"text": "c"}])
    rows = sorted(load_mixture([a, b]), key=lambda row: row["text"])
    assert [row["at"] is None for row in rows] == [False, True, True]


@pytest.mark.parametrize("mixing", ["concatenate", "interleave"])
def test_streams_hand_on_values_as_they_are(tmp_path, mixing, monkeypatch):
    monkeypatch.setattr(datasets.config, "SLEEP_TIME_ON_THREADS_SHUTDOWN", 0)  # 5 s, for the end of an interpreter
    call = [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]
    late = {"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "", "tool_calls": call}]}
    a = written(tmp_path / "a.jsonl", [chat("a"), late, chat("c", tools=[TOOL])])
    b = parquet(tmp_path / "b.parquet", messages=[chat("b")["messages"]] * 3, source=["s"] * 3)
    mixed = load_mixture([DatasetSource(a, weight=2), b], mixing=mixing, streaming=True, seed=1)
    assert isinstance(mixed, datasets.IterableDataset)
    rows = list(mixed)
    assert {frozenset(row) for row in rows} == {frozenset(("messages", "tools", "source"))}
    assert {row["source"] for row in rows} == {None, "s"}
    assert {**late, "tools": None, "source": None} in rows
    assert {**chat("c"), "tools": [TOOL], "source": None} in rows


def test_a_late_column_of_a_stream_is_told(tmp_path):
    a = written(tmp_path / "a.jsonl", [{"text": "a"}] * 1000 + [{"text": "b", "tools": [TOOL]}])
    b = written(tmp_path / "b.jsonl", [{"text": "c"}])
    with pytest.raises(SourceError, match=r"a\.jsonl: a row has the column 'tools', which none of the first 1,000"):
        list(load_mixture([a, b], streaming=True))
