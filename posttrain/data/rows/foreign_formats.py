"""Row formats of other projects (Alpaca, ShareGPT, OpenAI) and how a row of each becomes a row of ours.

A conversion changes names and nesting only. What it does not understand it leaves as it is, so that the check of our own
format reports it; `columns` says under which of the user's column names.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.data.rows.checks import Finding, check_text, describe

Row = dict[str, Any]
TEXT, MESSAGES, SHAREGPT = "text", "messages", "from/value messages"
IDS, OTHER, NOTHING = "token ids", "other", "nothing"
MESSAGE_COLUMNS = ("messages", "prompt", "completion", "chosen", "rejected")
CONVERSATION_COLUMNS = ("conversations", "conversation")
BESIDE_FOREIGN = ("system", "system_prompt", "history", "context", "input")
"""Columns that the formats of others read where they are there."""
SHAREGPT_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant",
    "bard": "assistant", "model": "assistant", "assistant": "assistant", "function_call": "assistant",
    "system": "system", "tool": "tool", "observation": "tool", "function": "tool", "function_response": "tool",
}  # fmt: skip


def value_kind(value: Any) -> str:
    """What a value looks like: text, messages (role/content), from/value messages, token ids, nothing, or other."""
    if isinstance(value, str):
        return TEXT
    if isinstance(value, Mapping):
        value = [value]
    if value is None or not hasattr(value, "__len__") or not len(value):
        return NOTHING if value is None or hasattr(value, "__len__") else OTHER
    first = value[0]
    if isinstance(first, Mapping):
        if first.get("from") is not None and first.get("value") is not None:
            return SHAREGPT
        return MESSAGES
    return IDS if not isinstance(first, (str, bytes, bool)) and hasattr(first, "__index__") else OTHER


def column_kinds(rows: Iterable[Row]) -> dict[str, str]:
    """The kind that most of the given rows agree on, for each column. One odd row does not decide."""
    votes: dict[str, Counter[str]] = {}
    for row in map(parsed_messages, rows):
        for column, value in row.items():
            votes.setdefault(column, Counter())[value_kind(value)] += 1
    kinds = {}
    for column, counts in votes.items():
        counts.pop(NOTHING, None)
        kinds[column] = counts.most_common(1)[0][0] if counts else NOTHING
    return kinds


def parsed_messages(row: Row) -> Row:
    """The row with the JSON texts of its conversations, as CSV files and some exports have them, as what they say."""
    parsed = {}
    for column in ("messages", *CONVERSATION_COLUMNS):
        text = row.get(column)
        if isinstance(text, str) and text.lstrip()[:1] in ("[", "{"):
            try:
                parsed[column] = json.loads(text)
            except ValueError:  # a text after all; the check of the format says what it should be
                continue
    return {**row, **parsed} if parsed else row


def from_value_messages(value: Any) -> Any:
    """[{"from": "human", "value": "..."}] -> [{"role": "user", "content": "..."}]; anything else unchanged."""
    if isinstance(value, Mapping) and "from" in value:
        value = [value]
    if not isinstance(value, list):
        return value
    return [_from_value_message(m) if isinstance(m, Mapping) and m.get("from") is not None else m for m in value]


def _from_value_message(message: Mapping[str, Any]) -> Row:
    speaker, text = message["from"], message.get("value")
    rest = {key: item for key, item in message.items() if key not in ("from", "value", "role", "content")}
    role = SHAREGPT_ROLES.get(speaker.strip().lower(), speaker) if isinstance(speaker, str) else speaker
    converted = {"role": role, "content": text}
    if speaker == "function_call":
        calls = _calls_in(text)
        if calls is not None:
            converted |= {"content": "", "tool_calls": calls}
    return {**converted, **rest}


def _calls_in(text: Any) -> list[Row] | None:
    """The JSON text of a call or of a list of calls, as tool calls; None when it is something else."""
    try:
        calls = json.loads(text) if isinstance(text, str) else text
    except ValueError:
        return None
    calls = calls if isinstance(calls, list) else [calls]
    if not all(isinstance(call, dict) and "name" in call for call in calls):
        return None
    return [{"type": "function", "function": call} for call in calls]


def _with_system(row: Row, messages: Any) -> Any:
    """A `system` column beside the conversation is its system message."""
    system = row.get("system") or row.get("system_prompt")
    if not system or not isinstance(messages, list) or (messages and _role_of(messages[0]) == "system"):
        return messages
    return [{"role": "system", "content": system}, *messages]


def _role_of(message: Any) -> Any:
    return message.get("role") if isinstance(message, Mapping) else None


def _conversation(row: Row) -> Any:
    return _with_system(row, from_value_messages(_first_of(row, *CONVERSATION_COLUMNS)))


def _read_sharegpt(row: Row, found: list[Finding], chat: bool) -> Row:
    return {**row, "messages": _conversation(row)}


def _read_sharegpt_preference(row: Row, found: list[Finding], chat: bool) -> Row:
    answers = {side: from_value_messages(row.get(side)) for side in ("chosen", "rejected")}
    return {**row, "prompt": _conversation(row), **answers}


def _first_of(row: Row, *columns: str) -> Any:
    return next((row[column] for column in columns if row.get(column) is not None), None)


def _read_alpaca(row: Row, found: list[Finding], chat: bool) -> Row:
    """instruction, input and output; a chat where the tokenizer has a template, a marked-up text otherwise."""
    instruction, context = row.get("instruction"), _first_of(row, "input", "context")
    output = _first_of(row, "output", "response")
    is_text = check_text(instruction, "instruction", found)
    if context is not None:
        is_text &= check_text(context, "input" if "input" in row else "context", found, may_be_blank=True)
    if not is_text:
        return row
    context = (context or "").strip()
    kept = {key: row[key] for key in ("tools", "chat_template_kwargs") if key in row}
    if not chat:
        asked = f"### Instruction:\n{instruction}\n\n" + (f"### Input:\n{context}\n\n" if context else "")
        return {**kept, "prompt": f"{asked}### Response:\n", "completion": output}
    question = f"{instruction}\n\n{context}" if context else instruction
    history = row.get("history") or []
    if not all(isinstance(turn, (list, tuple)) and len(turn) == 2 for turn in history):
        found.append(
            Finding("wrong_type", "history", f"is {describe(history)}, a list of (question, answer) is needed")
        )
        return row
    earlier = [{"role": role, "content": text} for turn in history for role, text in zip(("user", "assistant"), turn)]
    prompt = _with_system(row, [*earlier, {"role": "user", "content": question}])
    return {**kept, "prompt": prompt, "completion": [{"role": "assistant", "content": output}]}


def _read_openai_preference(row: Row, found: list[Finding], chat: bool) -> Row:
    asked = row.get("input")
    if not isinstance(asked, Mapping):
        found.append(Finding("wrong_type", "input", f"is {describe(asked)}, a dict with 'messages' is needed"))
        return row
    return {
        "prompt": asked.get("messages"),
        "tools": asked.get("tools"),
        "chosen": row.get("preferred_output"),
        "rejected": row.get("non_preferred_output"),
    }


@dataclass(frozen=True)
class ForeignFormat:
    """A format of another project: when it is recognised, which of our columns it gives, and how."""

    name: str
    matches: Callable[[dict[str, str], Sequence[Row]], bool]  # by the kinds of the columns and some rows
    columns: dict[str, tuple[str, ...]]  # our column -> names the user's column may have
    read: Callable[[Row, list[Finding], bool], Row]
    needs_template: bool = True  # False: rows become plain text where the tokenizer has no chat template
    before_ours: bool = False  # looked for before our own formats, which see a part of its columns


def _answers_alone(kinds: dict[str, str], rows: Sequence[Row]) -> bool:
    """A conversation, and beside it two answers that do not repeat it."""
    if not (_has_conversation(kinds) and {"chosen", "rejected"} <= kinds.keys()) or "prompt" in kinds:
        return False
    answers = [from_value_messages(row.get("chosen")) for row in rows]
    firsts = [answer[0] if isinstance(answer, list) and answer else answer for answer in answers]
    return any(_role_of(first) == "assistant" for first in firsts)


def _has_conversation(kinds: dict[str, str]) -> bool:
    return any(kinds.get(column) in (SHAREGPT, MESSAGES) for column in CONVERSATION_COLUMNS)


FOREIGN_FORMATS = (
    ForeignFormat(
        "ShareGPT preference",
        _answers_alone,
        {"prompt": CONVERSATION_COLUMNS, "chosen": ("chosen",), "rejected": ("rejected",)},
        _read_sharegpt_preference,
        before_ours=True,
    ),
    ForeignFormat(
        "ShareGPT", lambda kinds, rows: _has_conversation(kinds), {"messages": CONVERSATION_COLUMNS}, _read_sharegpt
    ),
    ForeignFormat(
        "Alpaca",
        lambda kinds, rows: kinds.get("instruction") == TEXT and bool({"output", "response"} & kinds.keys()),
        {"prompt": ("instruction",), "completion": ("output", "response")},
        _read_alpaca,
        needs_template=False,
    ),
    ForeignFormat(
        "OpenAI preference",
        lambda kinds, rows: {"input", "preferred_output", "non_preferred_output"} <= kinds.keys(),
        {"prompt": ("input",), "chosen": ("preferred_output",), "rejected": ("non_preferred_output",)},
        _read_openai_preference,
    ),
)
"""Tried in this order, after our own formats unless `before_ours`."""


def convert_message_columns(row: Row, columns: Iterable[str]) -> Row:
    """The row with from/value messages of these columns in role/content form."""
    return {**row, **{column: from_value_messages(row[column]) for column in columns if column in row}}
