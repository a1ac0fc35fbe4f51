"""Options of methods that train on rows with images; mixed into their configs."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.core.options import option
from posttrain.core.vision import LANGUAGE_MODEL, PROJECTOR, TOWER
from posttrain.data.images.limits import AUTO, DECODE, HEADER, ImageLimits
from posttrain.data.vision.augmentation import Augmentation, augmentation_of, described
from posttrain.trainer.options.base import check_range

MOST_PIXELS, MOST_BYTES = ImageLimits.bomb_pixels, ImageLimits.max_bytes


def unused_rate(reason: str) -> ValueError:
    return ValueError(
        f"`vision_learning_rate` is set, and neither tower nor projector is trained: {reason}. Leave it out, or train them."
    )


def _mapping(name: str, given: Any) -> dict[str, Any] | None:
    """Of JSON text, or as it is."""
    try:
        found = json.loads(given) if isinstance(given, str) else given
    except ValueError as error:
        raise ValueError(
            f'`{name}` is {given!r}, which is not JSON ({error}); it must look like {{"do_image_splitting": false}}.'
        ) from error
    if found is not None and not isinstance(found, dict):
        raise ValueError(
            f'`{name}` is {given!r}; it must be a mapping of options to values: {{"do_image_splitting": false}}.'
        )
    return found


@dataclass
class ImageConfig:
    """What images of rows may be, what the model is shown of them, and which of its parts learn from them."""

    # ---- images
    min_pixels: int | None = option(
        None, "Fewest pixels that the image processor of Qwen's models gives an image. None: as the processor says."
    )
    max_pixels: int | None = option(None, "And most pixels.")
    image_processor_kwargs: dict[str, Any] | str | None = option(
        None, "Further options of the model's image processor, such as do_image_splitting; JSON text is accepted."
    )
    image_max_pixels: int | None = option(
        None, "Shrink images of more pixels (height x width) before the image processor, aspect kept. For every model."
    )
    image_augmentation: list[dict[str, Any]] | str | None = option(
        None,
        "What training images go through, drawn anew in every epoch: light, geometric, document, an import path module:function, a "
        "list of {name: RandomRotation, degrees: 5} (transforms of torchvision; of Pillow by names such as ImageOps.autocontrast), "
        "or in Python any function of PIL images, or transforms of albumentations.",
    )
    image_root: str | None = option(
        None, "Folder that relative paths of images start from; nothing outside of it is opened. None: any path is."
    )
    allow_image_urls: bool = option(
        False, "Download images that rows name by http and https URLs, once, when data are prepared."
    )
    image_bomb_pixels: int = option(
        MOST_PIXELS, "An image that says it has more pixels is a bad row; it is not decoded."
    )
    max_image_bytes: int = option(MOST_BYTES, "An image file of more bytes is a bad row.")
    check_images: str = option(
        AUTO,
        "decode: every image is decoded once before training; header: sizes only; auto: decode up to 20,000 images.",
    )
    loss_on_image_tokens: bool = option(
        False, "Train the placeholders of images, too, as TRL's SFT does: most of the loss is about them then."
    )
    freeze_vision_tower: bool = option(False, "Do not train the model's vision tower.")
    freeze_multi_modal_projector: bool = option(False, "Do not train what joins the tower to the language model.")
    freeze_language_model: bool = option(False, "Do not train the language model.")
    lora_vision: bool = option(
        False, "Adapt tower and projector, too, wherever `target_modules` match. False: the language model alone."
    )
    vision_learning_rate: float | None = option(
        None, "Initial learning rate of tower and projector, under the same schedule. None: `learning_rate`."
    )

    dataloader_num_workers: int | None = option(
        None,
        "Processes that make batches. None: of offline methods with images on a GPU, as many as cores and shared memory allow, at "
        "most 8; else 0.",
    )

    def __post_init__(self) -> None:
        self.chooses_workers = self.dataloader_num_workers is None
        self.dataloader_num_workers = self.dataloader_num_workers or 0  # until it is known what images rows have
        self.image_processor_kwargs = _mapping("image_processor_kwargs", self.image_processor_kwargs)
        super().__post_init__()
        if self.check_images not in (AUTO, DECODE, HEADER):
            raise ValueError(f"`check_images` is {self.check_images!r}; it must be one of {AUTO}, {DECODE}, {HEADER}.")
        for name in ("min_pixels", "max_pixels", "image_max_pixels", "image_bomb_pixels", "max_image_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"`{name}` is {value}; it must be at least 1.")
        if (self.min_pixels or 0) > (self.max_pixels or math.inf):
            raise ValueError(f"`min_pixels` is {self.min_pixels}, more than `max_pixels`, which is {self.max_pixels}.")
        if self.vision_learning_rate is not None:
            check_range("vision_learning_rate", self.vision_learning_rate, 0)
            if {TOWER, PROJECTOR} <= {*self.frozen_parts}:
                raise unused_rate("`freeze_vision_tower` and `freeze_multi_modal_projector` are set")
        if self.image_augmentation is not None:
            self.augmentation().try_out()
            if getattr(self, "precompute_ref_log_probs", False):
                raise ValueError(
                    "`precompute_ref_log_probs` keeps the reference's numbers about plain images, and `image_augmentation` changes "
                    "them in every epoch: leave one of them out."
                )

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {"image_augmentation": described(self.image_augmentation)}

    def augmentation(self) -> Augmentation | None:
        """What pictures that have a draw go through."""
        return None if self.image_augmentation is None else augmentation_of(self.image_augmentation)

    @property
    def frozen_parts(self) -> tuple[str, ...]:
        frozen = {
            TOWER: self.freeze_vision_tower,
            PROJECTOR: self.freeze_multi_modal_projector,
            LANGUAGE_MODEL: self.freeze_language_model,
        }
        return tuple(part for part, is_frozen in frozen.items() if is_frozen)

    def image_limits(self, cache: Path) -> ImageLimits:
        """`cache`: where data are kept, and downloaded images among them."""
        return ImageLimits(
            root=self.image_root,
            allow_urls=self.allow_image_urls,
            download_folder=cache / "images" if self.allow_image_urls else None,
            bomb_pixels=self.image_bomb_pixels,
            max_bytes=self.max_image_bytes,
            max_pixels=self.image_max_pixels,
            check=self.check_images,
        )
