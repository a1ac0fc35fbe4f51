"""Kinds of malformed rows, each at row 1,131 of 1,200: refused with the right row, column and reason.

The row lies behind those that are looked at first (100), behind a batch (1,000 rows) and in none of the first parts of a store
(128 rows and more). One kind of each sort lies at row 7,331 of 10,000 besides.
"""

from __future__ import annotations

import copy
import json
import marshal
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest

from posttrain.core.sample import Sample
from posttrain.data.options import PrepareOptions
from posttrain.data.render.renderer import Renderer
from posttrain.data.rows import formats
from posttrain.data.rows.checks import BadRowsError, without_nones
from posttrain.data.store import building
from posttrain.data.store.prepare import prepare_dataset
from tests import tiny

ROWS, BAD = 120, 113  # in the third batch of `small_batches`
LONG = (10_000, 7_331)
SFT = (formats.LANGUAGE_MODELLING, formats.PROMPT_COMPLETION, formats.TOKENISED)
DPO = (formats.PREFERENCE, formats.TOKENISED_PREFERENCE)
REWARD = (formats.SCORED_PREFERENCE, formats.TOKENISED_SCORED_PREFERENCE)
KTO = (formats.UNPAIRED_PREFERENCE,)
PRM = (formats.STEPWISE, formats.TOKENISED_STEPWISE)


class RememberingRenderer(Renderer):
    """The real renderer, which does not render the 9,999 equal good rows again and again."""

    def __init__(self, tokenizer):
        super().__init__(tokenizer)
        self.seen: dict[Any, Any] = {}

    def remember(self, keys, items, encode):
        new = {key: item for key, item in zip(keys, items) if key not in self.seen}
        self.seen |= dict(zip(new, encode(list(new.values()))))
        return [self.seen[key] for key in keys]

    def encode_texts(self, texts, add_special_tokens=True):
        encode = super().encode_texts
        return self.remember(texts, texts, lambda new: encode(new, add_special_tokens))

    def encode_chats(self, chats, train):
        encode = super().encode_chats
        keys = [marshal.dumps((c.messages, c.tools, c.template_kwargs, c.num_prompt_messages, train)) for c in chats]
        samples = self.remember(keys, chats, lambda new: encode(new, train))
        return [Sample(s.input_ids, s.trained) if isinstance(s, Sample) else s for s in samples]


@pytest.fixture(scope="module")
def renderer():
    return RememberingRenderer(tiny.tokenizer())


def user(text: Any = "What is 2 + 2?", **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": text, **more}


def assistant(text: Any = "It is 4.", **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def system(text: Any = "Be brief.") -> dict[str, Any]:
    return {"role": "system", "content": text}


def tool(text: Any = "4", **more: Any) -> dict[str, Any]:
    return {"role": "tool", "content": text, **more}


def call(name: Any = "add", arguments: Any = '{"a": 2}', **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}, **more}


CHAT = {"messages": [user(), assistant()]}
TEXT = {"text": "The answer is 4."}
PAIR = {"prompt": "What is 2 + 2?", "completion": " It is 4."}
CHAT_PAIR = {"prompt": [user()], "completion": [assistant()]}
CHOICE = {"prompt": "What is 2 + 2?", "chosen": " It is 4.", "rejected": " It is 5."}
CHAT_CHOICE = {"chosen": [user(), assistant()], "rejected": [user(), assistant("It is 5.")]}
TEXT_CHOICE = {"chosen": "What is 2 + 2? It is 4.", "rejected": "What is 2 + 2? It is 5."}
SCORED = {**CHOICE, "margin": 1.0}
STEPS = {"prompt": "What is 2 + 2?", "completions": ["Add them.", "It is 4."], "labels": [True, True]}
STEP_IDS = {"input_ids": [5, 6, 7], "labels": [-100, 1, 0]}
IDS = {"input_ids": [1, 2, 3, 4], "labels": [-100, 2, 3, 4]}
ID_PAIR = {
    "prompt_ids": [1, 2],
    "chosen_ids": [3, 4],
    "rejected_ids": [5],
    "ref_chosen_logps": -1.0,
    "ref_rejected_logps": -2.0,
}
ALPACA = {"instruction": "Add 2 and 2.", "input": "", "output": "4"}
SHAREGPT = {"conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hello!"}]}


@dataclass
class Kind:
    """One way to spoil a row: the good row, what is changed, and what must be said about it."""

    name: str
    formats: tuple
    good: dict[str, Any]
    change: Any  # columns to change, or the whole row where it is no dict
    column: str
    reason: str  # regular expression
    options: dict[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()

    def rows(self, count: int = ROWS, place: int = BAD) -> list[Any]:
        if isinstance(self.change, dict):
            bad = {k: v for k, v in {**self.good, **self.change}.items() if k not in self.without}
        else:
            bad = self.change
        return [self.good] * place + [bad] + [self.good] * (count - place - 1)


def chat(name: str, messages: Any, reason: str, column: str = "messages", **extra: Any) -> Kind:
    good = {**CHAT, **dict.fromkeys(extra)}  # Arrow takes its columns from the first row
    return Kind(name, SFT, good, {"messages": messages, **extra}, column, reason)


def sft(name: str, good: dict[str, Any], change: Any, column: str, reason: str, **options: Any) -> Kind:
    return Kind(name, SFT, good, change, column, reason, options)


def dpo(name: str, good: dict[str, Any], change: Any, column: str, reason: str, **options: Any) -> Kind:
    return Kind(name, DPO, good, change, column, reason, options)


MESSAGES = [
    chat("messages null", None, "missing or null"),
    Kind("column missing", SFT, CHAT, {}, "messages", "missing or null", without=("messages",)),
    chat("messages an integer", 3, "int 3, a list of messages"),
    chat("messages bytes", b"abc", "bytes"),
    chat("messages a string", "Hello", "where the dataset holds lists of messages"),
    chat("messages empty", [], "empty list"),
    chat("message a string", ["Hello"], "message 0 is str"),
    chat("message null", [user(), None], "message 1 is NoneType"),
    chat("list of lists", [[user(), assistant()]], "message 0 is list"),
    chat("no role", [user(), {"content": "Hello"}], "message 1 has no 'role'"),
    chat("role null", [user(), {"role": None, "content": "Hello"}], "message 1 has no 'role'"),
    chat("role an integer", [user(), {"role": 1, "content": "Hello"}], "role int 1"),
    chat("unknown role", [user(), {"role": "bot", "content": "Hello"}], "role 'bot'; roles are"),
    chat("role of another project", [{"role": "Human", "content": "Hi"}, assistant()], r"'Human' \(write 'user'\)"),
    chat("no content", [user(), {"role": "assistant"}], "no 'content'"),
    chat("content null", [user(None), assistant()], r"message 0 \(user\) has no 'content'"),
    chat("content an integer", [user(), assistant(4)], "message 1 has as content int 4"),
    chat("content a dict", [user({"text": "x"}), assistant()], "message 0 has as content dict"),
    chat("content bytes", [user(), assistant(b"4")], "has as content bytes"),
    chat("system not first", [user(), system(), assistant()], "after a user turn"),
    chat("assistant first", [assistant("Hello!"), user(), assistant()], "answers before the user"),
    chat("assistant first, after system", [system(), assistant("Hello!")], "answers before the user"),
    chat("two users running", [user(), user("And 3?"), assistant()], "message 1 .user. follows another user turn"),
    chat("two assistants running", [user(), assistant(), assistant("Yes.")], "follows another assistant turn"),
    chat("ends on user", [user(), assistant(), user("Thanks")], "ends on a user turn"),
    chat("no assistant", [system(), user()], "no assistant turn"),
    chat("only a system turn", [system()], "no assistant turn"),
    chat("empty assistant", [user(), assistant("")], "assistant turn is empty"),
    chat("assistant of white space", [user(), assistant(" \n\t")], "assistant turn holds only white space"),
    chat("user of white space", [user("  "), assistant()], "user turn holds only white space"),
    chat("ShareGPT keys", SHAREGPT["conversations"], "'from' and 'value'"),
    chat("a key that no other row has", [user(), assistant(mood="glad")], "key 'mood', which 1 of 120"),
    chat(
        "half a weight",
        [user(), assistant(weight=0.5)],
        r"message 1 \(assistant\) has the weight 0.5; 0 \(not trained\)",
    ),
    chat("a user's weight", [{**user(), "weight": 0}, assistant()], r"message 0 \(user\) has the weight 0"),
    sft(
        "no turn of any weight",
        CHAT,
        {"messages": [user(), assistant(weight=0)]},
        "messages",
        "no token that could be",
        assistant_only_loss=True,
    ),
    chat("tool_calls no list", [user(), assistant(tool_calls="add")], "'tool_calls' is str"),
    chat("tool call a string", [user(), assistant(tool_calls=["add(2)"])], "tool call 0 is str"),
    chat("tool call without function", [user(), assistant(tool_calls=[{"id": "1"}])], "has no 'function'"),
    chat("tool call without name", [user(), assistant(tool_calls=[call(None)])], "no function name"),
    chat("arguments not JSON", [user(), assistant(tool_calls=[call(arguments="{a: 2")])], "not JSON"),
    chat("arguments a list", [user(), assistant(tool_calls=[call(arguments="[2]")])], "has as arguments list"),
    chat("the user calls a tool", [user(tool_calls=[call()]), assistant()], "only the assistant calls tools"),
    chat("tool result first", [tool(), assistant()], "no tool was called"),
    chat("tool result without call", [user(), assistant(), tool(), assistant()], "calls no tool"),
    chat(
        "tool result of another call",
        [user(), assistant("", tool_calls=[call(id="a")]), tool(tool_call_id="b"), assistant()],
        "answers the call 'b'; the calls before it are a",
    ),
    chat("call without result", [user(), assistant("", tool_calls=[call()]), user(), assistant()], "has no result"),
    chat("an image", [user([{"type": "image"}, {"type": "text", "text": "x"}]), assistant()], "block of type 'image'"),
    chat("unknown block", [user([{"type": "chart", "x": 1}]), assistant()], "content block 0 is dict"),
    chat("block without text", [user([{"type": "text", "text": 3}]), assistant()], "content block 0"),
    chat(
        "lone surrogate", [user(), assistant("It \ud83d is")], r"message 1 holds half of a surrogate pair \(U\+D83D\)"
    ),
    chat("NUL in a message", [user("a\x00b"), assistant()], "message 0 holds a NUL character at position 1"),
    chat("tools not JSON", CHAT["messages"], "not the JSON", "tools", tools="[{"),
    chat("tools an integer", CHAT["messages"], "int 3", "tools", tools=3),
    chat("tool without name", CHAT["messages"], "tool 0 is dict", "tools", tools=[{"parameters": {"a": 1}}]),
    chat("template arguments a list", CHAT["messages"], "list", "chat_template_kwargs", chat_template_kwargs=[1]),
    Kind("row a string", SFT, CHAT, "Hello", "", "the row is str"),
    sft(
        "ShareGPT: unknown speaker", SHAREGPT, {"conversations": [{"from": "x", "value": "y"}]}, "conversations", "'x'"
    ),
    sft(
        "ShareGPT: value null",
        SHAREGPT,
        {"conversations": [{"from": "human", "value": None}, {"from": "gpt", "value": "Hello"}]},
        "conversations",
        "no 'content'",
    ),
    sft(
        "another format's row",
        {**CHAT, "text": None},
        {"messages": None, **TEXT},
        "messages",
        "'text', the columns of another format",
    ),
    sft("Alpaca: no instruction", ALPACA, {"instruction": ""}, "instruction", "is empty"),
    sft("Alpaca: no output", ALPACA, {"output": None}, "output", "no 'content'"),
    sft("Alpaca: input a number", ALPACA, {"input": 3}, "input", "int 3"),
]

PLAIN = [
    sft("text null", TEXT, {"text": None}, "text", "missing or null"),
    sft("text an integer", TEXT, {"text": 3}, "text", "int 3, text is needed"),
    sft("text a dict", TEXT, {"text": {"a": 1}}, "text", "where the dataset holds text"),
    sft("text a list", TEXT, {"text": ["a"]}, "text", "where the dataset holds text"),
    sft("text bytes", TEXT, {"text": b"abc"}, "text", "bytes"),
    sft("text NaN", TEXT, {"text": math.nan}, "text", "float nan"),
    sft("text empty", TEXT, {"text": ""}, "text", "is empty"),
    sft("text of white space", TEXT, {"text": "\n \u2003"}, "text", "only white space"),
    sft("text with NUL", TEXT, {"text": "a\x00"}, "text", "NUL character at position 1"),
    sft("text with a lone surrogate", TEXT, {"text": "é\udc00"}, "text", r"U\+DC00\) at position 1"),
    sft(
        "formatting_func raises",
        TEXT,
        {"text": None},
        "text",
        "AttributeError",
        formatting_func=lambda r: r["text"].strip(),
    ),
    sft(
        "formatting_func gives None",
        TEXT,
        {"text": ""},
        "text",
        "null",
        formatting_func=lambda row: row["text"] or None,
    ),
    sft("prompt null", PAIR, {"prompt": None}, "prompt", "missing or null"),
    sft("prompt empty", PAIR, {"prompt": ""}, "prompt", "is empty"),
    sft("completion null", PAIR, {"completion": None}, "completion", "missing or null"),
    sft("completion empty", PAIR, {"completion": ""}, "completion", "is empty"),
    sft("completion of white space", PAIR, {"completion": " "}, "completion", "only white space"),
    sft("completion a list beside a text", PAIR, {"completion": [assistant()]}, "completion", "holds text"),
    sft("prompt a text beside a list", CHAT_PAIR, {"prompt": "What?"}, "prompt", "lists of messages"),
    sft(
        "completion begins with user",
        CHAT_PAIR,
        {"completion": [user(), assistant()]},
        "completion",
        "another user turn",
    ),
    sft(
        "prompt ends on assistant", CHAT_PAIR, {"prompt": [user(), assistant()]}, "completion", "another assistant turn"
    ),
    sft("completion ends on user", CHAT_PAIR, {"completion": [assistant(), user()]}, "completion", "ends on a user"),
    sft("prompt of two users", CHAT_PAIR, {"prompt": [user(), user()]}, "prompt", "follows another user turn"),
    sft(
        "longer than the limit",
        TEXT,
        {"text": "x" * 60},
        "text",
        "61 tokens.*is 50",
        max_length=50,
        truncation_mode="error",
    ),
    sft(
        "prompt longer than the limit",
        PAIR,
        {"prompt": "x" * 60},
        "completion",
        "its prompt alone has 60, so no trained token",
        max_length=50,
        truncation_mode="error",
    ),
    sft(
        "a column that the reward needs",
        {**PAIR, "solution": "4"},
        {"solution": None},
        "solution",
        "the run needs it",
        required_columns=("solution",),
    ),
    sft(
        "unknown environment",
        {**PAIR, "environment": "maze"},
        {"environment": "moon"},
        "environment",
        "it must be one of 'maze'",
        allowed_values={"environment": ("maze",)},
    ),
]

PREFERENCES = [
    dpo("chosen null", CHOICE, {"chosen": None}, "chosen", "missing or null"),
    Kind("rejected missing", DPO, CHOICE, {}, "rejected", "missing or null", without=("rejected",)),
    dpo("chosen empty", CHOICE, {"chosen": ""}, "chosen", "is empty"),
    dpo("rejected of white space", CHOICE, {"rejected": "\n"}, "rejected", "only white space"),
    dpo("chosen an integer", CHOICE, {"chosen": 4}, "chosen", "int 4"),
    dpo("chosen a list", CHOICE, {"chosen": [assistant()]}, "chosen", "where the dataset holds text"),
    dpo("chosen equals rejected", CHOICE, {"rejected": CHOICE["chosen"]}, "rejected", "equals 'chosen'"),
    dpo("equal conversations", CHAT_CHOICE, {"rejected": CHAT_CHOICE["chosen"]}, "rejected", "equals 'chosen'"),
    dpo("no shared beginning", TEXT_CHOICE, {"rejected": "Another thing"}, "chosen", "shares no beginning"),
    dpo(
        "different prompts", CHAT_CHOICE, {"rejected": [user("And 3?"), assistant("6")]}, "chosen", "part at message 0"
    ),
    dpo(
        "part at a later question",
        CHAT_CHOICE,
        {
            "chosen": [user(), assistant(), user("A"), assistant()],
            "rejected": [user(), assistant(), user("B"), assistant()],
        },
        "chosen",
        "part at message 2",
    ),
    dpo(
        "rejected ends on user",
        CHAT_CHOICE,
        {"rejected": [user(), assistant("5"), user("No")]},
        "rejected",
        "ends on a user",
    ),
    dpo("chosen empty conversation", CHAT_CHOICE, {"chosen": []}, "chosen", "empty list"),
    Kind("margin NaN", REWARD, SCORED, {"margin": math.nan}, "margin", "is nan"),
    Kind("margin infinite", REWARD, SCORED, {"margin": math.inf}, "margin", "is inf"),
    Kind("margin null", REWARD, SCORED, {"margin": None}, "margin", "missing or null"),
    Kind("margin a text", REWARD, SCORED, {"margin": "1.0"}, "margin", "str '1.0', a number"),
    Kind("scored: prompt null", REWARD, SCORED, {"prompt": None}, "prompt", "missing or null"),
    Kind("label null", KTO, {**PAIR, "label": True}, {"label": None}, "label", "missing or null"),
    Kind("label a text", KTO, {**PAIR, "label": True}, {"label": "yes"}, "label", "'yes', True or False"),
    Kind("label a share", KTO, {**PAIR, "label": True}, {"label": 0.5}, "label", "float 0.5"),
    Kind("label 2", KTO, {**PAIR, "label": True}, {"label": 2}, "label", "int 2"),
    Kind("labels of other length", PRM, STEPS, {"labels": [True]}, "labels", "1 entries for 2 steps"),
    Kind("step label null", PRM, STEPS, {"labels": [True, None]}, "labels", "missing or null"),
    Kind("step label a text", PRM, STEPS, {"labels": [True, "good"]}, "labels", "str 'good'"),
    Kind("step empty", PRM, STEPS, {"completions": ["Add them.", ""]}, "completions", "step 1 is empty"),
    Kind("steps a string", PRM, STEPS, {"completions": "Add them."}, "completions", "a non-empty list"),
    Kind("no steps", PRM, STEPS, {"completions": [], "labels": []}, "completions", "a non-empty list"),
    Kind("steps null", PRM, STEPS, {"completions": None}, "completions", "a non-empty list"),
    Kind("step null", PRM, STEPS, {"completions": ["Add them.", None]}, "completions", "step 1 is missing or null"),
    Kind("step a number", PRM, STEPS, {"completions": ["Add them.", 4]}, "completions", "step 1 is int 4"),
    Kind("step with NUL", PRM, STEPS, {"completions": ["Add\0", "It is 4."]}, "completions", "step 0 holds a NUL"),
    Kind("step labels null", PRM, STEPS, {"labels": None}, "labels", "a non-empty list"),
    Kind("step labels a string", PRM, STEPS, {"labels": "yes"}, "labels", "str 'yes', a non-empty list"),
    Kind("step label 2", PRM, STEPS, {"labels": [True, 2]}, "labels", "int 2"),
    Kind("step label a share", PRM, STEPS, {"labels": [True, 0.5]}, "labels", "float 0.5"),
    Kind("prompt of steps null", PRM, STEPS, {"prompt": None}, "prompt", "missing or null"),
    Kind("prompt of steps a chat", PRM, STEPS, {"prompt": [user()]}, "prompt", "where the dataset holds text"),
    Kind(
        "no step within the limit",
        PRM,
        STEPS,
        {"completions": ["x" * 60, "y"]},
        "completions",
        "no step to judge within its first 40",
        {"max_completion_length": 40},
    ),
    Kind("step label of a token 2", PRM, STEP_IDS, {"labels": [-100, 2, 0]}, "labels", "is 2 at 1; it must be 0, 1 or"),
    Kind("step at the first token", PRM, STEP_IDS, {"labels": [1, -100, 0]}, "labels", "1 at the first token"),
    Kind("no step in labels", PRM, STEP_IDS, {"labels": [-100] * 3}, "labels", "-100 everywhere: no step is judged"),
    Kind("step labels shorter than ids", PRM, STEP_IDS, {"labels": [1, 0]}, "labels", "2 entries for 3 token ids"),
]

TOKENS = [
    sft("ids null", IDS, {"input_ids": None}, "input_ids", "missing or null"),
    sft("ids empty", IDS, {"input_ids": [], "labels": []}, "input_ids", "is empty"),
    sft("id negative", IDS, {"input_ids": [1, -2, 3, 4]}, "input_ids", "negative id -2 at 1"),
    sft(
        "id out of vocabulary", IDS, {"input_ids": [1, 2, 3, 999_999]}, "input_ids", "999999 at 3; the vocabulary ends"
    ),
    sft("ids floats", IDS, {"input_ids": [1.0, 2.5, 3.0, 4.0]}, "input_ids", "a flat list of integers"),
    sft("ids a string", IDS, {"input_ids": "1 2 3 4"}, "input_ids", "str '1 2 3 4'"),
    sft("ids nested", IDS, {"input_ids": [[1, 2], [3]]}, "input_ids", "a flat list of integers"),
    sft("labels shorter", IDS, {"labels": [-100, 2, 3]}, "labels", "3 entries for 4"),
    sft("labels longer", IDS, {"labels": [-100, 2, 3, 4, 5]}, "labels", "5 entries for 4"),
    sft("labels all -100", IDS, {"labels": [-100] * 4}, "labels", "-100 everywhere"),
    sft("labels shifted", IDS, {"labels": [2, 3, 4, -100]}, "labels", "is 2 at 0, neither -100 nor the token id 1"),
    sft(
        "only the first token trained",
        IDS,
        {"labels": [1, -100, -100, -100]},
        "input_ids",
        "no token that could be trained",
    ),
    sft(
        "hole in the attention mask",
        {**IDS, "attention_mask": [1] * 4},
        {"attention_mask": [1, 0, 1, 1]},
        "attention_mask",
        "hole at 1",
    ),
    sft(
        "attention mask of zeros",
        {**IDS, "attention_mask": [1] * 4},
        {"attention_mask": [0] * 4},
        "attention_mask",
        "0 everywhere",
    ),
    sft(
        "mask of other length",
        {"input_ids": [1, 2, 3], "completion_mask": [0, 1, 1]},
        {"completion_mask": [0, 1]},
        "completion_mask",
        "2 entries for 3",
    ),
    sft(
        "mask of other numbers",
        {"input_ids": [1, 2, 3], "completion_mask": [0, 1, 1]},
        {"completion_mask": [0, 1, 7]},
        "completion_mask",
        "other than 0 and 1",
    ),
    sft(
        "mask of zeros",
        {"input_ids": [1, 2, 3], "completion_mask": [0, 1, 1]},
        {"completion_mask": [0, 0, 0]},
        "input_ids",
        "no token that could",
    ),
    sft(
        "no mask for completion_only_loss",
        {"input_ids": [1, 2, 3], "completion_mask": [0, 1, 1]},
        {"completion_mask": None},
        "completion_mask",
        "completion_only_loss=True needs it",
        completion_only_loss=True,
    ),
    sft(
        "seq_lengths of other sum",
        {"input_ids": [1, 2, 3], "seq_lengths": [1, 2]},
        {"seq_lengths": [1, 1]},
        "seq_lengths",
        "adds up to 2 for 3",
    ),
    sft(
        "ids longer than the limit",
        IDS,
        {"input_ids": [5] * 9, "labels": [5] * 9},
        "input_ids",
        "has 9 tokens, max_length is 8",
        max_length=8,
        truncation_mode="error",
    ),
    dpo("chosen_ids empty", ID_PAIR, {"chosen_ids": []}, "chosen_ids", "is empty"),
    dpo("rejected_ids out of vocabulary", ID_PAIR, {"rejected_ids": [10**6]}, "rejected_ids", "vocabulary ends"),
    dpo("equal ids", ID_PAIR, {"rejected_ids": [3, 4]}, "rejected_ids", "equals 'chosen_ids'"),
    Kind(
        "reference log-probs of one side",
        DPO,
        ID_PAIR,
        {},
        "ref_rejected_logps",
        "missing",
        without=("ref_rejected_logps",),
    ),
    dpo("reference log-prob NaN", ID_PAIR, {"ref_chosen_logps": math.nan}, "ref_chosen_logps", "is nan"),
]

KINDS = [*MESSAGES, *PLAIN, *PREFERENCES, *TOKENS]


def arrow_where_possible(rows: list[Any]) -> Any:
    """A Dataset where Arrow can hold the rows, which is what most users have; the list itself otherwise."""
    try:
        dataset = datasets.Dataset.from_list(copy.copy(rows))
    except (pa.ArrowException, UnicodeEncodeError, AttributeError, TypeError, ValueError):
        return rows
    # Arrow may have changed the type of all rows.
    return dataset if repr(without_nones(dataset[0])) == repr(without_nones(rows[0])) else rows


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are examined by fifties, not by thousands: each place in a dataset is reached with a tenth of the rows."""
    monkeypatch.setattr(building, "BATCH_ROWS", 50)


def problems_of(dataset: Any, kind: Kind, renderer: Renderer, tmp_path: Any) -> BadRowsError:
    options = PrepareOptions(cache_dir=tmp_path, **kind.options)
    with pytest.raises(BadRowsError) as caught:
        prepare_dataset(dataset, kind.formats, renderer, options, name="train.jsonl")
    return caught.value


def test_there_are_enough_kinds():
    assert len({kind.name for kind in KINDS}) == len(KINDS) >= 60


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_refused_with_row_column_and_reason(kind, renderer, tmp_path, small_batches):
    check_refused(kind, ROWS, BAD, renderer, tmp_path)


@pytest.mark.parametrize("kind", [MESSAGES[0], PLAIN[0], PREFERENCES[0], TOKENS[0]], ids=lambda kind: kind.name)
def test_refused_in_a_long_dataset(kind, renderer, tmp_path):
    check_refused(kind, *LONG, renderer, tmp_path)


def check_refused(kind, count, bad, renderer, tmp_path):
    rows = kind.rows(count, bad)
    if kind.formats is KTO:  # both classes have to be there, or that is a problem of its own
        rows[0] = {**kind.good, "label": False}
    error = problems_of(arrow_where_possible(rows), kind, renderer, tmp_path)
    assert {(p.row, p.column) for p in error.problems} == {(bad, kind.column)}
    assert re.search(kind.reason, error.problems[0].reason), error.problems[0].reason
    assert f"train.jsonl, row {bad}, column {kind.column!r}" in str(error)


@pytest.mark.parametrize("kind", KINDS[:3], ids=lambda kind: kind.name)
def test_dropped_and_counted(kind, renderer, tmp_path, small_batches):
    file = tmp_path / "bad.jsonl"
    options = PrepareOptions(cache_dir=tmp_path, on_bad_rows="drop", bad_rows_file=file, **kind.options)
    prepared = prepare_dataset(arrow_where_possible(kind.rows()), kind.formats, renderer, options)
    assert len(prepared) == ROWS - 1
    assert BAD not in prepared.rows
    assert sum(prepared.report.dropped.values()) == 1
    assert json.loads(file.read_text())["row"] == BAD


def test_all_problems_in_one_pass_first_twenty_shown(renderer, tmp_path):
    rows = [CHAT] * 100
    for i in range(0, 100, 2):
        rows[i] = MESSAGES[i % 10].rows()[BAD]
    error = problems_of(rows, MESSAGES[0], renderer, tmp_path)
    assert error.total == 50
    assert len(error.problems) == 20
    assert "... and 30 more" in str(error)
    assert len(Path(error.file).read_text().splitlines()) == 50


def test_several_problems_of_one_row_are_all_told(renderer, tmp_path):
    rows = [CHOICE, {"prompt": None, "chosen": 3, "rejected": ""}]
    error = problems_of(rows, PREFERENCES[0], renderer, tmp_path)
    assert {p.column for p in error.problems} == {"prompt", "chosen", "rejected"}


def test_one_class_of_labels(renderer, tmp_path):
    kind = Kind("one class", KTO, {**PAIR, "label": True}, {}, "label", "True in every row")
    error = problems_of(kind.rows(), kind, renderer, tmp_path)
    assert (error.problems[0].row, error.problems[0].column) == (-1, "label")
    assert "is True in every row" in str(error)


def test_duplicate_row_ids(renderer, tmp_path, small_batches):
    rows = [{**TEXT, "id": i} for i in range(ROWS)]
    rows[BAD]["id"] = 12
    kind = Kind("duplicate", SFT, TEXT, {}, "id", "", {"row_id_column": "id"})
    error = problems_of(rows, kind, renderer, tmp_path)
    assert [(p.row, p.column, p.reason) for p in error.problems] == [(BAD, "id", "repeats the id of row 12")]


@pytest.mark.parametrize("bad_row", [300, 1_500])
def test_stream_is_checked_ahead_and_then_as_it_is_read(bad_row, renderer, tmp_path):
    rows = [TEXT] * 2_000
    rows[bad_row] = {"text": 5}
    stream = datasets.IterableDataset.from_generator(lambda: iter(rows))
    if bad_row < 1_000:
        error = problems_of(stream, PLAIN[0], renderer, tmp_path)
    else:
        prepared = prepare_dataset(stream, SFT, renderer, PrepareOptions(), name="train.jsonl")
        with pytest.raises(BadRowsError) as caught:
            list(prepared)
        error = caught.value
    assert [(p.row, p.column) for p in error.problems] == [(bad_row, "text")]


def test_stream_drops_and_counts(renderer):
    rows = [TEXT] * 2_000
    rows[10] = rows[1_500] = {"text": ""}
    stream = datasets.IterableDataset.from_generator(lambda: iter(rows))
    prepared = prepare_dataset(stream, SFT, renderer, PrepareOptions(on_bad_rows="drop"))
    assert len(list(prepared)) == 1_998
    assert prepared.report.dropped == {"bad (blank)": 2}


@pytest.mark.parametrize(
    "text",
    ["x " * 500_000, "zero\u200bwidth", "שלום עולם", "e\u0301" * 100, "👩‍👩‍👧", "\ufeffbom", "a\u2028b"],
    ids=["million", "zero-width", "rtl", "combining", "emoji", "bom", "line-separator"],
)
def test_odd_but_valid_text_passes(text, renderer, tmp_path):
    prepared = prepare_dataset([{"text": text}], SFT, renderer, PrepareOptions(cache_dir=tmp_path, max_length=None))
    assert renderer.tokenizer.decode(prepared[0][0].input_ids[:-1]) == text


@pytest.mark.parametrize("turns", [1_000, pytest.param(5_000, marks=pytest.mark.slow)])
def test_chat_of_very_many_turns(turns, tmp_path):
    messages = [user(str(i)) if i % 2 == 0 else assistant(str(i)) for i in range(turns)]
    renderer = Renderer(tiny.tokenizer())
    prepared = prepare_dataset([{"messages": messages}], SFT, renderer, PrepareOptions(cache_dir=tmp_path))
    assert len(prepared[0][0]) == 1024
    assert prepared.report.truncated == 1


def test_cut_to_nothing_by_the_limit_is_dropped_and_counted(renderer, tmp_path):
    rows = [PAIR] * 3 + [{"prompt": "x" * 60, "completion": " y"}]
    options = PrepareOptions(cache_dir=tmp_path, max_length=40)
    prepared = prepare_dataset(rows, SFT, renderer, options)
    assert prepared.report.dropped == {"left without a trained token by max_length": 1}
    np.testing.assert_array_equal(prepared.rows, [0, 1, 2])
