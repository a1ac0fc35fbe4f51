"""PreparationReport: what became of the rows of a dataset, counted by reason."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from posttrain.core.sample import Unit
from posttrain.data.packing import Packing
from posttrain.data.rows.label_report import LabelReport

UNTRAINED = "left without a trained token by max_length"
TOO_LONG = "longer than max_length"
CUTS_IMAGES = "too long: max_length would cut an image off"


@dataclass
class ImageReport:
    """What the images of a dataset are. A row's images count once, their tokens in each of its samples."""

    images: int = 0
    tokens: int = 0  # of images, markers that the processor writes included
    longest: int = 0  # tokens of the longest image
    cut: int = 0  # images cut off with the end of samples
    rows_cut: int = 0
    rows_by_images: dict[int, int] = field(default_factory=dict)  # images of a row -> rows

    def add(self, unit: Unit, images: int, whole: Unit) -> None:
        """Count a row of so many images, which was `whole` before it was cut."""
        cut = sum(len(sample.images) for sample in whole) - sum(len(sample.images) for sample in unit)
        self.cut, self.rows_cut = self.cut + cut, self.rows_cut + (cut > 0)
        tokens = [image.stop - image.start for sample in unit for image in sample.images]
        self.images += images
        self.tokens += sum(tokens)
        self.longest = max([self.longest, *tokens])
        self.rows_by_images[images] = self.rows_by_images.get(images, 0) + 1

    def sentences(self) -> list[str]:
        rows = ", ".join(f"{rows:,} rows with {number}" for number, rows in sorted(self.rows_by_images.items()))
        lines = [f"{self.images:,} images ({rows}) of {self.tokens:,} tokens, the longest of {self.longest:,}"]
        if self.cut:
            lines.append(f"{self.cut:,} images are cut off with the end of {self.rows_cut:,} rows")
        return lines


@dataclass
class PreparationReport:
    """Counts of one prepared dataset. For a stream they grow while it is read."""

    dataset: str
    explanation: str  # why the rows were read as they were
    source: str | None = None  # the name that the rows came under: a file, an id of the Hub
    rows_read: int = 0
    kept: int = 0  # rows
    dropped: dict[str, int] = field(default_factory=dict)  # reason -> rows
    truncated: int = 0  # samples that were cut to max_length
    truncated_tokens: int = 0
    truncated_steps: int = 0  # stepwise rows: steps whose label was cut off
    tokens: int = 0
    trained_tokens: int = 0
    control_token_rows: int = 0
    unusual_message_keys: dict[str, int] = field(default_factory=dict)  # key -> rows
    notes: dict[str, int] = field(default_factory=dict)  # what the encoders counted, in words
    labels: LabelReport | None = None
    images: ImageReport | None = None
    packing: str | None = None  # in words
    bad_rows_file: str | None = None
    warnings: list[str] = field(default_factory=list)  # problems of the dataset as a whole, where rows are dropped

    def drop(self, reason: str, rows: int = 1) -> None:
        if rows:
            self.dropped[reason] = self.dropped.get(reason, 0) + rows

    def packed(self, packing: Packing, strategy: str) -> PreparationReport:
        """The same report after packing."""
        words = f"{len(packing):,} blocks of {packing.capacity:,} tokens by {strategy}, {packing.filled:.1%} full"
        if packing.dropped_tokens:
            words += f"; {packing.dropped_tokens:,} tokens cut off {packing.cut_samples:,} samples longer than a block"
        elif packing.cut_samples:
            words += f"; {packing.cut_samples:,} samples split"
        return replace(self, packing=words)

    def name_and_rows(self) -> str:
        return f"{self.source}, {self.kept:,} rows" if self.source else f"{self.kept:,} rows"

    def _counted(self) -> str:
        if not self.rows_read:
            return "Its rows are checked and counted as they are read."
        trained = f", {self.trained_tokens:,} of them trained" if self.trained_tokens else ""
        return f"{self.rows_read:,} rows read, {self.kept:,} kept; {self.tokens:,} tokens{trained}."

    def summary(self) -> str:
        """A few lines for a person."""
        lines = [f"{self.dataset}: {self.explanation}."]
        lines.append(self._counted())
        if self.dropped:
            reasons = ", ".join(f"{rows:,} {reason}" for reason, rows in self.dropped.items())
            where = f" (see {self.bad_rows_file})" if self.bad_rows_file else ""
            lines.append(f"Dropped: {reasons}{where}.")
        if self.truncated:
            steps = f" and the labels of {self.truncated_steps:,} steps" if self.truncated_steps else ""
            lines.append(
                f"Cut to max_length: {self.truncated:,} samples, {self.truncated_tokens:,} tokens{steps} lost."
            )
        if self.images:
            lines += [f"Images: {sentence}." for sentence in self.images.sentences()]
        if self.packing:
            lines.append(f"Packed: {self.packing}.")
        if self.control_token_rows:
            lines.append(f"Control tokens inside plain text: {self.control_token_rows:,} rows.")
        if self.unusual_message_keys:
            keys = ", ".join(f"{key!r} ({rows:,} rows)" for key, rows in self.unusual_message_keys.items())
            lines.append(f"Message keys that templates rarely know: {keys}.")
        lines += [f"Noted: {count:,} {what}." for what, count in self.notes.items() if count]
        lines += [f"Warning: {warning}." for warning in self.warnings]
        if self.labels:
            lines += [f"Labels: {sentence}." for sentence in self.labels.sentences()]
        return "\n".join(lines)
