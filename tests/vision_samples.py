"""Samples of the tiny vision-language families, made by hand from what their own processors return, and their pixels."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.nn.functional import pad

from posttrain.core.batch import RAGGED, TokenBatch
from posttrain.core.sample import ImageSpan, Sample, Unit
from posttrain.core.vision import VisionFamily
from posttrain.data.collate import collate
from posttrain.data.vision.families import vision_family
from posttrain.data.vision.layouts import ImageLayouts
from posttrain.data.vision.positions import image_positions
from posttrain.models.scoring.probe import ImageProbe
from tests.tiny_vision import TinyVision, images, vision_model

RAGGED_FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava", "llava_next", "idefics3", "smolvlm", "internvl")


@dataclass
class Shown:
    """A tiny model, and samples that show it images: `pixels` of data.collate."""

    tiny: TinyVision
    family: VisionFamily
    pictures: dict[bytes, Image.Image] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str, dtype: torch.dtype = torch.float64) -> Shown:
        """A copy of a model that is built once."""
        tiny = _built(name, dtype)
        return cls(
            replace(tiny, model=copy.deepcopy(tiny.model)), vision_family(tiny.model.config.model_type, tiny.processor)
        )

    def sample(self, *parts: str | Image.Image, answer: str = "It is red.") -> Sample:
        """A prompt of texts and pictures, and an answer that is trained."""
        pictures = [part for part in parts if isinstance(part, Image.Image)]
        text = "".join(part if isinstance(part, str) else self.family.written for part in parts)
        ids = self._ids(text, pictures)
        spans, starts, at = [], [], 0
        for picture in pictures:
            inside = self._ids(self.family.written, [picture])
            inside = inside[np.flatnonzero(inside == self.family.placeholder_id)[0] :]  # what is before may be a <bos>
            inside = inside[: np.flatnonzero(inside == self.family.placeholder_id)[-1] + 1]
            at = next(i for i in range(at, len(ids)) if np.array_equal(ids[i : i + len(inside)], inside))
            key = picture.tobytes()[:16]
            self.pictures[key] = picture
            size = (picture.height, picture.width)
            spans.append(ImageSpan(at, at + len(inside), key, size, self._grid(*size)))
            starts.append(at)
            at += len(inside)
        positions = None
        if self.family.three_axis_positions:
            positions = image_positions(len(ids), starts, [span.grid for span in spans], self.family.merge_size)
        prompt = Sample(ids, np.zeros(len(ids)), images=tuple(spans), positions=positions)
        return prompt.append(self.tiny.processor.tokenizer(answer, add_special_tokens=False)["input_ids"], True)

    def _ids(self, text: str, pictures: list[Image.Image]) -> np.ndarray:
        if not pictures:
            return np.array(self.tiny.processor.tokenizer(text)["input_ids"])
        return self.tiny.processor(text=[text], images=[pictures], return_tensors="np")["input_ids"][0]

    def _grid(self, height: int, width: int) -> tuple[int, ...]:
        return _layouts(self.family.model_type).layout(height, width).grid

    def load(self, spans: Sequence[ImageSpan]) -> dict[str, torch.Tensor]:
        made = [self.inputs_of(self.pictures[span.key]) for span in spans]
        if not self.family.pixels_in_one_row:
            return {key: torch.cat([one[key] for one in made]) for key in self.family.forward_keys}
        sides = [max(one["pixel_values"].shape[axis] for one in made) for axis in (-2, -1)]
        return {key: torch.cat([_filled(one[key], *sides) for one in made])[None] for key in self.family.forward_keys}

    def inputs_of(self, picture: Image.Image) -> dict[str, torch.Tensor]:
        inputs = self.tiny.processor(text=[self.family.written], images=[[picture]], return_tensors="pt")
        pixels = inputs["pixel_values"]
        if pixels.dim() == 5:  # (images, tiles, ...)
            inputs["pixel_values"] = pixels[0]
            if "pixel_attention_mask" in inputs:
                inputs["pixel_attention_mask"] = inputs["pixel_attention_mask"][0]
        inputs["pixel_values"] = inputs["pixel_values"].to(self.tiny.model.dtype)
        return inputs

    def batch(self, units: Sequence[Unit], layout: str = RAGGED) -> TokenBatch:
        return collate(units, ("text",), layout, self.tiny.processor.tokenizer.pad_token_id, None, self)

    def own_logits(self, sample: Sample, pictures: Sequence[Image.Image]) -> torch.Tensor:
        """(tokens, vocabulary) by transformers' own forward with the processor's own arguments and positions."""
        ids = torch.tensor(sample.input_ids.astype(np.int64))[None]
        kwargs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if pictures:
            text = self.family.written * len(pictures)
            inputs = self.tiny.processor(text=[text], images=[list(pictures)], return_tensors="pt")
            kwargs |= {key: inputs[key] for key in self.family.forward_keys}
            kwargs["pixel_values"] = kwargs["pixel_values"].to(self.tiny.model.dtype)
        is_image = (ids == self.family.placeholder_id).long()
        if self.family.three_axis_positions:
            kwargs["mm_token_type_ids"] = is_image
        elif self.family.prefix_sees_itself_whole:
            kwargs["token_type_ids"] = torch.tensor(sample.trained.astype(np.int64))[None]
        elif self.family.token_types_key:
            kwargs[self.family.token_types_key] = is_image
        return self.tiny.model(**kwargs, use_cache=False).logits[0]

    def own_logps(self, sample: Sample) -> torch.Tensor:
        logits = self.own_logits(sample, [self.pictures[span.key] for span in sample.images])
        trained = np.flatnonzero(sample.trained)
        targets = torch.tensor(sample.input_ids[trained].astype(np.int64))
        return logits[trained - 1].log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1)


@cache
def _built(name: str, dtype: torch.dtype) -> TinyVision:
    return vision_model(name, dtype=dtype)


def _filled(tiles: torch.Tensor, height: int, width: int) -> torch.Tensor:
    return pad(tiles, (0, width - tiles.shape[-1], 0, height - tiles.shape[-2]))


@cache
def _layouts(name: str) -> ImageLayouts:
    from tests.tiny_vision import tiny_processor

    processor = tiny_processor(name)
    return ImageLayouts(vision_family(name, processor), processor)


def repeated_images(shown: Shown) -> list[Unit]:
    """Two answers to one prompt with two images, a text alone, and the two images in the other order."""
    first, second = images((60, 40), (30, 90))
    pair = tuple(shown.sample("a", first, "b", second, "c?", answer=answer) for answer in ("It is red.", "Blue, no?"))
    return [pair, (shown.sample("Hello?"),), (shown.sample(second, "and ", first, "!", answer="Both."),)]


def image_probe(shown: Shown) -> ImageProbe:
    first, second, other = images((60, 40), (30, 90), (60, 40))
    return ImageProbe(
        one=shown.sample("a", first, "b"),
        two=shown.sample("a", first, "b", second, "c"),
        none=shown.sample("Hello?"),
        other=shown.sample("a", other, "b"),
        swapped=shown.sample("a", second, "b", first, "c"),
        sibling=shown.sample("a", first, "b", second, "c", answer="No."),
        collate=shown.batch,
    )
