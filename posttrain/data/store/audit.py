"""What a whole prepared dataset shows that no single row does: repeats, overlap, cuts, answers that hardly differ, lengths.

Everything is read from the stored tokens, so that it costs little beside the preparation and serves every format alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from posttrain.data.render.template_checks import probe_template, trained_stop_token
from posttrain.data.rows.encoding import common_prefix_length
from posttrain.data.rows.foreign_formats import BESIDE_FOREIGN
from posttrain.data.rows.formats import LANGUAGE_MODELLING, Detection
from posttrain.data.store.building import read_problems

if TYPE_CHECKING:
    from posttrain.data.render.renderer import Renderer
    from posttrain.data.store.prepare import PreparedDataset

ERROR, WARNING, NOTE = "error", "warning", "note"
"""In the order in which they are shown. A note is how the options are understood, and may well be meant."""
FEW = 0.01
"""Share of rows below which a repeat is left unsaid: large datasets have a few."""
MANY_CUT = 0.05
NEARLY_EQUAL = 0.9
"""Share of two answers' tokens that they begin with in common, above which a pair says little."""
MAX_ROWS_NAMED = 5
STOPS_LOOKED_AT = 2000


@dataclass(frozen=True)
class AuditFinding:
    """Something to look at. `kind` is a slug, `rows` the first of the rows that it was seen in."""

    severity: str
    kind: str
    dataset: str
    sentence: str
    count: int = 0
    rows: tuple[int, ...] = ()

    def __str__(self) -> str:
        more = " ..." if self.count > len(self.rows) else ""
        where = f" (rows {', '.join(map(str, self.rows))}{more})" if self.rows else ""
        return f"{self.dataset}: {self.sentence}{where}."


@dataclass
class Audit:
    """Findings and figures of one dataset."""

    dataset: str
    explanation: str
    rows: int
    kept: int
    tokens: int
    trained_tokens: int
    truncated: int
    truncated_tokens: int
    dropped: dict[str, int]
    lengths: dict[str, float] = field(default_factory=dict)  # percentiles of the samples' tokens, before they are cut
    histogram: list[tuple[int, int]] = field(default_factory=list)  # (tokens up to, samples)
    findings: list[AuditFinding] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class StoredUnits:
    """The kept units of a prepared dataset as hashes and lengths."""

    def __init__(self, prepared: PreparedDataset) -> None:
        self.prepared, self.store = prepared, prepared.store
        self.rows = prepared.rows
        self.whole, self.prompts = self._hashes()

    def _hashes(self) -> tuple[np.ndarray, np.ndarray]:
        """(units,) of all tokens and images, and of those before the first trained one (all of them where none is trained)."""
        store, units = self.store, self.prepared.units
        whole, prompts = np.empty((2, len(units)), dtype=np.uint64)
        for place, unit in enumerate(units):
            first, last = int(store.unit_offsets[unit]), int(store.unit_offsets[unit + 1])
            hashed = xxhash.xxh3_64()
            for number in range(first, last):
                hashed.update(store.tokens_of(number).tobytes())
                hashed.update(b"".join([b"|", *(image.key for image in store.images_of(number))]))
            whole[place] = hashed.intdigest()
            tokens = store.tokens_of(first)
            begin = store.first_trained(first)
            end = begin if begin > 0 else len(tokens)
            keys = (image.key for image in store.images_of(first) if image.stop <= end)
            prompts[place] = xxhash.xxh3_64_intdigest(b"".join([tokens[:end].tobytes(), *keys]))
        return whole, prompts

    def repeats(self, hashes: np.ndarray) -> np.ndarray:
        """Places whose hash an earlier place has."""
        _, first = np.unique(hashes, return_index=True)
        return np.setdiff1d(np.arange(len(hashes)), first)


def audit(prepared: PreparedDataset, renderer: Renderer) -> Audit:
    """All findings about one dataset whose bad rows were left out and counted."""
    report = prepared.report
    found = Audit(
        report.dataset, report.explanation, report.rows_read, report.kept, report.tokens, report.trained_tokens,
        report.truncated, report.truncated_tokens, dict(report.dropped),
    )  # fmt: skip
    _lengths(found, prepared)
    found.findings += [*_of_bad_rows(prepared), *_of_report(report)]
    if len(prepared):
        found.findings += _of_units(report.dataset, StoredUnits(prepared))
        found.findings += _of_pairs(report.dataset, prepared)
        found.findings += _of_stops(report.dataset, prepared, renderer)
    return found


def _lengths(found: Audit, prepared: PreparedDataset) -> None:
    lengths = np.asarray(prepared.store.lengths)
    if not len(lengths):
        return
    names = {"shortest": 0, "median": 50, "95%": 95, "99%": 99, "longest": 100}
    found.lengths = {name: float(np.percentile(lengths, share)) for name, share in names.items()}
    edges = 2 ** np.arange(3, int(np.ceil(np.log2(max(lengths.max(), 9)))) + 1)
    counts = np.histogram(lengths, bins=[0, *edges])[0]
    found.histogram = [(int(edge), int(count)) for edge, count in zip(edges, counts)]


def _of_bad_rows(prepared: PreparedDataset) -> list[AuditFinding]:
    """Each kind of bad row with the first reason in words and the rows that have it."""
    kinds: dict[str, list[tuple[int, str]]] = {}
    for row, problems in read_problems(prepared.store):
        for problem in problems:
            kinds.setdefault(problem.kind, []).append((row, f"column {problem.column!r} {problem.reason}"))
    report, found = prepared.report, []
    for kind, places in kinds.items():
        rows = list(dict.fromkeys(row for row, _ in places if row >= 0))  # a row may have a fault in several columns
        text = f"{len(rows):,} of {report.rows_read:,} rows cannot be trained on ({kind}): {places[0][1]}"
        if not rows:
            text = f"no row can be trained on ({kind}): {places[0][1]}"
        named = tuple(rows[:MAX_ROWS_NAMED])
        found.append(AuditFinding(ERROR, f"bad ({kind})", report.dataset, text, len(rows), named))
    return found


def of_columns(prepared: PreparedDataset, renderer: Renderer, columns: Sequence[str]) -> list[AuditFinding]:
    """How the columns are read: without the chat template, with turns trained that are not the model's, or not at all.

    `columns` are those of the dataset that nothing else (a reward, an environment) reads.
    """
    detection, name, found = prepared.detection, prepared.report.dataset, []
    plain = not (detection.conversational or detection.format.tokenised or detection.format is LANGUAGE_MODELLING)
    if plain and renderer.has_template and not prepared.report.control_token_rows:
        text = (
            "the rows are plain texts, and the model has a chat template, which they are used without: in a chat it will be asked "
            'otherwise. Give lists of messages, [{"role": "user", "content": ...}], unless that is meant'
        )
        found.append(AuditFinding(WARNING, "no_template", name, text))
    asked = prepared.options.assistant_only_loss or "trained_roles" in columns
    if detection.conversational and detection.format is LANGUAGE_MODELLING and not asked:
        text = "all turns are trained, those of system and user too; --assistant_only_loss trains the assistant's alone"
        found.append(AuditFinding(NOTE, "trained_turns", name, text))
    if unread := [column for column in columns if column not in _used(detection, columns)]:
        text = f"nothing reads the column{'s' * (len(unread) > 1)} {', '.join(map(repr, unread))}"
        found.append(AuditFinding(NOTE, "ignored_columns", name, text))
    return found


def _used(detection: Detection, columns: Sequence[str]) -> set[str]:
    """Columns that make a row, under the user's names."""
    fmt = detection.format
    if detection.foreign is not None:
        return {*detection.columns.values(), *fmt.optional, *BESIDE_FOREIGN}
    ways = [{detection.text_field if name == "text" else name for name in names} for names in fmt.required]
    return next((names for names in ways if names <= set(columns)), ways[0]) | set(fmt.optional)


def _of_report(report: Any) -> list[AuditFinding]:
    name, found = report.dataset, []
    for reason, rows in report.dropped.items():
        if not reason.startswith("bad ("):
            text = f"{rows:,} of {report.rows_read:,} rows are {reason}"
            found.append(AuditFinding(WARNING if report.kept else ERROR, reason, name, text, rows))
    if report.truncated and report.truncated > MANY_CUT * max(report.kept, 1):
        share = report.truncated_tokens / max(report.tokens + report.truncated_tokens, 1)
        text = f"{report.truncated:,} samples are cut to max_length, {share:.0%} of all tokens are lost"
        found.append(AuditFinding(WARNING, "truncated", name, text, report.truncated))
    if report.control_token_rows:
        text = f"{report.control_token_rows:,} rows have the text of a control token inside plain text"
        found.append(AuditFinding(WARNING, "control_tokens", name, text, report.control_token_rows))
    for what, count in report.notes.items():
        if count:
            found.append(AuditFinding(WARNING, "noted", name, f"{count:,} {what}", count))
    for key, rows in report.unusual_message_keys.items():
        text = f"messages have the key {key!r}, which templates rarely know"
        found.append(AuditFinding(WARNING, "message_key", name, text, rows))
    for sentence in report.labels.sentences() if report.labels else ():
        found.append(AuditFinding(WARNING, "labels", name, sentence))
    return found


def _of_units(name: str, units: StoredUnits) -> list[AuditFinding]:
    for kind, hashes, limit, what in (
        ("duplicate_rows", units.whole, FEW, "rows repeat an earlier row"),
        # Many answers to a prompt may be meant; mostly one prompt is not.
        ("duplicate_prompts", units.prompts, 0.5, "rows have the prompt of an earlier row"),
    ):
        places = units.repeats(hashes)
        if len(places) > limit * len(hashes):
            rows = tuple(units.rows[places[:MAX_ROWS_NAMED]].tolist())
            text = f"{len(places):,} of {len(hashes):,} {what}"  # repeated rows have repeated prompts: one is enough
            return [AuditFinding(WARNING, kind, name, text, len(places), rows)]
    return []


def _of_pairs(name: str, prepared: PreparedDataset) -> list[AuditFinding]:
    """Pairs whose answers part only near their end."""
    if len(prepared.roles) != 2:
        return []
    store, places = prepared.store, []
    for unit in prepared.units:
        first = int(store.unit_offsets[unit])
        begin = max(store.first_trained(first), 0)
        one, other = (store.tokens_of(number)[begin:] for number in (first, first + 1))
        long_enough = min(len(one), len(other)) >= 8
        if long_enough and common_prefix_length(one, other) > NEARLY_EQUAL * max(len(one), len(other)):
            places.append(int(store.rows[unit]))
    if not places or len(places) < FEW * len(prepared):
        return []
    text = f"the answers of {len(places):,} pairs are the same for nine tenths of their tokens: the pair says little"
    return [AuditFinding(WARNING, "nearly_equal_pair", name, text, len(places), tuple(places[:MAX_ROWS_NAMED]))]


def _of_stops(name: str, prepared: PreparedDataset, renderer: Renderer) -> list[AuditFinding]:
    """Samples that are trained up to their end, and do not end on a token that stops generation."""
    if not prepared.detection.format.trains_tokens or prepared.options.assistant_only_loss:
        return []
    stops = {renderer.tokenizer.eos_token_id, trained_stop_token(renderer) if renderer.has_template else None} - {None}
    samples = prepared.store.unit_offsets[prepared.units[:STOPS_LOOKED_AT]]
    endings = [set(prepared.store.tokens_of(number)[-2:].tolist()) for number in samples]
    unstopped = sum(not ending & stops for ending in endings)  # a template may write a line break after the stop token
    if unstopped <= FEW * len(endings):
        return []
    text = f"{unstopped:,} of the first {len(endings):,} samples do not end on a stop token: the model is not taught to stop"
    return [AuditFinding(WARNING, "no_stop_token", name, text, unstopped)]


def overlap(train: PreparedDataset, evaluation: PreparedDataset, name: str = "eval") -> list[AuditFinding]:
    """Rows of the evaluation that are trained on."""
    seen, asked = StoredUnits(train), StoredUnits(evaluation)
    kinds = {
        "whole": "rows stand in the training data word for word",
        "prompts": "rows have a prompt of the training data",
    }
    for kind, what in kinds.items():
        places = np.flatnonzero(np.isin(getattr(asked, kind), getattr(seen, kind)))
        if len(places):
            rows = tuple(int(row) for row in asked.rows[places[:MAX_ROWS_NAMED]])
            text = f"{len(places):,} of {len(asked.rows):,} {what}"
            return [AuditFinding(WARNING, f"overlap_{kind}", name, text, len(places), rows)]
    return []


def of_tokenizer(renderer: Renderer, uses_template: bool) -> list[AuditFinding]:
    """What is wrong with the tokenizer and its template, whatever the rows."""
    tokenizer, found = renderer.tokenizer, []
    if tokenizer.eos_token_id is None:
        found.append(AuditFinding(ERROR, "no_eos", "tokenizer", "it has no end-of-sequence token: set `eos_token`"))
    if uses_template:
        warnings = probe_template(renderer)
        found += [AuditFinding(WARNING, "template", "chat template", text.rstrip(".")) for text in warnings]
    return found
