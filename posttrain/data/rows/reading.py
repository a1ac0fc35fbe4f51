"""Reading a row of each format: its clean form, and everything that is wrong with it.

The clean form has text or messages in the format's own columns, tools as a list, token ids as arrays, and no None of Arrow's.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from posttrain.data.images.limits import BadImage, ImageLimits
from posttrain.data.images.opening import open_image
from posttrain.data.images.row_image import RowImage
from posttrain.data.rows.checks import Finding, check_text, describe, read_ids, read_integers, read_label, read_number
from posttrain.data.rows.foreign_formats import Row
from posttrain.data.rows.message_checks import (
    FOR_TEXT_MODEL,
    NO_VISION,
    check_turns,
    read_messages,
    read_template_kwargs,
    read_tools,
    read_trained_roles,
)
from posttrain.data.rows.row_images import IMAGE_COLUMNS, with_images_placed, with_images_used

EXTRAS: dict[str, Callable[[Any, str, list[Finding]], Any]] = {
    "tools": read_tools,
    "chat_template_kwargs": read_template_kwargs,
    "trained_roles": read_trained_roles,
}
"""Columns that may stand beside a conversation -> their readers."""
REFERENCE_NUMBERS = ("ref_chosen_logps", "ref_rejected_logps")
PAIR_NUMBERS = ("margin", *REFERENCE_NUMBERS)
UNREADABLE = RowImage(bytes(16), (0, 0))
"""In the place of an image that was refused, so that the rest of its row is still checked."""


@dataclass
class Reading:
    """How the rows of one dataset are read, and what was found in the row that is being read."""

    conversational: bool
    implicit_prompt: bool = False
    text_field: str = "text"
    vocab_size: int | None = None
    image_limits: ImageLimits | None = None  # None: for a model that sees no images
    image_marker: bool = False  # `<image>` in a text is an image
    found: list[Finding] = field(default_factory=list)
    bad_images: list[Finding] = field(default_factory=list)
    images: list[RowImage] = field(default_factory=list)  # of the row, in the order of `row_images`
    column_images: list[RowImage] = field(default_factory=list)  # those outside of messages
    unknown_keys: set[tuple[str, str]] = field(default_factory=set)  # (column, key of a message)

    def open_images(self, row: Row) -> Row:
        """The row with a RowImage in the place of every payload; what is wrong with a payload goes to `bad_images`."""
        if self.image_limits is None:  # parts of messages are refused where messages are read
            for column in IMAGE_COLUMNS:
                if row.get(column) is not None and not (isinstance(row[column], list | tuple) and not row[column]):
                    reason = f"holds an image, and {NO_VISION}; remove the column if the texts are enough"
                    self.bad_images.append(Finding(FOR_TEXT_MODEL, column, reason))
            return row

        def opened(payload: Any, column: str, place: str) -> RowImage:
            try:
                source = open_image(payload, self.image_limits)
                image = RowImage(source.key, source.size)
            except BadImage as error:
                self.bad_images.append(Finding(error.kind, column, f"{place}{error}".rstrip(".")))
                image = UNREADABLE
            self.images.append(image)
            if column in IMAGE_COLUMNS:
                self.column_images.append(image)
            return image

        return with_images_used(row, opened)

    def place_images(self, row: Row) -> Row:
        """The row with the images of its columns in their places of its conversations."""
        if self.image_limits is None or not self.conversational:
            return row
        return with_images_placed(row, self.column_images, self.image_marker, self.found)

    def text_or_messages(self, row: Row, column: str) -> Any:
        """The value of a column that holds text in a plain dataset and messages in a conversational one."""
        value = row.get(column)
        if not self.conversational:
            if isinstance(value, (list, dict)):
                self.report("mixed_kinds", column, f"is {describe(value)} where the dataset holds text")
                return None
            return value if check_text(value, column, self.found) else None
        if isinstance(value, str):
            self.report("mixed_kinds", column, f"is {describe(value)} where the dataset holds lists of messages")
            return None
        return read_messages(value, column, self.found, self.unknown_keys)

    def extras(self, row: Row) -> Row:
        """The per-row `tools`, `chat_template_kwargs` and `trained_roles` of a conversation."""
        given = {column: row[column] for column in EXTRAS if self.conversational and row.get(column) is not None}
        return {column: EXTRAS[column](value, column, self.found) for column, value in given.items()}

    def report(self, kind: str, column: str, reason: str) -> None:
        self.found.append(Finding(kind, column, reason))


def language_modelling(row: Row, reading: Reading) -> Row:
    if not reading.conversational:
        return {"text": reading.text_or_messages(row, reading.text_field)}
    messages = reading.text_or_messages(row, "messages")
    if messages:
        check_turns(messages, lambda i: "messages", reading.found)
    return {"messages": messages, **reading.extras(row)}


def prompt_only(row: Row, reading: Reading) -> Row:
    prompt = reading.text_or_messages(row, "prompt")
    if prompt and reading.conversational:
        check_turns(prompt, lambda i: "prompt", reading.found, answer_from=None)
    return {"prompt": prompt, **reading.extras(row)}


def prompt_completion(row: Row, reading: Reading) -> Row:
    prompt = reading.text_or_messages(row, "prompt")
    completion = reading.text_or_messages(row, "completion")
    if prompt and completion and reading.conversational:
        _check_answer(prompt, completion, "completion", reading)
    return {"prompt": prompt, "completion": completion, **reading.extras(row)}


def last_turn(row: Row, reading: Reading) -> Row:
    """A conversation as a prompt and the completion that its last turn is."""
    clean = language_modelling(row, reading)
    messages = clean.pop("messages", None)
    if not reading.found and messages[-1]["role"] != "assistant":
        who = messages[-1]["role"]
        reading.report(
            "no_answer", "messages", f"ends with a turn of {who!r}; the assistant's last turn is the completion"
        )
    return clean if reading.found else {"prompt": messages[:-1], "completion": messages[-1:], **clean}


def _check_answer(prompt: list[Row], answer: list[Row], column: str, reading: Reading) -> None:
    """The turns of a prompt and its answer, as one conversation."""

    def column_of(i: int) -> str:
        return "prompt" if i < len(prompt) else column

    check_turns([*prompt, *answer], column_of, reading.found, answer_from=len(prompt))


def preference(row: Row, reading: Reading) -> Row:
    return _read_pair(row, reading, _split_text)


def scored_preference(row: Row, reading: Reading) -> Row:
    """As preference, but plain sides without a prompt are whole texts: they need not share a beginning."""
    return _read_pair(row, reading, lambda clean, reading: {})


def _read_pair(row: Row, reading: Reading, split_text: Callable[[Row, Reading], Row]) -> Row:
    sides = {side: reading.text_or_messages(row, side) for side in ("chosen", "rejected")}
    prompt = None if reading.implicit_prompt else reading.text_or_messages(row, "prompt")
    clean = {"prompt": prompt, **sides, **reading.extras(row), **_pair_numbers(row, reading)}
    if reading.found:
        return clean
    if sides["chosen"] == sides["rejected"]:
        reading.report("equal_pair", "rejected", "equals 'chosen': the pair says nothing about which is better")
        return clean
    split = _split_conversation if reading.conversational else split_text
    return {**clean, **split(clean, reading)}


def _pair_numbers(row: Row, reading: Reading) -> Row:
    """The numbers that may stand beside a pair. A column that is there has to be there in every row."""
    columns = [column for column in PAIR_NUMBERS if column in row]
    if any(column in columns for column in REFERENCE_NUMBERS):
        columns = list(dict.fromkeys([*columns, *REFERENCE_NUMBERS]))  # one side alone is of no use
    return {column: read_number(row.get(column), column, reading.found) for column in columns}


def _split_text(clean: Row, reading: Reading) -> Row:
    if not reading.implicit_prompt:
        return {}
    parts = split_shared_text(clean["chosen"], clean["rejected"])
    if parts is None:
        reason = "shares no beginning with 'rejected' that could be the prompt of both"
        reading.report("different_prompts", "chosen", reason)
        return {}
    return dict(zip(("prompt", "chosen", "rejected"), parts))


def _split_conversation(clean: Row, reading: Reading) -> Row:
    prompt, chosen, rejected = clean["prompt"], clean["chosen"], clean["rejected"]
    if reading.implicit_prompt:
        prompt, chosen, rejected = split_shared_turns(chosen, rejected)
        if not prompt or any(side[0]["role"] == "user" for side in (chosen, rejected)):
            reason = f"and 'rejected' have different prompts: they part at message {len(prompt)}, before an answer"
            reading.report("different_prompts", "chosen", reason)
            return {}
    elif all(len(side) > len(prompt) and side[: len(prompt)] == prompt for side in (chosen, rejected)):
        chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]  # the sides repeat the prompt
    _check_answer(prompt, chosen, "chosen", reading)
    if not any(finding.column == "prompt" for finding in reading.found):
        _check_answer(prompt, rejected, "rejected", reading)
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def triple_preference(row: Row, reading: Reading) -> Row:
    """A pair, and in `reference` a gold answer to the same prompt."""
    gold = reading.text_or_messages(row, "reference")
    clean = {**preference(row, reading), "reference": gold}
    if reading.found:
        return clean
    prompt = clean["prompt"]
    repeats = len(gold) > len(prompt) and gold[: len(prompt)] == prompt
    if reading.implicit_prompt and not repeats:
        reason = "does not begin with the prompt that 'chosen' and 'rejected' share"
        reading.report("different_prompts", "reference", reason)
        return clean
    if repeats and (reading.implicit_prompt or reading.conversational):
        clean["reference"] = gold[len(prompt) :]
    if reading.conversational:
        _check_answer(prompt, clean["reference"], "reference", reading)
    return clean


def unpaired_preference(row: Row, reading: Reading) -> Row:
    clean = prompt_completion(row, reading)
    sides = [side for side in ("chosen", "rejected") if row.get(side) is not None]
    if sides and row.get("completion") is not None:
        reason = "is filled beside 'completion' and 'label': leave one of the two, the pair or the labelled answer"
        reading.report("mixed_formats", sides[0], reason)
    return {**clean, "label": read_label(row.get("label"), "label", reading.found)}


def stepwise(row: Row, reading: Reading) -> Row:
    clean = prompt_only(row, reading)
    steps, labels = row.get("completions"), row.get("labels")
    for column, value in (("completions", steps), ("labels", labels)):
        if not isinstance(value, list) or not value:
            reading.report("wrong_type", column, f"is {describe(value)}, a non-empty list is needed")
            return clean
    for i, step in enumerate(steps):
        problems: list[Finding] = []
        check_text(step, "completions", problems)
        reading.found += [Finding(kind, column, f"step {i} {reason}") for kind, column, reason in problems]
    if len(steps) != len(labels):
        reading.report("other_length", "labels", f"has {len(labels)} entries for {len(steps)} steps in 'completions'")
    clean["completions"] = steps
    clean["labels"] = [read_label(label, "labels", reading.found) for label in labels]
    return clean


def tokenised(row: Row, reading: Reading) -> Row:
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
                reading.report("mask_not_binary", column, "holds numbers other than 0 and 1")
            clean[column] = mask
    if row.get("seq_lengths") is not None:
        lengths = read_integers(row["seq_lengths"], "seq_lengths", reading.found)
        if lengths is not None and lengths.sum() != len(ids):
            reading.report("other_length", "seq_lengths", f"adds up to {lengths.sum()} for {len(ids)} token ids")
        clean["seq_lengths"] = lengths
    _check_attention_mask(clean.get("attention_mask"), reading.found)
    return {**clean, "trained": trained, "has_labels": row.get("labels") is not None}


def tokenised_prompt(row: Row, reading: Reading) -> Row:
    """Without labels or masks of what is trained: those of another method's rows would mean something else."""
    clean = tokenised({name: row.get(name) for name in ("input_ids", "attention_mask")}, reading)
    return {name: clean[name] for name in ("input_ids", "attention_mask") if clean.get(name) is not None}


def tokenised_stepwise(row: Row, reading: Reading) -> Row:
    """`labels` is -100 but where a step ends: 1 there for a good step, 0 for a bad one."""
    ids = read_ids(row.get("input_ids"), "input_ids", reading.found, reading.vocab_size)
    labels = read_integers(row.get("labels"), "labels", reading.found, None if ids is None else len(ids))
    if ids is None or labels is None:
        return {}
    if len(wrong := np.flatnonzero(~np.isin(labels, (-100, 0, 1)))):
        at = int(wrong[0])
        reading.report("step_label", "labels", f"is {labels[at]} at {at}; it must be 0, 1 or, where no step ends, -100")
    elif (labels == -100).all():
        reading.report("nothing_trained", "labels", "is -100 everywhere: no step is judged")
    elif labels[0] != -100:
        reading.report("step_label", "labels", f"is {labels[0]} at the first token, where no step can end")
    return {"input_ids": ids, "labels": labels}


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


def tokenised_preference(row: Row, reading: Reading) -> Row:
    clean = _pair_numbers(row, reading)
    for column in ("prompt_ids", "chosen_ids", "rejected_ids"):
        old_name = column.replace("_ids", "_input_ids")
        name = column if column in row or old_name not in row else old_name
        if name != "prompt_ids" or not reading.implicit_prompt:
            clean[column] = read_ids(row.get(name), name, reading.found, reading.vocab_size)
    if not reading.found and np.array_equal(clean["chosen_ids"], clean["rejected_ids"]):
        reading.report("equal_pair", "rejected_ids", "equals 'chosen_ids': the pair says nothing about which is better")
    return clean


def split_shared_text(chosen: str, rejected: str) -> tuple[str, str, str] | None:
    """(prompt, chosen, rejected): the beginning that both share, cut where a word ends; None when there is none.

    A single space at the cut goes to the answers, as tokenizers join it to the word that follows. Both answers keep
    at least one word, also when one text is the beginning of the other.
    """
    shared = _shared_length(chosen, rejected)
    limit = min(shared, len(chosen.rstrip()) - 1, len(rejected.rstrip()) - 1)
    for cut in range(limit, 0, -1):
        if _is_word_end(chosen, cut) and _is_word_end(rejected, cut):
            if chosen[cut - 1] == " ":
                cut -= 1
            if not chosen[:cut].strip():
                return None
            return chosen[:cut], chosen[cut:], rejected[cut:]
    return None


def _shared_length(a: str, b: str) -> int:
    low, high = 0, min(len(a), len(b))
    while low < high:  # bisection on slices compares at the speed of memcmp
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low


def _is_word_end(text: str, cut: int) -> bool:
    """Whether a new word, or something that is not a word, begins at `cut`."""
    before, after = text[cut - 1], text[cut]
    if unicodedata.combining(after) or after in "\u200d\ufe0f" or before == "\u200d":
        return False  # the character before is not finished
    if before in "'’" and after.isalpha():
        return False
    is_east_asian = ord(after) >= 0x2E80 and ord(before) >= 0x2E80  # scripts without spaces between words
    return is_east_asian or not (before.isalnum() and (after.isalnum() or after in "'’"))


def split_shared_turns(chosen: list[Any], rejected: list[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """(prompt, chosen, rejected): the turns that both share, leaving at least one turn to each side."""
    shared = 0
    while shared < min(len(chosen), len(rejected)) - 1 and chosen[shared] == rejected[shared]:
        shared += 1
    return chosen[:shared], chosen[shared:], rejected[shared:]
