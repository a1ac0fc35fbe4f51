"""PromptRows and StreamedPrompts: the prompts of a dataset or of a stream, ready for an engine, with the rows that rewards see."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import PIL.Image
import xxhash
from datasets import Dataset

from posttrain.core.sample import ImageSpan, Sample, Unit
from posttrain.data.images.lazy_picture import LazyPicture, has_pictures
from posttrain.data.images.limits import HEADER, ImageLimits
from posttrain.data.images.media import MediaFolder
from posttrain.data.images.payloads import undecoded
from posttrain.data.images.row_image import RowImage, with_images_as
from posttrain.data.rows.formats import Detection
from posttrain.data.rows.row_images import IMAGE_COLUMNS, row_images, with_images_used
from posttrain.data.store.building import RowSource
from posttrain.data.store.prepare import PreparedDataset
from posttrain.data.store.streaming import PreparedStream

ROWS_HASHED = 256
TOKEN_COLUMNS = ("input_ids", "attention_mask")
COMPLETION = "completion"
Decode = Callable[[Any], str]
Pictures = dict[bytes, LazyPicture | PIL.Image.Image]


@dataclass(frozen=True)
class PromptRow:
    """One prompt: as tokens for the engine, as text or messages for rewards, with the other columns of its row."""

    ids: np.ndarray
    prompt: str | list[dict[str, Any]]
    columns: dict[str, Any]
    row: int  # in the user's dataset
    answer: Sample | None = None  # prompt and the row's own completion, where it has one
    images: tuple[ImageSpan, ...] = ()
    positions: np.ndarray | None = None  # (3, tokens), of models that have such
    pictures: Pictures = field(default_factory=dict)  # what the image parts of `prompt` show, by key
    media: MediaFolder | None = None  # where those are that tools return

    def sample(self, group: int) -> Sample:
        """The prompt, of which nothing is trained; completions are appended to it."""
        shown = {"images": self.images, "positions": self.positions}
        return Sample(self.ids, np.zeros(len(self.ids), dtype=bool), row=self.row, group=group, **shown)

    @property
    def spans(self) -> tuple[ImageSpan, ...]:
        """Of the images of the prompt, and of the row's own completion."""
        return self.images if self.answer is None else self.answer.images

    def carrying(self, carried: Callable[[Sequence[ImageSpan]], tuple[ImageSpan, ...]], looks: bool) -> PromptRow:
        """For an engine in a process without the dataset. Others are shown pictures only where one of them `looks`."""
        if not self.images and not self.pictures:
            return self
        images = carried(self.images)
        if looks:
            return replace(self, images=images)
        columns = {name: value for name, value in self.columns.items() if not has_pictures(value)}
        return replace(self, images=images, pictures={}, columns=columns)


def prompt_row(unit: Unit, raw: dict[str, Any], detection: Detection, decode: Decode | None = None) -> PromptRow:
    """An encoded prompt together with the row that it was made from; `decode` makes a text of one that came as tokens."""
    (sample,) = unit
    if detection.format.tokenised:
        columns = {name: value for name, value in raw.items() if name not in TOKEN_COLUMNS}
        return PromptRow(sample.input_ids, decode(sample.input_ids), columns, sample.row)
    clean, pictures = _read(raw, detection)
    theirs = detection.columns.get("prompt", "prompt")
    columns = {name: _pictured(name, value, pictures) for name, value in raw.items() if name not in ("prompt", theirs)}
    encoded, answer, prompt = sample, None, _with_keys_of(sample.images, clean["prompt"], pictures)
    if detection.format.trains_tokens:
        start = max(int(sample.trained.argmax()), 1)  # a token that merges prompt and completion is the completion's
        encoded, answer, columns[COMPLETION] = sample.slice(0, start), sample, clean["completion"]
    shown = {"images": encoded.images, "positions": encoded.positions, "pictures": pictures.by_key}
    return PromptRow(encoded.input_ids, prompt, columns, encoded.row, answer, **shown)


@dataclass
class _RowPictures:
    """The images of a row for rewards, each as one object wherever it stands."""

    limits: ImageLimits | None  # None: the run shows no images
    by_key: Pictures = field(default_factory=dict)
    by_payload: dict[int, Any] = field(default_factory=dict)  # id of the payload, which the row holds

    def add(self, key: bytes, payload: Any) -> None:
        self.by_key[key] = self.of(payload)

    def of(self, payload: Any) -> Any:
        if self.limits is None or isinstance(payload, PIL.Image.Image):
            return payload
        made = LazyPicture(functools.partial(undecoded, payload, self.limits))
        return self.by_payload.setdefault(id(payload), made)


def _read(raw: dict[str, Any], detection: Detection) -> tuple[dict[str, Any], _RowPictures]:
    """The clean row and its pictures. Headers are enough: everything was checked when data were prepared."""
    limits = detection.image_limits
    if limits is None:
        return detection.read(raw)[0], _RowPictures(None)
    detection, pictures = replace(detection, image_limits=replace(limits, check=HEADER)), _RowPictures(limits)
    clean, _, _, images = detection.read_with_images(raw)
    for image, payload in zip(images, row_images(raw)):
        pictures.add(image.key, payload)
    return clean, pictures


def _with_keys_of(spans: tuple[ImageSpan, ...], prompt: Any, pictures: _RowPictures) -> Any:
    """The prompt with images under the keys of its tokens: those of files depend on how much of a dataset was decoded."""
    keys = iter(span.key for span in spans)

    def renamed(image: RowImage) -> dict[str, Any]:
        key = next(keys, image.key)  # a prompt that was cut has fewer spans
        if image.key in pictures.by_key:
            pictures.by_key[key] = pictures.by_key[image.key]
        return {"type": "image", "image": replace(image, key=key)}

    return with_images_as(prompt, renamed)


def _pictured(column: str, value: Any, pictures: _RowPictures) -> Any:
    """A column with its images as rewards get them: payloads of image columns, and undecoded images of any other."""
    if pictures.limits is None or value is None:
        return value
    if isinstance(value, dict) and set(value) == {"bytes", "path"}:
        return pictures.of(value)
    if isinstance(value, list | tuple):
        return [_pictured(column, item, pictures) for item in value]
    if column in IMAGE_COLUMNS:
        return pictures.of(value)
    return {name: _pictured("", item, pictures) for name, item in value.items()} if isinstance(value, dict) else value


def shown_pictures(known: Pictures, media: MediaFolder | None, sample: Sample) -> Pictures:
    """Those of a row, and those of the sample that are not its own."""
    made = () if media is None else (span.key for span in sample.images if span.key not in known)
    return {**known, **{key: media.picture(key) for key in made}}


def with_pictures(messages: Any, pictures: Pictures) -> Any:
    """A conversation whose image parts hold the pictures themselves, for functions of users."""
    return with_images_as(messages, lambda image: {"type": "image", "image": pictures[image.key]})


def _in_words(value: Any) -> str:
    """For a fingerprint. Pixels are part of that of the prepared rows, and a picture in words would be its place in memory."""
    return type(value).__name__ if isinstance(value, PIL.Image.Image | bytes) else str(value)


class PromptRows:
    """`prepared` holds checked and encoded prompts; `dataset` the user's rows, every column of them."""

    def __init__(self, prepared: PreparedDataset, dataset: Any, decode: Decode | None = None) -> None:
        self.prepared, self.dataset, self.decode = prepared, dataset, decode
        self._shows_images = prepared.detection.image_limits is not None
        self._undecoded = RowSource(dataset, None) if self._shows_images and isinstance(dataset, Dataset) else None

    @property
    def report(self) -> Any:
        """What became of the rows when they were checked."""
        return self.prepared.report

    @cached_property
    def fingerprint(self) -> str:
        """Changes with any prompt; of the columns that only rewards read, a few hundred rows are looked at."""
        places = np.unique(np.linspace(0, len(self.dataset) - 1, ROWS_HASHED).astype(int))
        rows = [self._row(int(place)) for place in places]
        if self._shows_images:  # their content is in the fingerprint of the prepared rows
            rows = [with_images_used(row, lambda *place: "image") for row in rows]
        written = json.dumps(rows, default=_in_words, sort_keys=True)
        return f"{self.prepared.fingerprint}-{xxhash.xxh3_64_hexdigest(written.encode())}"

    @property
    def has_answers(self) -> bool:
        """Whether rows bring completions of their own."""
        return self.prepared.detection.format.trains_tokens

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt; with its own completion, where rows have such."""
        return int(max(self.prepared.unit_lengths))

    def __len__(self) -> int:
        return len(self.prepared)

    def __getitem__(self, index: int) -> PromptRow:
        unit = self.prepared[index]
        return prompt_row(unit, self._row(unit[0].row), self.prepared.detection, self.decode)

    def _row(self, number: int) -> dict[str, Any]:
        """To read a prompt must not decode its pictures."""
        return self.dataset[number] if self._undecoded is None else self._undecoded.rows(number, number + 1)[0]

    def take(self, indices: Iterable[int]) -> dict[int, PromptRow]:
        """Index -> its row; each is read once, however often it is asked for."""
        return {index: self[index] for index in dict.fromkeys(indices)}


class StreamedPrompts:
    """The prompts of a stream, by the number that each has in the run; in the place of PromptRows.

    A stream has no length and is read in its own order; when it ends, its next epoch begins. Numbers are asked for in batches, each
    above all before it. Every process reads all of it and keeps what it is asked for, so a prompt has one number for all of them.
    After a resume the stream is read again up to where the run was; what it says must not depend on when it is read.
    """

    def __init__(self, prepared: PreparedStream, decode: Decode | None = None) -> None:
        self.prepared, self.decode = prepared, decode
        self.rewind()

    def rewind(self) -> None:
        """Begin with the first prompt of the run again."""
        self._reader = self._endless()
        self._next = 0  # number of the prompt that the reader gives next

    @property
    def has_answers(self) -> bool:
        return self.prepared.detection.format.trains_tokens

    @property
    def report(self) -> Any:
        """What became of the rows that were read in the current epoch."""
        return self.prepared.report

    def take(self, numbers: Iterable[int]) -> dict[int, PromptRow]:
        """Number -> its prompt. Those in between belong to other processes, or to the time before a resume."""
        wanted = sorted(set(numbers))
        if wanted and wanted[0] < self._next:
            raise RuntimeError(f"Prompt {wanted[0]} of the stream is asked for, but {self._next} were read already.")
        found = {}
        for number in wanted:
            while self._next <= number:
                row, unit = next(self._reader)
                self._next += 1
            found[number] = prompt_row(unit, row, self.prepared.detection, self.decode)
        return found

    def _endless(self) -> Iterator[tuple[Any, Unit]]:
        epoch = 0
        while True:
            self.prepared.set_epoch(epoch)
            before = self._next
            yield from self.prepared.rows_and_units()
            if self._next == before:
                raise ValueError(
                    f"Nothing is left of {self.prepared.name}: in epoch {epoch} of the stream there was no usable prompt."
                )
            epoch += 1


class StreamOrder:
    """The order of a stream's prompts: that of the stream. Replaces PromptStream."""

    num_rows = None  # not known

    def row(self, number: int) -> int:
        return number
