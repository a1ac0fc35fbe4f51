"""Bad rows of KTO and BCO: each kind is refused with dataset, row, column and reason, before a model is loaded."""

from __future__ import annotations

import math
import re

import pytest
from datasets import IterableDataset

from posttrain.data.rows.checks import BadRowsError
from posttrain.methods.table import METHODS
from tests import tiny
from tests.data.test_malformed_rows import CHAT_PAIR, PAIR, Kind, arrow_where_possible, assistant, system, user

METHOD_NAMES = ("kto", "bco")
PLAIN, CHAT = {**PAIR, "label": True}, {**CHAT_PAIR, "label": True}
SIDES = {"chosen": " It is 4.", "rejected": " It is 5."}
MIXED = {**PLAIN, "chosen": None, "rejected": None}
ROWS, BAD = 12, 7


def plain(name, change, column, reason, without=(), **options):
    return Kind(name, (), PLAIN, change, column, reason, options, without)


def chat(name, change, column, reason, **options):
    return Kind(name, (), CHAT, change, column, reason, options)


KINDS = [
    plain("label missing", {}, "label", "missing or null, True or False is needed", ("label",)),
    plain("label null", {"label": None}, "label", "missing or null, True or False is needed"),
    plain("label 2", {"label": 2}, "label", "int 2, True or False is needed"),
    plain("label -1", {"label": -1}, "label", "int -1, True or False is needed"),
    plain("label a score", {"label": 0.5}, "label", "float 0.5, True or False is needed"),
    plain("label NaN", {"label": math.nan}, "label", "float nan, True or False is needed"),
    plain("label a word", {"label": "yes"}, "label", "str 'yes', True or False is needed"),
    plain("label the text True", {"label": "True"}, "label", "str 'True', True or False is needed"),
    plain("label a list", {"label": [True]}, "label", r"list \[True\], True or False is needed"),
    plain("completion missing", {}, "completion", "missing or null, text is needed", ("completion",)),
    plain("completion null", {"completion": None}, "completion", "missing or null, text is needed"),
    plain("completion empty", {"completion": ""}, "completion", "is empty"),
    plain("completion of white space", {"completion": " \n"}, "completion", "only white space"),
    plain("completion a number", {"completion": 4}, "completion", "int 4, text is needed"),
    plain("completion bytes", {"completion": b"4"}, "completion", "bytes b'4', text is needed"),
    plain("completion a chat", {"completion": [assistant()]}, "completion", "where the dataset holds text"),
    plain("completion with NUL", {"completion": "It\0is"}, "completion", "a NUL character at position 2"),
    plain("completion half a character", {"completion": "It \ud83d"}, "completion", "half of a surrogate pair"),
    plain("prompt missing", {}, "prompt", "missing or null, text is needed", ("prompt",)),
    plain("prompt null", {"prompt": None}, "prompt", "missing or null, text is needed"),
    plain("prompt empty", {"prompt": ""}, "prompt", "is empty"),
    plain("prompt a number", {"prompt": 4}, "prompt", "int 4, text is needed"),
    plain("prompt a chat", {"prompt": [user()]}, "prompt", "where the dataset holds text"),
    plain("row a list", ["What is 2 + 2?", " It is 4.", True], "", "the row is list"),
    plain("too long", {"completion": "x" * 90}, "completion", "has 105 tokens", max_length=64, truncation_mode="error"),
    Kind("a pair between labelled rows", (), MIXED, {**dict.fromkeys(PLAIN), **SIDES}, "completion", "of another format"),
    Kind("a pair and a labelled answer", (), MIXED, SIDES, "chosen", "is filled beside 'completion' and 'label': leave one"),
    chat("completion text between chats", {"completion": "It is 4."}, "completion", "holds lists of messages"),
    chat("prompt text between chats", {"prompt": "What is 2 + 2?"}, "prompt", "holds lists of messages"),
    chat("completion without messages", {"completion": []}, "completion", "an empty list, at least one message"),
    chat("prompt without messages", {"prompt": []}, "prompt", "an empty list, at least one message"),
    chat("role unknown", {"completion": [{"role": "bot", "content": "4"}]}, "completion", "has the role 'bot'"),
    chat("role missing", {"completion": [{"content": "4"}]}, "completion", "message 0 has no 'role'"),
    chat("content null", {"completion": [assistant(None)]}, "completion", "has no 'content', or it is null"),
    chat("content of the prompt null", {"prompt": [user(None)]}, "prompt", "has no 'content', or it is null"),
    chat("content blank", {"completion": [assistant(" ")]}, "completion", "holds only white space"),
    chat("content a number", {"completion": [assistant(4)]}, "completion", "has as content int 4"),
    chat("content a picture", {"completion": [assistant([{"type": "image"}])]}, "completion", "block of type 'image'"),
    chat("message a text", {"completion": ["It is 4."]}, "completion", "message 0 is str 'It is 4.', not a dict"),
    chat("ShareGPT's keys", {"completion": [{"from": "gpt", "value": "4"}]}, "completion", "where 'role' is used"),
    chat("completion ends on the user", {"completion": [assistant(), user("Why?")]}, "completion", "ends on a user"),
    chat("completion from the user", {"completion": [user("4")]}, "completion", "follows another user turn"),
    chat("prompt ends on an answer", {"prompt": [user(), assistant()]}, "completion", "follows another assistant turn"),
    chat("prompt without a question", {"prompt": [system()]}, "completion", "answers before the user has said anything"),
    chat("prompt of two questions", {"prompt": [user(), user()]}, "prompt", "message 1 .user. follows another user turn"),
]  # fmt: skip


def refused(method, dataset, folder, **options):
    """What is said about a dataset where the model has a config and no weights: loading it would be another error."""
    tiny.config().save_pretrained(folder / "model")
    args = METHODS[method].config_class(
        output_dir=str(folder / "run"),
        use_cpu=True,
        report_to="none",
        dataset_cache_dir=str(folder / "cache"),
        **options,
    )
    with pytest.raises(BadRowsError) as caught:
        METHODS[method].trainer_class(
            str(folder / "model"), args=args, train_dataset=dataset, processing_class=tiny.tokenizer()
        )
    return caught.value


def rows_of(kind):
    rows = kind.rows(ROWS, BAD)
    rows[0] = {**kind.good, "label": False}  # both classes have to be there, or that is a problem of its own
    return rows


def test_there_are_enough_kinds():
    assert len({kind.name for kind in KINDS}) == len(KINDS) >= 40


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("method", METHOD_NAMES)
def test_refused_with_row_column_and_reason(kind, method, tmp_path):
    error = refused(method, arrow_where_possible(rows_of(kind)), tmp_path, **kind.options)
    told = [problem for problem in error.problems if problem.column == kind.column]
    assert {problem.row for problem in error.problems} == {BAD}
    assert any(re.search(kind.reason, problem.reason) for problem in told), error.problems
    assert f"train, row {BAD}, column {kind.column!r}: " in str(error)


@pytest.mark.parametrize("method", METHOD_NAMES)
@pytest.mark.parametrize("label", [True, False])
def test_one_class_alone_is_refused(method, label, tmp_path):
    error = refused(method, [{**PLAIN, "label": label}] * ROWS, tmp_path)
    assert f"train, all rows, column 'label': is {label} in every row: there is nothing to tell apart" in str(error)


@pytest.mark.parametrize("method", METHOD_NAMES)
def test_streams_are_checked_ahead(method, tmp_path):
    rows = rows_of(KINDS[2])
    error = refused(method, IterableDataset.from_generator(lambda: iter(rows)), tmp_path, max_steps=1)
    assert f"train, row {BAD}, column 'label': is int 2" in str(error)


@pytest.mark.parametrize("method", METHOD_NAMES)
def test_rows_for_evaluation_are_named_as_such(method, tmp_path):
    tiny.config().save_pretrained(tmp_path / "model")
    args = METHODS[method].config_class(
        output_dir=str(tmp_path / "run"), use_cpu=True, report_to="none", dataset_cache_dir=str(tmp_path)
    )
    with pytest.raises(BadRowsError, match=r"eval, row 7, column 'label': is int 2"):
        METHODS[method].trainer_class(
            str(tmp_path / "model"), args=args, eval_dataset=rows_of(KINDS[2]), processing_class=tiny.tokenizer()
        )


@pytest.mark.parametrize("method", METHOD_NAMES)
def test_bad_rows_may_be_dropped_and_are_counted(method, tmp_path):
    args = METHODS[method].config_class(
        output_dir=str(tmp_path), use_cpu=True, report_to="none", dataset_cache_dir=str(tmp_path), on_bad_rows="drop"
    )
    trainer = METHODS[method].trainer_class(
        tiny.causal_lm(), args=args, train_dataset=rows_of(KINDS[2]), processing_class=tiny.tokenizer()
    )
    assert (len(trainer.train_dataset), trainer.train_dataset.report.dropped) == (ROWS - 1, {"bad (label_not_bool)": 1})


@pytest.mark.parametrize("method", METHOD_NAMES)
def test_rows_that_are_all_both_are_refused_and_empty_columns_decide_nothing(method, tmp_path):
    error = refused(method, [{**PLAIN, **SIDES, "label": row % 2 == 0} for row in range(ROWS)], tmp_path)
    assert error.total == ROWS
    assert "train, row 0, column 'chosen': is filled beside 'completion' and 'label': leave one of the two" in str(
        error
    )
    pairs = [{**dict.fromkeys(PLAIN), "prompt": PLAIN["prompt"], **SIDES}] * ROWS
    pairs[BAD] = {**pairs[BAD], "chosen": 4}
    error = refused(method, pairs, tmp_path)
    assert [(problem.row, problem.column) for problem in error.problems] == [(BAD, "chosen")]
