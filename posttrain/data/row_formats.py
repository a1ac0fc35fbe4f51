"""The row formats: which columns a row has, how it is read and checked, and how rows become units of Samples.

A method names the formats it accepts; `detect_format` finds out which of them a dataset is in, and says why. Reading a row
gives its clean form (text or messages, tools as a list, no None of Arrow's) and everything that is wrong with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from posttrain.core.sample import Unit
from posttrain.data import row_encoding
from posttrain.data.dataset_helpers import split_shared_text, split_shared_turns
from posttrain.data.foreign_formats import (
    FOREIGN_FORMATS,
    MESSAGE_COLUMNS,
    MESSAGES,
    NOTHING,
    SHAREGPT,
    ForeignFormat,
    Row,
    column_kinds,
    convert_message_columns,
    value_kind,
)
from posttrain.data.row_checks import (
    Finding,
    check_text,
    check_turns,
    describe,
    read_ids,
    read_integers,
    read_label,
    read_messages,
    read_number,
    read_template_kwargs,
    read_tools,
)

if TYPE_CHECKING:
    from posttrain.data.prepare import PrepareOptions
    from posttrain.data.renderer import Renderer

CHAT_EXTRAS = ("tools", "chat_template_kwargs")


class FormatError(ValueError):
    """The columns of a dataset fit none of the formats that the method reads."""


@dataclass
class Reading:
    """How the rows of one dataset are read, and what was found in the row that is being read."""

    conversational: bool
    implicit_prompt: bool = False
    text_field: str = "text"
    vocab_size: int | None = None
    found: list[Finding] = field(default_factory=list)
    unknown_keys: set[str] = field(default_factory=set)

    def text_or_messages(self, row: Row, column: str) -> Any:
        """The value of a column that holds text in a plain dataset and messages in a conversational one."""
        value = row.get(column)
        if not self.conversational:
            if isinstance(value, (list, dict)):
                reason = f"is {describe(value)} where the dataset holds text"
                self.found.append(Finding("mixed_kinds", column, reason))
                return None
            return value if check_text(value, column, self.found) else None
        if isinstance(value, str):
            reason = f"is {describe(value)} where the dataset holds lists of messages"
            self.found.append(Finding("mixed_kinds", column, reason))
            return None
        return read_messages(value, column, self.found, self.unknown_keys)

    def extras(self, row: Row) -> Row:
        """The per-row `tools` and `chat_template_kwargs` of a conversation."""
        extras: Row = {}
        if self.conversational and row.get("tools") is not None:
            extras["tools"] = read_tools(row["tools"], "tools", self.found)
        if self.conversational and row.get("chat_template_kwargs") is not None:
            extras["chat_template_kwargs"] = read_template_kwargs(
                row["chat_template_kwargs"], "chat_template_kwargs", self.found
            )
        return extras


# -------------------------------------------------------------------------------------------------- reading, per format


def _read_language_modelling(row: Row, reading: Reading) -> Row:
    if not reading.conversational:
        return {"text": reading.text_or_messages(row, reading.text_field)}
    messages = reading.text_or_messages(row, "messages")
    if messages:
        check_turns(messages, lambda i: "messages", reading.found)
    return {"messages": messages, **reading.extras(row)}


def _read_prompt_only(row: Row, reading: Reading) -> Row:
    prompt = reading.text_or_messages(row, "prompt")
    if prompt and reading.conversational:
        check_turns(prompt, lambda i: "prompt", reading.found, answer_from=None)
    return {"prompt": prompt, **reading.extras(row)}


def _read_prompt_completion(row: Row, reading: Reading) -> Row:
    prompt = reading.text_or_messages(row, "prompt")
    completion = reading.text_or_messages(row, "completion")
    if prompt and completion and reading.conversational:
        _check_answer(prompt, completion, "completion", reading)
    return {"prompt": prompt, "completion": completion, **reading.extras(row)}


def _check_answer(prompt: list[Row], answer: list[Row], column: str, reading: Reading) -> None:
    """The turns of a prompt and its answer, as one conversation."""

    def column_of(i: int) -> str:
        return "prompt" if i < len(prompt) else column

    check_turns([*prompt, *answer], column_of, reading.found, answer_from=len(prompt))


def _read_preference(row: Row, reading: Reading) -> Row:
    sides = {side: reading.text_or_messages(row, side) for side in ("chosen", "rejected")}
    prompt = None if reading.implicit_prompt else reading.text_or_messages(row, "prompt")
    clean = {"prompt": prompt, **sides, **reading.extras(row)}
    for column in ("margin", "ref_chosen_logps", "ref_rejected_logps"):
        if column in row:
            clean[column] = read_number(row[column], column, reading.found)
    if reading.found:
        return clean
    if sides["chosen"] == sides["rejected"]:
        reason = "equals 'chosen': the pair says nothing about which is better"
        reading.found.append(Finding("equal_pair", "rejected", reason))
        return clean
    split = _split_conversation if reading.conversational else _split_text
    return {**clean, **split(clean, reading)}


def _split_text(clean: Row, reading: Reading) -> Row:
    if not reading.implicit_prompt:
        return {}
    parts = split_shared_text(clean["chosen"], clean["rejected"])
    if parts is None:
        reason = "shares no beginning with 'rejected' that could be the prompt of both"
        reading.found.append(Finding("different_prompts", "chosen", reason))
        return {}
    return dict(zip(("prompt", "chosen", "rejected"), parts))


def _split_conversation(clean: Row, reading: Reading) -> Row:
    prompt, chosen, rejected = clean["prompt"], clean["chosen"], clean["rejected"]
    if reading.implicit_prompt:
        prompt, chosen, rejected = split_shared_turns(chosen, rejected)
        if not prompt or any(side[0]["role"] == "user" for side in (chosen, rejected)):
            reason = f"and 'rejected' have different prompts: they part at message {len(prompt)}, before an answer"
            reading.found.append(Finding("different_prompts", "chosen", reason))
            return {}
    elif all(len(side) > len(prompt) and side[: len(prompt)] == prompt for side in (chosen, rejected)):
        chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]  # the sides repeat the prompt
    _check_answer(prompt, chosen, "chosen", reading)
    if not any(finding.column == "prompt" for finding in reading.found):
        _check_answer(prompt, rejected, "rejected", reading)
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def _read_scored_preference(row: Row, reading: Reading) -> Row:
    """As preference, but plain sides without a prompt are whole texts: they need not share a beginning."""
    if reading.conversational or not reading.implicit_prompt:
        return _read_preference(row, reading)
    explicit = Reading(False, False, vocab_size=reading.vocab_size, found=reading.found)
    return {**_read_preference({**row, "prompt": "whole text"}, explicit), "prompt": None}


def _read_unpaired(row: Row, reading: Reading) -> Row:
    clean = _read_prompt_completion(row, reading)
    return {**clean, "label": read_label(row.get("label"), "label", reading.found)}


def _read_stepwise(row: Row, reading: Reading) -> Row:
    clean = _read_prompt_only(row, reading)
    steps, labels = row.get("completions"), row.get("labels")
    for column, value in (("completions", steps), ("labels", labels)):
        if not isinstance(value, list) or not value:
            reading.found.append(Finding("wrong_type", column, f"is {describe(value)}, a non-empty list is needed"))
            return clean
    for i, step in enumerate(steps):
        problems: list[Finding] = []
        check_text(step, "completions", problems)
        reading.found += [Finding(kind, column, f"step {i} {reason}") for kind, column, reason in problems]
    if len(steps) != len(labels):
        reason = f"has {len(labels)} entries for {len(steps)} steps in 'completions'"
        reading.found.append(Finding("other_length", "labels", reason))
    clean["completions"] = steps
    clean["labels"] = [read_label(label, "labels", reading.found) for label in labels]
    return clean


def _read_tokenised(row: Row, reading: Reading) -> Row:
    ids = read_ids(row.get("input_ids"), "input_ids", reading.found, reading.vocab_size)
    if ids is None:
        return {}
    trained = np.ones(len(ids), dtype=bool)
    clean: Row = {"input_ids": ids}
    if row.get("labels") is not None:
        labels = read_integers(row["labels"], "labels", reading.found, len(ids))
        if labels is not None:
            _check_labels(ids, labels, reading.found)
            trained = labels != -100
    for column in ("completion_mask", "assistant_masks", "attention_mask"):
        if row.get(column) is not None:
            mask = read_integers(row[column], column, reading.found, len(ids))
            if mask is not None and not np.isin(mask, (0, 1)).all():
                reading.found.append(Finding("mask_not_binary", column, "holds numbers other than 0 and 1"))
            clean[column] = mask
    if row.get("seq_lengths") is not None:
        lengths = read_integers(row["seq_lengths"], "seq_lengths", reading.found)
        if lengths is not None and lengths.sum() != len(ids):
            reason = f"adds up to {lengths.sum()} for {len(ids)} token ids"
            reading.found.append(Finding("other_length", "seq_lengths", reason))
        clean["seq_lengths"] = lengths
    _check_attention_mask(clean.get("attention_mask"), reading.found)
    return {**clean, "trained": trained}


def _check_labels(ids: np.ndarray, labels: np.ndarray, found: list[Finding]) -> None:
    wrong = np.flatnonzero((labels != -100) & (labels != ids))
    if len(wrong):
        at = int(wrong[0])
        reason = f"is {labels[at]} at {at}, neither -100 nor the token id {ids[at]}; labels are not shifted"
        found.append(Finding("label_not_id", "labels", reason))
    elif (labels == -100).all():
        found.append(Finding("nothing_trained", "labels", "is -100 everywhere: no token is trained"))


def _check_attention_mask(mask: np.ndarray | None, found: list[Finding]) -> None:
    """Padding at the ends is cut off; a hole inside is not something that a model without padding can honour."""
    if mask is None:
        return
    seen = np.flatnonzero(mask)
    if not len(seen):
        found.append(Finding("nothing_trained", "attention_mask", "is 0 everywhere: no token is left"))
    elif len(seen) != seen[-1] - seen[0] + 1:
        hole = int(seen[0] + np.argmin(mask[seen[0] :]))
        found.append(Finding("attention_hole", "attention_mask", f"has a hole at {hole}, between tokens that count"))


def _read_tokenised_preference(row: Row, reading: Reading) -> Row:
    clean: Row = {}
    for column in ("prompt_ids", "chosen_ids", "rejected_ids"):
        old_name = column.replace("_ids", "_input_ids")
        name = column if column in row or old_name not in row else old_name
        if name != "prompt_ids" or not reading.implicit_prompt:
            clean[column] = read_ids(row.get(name), name, reading.found, reading.vocab_size)
    for column in ("margin", "ref_chosen_logps", "ref_rejected_logps"):
        if column in row:
            clean[column] = read_number(row[column], column, reading.found)
    if not reading.found and np.array_equal(clean["chosen_ids"], clean["rejected_ids"]):
        reason = "equals 'chosen_ids': the pair says nothing about which is better"
        reading.found.append(Finding("equal_pair", "rejected_ids", reason))
    return clean


# ---------------------------------------------------------------------------------------------------------- the formats


@dataclass(frozen=True)
class RowFormat:
    """One way to write a row. `required` lists alternatives: sets of columns any of which is enough."""

    name: str
    roles: tuple[str, ...]
    required: tuple[tuple[str, ...], ...]
    optional: tuple[str, ...]
    read: Callable[[Row, Reading], Row]
    encode: Callable[[list[Row], Renderer, PrepareOptions], list[Unit | Finding]]
    decided_by: str = ""  # the column whose values tell plain from conversational; the first required one by default
    trains_tokens: bool = True  # False: units are read or scored as a whole, `trained` may be empty
    tokenised: bool = False

    def reading(self, row: Row, **options: Any) -> Reading:
        """How this single row would be read if it were a dataset of its own."""
        detection = _match(self, column_kinds([row]), options.pop("text_field", "text"))
        if detection is None:
            detection = Detection(self, False, "")
        return detection.reading(**options)

    def check(self, row: Row, reading: Reading | None = None) -> list[Finding]:
        """Everything that is wrong with the row."""
        reading = reading or self.reading(row)
        self.read(row, reading)
        return list(dict.fromkeys(reading.found))

    def normalise(self, row: Row, reading: Reading | None = None) -> Row:
        """The row in its clean form; raises FormatError when something is wrong with it."""
        reading = reading or self.reading(row)
        clean = self.read(row, reading)
        if reading.found:
            raise FormatError("; ".join(f"column {f.column!r} {f.reason}" for f in reading.found))
        return clean

    def units(self, rows: list[Row], renderer: Renderer, options: PrepareOptions) -> list[Unit | Finding]:
        """Normalised rows as units of Samples; a Finding stands for a row that cannot be rendered."""
        return self.encode(rows, renderer, options) if rows else []


PAIR_OPTIONAL = ("prompt", *CHAT_EXTRAS, "margin", "ref_chosen_logps", "ref_rejected_logps")

LANGUAGE_MODELLING = RowFormat(
    "language modelling",
    ("text",),
    (("messages",), ("text",)),
    CHAT_EXTRAS,
    _read_language_modelling,
    row_encoding.language_modelling,
)
PROMPT_ONLY = RowFormat(
    "prompt-only",
    ("prompt",),
    (("prompt",),),
    CHAT_EXTRAS,
    _read_prompt_only,
    row_encoding.prompt_only,
    trains_tokens=False,
)
PROMPT_COMPLETION = RowFormat(
    "prompt-completion",
    ("text",),
    (("prompt", "completion"),),
    CHAT_EXTRAS,
    _read_prompt_completion,
    row_encoding.prompt_completion,
    decided_by="completion",
)
PREFERENCE = RowFormat(
    "preference",
    ("chosen", "rejected"),
    (("chosen", "rejected"),),
    PAIR_OPTIONAL,
    _read_preference,
    row_encoding.preference,
)
SCORED_PREFERENCE = RowFormat(
    "preference",
    ("chosen", "rejected"),
    (("chosen", "rejected"),),
    PAIR_OPTIONAL,
    _read_scored_preference,
    row_encoding.scored_preference,
    trains_tokens=False,
)
"""Preference pairs whose sides are scored as whole sequences, as reward models do."""
UNPAIRED_PREFERENCE = RowFormat(
    "unpaired preference",
    ("completion",),
    (("prompt", "completion", "label"),),
    CHAT_EXTRAS,
    _read_unpaired,
    row_encoding.unpaired_preference,
    decided_by="completion",
)
STEPWISE = RowFormat(
    "stepwise supervision",
    ("text",),
    (("prompt", "completions", "labels"),),
    CHAT_EXTRAS,
    _read_stepwise,
    row_encoding.stepwise,
)
TOKENISED = RowFormat(
    "tokenised",
    ("text",),
    (("input_ids",),),
    ("labels", "completion_mask", "assistant_masks", "attention_mask", "seq_lengths"),
    _read_tokenised,
    row_encoding.tokenised,
    tokenised=True,
)
TOKENISED_PREFERENCE = RowFormat(
    "tokenised preference",
    ("chosen", "rejected"),
    (("prompt_ids", "chosen_ids", "rejected_ids"),),
    PAIR_OPTIONAL[3:],
    _read_tokenised_preference,
    row_encoding.tokenised_preference,
    tokenised=True,
)
TOKENISED_SCORED_PREFERENCE = RowFormat(
    "tokenised preference",
    ("chosen", "rejected"),
    (("chosen_ids", "rejected_ids"), ("chosen_input_ids", "rejected_input_ids")),
    ("prompt_ids", "margin"),
    _read_tokenised_preference,
    row_encoding.tokenised_scored_preference,
    trains_tokens=False,
    tokenised=True,
)

FORMATS = (
    TOKENISED_PREFERENCE,
    TOKENISED_SCORED_PREFERENCE,
    TOKENISED,
    PREFERENCE,
    SCORED_PREFERENCE,
    UNPAIRED_PREFERENCE,
    STEPWISE,
    PROMPT_COMPLETION,
    LANGUAGE_MODELLING,
    PROMPT_ONLY,
)
"""In the order in which they are looked for: the more a format asks for, the earlier."""


# ------------------------------------------------------------------------------------------------------------ detection


@dataclass(frozen=True)
class Detection:
    """The format of a dataset, and why it was taken for it."""

    format: RowFormat
    conversational: bool
    explanation: str
    implicit_prompt: bool = False
    text_field: str = "text"
    foreign: ForeignFormat | None = None
    from_value_columns: tuple[str, ...] = ()
    columns: dict[str, str] = field(default_factory=dict)  # our column -> the user's, where they differ

    def reading(self, vocab_size: int | None = None) -> Reading:
        return Reading(self.conversational, self.implicit_prompt, self.text_field, vocab_size)

    def read(self, row: Any, vocab_size: int | None = None) -> tuple[Row, list[Finding], set[str]]:
        """(clean row, findings under the user's column names, keys of messages that no template knows)."""
        if not isinstance(row, dict):
            return {}, [Finding("row_not_dict", "", f"the row is {describe(row)}, a dict of columns is needed")], set()
        reading = self.reading(vocab_size)
        if self.from_value_columns:
            row = convert_message_columns(row, self.from_value_columns)
        if self.foreign is not None:
            row = self.foreign.read(row, reading.found, self.conversational)
        clean = row if reading.found else self.format.read(row, reading)
        if not reading.found:
            return clean, [], reading.unknown_keys
        found = [f._replace(column=self.columns.get(f.column, f.column)) for f in dict.fromkeys(reading.found)]
        return clean, [self._explain_other_format(f, row) for f in found], reading.unknown_keys

    def _explain_other_format(self, finding: Finding, row: Row) -> Finding:
        """A null in a row that holds another format's columns is a mix of two files; say so."""
        if finding.kind != "null":
            return finding
        needed = {self.columns.get(name, name) for names in self.format.required for name in names}
        known = {name for fmt in FORMATS for names in fmt.required for name in names} | {"conversations", "instruction"}
        others = [c for c, v in row.items() if c in known - needed and value_kind(v) != NOTHING]
        if not others:
            return finding
        reason = f"{finding.reason}; the row has {', '.join(map(repr, others))}, the columns of another format"
        return finding._replace(kind="mixed_formats", reason=reason)


def detect_format(
    rows: Iterable[Row],
    wanted: tuple[RowFormat, ...],
    *,
    text_field: str = "text",
    has_template: bool = True,
    name: str = "the dataset",
) -> Detection:
    """Which of the `wanted` formats a dataset is in, decided by all the rows given (its first hundred or so)."""
    kinds = column_kinds(row for row in rows if isinstance(row, dict))
    candidates = [fmt for fmt in FORMATS if fmt in wanted]
    if text_field != "text" and text_field in kinds:  # a text column that the user names goes before all others
        candidates.sort(key=lambda fmt: fmt is not LANGUAGE_MODELLING)
    for fmt in candidates:
        detection = _match(fmt, kinds, text_field)
        if detection is not None:
            return detection
    for foreign in FOREIGN_FORMATS:
        fmt = next((f for f in candidates if any(set(names) <= foreign.columns.keys() for names in f.required)), None)
        if fmt is not None and foreign.matches(kinds):
            return _foreign_detection(foreign, fmt, kinds, has_template)
    alternatives = " or ".join(
        f"{fmt.name} ({' or '.join(' + '.join(map(repr, names)) for names in fmt.required)})"
        for fmt in dict.fromkeys(candidates)
    )
    raise FormatError(
        f"The columns of {name} are {', '.join(map(repr, kinds)) or 'none'}; this method reads {alternatives}. "
        "Rename the columns, or give a formatting function or a column mapping."
    )


def _match(fmt: RowFormat, kinds: dict[str, str], text_field: str) -> Detection | None:
    for names in fmt.required:
        columns = tuple(text_field if (name == "text" and fmt is LANGUAGE_MODELLING) else name for name in names)
        empty = [c for c in columns if kinds.get(c, NOTHING) == NOTHING]
        if not kinds.keys() >= set(columns) or (empty and len(fmt.required) > 1):
            continue
        decider = fmt.decided_by or columns[0]
        is_chat = not fmt.tokenised and kinds[decider] in (MESSAGES, SHAREGPT)
        from_value = tuple(c for c in MESSAGE_COLUMNS if kinds.get(c) == SHAREGPT)
        implicit = "chosen" in fmt.roles and _prompt_is_implicit(fmt, kinds, is_chat)
        why = _explain(fmt, columns, kinds[decider], decider, is_chat, implicit, kinds)
        return Detection(fmt, is_chat, why, implicit, text_field, from_value_columns=from_value)
    return None


def _prompt_is_implicit(fmt: RowFormat, kinds: dict[str, str], is_chat: bool) -> bool:
    if fmt.tokenised:
        return kinds.get("prompt_ids", NOTHING) == NOTHING
    prompt = kinds.get("prompt", NOTHING)
    return prompt == NOTHING or (is_chat and prompt not in (MESSAGES, SHAREGPT))


def _explain(
    fmt: RowFormat,
    columns: tuple[str, ...],
    kind: str,
    decider: str,
    is_chat: bool,
    implicit: bool,
    kinds: dict[str, str],
) -> str:
    plural = "s" * (len(columns) > 1)
    sentence = f"read as {_style(fmt, is_chat)} because it has the column{plural} {' and '.join(map(repr, columns))}"
    if not fmt.tokenised:
        sentence += f" and {decider!r} holds {'lists of ' if is_chat else ''}{kind}"
    if implicit and not fmt.tokenised:
        beside = "the 'prompt' column is plain text beside them" if "prompt" in kinds else "there is no 'prompt' column"
        sentence += f"; {beside}, so the prompt is what both sides share"
    return sentence


def _style(fmt: RowFormat, is_chat: bool) -> str:
    return fmt.name if fmt.tokenised else f"{'conversational' if is_chat else 'plain'} {fmt.name}"


def _foreign_detection(foreign: ForeignFormat, fmt: RowFormat, kinds: dict[str, str], has_template: bool) -> Detection:
    columns = {
        ours: next((name for name in names if name in kinds), names[0]) for ours, names in foreign.columns.items()
    }
    is_chat = foreign.needs_template or has_template
    sources = " and ".join(map(repr, dict.fromkeys(columns.values())))
    why = f"read as {_style(fmt, is_chat)} because it has {foreign.name}'s columns {sources}"
    return Detection(fmt, is_chat, why, foreign=foreign, columns=columns)
