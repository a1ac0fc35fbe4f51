"""What a trainer has where its model sees images: the family, what images become in texts, pixels, and a probe of the model."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from PIL import Image
from torch import nn

from posttrain.core.batch import PADDED, BatchImages, TokenBatch
from posttrain.core.machine import training_processes, usable_cores
from posttrain.core.sample import Sample, Unit
from posttrain.core.vision import PROJECTOR, TOWER, VisionFamily
from posttrain.data.collate import collate
from posttrain.data.images.limits import HEADER, BadImage, ImageLimits
from posttrain.data.images.media import MediaFolder
from posttrain.data.images.opening import open_image
from posttrain.data.images.row_image import RowImage
from posttrain.data.images.streamed_span import StreamedSpan
from posttrain.data.options import PrepareOptions
from posttrain.data.pixels import PixelLoader
from posttrain.data.render.renderer import Conversation, Renderer
from posttrain.data.store.prepare import cache_folder
from posttrain.data.vision.families import vision_family
from posttrain.data.vision.layouts import ImageLayouts, image_options, with_options
from posttrain.models.memory.tower import TowerShape
from posttrain.models.scoring.probe import ImageProbe
from posttrain.models.vision.features import vision_parameters
from posttrain.trainer.options.base import DEEPSPEED
from posttrain.trainer.options.images import ImageConfig, unused_rate

PROBE_SIZES = ((64, 48), (56, 112))  # height, width of the pictures that a model is probed with
CACHED_BYTES = 512 << 20
SHARED_MEMORY = "/dev/shm"
MOST_WORKERS, LOOKED_AT = 8, 16


@dataclass
class Vision:
    """Of one run: made with its renderer, before any data is read."""

    family: VisionFamily
    processor: Any
    layouts: ImageLayouts
    limits: ImageLimits
    pixels: PixelLoader
    context: int | None  # tokens that the model can read
    datasets_with_images: list[str] = field(default_factory=list)
    most_images: int | None = 0  # in a row; None: rows come from a stream

    @property
    def media(self) -> MediaFolder | None:
        """Where images are kept that tools return; None: they return none."""
        return self.pixels.media

    @media.setter
    def media(self, folder: MediaFolder) -> None:
        self.pixels.media = folder

    @property
    def shows_images(self) -> bool:
        """Whether the model is shown any in this run."""
        return bool(self.datasets_with_images) or self.media is not None

    @classmethod
    def of(
        cls, config: dict[str, Any], processor: Any, args: ImageConfig, family: VisionFamily | None = None
    ) -> Vision:
        """`config`: the model's; `family`: where it is in no table."""
        family = family or vision_family(str(config.get("model_type")), processor)
        sizes = {"min_pixels": args.min_pixels, "max_pixels": args.max_pixels}
        options = image_options(family, processor, **sizes, others=args.image_processor_kwargs)
        if options:
            processor = with_options(processor, options)
        how = {"dtype": args.compute_dtype, "cache_bytes": CACHED_BYTES, "augmentation": args.augmentation()}
        pixels = PixelLoader(family, processor, options, **how)
        limits = args.image_limits(cache_folder(PrepareOptions(cache_dir=args.dataset_cache_dir)))
        context = config.get("text_config", config).get("max_position_embeddings")
        return cls(family, processor, ImageLayouts(family, processor, options), limits, pixels, context)

    def of_teacher(self, config: dict[str, Any], processor: Any, args: ImageConfig) -> Vision:
        """What shows this run's images to another model, which has tokens of its own and the same processor of images."""
        model_type = str(config.get("model_type"))
        if model_type != self.family.model_type or not hasattr(processor, "image_processor"):
            raise ValueError(
                f"The dataset has images, which the teacher, a model of type {model_type!r}, would be shown by another processor "
                f"than the student ({self.family.model_type!r}). Take a teacher of the student's type, with its processor as "
                "`teacher_processing_class` where it has none beside it; its tokenizer may be another."
            )
        made = Vision.of(config, processor, args)
        made.pixels.share_datasets(self.pixels)
        return made

    def add(self, dataset: Any, prepared: Any, name: str) -> None:
        """Let pixels be made of a dataset's images."""
        prepared = getattr(prepared, "samples", prepared)  # of a packed one
        store = getattr(prepared, "store", None)
        has_images = len(store.spans) > 0 if store is not None else True  # what a stream will bring is not known
        if has_images:
            self.datasets_with_images.append(name)
        if store is None:
            self.most_images = None
            return
        self.pixels.add(dataset, store, name)
        if self.most_images is not None:
            self.most_images = max(self.most_images, int(store.span_counts.max(initial=0)))

    def choose_workers(self, args: ImageConfig, rows: Any) -> None:
        """Let processes make the batches of `rows` where images are worth it, unless their number was set.

        Batches wait in shared memory, two for each worker and one on its way; of containers it may be small, and a worker that
        finds no more of it dies.
        """
        chooses = args.chooses_workers and args.device.type != "cpu"  # a model on the CPU needs the cores itself
        if chooses and self.datasets_with_images and self.most_images is not None and rows is not None:
            here = training_processes()
            room = shutil.disk_usage(SHARED_MEMORY).free / here if os.path.exists(SHARED_MEMORY) else math.inf
            batch = args.train_batch_size * self._bytes_of_a_unit(rows)
            args.dataloader_num_workers = num_workers(usable_cores() // here, room, batch)
        self.pixels.cache.limit = CACHED_BYTES // max(args.dataloader_num_workers, 1)  # each worker has a copy

    def _bytes_of_a_unit(self, rows: Any) -> float:
        """Of pixels, by some rows that are taken from all over the dataset."""
        some = [rows[int(number)] for number in np.linspace(0, len(rows) - 1, min(len(rows), LOOKED_AT))]
        distinct = [{image.key: image for sample in unit for image in sample.images}.values() for unit in some]
        found = 0
        for image in (image for images in distinct for image in images):
            with contextlib.suppress(BadImage):  # said when its batch is made
                found += sum(tensor.nbytes for tensor in self.pixels.load([image]).values())
        return found / len(some)

    def load_options(self, args: ImageConfig, renderer: Renderer) -> dict[str, Any]:
        """Arguments of LoadOptions. What no image will reach is not trained: DDP would wait for gradients of the tower, and weight
        decay would shrink it."""
        if self.shows_images and args.sharding == DEEPSPEED:
            who = f"The {self.datasets_with_images[0]} dataset has" if self.datasets_with_images else "Tools return"
            raise ValueError(
                f"{who} images, which posttrain does not train under DeepSpeed. Shard the model with FSDP (`fsdp=True`), or leave "
                "the images out."
            )
        frozen = args.frozen_parts
        if not self.shows_images:
            frozen = tuple(dict.fromkeys([*frozen, TOWER, PROJECTOR]))
            if args.vision_learning_rate is not None:
                raise unused_rate("no row has an image")
            if args.freeze_language_model:
                raise ValueError(
                    "`freeze_language_model` is set, and no row has an image, from which tower and projector could learn: nothing "
                    "is left to train. Leave it out."
                )
            if args.image_augmentation is not None:
                raise ValueError("`image_augmentation` is set, and no row has an image: leave it out.")
        probe = image_probe(self, renderer) if self.shows_images else None
        return {"vision": self.family, "image_probe": probe, "lora_vision": args.lora_vision, "frozen_parts": frozen}

    def tower(self, innermost: nn.Module) -> TowerShape | None:
        """None: of a family that is in no table, whose tower may be anything."""
        return None if self.family.is_found else TowerShape.of(innermost, self.family)

    def probe_images(self, renderer: Renderer, device: Any) -> tuple[BatchImages, BatchImages]:
        """Of one picture, and of two: what more patches need is measured by."""
        probe = image_probe(self, renderer)
        one, two = (probe.collate([(sample,)], PADDED).to(device).images for sample in (probe.one, probe.two))
        return one, two

    def trained_parameters(self, innermost: nn.Module) -> list[nn.Parameter]:
        """Those of tower and projector."""
        return [parameter for parameter in vision_parameters(innermost, self.family) if parameter.requires_grad]


def num_workers(cores: int, room: float, batch: float) -> int:
    """Of a process that has `cores`, half of them; none where that is one, or where `room` bytes hold no batches of `batch`."""
    wanted = int(min(MOST_WORKERS, cores // 2, room / 2 / (3 * max(batch, 1.0))))
    return wanted if wanted > 1 else 0


def refuse_other_ids(vision: Vision, renderer: Renderer) -> None:
    """Of a family that is in no table: two pictures in a text must become the very ids that its processor makes of them."""
    written = vision.family.written
    text = f"a{written} b\n{written}c"
    (ours,) = renderer.encode_image_texts([text], [[RowImage(bytes(16), size) for size in PROBE_SIZES]])
    blank = [Image.new("RGB", size[::-1], (127, 127, 127)) for size in PROBE_SIZES]
    theirs = vision.processor(text=[text], images=[blank], images_kwargs=vision.layouts.options)["input_ids"][0]
    if isinstance(ours, Exception) or ours.input_ids.tolist() != [int(number) for number in theirs]:
        raise ValueError(f"the ids that {type(vision.processor).__name__} makes of two images are not found again")


def image_probe(vision: Vision, renderer: Renderer) -> ImageProbe:
    """Samples about pictures of noise, as the run's own renderer and loader make them."""
    random = np.random.default_rng(0)
    first, second, third = (
        Image.fromarray(random.integers(0, 256, (*size, 3), dtype=np.uint8)) for size in (*PROBE_SIZES, PROBE_SIZES[0])
    )
    pad = renderer.tokenizer.pad_token_id

    def lay_out(units: Sequence[Unit], layout: str) -> TokenBatch:
        return collate(units, ("text",), layout, pad, None, vision.pixels)

    def sample(*parts: Any, answer: str = "It is red.") -> Sample:
        return _probe_sample(vision, renderer, parts, answer)

    return ImageProbe(
        one=sample(first, "What is it?"),
        two=sample(first, "and", second, "What are they?"),
        none=sample("What is it?"),
        other=sample(third, "What is it?"),
        swapped=sample(second, "and", first, "What are they?"),
        sibling=sample(first, "and", second, "What are they?", answer="They are blue."),
        collate=lay_out,
    )


def _probe_sample(vision: Vision, renderer: Renderer, parts: Sequence[Any], answer: str) -> Sample:
    limits = replace(vision.limits, check=HEADER)
    sources = {
        source.key: (part, source)
        for part in parts
        if not isinstance(part, str)
        for source in [open_image(part, limits)]
    }
    shown = iter(sources.values())
    content: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, str):
            content.append({"type": "text", "text": part})
        else:
            source = next(shown)[1]
            content.append({"type": "image", "image": RowImage(source.key, source.size)})
    made = _encoded(vision, renderer, content, answer)
    spans = (StreamedSpan.of(span, sources[span.key][0], limits, "the probe: ") for span in made.images)
    return replace(made, images=tuple(spans))


def _encoded(vision: Vision, renderer: Renderer, content: list[dict[str, Any]], answer: str) -> Sample:
    if renderer.has_template:
        turns = [
            {"role": "user", "content": content},
            {"role": "assistant", "content": [{"type": "text", "text": answer}]},
        ]
        (made,) = renderer.encode_chats([Conversation(turns, num_prompt_messages=1)], "completion")
    else:
        text = "".join(part.get("text", vision.family.written) for part in content)
        images = [part["image"] for part in content if "image" in part]
        (made,) = renderer.encode_image_texts([text + answer], [images])
        if isinstance(made, Sample):
            made.trained = np.arange(len(made)) >= len(made) - 3
    if not isinstance(made, Sample):
        raise ValueError(f"A conversation with an image cannot be rendered for this model: {made}") from made
    return made
