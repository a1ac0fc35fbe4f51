"""`posttrain check METHOD|CONFIG.yaml [--option value]`: a look at the data, token by token, before any GPU is paid for."""

from __future__ import annotations

import contextlib
import io
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.cli.errors import UsageError, as_usage_error
from posttrain.cli.options.arguments import RunConfig, config_named
from posttrain.cli.options.words import own_options
from posttrain.cli.running.output import no_bars, writable_folder, write_json

if TYPE_CHECKING:
    from posttrain.cli.options.needs import RewardColumns
    from posttrain.data.store.audit import Audit, AuditFinding

USAGE = """usage: posttrain check [METHOD] [CONFIG.yaml] [--samples 3] [--images DIR] [--json FILE|-] [--option value ...]

Reads, checks and tokenises the rows as `posttrain METHOD` would, with the same options, and loads no model. Shows a few samples
token by token (trained, context, cut), what is cut, dropped or repeated, how long the rows are, and what is wrong with the chat
template. Of images: their sizes, the tokens that they become, and where these stand.
--images DIR  a PNG file for each image of these samples: the picture as the model gets it, with its tiles or tokens drawn.
Rewards and tools are imported, and their arguments looked for among the columns; packages that the options need are named.
Exit code 0: nothing is wrong; 1: errors; 2: the command cannot be done. Warnings and notes do not change it."""
OWN = {"--samples": "5", "--images": "seen", "--json": "checked.json"}
BAR = 40
STYLES = {"error": "red", "warning": "yellow", "note": "cyan"}
"""Severities as they are shown, in that order."""


def main(words: list[str]) -> int:
    if not words or any(word in ("-h", "--help") for word in words):
        print(USAGE)
        return 0
    own, words = own_options(words, OWN)
    if not (own["--samples"] or "3").isdigit():
        raise UsageError(f"--samples is {own['--samples']!r}; it takes a whole number.")
    config = config_named(words, "check")
    pictures = own["--images"] and writable_folder(own["--images"], "--images")
    found = Checked(config)
    if own["--json"]:
        write_json(own["--json"], found.as_json())
    if own["--json"] != "-":
        found.show(int(own["--samples"] or 3), pictures)
    return 1 if found.errors else 0


class Checked:
    """The datasets of a run, prepared and looked at."""

    def __init__(self, config: RunConfig) -> None:
        from posttrain.cli.options.needs import missing_packages
        from posttrain.cli.running.assemble import config_of, side_of
        from posttrain.data.store.audit import WARNING, AuditFinding, audit, of_columns, of_tokenizer, overlap

        config.values["on_bad_rows"] = "drop"  # to see all of them
        config.values["dataset_streaming"] = config.values["streaming"] = False
        no_bars()
        self.config = config
        self.args = as_usage_error(lambda: config_of(config))
        self.side = as_usage_error(lambda: side_of(config, self.args))
        packages = missing_packages(config, self.args)
        self.findings = [AuditFinding(WARNING, "package", "run", missing) for missing in packages]
        self.rewards = self._rewards()
        self.teachers_tokenizer = self._teachers_tokenizer()
        self.audits: list[Audit] = []
        self.prepared: list[Any] = []
        agents = getattr(self.side, "agents", None)
        has_tools = agents is not None and bool(agents.schemas)
        for name, rows in zip(("train", "eval"), self._rows()):
            if rows is not None and (prepared := self._prepared(rows, name)) is not None:
                has_tools |= "tools" in (rows.column_names or ())
                self.prepared.append(prepared)
                self.audits.append(audit(prepared, self.side.renderer))
                self.audits[-1].findings += of_columns(prepared, self.side.renderer, self._unread(rows, name))
        conversational = any(each.detection.conversational for each in self.prepared)
        of_template = of_tokenizer(self.side.renderer, conversational)
        self.findings += [one for one in of_template if has_tools or "tool calls" not in one.sentence]
        self.findings += [finding for each in self.audits for finding in each.findings]
        if len(self.prepared) == 2:
            self.findings += overlap(*self.prepared)

    def _found(self, kind: str, where: str, wrong: ValueError | UsageError | str) -> None:
        from posttrain.data.store.audit import ERROR, AuditFinding

        self.findings.append(AuditFinding(ERROR, kind, where, str(wrong).rstrip(".")))

    def _rewards(self) -> RewardColumns | None:
        """The rewards, tools and environments of an online method, imported; what cannot be is a finding."""
        from posttrain.cli.options.needs import RewardColumns, give_agents
        from posttrain.cli.running.assemble import rewards_of

        try:
            given = rewards_of(self.config)
            as_usage_error(lambda: give_agents(self.side, given, self.args))
        except UsageError as error:
            self._found("rewards", "run", error)
            return None
        return RewardColumns(self.side, given) if given else None

    def _teachers_tokenizer(self) -> Any:
        """Of a method whose teacher may have another one; one that the student's tokens do not fit is a finding."""
        from posttrain.models.load.model import load_tokenizer
        from posttrain.models.load.teacher import check_tokenizers

        named = getattr(self.args, "teacher_model_name_or_path", None)
        if named is None:
            return None
        beside = getattr(self.args, "teacher_tokenizer_name_or_path", None)
        try:
            theirs = load_tokenizer(beside or named, self.args.teacher_arguments(), self.args.trust_remote_code)
            if not self.args.shares_tokenizer:
                return theirs
            check_tokenizers(self.side.renderer.tokenizer, theirs, named)
        except ValueError as error:
            self._found("teacher", "run", error)
        return None

    def _unread(self, rows: Any, name: str) -> list[str]:
        """Columns that neither the method nor a reward or an environment reads; a reward's own that are missing are a finding."""
        columns = [one for one in rows.column_names or () if one not in getattr(self.side, "columns_read", ())]
        if self.rewards is None:
            return columns
        for missing in self.rewards.missing(columns):
            self._found("reward_columns", name, missing)
        return [column for column in columns if column not in self.rewards.read(columns)]

    def _rows(self) -> tuple[Any, Any]:
        from posttrain.cli.running.datasets_of import datasets_of
        from posttrain.data.sources.named import SourceError

        try:
            return datasets_of(self.config)
        except SourceError as error:
            self._found("file", "data", error)
            return None, None

    def _prepared(self, rows: Any, name: str) -> Any:
        self.side.args.on_bad_rows = "drop"
        try:
            # The summary of the preparation is shown in another form here.
            with contextlib.redirect_stdout(io.StringIO()):
                prepared = self.side._prepared(rows, name)
        except ValueError as error:  # no format fits, or nothing is left: the sentence says which
            self._found("format", name, error)
            return None
        prepared = getattr(prepared, "prepared", prepared)  # prompts of online methods
        return getattr(prepared, "samples", prepared)  # before they are packed

    @property
    def errors(self) -> list[AuditFinding]:
        return [finding for finding in self.findings if finding.severity == "error"]

    # ---- shown -----------------------------------------------------------------------------------------------------

    def show(self, samples: int, pictures: Path | None = None) -> None:
        """`pictures`: the folder in which those of the samples are drawn."""
        from rich.console import Console

        console = Console(highlight=False, soft_wrap=True)
        for audit, prepared in zip(self.audits, self.prepared):
            console.rule(f"{audit.dataset}: {audit.kept:,} of {audit.rows:,} rows", align="left")
            console.print(f"{audit.explanation[0].upper()}{audit.explanation[1:]}.")
            console.print(f"{audit.tokens:,} tokens, {audit.trained_tokens:,} of them trained.")
            for line in histogram(audit, prepared.options.max_length):
                console.print(line, markup=False)
            for sample in self._samples(prepared, samples):
                self._show_sample(console, prepared, *sample)
                self._show_images(console, prepared, *sample, pictures)
        if self.findings:
            console.rule("to look at", align="left")
        for finding in sorted(self.findings, key=lambda one: list(STYLES).index(one.severity)):
            console.print(f"{finding.severity:<8}{finding}", style=STYLES[finding.severity], markup=False)
        counts = Counter(finding.severity for finding in self.findings)
        is_clean = not counts["error"] and not counts["warning"]
        console.print("Nothing is wrong." if is_clean else f"{counts['error']} errors, {counts['warning']} warnings.")

    @staticmethod
    def _samples(prepared: Any, count: int) -> Iterator[tuple[int, int]]:
        """(stored number, role) of the samples of a few units, spread over the dataset."""
        if not len(prepared):
            return
        step = max(len(prepared) // max(count, 1), 1)
        for unit in prepared.units[::step][:count]:
            first, last = int(prepared.store.unit_offsets[unit]), int(prepared.store.unit_offsets[unit + 1])
            for number in range(first, last):
                yield number, int(unit)

    def _show_sample(self, console: Any, prepared: Any, number: int, unit: int) -> None:
        from posttrain.cli.running.token_view import aligned, coloured, kinds_of, marked

        sample = prepared.store.sample(number, int(prepared.store.rows[unit]))
        start, stop = prepared.window(number)
        role = prepared.roles[number - int(prepared.store.unit_offsets[unit])]
        kinds = kinds_of(sample.trained, start, stop)
        tokenizer = self.side.renderer.tokenizer
        console.print(
            f"\nrow {sample.row}, {role}: {len(kinds)} tokens, {kinds.count('trained')} trained, {kinds.count('cut')} cut"
        )
        if console.is_terminal:
            console.print(coloured(tokenizer, sample, kinds))
        else:
            console.print(marked(tokenizer, sample, kinds), markup=False)
        if self.teachers_tokenizer is not None:
            chosen = [int(token) for token, kind in zip(sample.input_ids, kinds) if kind == "trained"]
            console.print(aligned(tokenizer, self.teachers_tokenizer, chosen), markup=False)

    def _show_images(self, console: Any, prepared: Any, number: int, unit: int, pictures: Path | None) -> None:
        """A line for each image of a sample; a picture of each image of its row."""
        start, stop = prepared.window(number)
        row, role = int(prepared.store.rows[unit]), number - int(prepared.store.unit_offsets[unit])
        for place, image in enumerate(prepared.store.images_of(number), 1):
            pixels = self.side.vision.pixels
            source, _ = pixels.source(image)
            tokens, (height, width) = image.stop - image.start, image.size
            where = "cut off" if image.start < start or image.stop > stop else f"{image.start} to {image.stop - 1}"
            line = f"[image {place}] {source.height} x {source.width} ({source.format}, height x width), given to the processor as "
            line += f"{height} x {width}: {tokens} tokens, {where}"
            if pictures is not None:
                file = pictures / f"{prepared.report.dataset}-row{row}-{prepared.roles[role]}-image{place}.png"
                seen = pixels.seen(image)
                seen.save(file)
                line += f"; seen as {seen.height} x {seen.width} in {file}"
            console.print(line, markup=False)

    def as_json(self) -> dict[str, Any]:
        findings = [{**asdict(finding), "rows": list(finding.rows)} for finding in self.findings]
        datasets = [
            {name: value for name, value in each.as_json().items() if name != "findings"} for each in self.audits
        ]
        return {"method": self.config.method, "errors": len(self.errors), "findings": findings, "datasets": datasets}


def histogram(audit: Audit, max_length: int | None) -> list[str]:
    if not audit.histogram:
        return []
    most = max(count for _, count in audit.histogram) or 1
    shown = ", ".join(f"{name} {value:,.0f}" for name, value in audit.lengths.items())
    lines = [f"Tokens a sample: {shown}; max_length is {max_length}."]
    for edge, count in audit.histogram:
        if count:
            lines.append(f"  up to {edge:>7,} {'#' * max(1, round(BAR * count / most))} {count:,}")
    return lines
