"""RowExaminer: batches of raw rows -> units or findings, and the tallies that only a whole dataset can judge."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash

from posttrain.core.sample import Unit
from posttrain.data.images.row_image import RowImage
from posttrain.data.options import PrepareOptions
from posttrain.data.render.renderer import Renderer
from posttrain.data.rows.checks import Finding, describe
from posttrain.data.rows.foreign_formats import Row
from posttrain.data.rows.formats import Detection
from posttrain.data.rows.label_report import LabelReport, answer_hashes, label_report, steps_report
from posttrain.data.rows.message_checks import BLANK_USER
from posttrain.data.rows.row_images import IMAGE_COLUMNS

MESSAGE_COLUMNS = ("messages", "prompt", "completion", "chosen", "rejected")
LOST_TOOLS = "rows call tools and have no 'tools': what the model was asked is rendered without them"
PLAIN_COLUMNS = ("text", "prompt", "completion", "chosen", "rejected")
ROWS_KEPT_PER_KEY = 1000
TableEntry = tuple[bytes, int, int]
"""Key of an image, its row, and its number among the images of its row (see `row_images`)."""


@dataclass
class Tally:
    """What was seen over many rows. Tallies of several workers are added up in the order of their rows."""

    rows_read: int = 0
    control_token_rows: int = 0
    key_counts: dict[tuple[str, str], int] = field(default_factory=dict)  # (column, unknown message key) -> rows
    key_rows: dict[tuple[str, str], list[int]] = field(default_factory=dict)  # the first of those rows
    hashes: array[int] = field(default_factory=lambda: array("Q"))  # four a row, see label_report.answer_hashes
    answer_lengths: array[int] = field(default_factory=lambda: array("q"))  # two a pair
    notes: Counter[str] = field(default_factory=Counter)  # what the encoders counted
    labels: set[bool] = field(default_factory=set)
    steps: array[int] = field(default_factory=lambda: array("q"))  # judged steps and good ones of each stepwise row
    ids: dict[int, int] = field(default_factory=dict)  # hash of a row id -> first row
    repeated_ids: list[tuple[int, int]] = field(default_factory=list)  # (row, hash of its id)

    def as_json(self) -> dict[str, Any]:
        """For the file in which a worker leaves its tally."""
        return {
            "rows_read": self.rows_read,
            "control_token_rows": self.control_token_rows,
            "keys": [[*key, count, self.key_rows[key]] for key, count in self.key_counts.items()],
            "hashes": list(self.hashes),
            "answer_lengths": list(self.answer_lengths),
            "notes": dict(self.notes),
            "labels": sorted(self.labels),
            "steps": list(self.steps),
            "ids": list(self.ids.items()),
            "repeated_ids": self.repeated_ids,
        }

    @classmethod
    def of_json(cls, raw: dict[str, Any]) -> Tally:
        return cls(
            rows_read=raw["rows_read"],
            control_token_rows=raw["control_token_rows"],
            key_counts={(column, key): count for column, key, count, _ in raw["keys"]},
            key_rows={(column, key): rows for column, key, _, rows in raw["keys"]},
            hashes=array("Q", raw["hashes"]),
            answer_lengths=array("q", raw["answer_lengths"]),
            notes=Counter(raw["notes"]),
            labels=set(raw["labels"]),
            steps=array("q", raw["steps"]),
            ids=dict(raw["ids"]),
            repeated_ids=[tuple(pair) for pair in raw["repeated_ids"]],
        )

    def add(self, other: Tally) -> None:
        self.rows_read += other.rows_read
        self.control_token_rows += other.control_token_rows
        for key, count in other.key_counts.items():
            self.key_counts[key] = self.key_counts.get(key, 0) + count
            self.key_rows[key] = (self.key_rows.get(key, []) + other.key_rows[key])[:ROWS_KEPT_PER_KEY]
        self.hashes.extend(other.hashes)
        self.answer_lengths.extend(other.answer_lengths)
        self.labels |= other.labels
        self.steps.extend(other.steps)
        self.notes += other.notes
        self.repeated_ids += other.repeated_ids
        for hashed, row in other.ids.items():
            if self.ids.setdefault(hashed, row) != row:
                self.repeated_ids.append((row, hashed))

    def late_findings(self, id_column: str | None) -> dict[int, list[Finding]]:
        """What only the whole dataset shows, by row; row -1 stands for all rows."""
        late: dict[int, list[Finding]] = {}
        for (column, key), count in self.key_counts.items():
            if count < self.rows_read and count <= max(1, self.rows_read // 100):
                reason = f"has a message with the key {key!r}, which {count:,} of {self.rows_read:,} rows have"
                for row in self.key_rows[column, key]:
                    late.setdefault(row, []).append(Finding("extra_key", column, reason))
        for row, hashed in sorted(self.repeated_ids):
            reason = f"repeats the id of row {self.ids[hashed]}"
            late.setdefault(row, []).append(Finding("duplicate_id", id_column or "", reason))
        if len(self.labels) == 1 and self.rows_read > 1:
            only = next(iter(self.labels))
            late[-1] = [Finding("one_class", "label", f"is {only} in every row: there is nothing to tell apart")]
        return late

    def label_report(self) -> LabelReport | None:
        if self.steps:
            return steps_report(np.array(self.steps).reshape(-1, 2))
        if not self.hashes:
            return None
        lengths = np.array(self.answer_lengths).reshape(-1, 2) if self.answer_lengths else None
        return label_report(np.array(self.hashes, dtype=np.uint64).reshape(-1, 4), lengths)


class RowExaminer:
    """Reads, checks and encodes rows of one dataset, a batch at a time."""

    def __init__(self, detection: Detection, renderer: Renderer, options: PrepareOptions) -> None:
        self.detection, self.renderer, self.options = detection, renderer, options
        self.tally = Tally()
        self.images: list[TableEntry] = []  # of the rows that became units; emptied when they are stored
        self.vocab_size = len(renderer.tokenizer) if renderer is not None else None

    def examine(self, rows: Iterable[Any], first_row: int = 0) -> list[Unit | list[Finding]]:
        """One entry a row: its unit, or everything that is wrong with it. Samples carry the number of their row."""
        results: list[Any] = []
        clean_rows: list[Row] = []
        places: list[int] = []
        images: dict[int, list[RowImage]] = {}  # of the rows that have some
        for row in rows:
            clean, found, shown = self._read(row, first_row + len(results))
            if not found:
                places.append(len(results))
                clean_rows.append(clean)
            if shown:
                images[len(results)] = shown
            results.append(found)
        self._count_control_tokens(clean_rows)
        self._count_lost_tools(clean_rows)
        encode = self.detection.format.encode
        encoded = encode(clean_rows, self.renderer, self.options, self.tally.notes) if clean_rows else []
        for place, clean, unit in zip(places, clean_rows, encoded):
            if isinstance(unit, Finding):
                user_column = self.detection.columns.get(unit.column, unit.column)
                results[place] = [unit._replace(column=user_column)]
                continue
            for sample in unit:
                sample.row = first_row + place
            results[place] = unit
            self.images += [
                (image.key, first_row + place, number) for number, image in enumerate(images.get(place, ()))
            ]
            self._tally(clean, unit)
        self.tally.rows_read += len(results)
        return results

    def _read(self, row: Any, number: int) -> tuple[Row, list[Finding], list[RowImage]]:
        if self.options.formatting_func is not None:
            try:
                images = {column: row[column] for column in IMAGE_COLUMNS if row.get(column) is not None}
                row = {"text": self.options.formatting_func(row), **images}
            except Exception as error:  # the user's function; whatever it raises is a problem of this row
                reason = f"formatting_func raised {type(error).__name__}: {error}"
                return {}, [Finding("formatting_func", "text", reason)], []
        clean, found, unknown_keys, shown = self.detection.read_with_images(row, self.vocab_size)
        if self.options.allow_blank_prompts:
            found = [finding for finding in found if finding.kind != BLANK_USER]
        if isinstance(row, dict):
            found = found + self._check_other_columns(row, number)
        for key in unknown_keys:
            self.tally.key_counts[key] = self.tally.key_counts.get(key, 0) + 1
            self.tally.key_rows.setdefault(key, [])
            if len(self.tally.key_rows[key]) < ROWS_KEPT_PER_KEY:
                self.tally.key_rows[key].append(number)
        return clean, found, shown

    def _check_other_columns(self, row: Row, number: int) -> list[Finding]:
        """Columns that the method or the user asked for, beyond those of the format."""
        found = []
        for column in self.options.required_columns:
            if row.get(column) is None:
                found.append(Finding("null", column, "is missing or null, and the run needs it"))
        for column, allowed in self.options.allowed_values.items():
            value = row.get(column)
            if value not in allowed:
                reason = f"is {describe(value)}; it must be one of {', '.join(map(repr, allowed))}"
                found.append(Finding("unknown_value", column, reason))
        id_column = self.options.row_id_column
        if id_column is not None:
            if row.get(id_column) is None:
                found.append(Finding("null", id_column, "is missing or null, and names the row"))
            else:
                hashed = xxhash.xxh3_64_intdigest(repr(row[id_column]).encode())
                if self.tally.ids.setdefault(hashed, number) != number:
                    self.tally.repeated_ids.append((number, hashed))
        return found

    def _count_control_tokens(self, rows: list[Row]) -> None:
        """Plain columns are parsed for control tokens, as TRL does; how many rows hold some is worth knowing."""
        if self.detection.conversational or self.detection.format.tokenised or not rows:
            return
        columns = [column for column in PLAIN_COLUMNS if isinstance(rows[0].get(column), str)]
        texts = ["\n".join(row[column] for column in columns) for row in rows]
        if self.renderer.layouts is not None:  # the place of an image is meant
            texts = [text.replace(self.renderer.layouts.family.written, "") for text in texts]
        self.tally.control_token_rows += self.renderer.count_control_tokens(texts)

    def _count_lost_tools(self, rows: list[Row]) -> None:
        """Calls without the tools that were called: the prompt that the model answered has another text than this row's."""
        if self.detection.conversational and not self.options.tools:
            self.tally.notes[LOST_TOOLS] += sum(not row.get("tools") and _calls_tools(row) for row in rows)

    def _tally(self, clean: Row, unit: Unit) -> None:
        if "label" in clean:
            self.tally.labels.add(clean["label"])
            self.tally.hashes.extend(answer_hashes(clean))
        elif self.detection.format.judges_steps:
            judged = unit[0].per_token["labels"][unit[0].trained]
            self.tally.steps.extend((len(judged), int(judged.sum())))
        elif len(self.detection.format.roles) == 2:
            self.tally.hashes.extend(answer_hashes(clean))
            self.tally.answer_lengths.extend((len(unit[0]), len(unit[1])))


def _calls_tools(row: Row) -> bool:
    columns = (row.get(column) for column in MESSAGE_COLUMNS)
    return any(message.get("tool_calls") for messages in columns if isinstance(messages, list) for message in messages)
