"""The row formats: which columns a row has, how it is read and checked, and how rows become units of Samples.

A method names the formats it accepts; `detect_format` finds out which of them a dataset is in, and says why.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from posttrain.data.images.limits import ImageLimits
from posttrain.data.images.row_image import RowImage
from posttrain.data.options import PrepareOptions
from posttrain.data.render.renderer import Renderer
from posttrain.data.render.templates import adopt_chat_format
from posttrain.data.rows import encoding as encode
from posttrain.data.rows import reading as read
from posttrain.data.rows.checks import Finding, describe
from posttrain.data.rows.encoding import Notes, Units
from posttrain.data.rows.foreign_formats import (
    FOREIGN_FORMATS,
    MESSAGE_COLUMNS,
    MESSAGES,
    NOTHING,
    SHAREGPT,
    TEXT,
    ForeignFormat,
    Row,
    column_kinds,
    convert_message_columns,
    parsed_messages,
    value_kind,
)
from posttrain.data.rows.reading import PAIR_NUMBERS, Reading
from posttrain.data.rows.row_images import IMAGE_COLUMNS, MARKER, counts_markers, num_column_images

CHAT_EXTRAS = ("tools", "chat_template_kwargs", "trained_roles", *IMAGE_COLUMNS)
MEDIA_COLUMNS = ("video", "videos", "audio", "audios")
IMAGES = "images"
"""The column of a clean row of plain text that holds its RowImages."""


class FormatError(ValueError):
    """The columns of a dataset fit none of the formats that the method reads."""


@dataclass(frozen=True)
class RowFormat:
    """One way to write a row. `required` lists alternatives: sets of columns any of which is enough."""

    name: str
    roles: tuple[str, ...]
    required: tuple[tuple[str, ...], ...]
    optional: tuple[str, ...]
    read: Callable[[Row, Reading], Row]
    encode: Callable[[list[Row], Renderer, PrepareOptions, Notes], Units]
    decided_by: str = ""  # the column whose values tell plain from conversational; the first required one by default
    trains_tokens: bool = True  # False: units are read or scored as a whole, `trained` may be empty
    tokenised: bool = False
    judges_steps: bool = False  # `trained` marks the tokens at which a step is judged, `per_token["labels"]` says how


PAIR_OPTIONAL = ("prompt", *CHAT_EXTRAS, *PAIR_NUMBERS)
TRIPLE = ("chosen", "rejected", "reference")

LANGUAGE_MODELLING = RowFormat(
    "language modelling", ("text",), (("messages",), ("text",)), CHAT_EXTRAS,
    read.language_modelling, encode.language_modelling,
)  # fmt: skip
PROMPT_ONLY = RowFormat(
    "prompt-only", ("prompt",), (("prompt",),), CHAT_EXTRAS, read.prompt_only, encode.prompt_only, trains_tokens=False
)
PROMPT_COMPLETION = RowFormat(
    "prompt-completion", ("text",), (("prompt", "completion"),), CHAT_EXTRAS,
    read.prompt_completion, encode.prompt_completion, decided_by="completion",
)  # fmt: skip
LAST_TURN = RowFormat(
    "messages before a last turn", ("text",), (("messages",),), CHAT_EXTRAS, read.last_turn, encode.prompt_completion
)
"""A conversation whose last turn is the completion: it alone is trained, and may be written anew."""
PREFERENCE = RowFormat(
    "preference", ("chosen", "rejected"), (("chosen", "rejected"),), PAIR_OPTIONAL, read.preference, encode.preference
)
TRIPLE_PREFERENCE = RowFormat(
    "triple preference", TRIPLE, (TRIPLE,), ("prompt", *CHAT_EXTRAS), read.triple_preference, encode.triple_preference
)
SCORED_PREFERENCE = replace(
    PREFERENCE, read=read.scored_preference, encode=encode.scored_preference, trains_tokens=False
)
"""Preference pairs whose sides are scored as whole sequences, as reward models do."""
UNPAIRED_PREFERENCE = RowFormat(
    "unpaired preference", ("completion",), (("prompt", "completion", "label"),), CHAT_EXTRAS,
    read.unpaired_preference, encode.unpaired_preference, decided_by="completion",
)  # fmt: skip
STEPWISE = RowFormat(
    "stepwise supervision", ("text",), (("prompt", "completions", "labels"),), CHAT_EXTRAS,
    read.stepwise, encode.stepwise, judges_steps=True,
)  # fmt: skip
TOKENISED = RowFormat(
    "tokenised", ("text",), (("input_ids",),),
    ("labels", "completion_mask", "assistant_masks", "attention_mask", "seq_lengths"),
    read.tokenised, encode.tokenised, tokenised=True,
)  # fmt: skip
TOKENISED_PROMPT = RowFormat(
    "tokenised prompt", ("prompt",), (("input_ids",),), ("attention_mask",),
    read.tokenised_prompt, encode.tokenised_prompt, trains_tokens=False, tokenised=True,
)  # fmt: skip
TOKENISED_STEPWISE = RowFormat(
    "tokenised stepwise supervision", ("text",), (("input_ids", "labels"),), (),
    read.tokenised_stepwise, encode.tokenised_stepwise, tokenised=True, judges_steps=True,
)  # fmt: skip
TOKENISED_PREFERENCE = RowFormat(
    "tokenised preference", ("chosen", "rejected"), (("prompt_ids", "chosen_ids", "rejected_ids"),), PAIR_NUMBERS,
    read.tokenised_preference, encode.tokenised_preference, tokenised=True,
)  # fmt: skip
TOKENISED_SCORED_PREFERENCE = replace(
    TOKENISED_PREFERENCE,
    required=(("chosen_ids", "rejected_ids"), ("chosen_input_ids", "rejected_input_ids")),
    optional=("prompt_ids", "margin"),
    encode=encode.tokenised_scored_preference,
    trains_tokens=False,
)

FORMATS = (
    TOKENISED_PREFERENCE, TOKENISED_SCORED_PREFERENCE, TOKENISED_STEPWISE, TOKENISED, TRIPLE_PREFERENCE,
    UNPAIRED_PREFERENCE, PREFERENCE, SCORED_PREFERENCE, STEPWISE, PROMPT_COMPLETION, LANGUAGE_MODELLING, LAST_TURN,
    PROMPT_ONLY, TOKENISED_PROMPT,
)  # fmt: skip
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
    image_limits: ImageLimits | None = None  # None: for a model that sees no images
    image_marker: bool = False  # `<image>` in a text is an image

    def reading(self, vocab_size: int | None = None) -> Reading:
        how = (self.conversational, self.implicit_prompt, self.text_field, vocab_size)
        return Reading(*how, self.image_limits, self.image_marker)

    def read(self, row: Any, vocab_size: int | None = None) -> tuple[Row, list[Finding], set[tuple[str, str]]]:
        """(clean row, findings, keys of messages that no template knows), under the user's names of columns."""
        clean, found, unknown, _ = self.read_with_images(row, vocab_size)
        return clean, found, unknown

    def read_with_images(
        self, row: Any, vocab_size: int | None = None
    ) -> tuple[Row, list[Finding], set[tuple[str, str]], list[RowImage]]:
        """As `read`, and the images of the row in the order of `row_images`."""
        if not isinstance(row, dict):
            wrong = Finding("row_not_dict", "", f"the row is {describe(row)}, a dict of columns is needed")
            return {}, [wrong], set(), []
        reading = self.reading(vocab_size)
        row = reading.place_images(self.converted(reading.open_images(parsed_messages(row)), reading.found))
        clean = row if reading.found else self.format.read(row, reading)
        if reading.column_images and not self.conversational:
            clean = {**clean, IMAGES: reading.column_images}
        if reading.images and self.format.tokenised:
            reading.report("images_not_read", IMAGES, f"stand beside {self.format.name} rows, which cannot have images")
        unknown = {(self.columns.get(column, column), key) for column, key in reading.unknown_keys}
        found = [f._replace(column=self.columns.get(f.column, f.column)) for f in dict.fromkeys(reading.found)]
        found = [*dict.fromkeys(reading.bad_images), *(self._explain_other_format(f, row) for f in found)]
        return clean, found, unknown, reading.images

    def converted(self, row: Row, found: list[Finding]) -> Row:
        """A row of another project's format as one of ours."""
        if self.from_value_columns:
            row = convert_message_columns(row, self.from_value_columns)
        return row if self.foreign is None else self.foreign.read(row, found, self.conversational)

    def column_of_role(self, role: str) -> str:
        """The user's column in which the sample that plays `role` ends."""
        if self.format.tokenised:
            return f"{role}_ids" if len(self.format.roles) > 1 else "input_ids"
        if self.format.judges_steps:
            return self.columns.get("completions", "completions")
        if len(self.format.roles) > 1:
            return self.columns.get(role, role)
        column = self.format.decided_by or ("messages" if self.conversational else self.text_field)
        return self.columns.get(column, column) if self.format.required[0] != ("prompt",) else "prompt"

    def _explain_other_format(self, finding: Finding, row: Row) -> Finding:
        """A null in a row that holds another format's columns is a mix of two files; say so."""
        if finding.kind != "null":
            return finding
        signatures = [{self.columns.get(name, name) for name in names} for names in self.format.required]
        needed = next((names for names in signatures if finding.column in names), set())
        known = {name for fmt in FORMATS for names in fmt.required for name in names} | {"conversations", "instruction"}
        foreign = known - needed - set(self.format.optional)
        others = [c for c, v in row.items() if c in foreign and value_kind(v) != NOTHING]
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
    rows = [row for row in rows if isinstance(row, dict)]
    kinds = column_kinds(rows)
    candidates = [fmt for fmt in FORMATS if fmt in wanted]
    if text_field != "text" and text_field in kinds:  # a text column that the user names goes before all others
        candidates.sort(key=lambda fmt: fmt is not LANGUAGE_MODELLING)
    foreign = {True: [], False: []}
    for theirs in FOREIGN_FORMATS:
        fmt = next((f for f in candidates if any(set(names) <= theirs.columns.keys() for names in f.required)), None)
        if fmt is not None and theirs.matches(kinds, rows):
            foreign[theirs.before_ours].append(_foreign_detection(theirs, fmt, kinds, has_template))
    ours = _matches(candidates, kinds, text_field) or _matches(candidates, kinds, text_field, may_be_empty=True)
    detections = [*foreign[True], *ours, *foreign[False]]
    if detections:
        return detections[0]
    alternatives = " or ".join(
        f"{fmt.name} ({' or '.join(' + '.join(map(repr, names)) for names in fmt.required)})"
        for fmt in dict.fromkeys(candidates)
    )
    raise FormatError(
        f"The columns of {name} are {', '.join(map(repr, kinds)) or 'none'}; this method reads {alternatives}. "
        f"{_renaming(kinds, candidates) or 'Rename the columns, or give a formatting function or a column mapping.'}"
    )


def detect(
    rows: Sequence[Any], formats: tuple[RowFormat, ...], renderer: Renderer, options: PrepareOptions, name: str
) -> Detection:
    """The format of a dataset, and a refusal of options that do not go with it."""
    if options.formatting_func is not None:
        if LANGUAGE_MODELLING not in formats:
            kinds = " or ".join(fmt.name for fmt in formats)
            raise ValueError(f"formatting_func writes one text for each row of {name}; this method reads {kinds}.")
        why = "read as plain language modelling because formatting_func writes the text of each row"
        detection = Detection(LANGUAGE_MODELLING, False, why)
    else:
        detection = detect_format(
            rows, formats, text_field=options.dataset_text_field, has_template=renderer.has_template, name=name
        )
    _check_options(options, detection, name)
    if options.image_limits is not None:
        if renderer.layouts is None:
            raise ValueError(
                f"`image_limits` are given for {name}, and its renderer was made without `layouts` of images."
            )
        detection = _with_images(detection, rows, options.image_limits, name)
    if detection.conversational and not renderer.has_template:
        detection = replace(detection, explanation=f"{detection.explanation}; {adopt_chat_format(renderer)}")
    return detection


def _with_images(detection: Detection, rows: Sequence[Any], limits: ImageLimits, name: str) -> Detection:
    """The detection for a model that sees images."""
    if unseen := {column for row in rows if isinstance(row, dict) for column in row if column in MEDIA_COLUMNS}:
        columns = " and ".join(map(repr, sorted(unseen)))
        raise ValueError(f"{name} has {columns}; videos and audio are not supported: remove what is not to be seen.")
    detection = replace(detection, image_limits=limits)
    ours = [parsed_messages(row) for row in rows if isinstance(row, dict)]
    counted = [(detection.converted(row, []), num_column_images(row)) for row in ours]
    if not detection.conversational or not counts_markers(counted):
        return detection
    why = f"{detection.explanation}; every {MARKER!r} in its texts is read as the place of an image, as there are as many images"
    return replace(detection, image_marker=True, explanation=why)


def _check_options(options: PrepareOptions, detection: Detection, name: str) -> None:
    """Options that the format of a dataset cannot honour are refused, not ignored."""
    fmt = detection.format
    if options.assistant_only_loss and not (detection.conversational or fmt.tokenised):
        raise ValueError(f"assistant_only_loss needs conversations; {name} was {detection.explanation}.")
    if options.completion_only_loss and fmt is LANGUAGE_MODELLING:
        why = "formatting_func writes one text" if options.formatting_func else f"{name} was {detection.explanation}"
        raise ValueError(f"completion_only_loss=True needs the columns 'prompt' and 'completion'; {why}.")
    if options.packing is not None and len(fmt.roles) > 1:
        raise ValueError(f"packing puts single samples into blocks; {name} was {detection.explanation}.")


ALSO_CALLED = {
    "prompt": ("question", "query", "instruction", "problem", "input", "user"),
    "completion": ("answer", "response", "output", "target", "assistant"),
    "chosen": ("preferred", "accepted", "winner", "good", "better"),
    "rejected": ("dispreferred", "loser", "bad", "worse"),
    "messages": ("chat", "dialog", "dialogue", "turns"),
    "text": ("content", "document", "body"),
}
"""Our column -> what others call it; a column that is only spelled differently needs no entry."""


def _renaming(kinds: dict[str, str], candidates: list[RowFormat]) -> str:
    """The line to write where the columns fit a format but for their names; nothing where they do not."""
    found: list[dict[str, str]] = []
    for fmt in candidates:
        for names in () if fmt.tokenised else fmt.required:
            wanted = [*names, *(["prompt"] if "prompt" in fmt.optional else [])]
            given = {name: _near_column(name, kinds, wanted) for name in wanted if name not in kinds}
            if all(given.get(name, name) for name in names):
                found.append({theirs: ours for ours, theirs in given.items() if theirs})
    if not found:
        return ""
    columns = json.dumps(min(found, key=len), ensure_ascii=False)
    return (
        f"Did you mean {columns}? Write --dataset_columns '{columns}', or in Python dataset.rename_columns({columns})."
    )


def _near_column(name: str, kinds: dict[str, str], wanted: list[str]) -> str | None:
    """The user's column that stands for `name`: of another spelling, or of a usual other name."""
    spelled = {column.lower().strip().replace(" ", "_"): column for column in kinds if column not in wanted}
    others = [*difflib.get_close_matches(name, spelled, n=1, cutoff=0.75), *ALSO_CALLED.get(name, ())]
    return next((spelled[other] for other in others if other in spelled), None)


def _matches(
    candidates: list[RowFormat], kinds: dict[str, str], text_field: str, may_be_empty: bool = False
) -> list[Detection]:
    found = (_match(fmt, kinds, text_field, may_be_empty) for fmt in candidates)
    return [detection for detection in found if detection is not None]


def _match(fmt: RowFormat, kinds: dict[str, str], text_field: str, may_be_empty: bool) -> Detection | None:
    """`may_be_empty`: also where a column that the format needs holds nothing in the rows that are looked at."""
    for names in fmt.required:
        columns = tuple(text_field if (name == "text" and fmt is LANGUAGE_MODELLING) else name for name in names)
        empty = [c for c in columns if kinds.get(c, NOTHING) == NOTHING]
        no_chat = columns == ("messages",) and kinds.get("messages") == TEXT  # and not the JSON of one
        if not kinds.keys() >= set(columns) or no_chat or (empty and not (may_be_empty and len(fmt.required) == 1)):
            continue
        decider = fmt.decided_by or columns[0]
        is_chat = not fmt.tokenised and kinds[decider] in (MESSAGES, SHAREGPT)
        from_value = tuple(c for c in MESSAGE_COLUMNS if kinds.get(c) == SHAREGPT)
        implicit = "chosen" in fmt.roles and _prompt_is_implicit(fmt, kinds, is_chat)
        why = _explain(fmt, columns, decider, is_chat, implicit, kinds)
        return Detection(fmt, is_chat, why, implicit, text_field, from_value_columns=from_value)
    return None


def _prompt_is_implicit(fmt: RowFormat, kinds: dict[str, str], is_chat: bool) -> bool:
    if fmt.tokenised:
        return kinds.get("prompt_ids", NOTHING) == NOTHING
    prompt = kinds.get("prompt", NOTHING)
    return prompt == NOTHING or (is_chat and prompt not in (MESSAGES, SHAREGPT))


def _explain(
    fmt: RowFormat, columns: tuple[str, ...], decider: str, is_chat: bool, implicit: bool, kinds: dict[str, str]
) -> str:
    plural = "s" * (len(columns) > 1)
    sentence = f"read as {_style(fmt, is_chat)} because it has the column{plural} {' and '.join(map(repr, columns))}"
    if not fmt.tokenised:
        sentence += f" and {decider!r} holds {'lists of ' if is_chat else ''}{kinds[decider]}"
    if implicit and not fmt.tokenised:
        beside = "the 'prompt' column is plain text beside them" if "prompt" in kinds else "there is no 'prompt' column"
        whole = not fmt.trains_tokens and not is_chat
        sentence += f"; {beside}, so {'each side is a whole text' if whole else 'the prompt is what both sides share'}"
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
