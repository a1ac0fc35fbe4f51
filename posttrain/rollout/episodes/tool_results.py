"""What a tool or `reset` returned, as the model reads it: a text, or a list of parts with images among them.

Images are checked as those of rows are and kept in the run's media folder; what is carried on is their key and size.
"""

from __future__ import annotations

import inspect
import itertools
import json
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image

from posttrain.data.images.limits import BadImage, ImageLimits
from posttrain.data.images.media import MediaFolder, MediaNotWritten
from posttrain.data.rows.row_images import is_image_part, payload_of

MAX_ITEMS = 100_000  # of what a tool yields: it may have no end
MAX_IMAGES = 4
"""Of one result."""
NOT_SHOWN = (
    "it returned an image, and this run shows the model none. Say that it does in its return annotation (`-> Image.Image`), or set "
    "`tool_image_role`; the model has to be one that reads images."
)
Part = dict[str, Any]
Content = str | list[Part]


class UnexpectedImage(RuntimeError):
    """An image in a run that shows none. The run ends: the model would be trained on what it cannot see."""


def raise_if_fatal(error: BaseException | None, who: str) -> None:
    """What is no mistake of the tool's, and nothing that the model should learn from."""
    if isinstance(error, UnexpectedImage):
        raise UnexpectedImage(f"{who}: {error}") from error
    if isinstance(error, MediaNotWritten):
        raise error


@dataclass(frozen=True)
class ShownImages:
    """Where images of tools are kept, and what they may be."""

    media: MediaFolder
    limits: ImageLimits

    def part(self, payload: Any) -> Part:
        if isinstance(payload, str):
            raise BadImage(
                "image_type",
                "A tool names an image by a path or a URL, which are not opened: return the image itself (PIL, bytes or an array).",
            )
        return {"type": "image", "image": self.media.keep(payload, self.limits)}


def content_of(result: Any, limit: int, shown: ShownImages | None) -> Content:
    """A result for the model, with texts of at most `limit` characters together. `shown` is None where no images are."""
    parts = kept_parts(result, shown)
    return text_of(result, limit) if parts is None else _joined(parts, limit)


def kept_parts(result: Any, shown: ShownImages | None) -> list[Part] | None:
    """The result as content parts, its images kept; None where it is anything else, which is shown as text."""
    parts = _as_parts(result, shown is not None)
    count = sum(map(is_image_part, parts or ()))
    if count and shown is None:
        raise UnexpectedImage(NOT_SHOWN)
    if count > MAX_IMAGES:
        raise ValueError(f"It returned {count} images; a result may have {MAX_IMAGES} at most.")
    return parts and [shown.part(payload_of(part)) if is_image_part(part) else part for part in parts]


def _as_parts(result: Any, shows_images: bool) -> list[Part] | None:
    if _is_picture(result, shows_images):
        return [{"type": "image", "image": result}]
    if not isinstance(result, list | tuple) or not result:
        return None
    parts = [{"type": "image", "image": item} if _is_picture(item, shows_images) else item for item in result]
    parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    if not any(map(is_image_part, parts)) and not all(map(_is_text, result)):
        return None
    for part in parts:
        if not is_image_part(part) and not _is_text(part):
            raise TypeError(f"It returned images beside something that is neither text nor image: {str(part)[:100]}.")
    return parts


def _is_picture(value: Any, shows_images: bool) -> bool:
    """Bytes and arrays may be anything to a model that reads texts; so may arrays of numbers to one that sees."""
    if isinstance(value, Image.Image):
        return True
    if not shows_images:
        return False
    is_array = isinstance(value, np.ndarray | torch.Tensor) and value.dtype in (np.uint8, torch.uint8)
    return isinstance(value, bytes | bytearray) or (is_array and value.ndim == 3)


def _is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _joined(parts: list[Part], limit: int) -> Content:
    """Neighbouring texts as one, and a text alone as a text."""
    content: list[Part] = []
    for part in parts:
        if content and not is_image_part(part) and not is_image_part(content[-1]):
            content[-1] = {"type": "text", "text": content[-1]["text"] + part["text"]}
        else:
            content.append(part if is_image_part(part) else {"type": "text", "text": part["text"]})
    left = limit
    for part in content:
        if not is_image_part(part):
            size = len(part["text"])
            part["text"], left = text_of(part["text"], left), max(left - size, 0)
    return content[0]["text"] if len(content) == 1 and not is_image_part(content[0]) else content


def text_of(result: Any, limit: int) -> str:
    """A result as a text of at most `limit` characters: texts as they are, anything else as JSON."""
    text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=_plain)
    if len(text) > limit:
        text = f"{text[:limit]}\n[cut: {len(text):,} characters, of which the first {limit:,} are shown]"
    return clean(text)


def clean(text: str) -> str:
    """Without halves of characters, which no tokenizer takes."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _plain(value: Any) -> Any:
    """Arrays and numbers of numpy and torch as lists and numbers, what is iterated as a list; anything else as its text.

    What has no text of its own would be shown with its address in memory: never the same twice, and nothing to learn from.
    """
    if isinstance(value, Image.Image):
        raise TypeError("It returned an image inside of other data: return the image, or a list of texts and images.")
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)  # their own order changes from process to process
    if isinstance(value, Iterator):
        return list(itertools.islice(value, MAX_ITEMS))
    has_text = type(value).__str__ is not object.__str__ or type(value).__repr__ is not object.__repr__
    if not has_text or callable(value) or inspect.isasyncgen(value):
        name = type(value).__name__
        raise TypeError(f"The tool returned a {name}, which has no text: return a string, a number, a list or a dict.")
    return str(value)


def says_images(function: Callable[..., Any]) -> bool:
    """Whether the annotation of what a function returns has PIL's image in it."""
    try:
        returned = typing.get_type_hints(function).get("return")
    except Exception:  # an annotation may be any text, of names that are not there
        return False
    return _has_image_type(returned)


def _has_image_type(annotation: Any) -> bool:
    is_image = isinstance(annotation, type) and issubclass(annotation, Image.Image)
    return is_image or any(map(_has_image_type, typing.get_args(annotation)))
