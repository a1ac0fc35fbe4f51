"""Augmentation of training images: what an option names, and draws that depend on seed, epoch, row and image alone.

A draw is an integer that a span carries into the loader worker that makes its pixels. It is made where a unit is read, from the
epoch that the batch sampler hands out with the row: a worker that lives for several epochs learns of a new one in no other way.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import logging
import os
import pickle
import random
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import numpy as np
import torch
import xxhash
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

from posttrain.core.sample import Sample, Unit

logger = logging.getLogger(__name__)

OPTION = "image_augmentation"
DRAWS_TRIED = 8
Transform = Callable[[Any], Any]


# ---- what is applied -------------------------------------------------------------------------------------------------------


class AugmentationError(ValueError):
    """What was asked for cannot be done to a picture. Not a BadImage: what is wrong is the option, and no row is left out for it,
    whatever `on_bad_rows` says."""


@dataclass(frozen=True)
class Augmentation:
    """A transform whose randomness is that of a draw, and whose result has the size of what it was given."""

    transform: Transform

    def __call__(self, picture: Image.Image, draw: int) -> Image.Image:
        """The number of placeholders was fixed at preparation, by the size: any other size is resized back to it."""
        name = getattr(self.transform, "__qualname__", type(self.transform).__name__)
        with drawn_from(draw), _said_of(name, picture):
            made = _expect(Image.Image, self.transform(picture.copy()), name)
        made = made.convert("RGB")
        return made if made.size == picture.size else made.resize(picture.size, Image.Resampling.BICUBIC)

    def try_out(self) -> None:
        """Raise if it cannot be applied to a picture, lying or standing, by any of some draws: before a model is loaded.

        What fails on a small one, as a crop of 500 pixels does, may fit the data, and is tried once more on one of 12 megapixels.
        What a function of one's own raises is only said: it may be made for what noise is not.
        """
        height, width = 48, 64
        for draw in range(DRAWS_TRIED):
            try:
                self(_noise(height, width), draw)
            except AugmentationError:
                break
            height, width = width, height
        else:
            return
        try:
            self(_noise(64 * height, 64 * width), draw)
        except AugmentationError as error:
            is_own = not isinstance(self.transform, _Entries | _OfAlbumentations)
            if error.__cause__ is None or not is_own:
                raise
            logger.warning(f"{error} It was tried on noise; a picture of the dataset for which it raises ends the run.")


def _noise(height: int, width: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8))


@contextlib.contextmanager
def _said_of(entry: str, picture: Image.Image) -> Iterator[None]:
    """Whatever a transform raises is said with the option and its entry."""
    try:
        yield
    except (AugmentationError, MemoryError):
        raise
    except Exception as error:  # of torchvision, Pillow or the user
        raise AugmentationError(
            f"`{OPTION}`: {entry} cannot be applied to a picture of {picture.height} x {picture.width} (height x width): "
            f"{type(error).__name__}: {str(error).rstrip('.')}."
        ) from error


def _expect(kinds: Any, made: Any, entry: str) -> Any:
    if not isinstance(made, kinds):
        raise AugmentationError(
            f"`{OPTION}`: {entry} gave back a {type(made).__name__}; it must give a picture for a picture."
        )
    return made


@contextlib.contextmanager
def drawn_from(draw: int) -> Iterator[None]:
    """The global generators of torch (of the CPU), Python and NumPy, seeded in here and as they were afterwards.

    `torch.manual_seed` would seed those of GPUs, too, and with them the dropout of the run.
    """
    kept = torch.get_rng_state(), random.getstate(), np.random.get_state()
    torch.default_generator.manual_seed(draw)
    random.seed(draw)
    np.random.seed(draw % 2**32)
    try:
        yield
    finally:
        torch.set_rng_state(kept[0])
        random.setstate(kept[1])
        np.random.set_state(kept[2])


def augmentation_of(given: Any) -> Augmentation:
    """Of a built-in's name, an import path `module:function`, a callable, or a list of {name: ..., option: ...}."""
    if isinstance(given, str) and given in BUILT_IN:
        _v2()
        return Augmentation(_Entries(given))
    if isinstance(given, list | tuple):
        return Augmentation(_Entries([(str(entry), _named_transform(entry)) for entry in given]))
    if isinstance(given, str):
        given = _imported(given)
    if not callable(given):
        raise ValueError(f"`{OPTION}` is {given!r}; it takes {KNOWN}.")
    try:
        pickle.dumps(given)
    except Exception as error:
        raise ValueError(
            f"`{OPTION}` is {given!r}, which cannot be pickled for checkpoints and loader workers ({error}): define it at the "
            "top of a module."
        ) from error
    package = type(given).__module__
    if package.startswith("torchvision.transforms"):
        return Augmentation(_Entries([(" ".join(repr(given).split()), given)]))
    return Augmentation(_OfAlbumentations(given) if package.partition(".")[0] == "albumentations" else given)


def described(given: Any) -> Any:
    """An augmentation in words that are the same in every process: what a resumed run compares."""
    if isinstance(given, str) and ":" in given:
        given = _imported(given)  # the text stays what it is when the function is edited
    if not callable(given) or isinstance(given, type):
        return given
    if not hasattr(given, "__qualname__"):
        return re.sub(r" at 0x[0-9a-f]+", "", repr(given))
    try:
        source = inspect.getsource(given)
    except (OSError, TypeError):  # written in a session, or not in Python
        source = ""
    return f"{given.__module__}:{given.__qualname__} {xxhash.xxh3_64_hexdigest(source.encode())}"


def _imported(path: str) -> Transform:
    module, colon, name = path.partition(":")
    if not (module and colon and name):
        raise ValueError(f"`{OPTION}` is {path!r}; it takes {KNOWN}.")
    if os.getcwd() not in sys.path:  # the script of a command line has a folder of its own there
        sys.path.append(os.getcwd())
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"`{OPTION}` is {path!r}, which cannot be imported: {error}.") from error
    if not callable(found):
        raise ValueError(f"`{OPTION}` is {path!r}, which is a {type(found).__name__}; it must be a function.")
    return found


# ---- transforms of torchvision, Pillow and albumentations ------------------------------------------------------------------


def _v2() -> Any:
    try:
        from torchvision.transforms import v2
    except ImportError as error:
        raise ValueError(
            f"`{OPTION}` names transforms of torchvision, which cannot be imported ({error}): install it, name transforms of "
            "Pillow, or give a function of your own that takes and gives a PIL image."
        ) from error
    return v2


@dataclass(frozen=True)
class _Entries:
    """Transforms, one after the other, each with the words that name it in messages; or the name of a built-in.

    Those of torchvision are on uint8 tensors (channels, height, width); without any of them nothing needs torchvision.
    """

    given: str | Sequence[tuple[str, Transform]]

    def __call__(self, picture: Image.Image) -> Image.Image:
        entries = self.given
        if isinstance(entries, str):
            entries = [(entries, one) for one in BUILT_IN[entries](_v2(), picture.height, picture.width)]
        are_of_pillow = all(isinstance(transform, _OfPillow) for _, transform in entries)
        made = picture if are_of_pillow else _v2().functional.pil_to_tensor(picture)
        for entry, transform in entries:
            with _said_of(entry, picture):
                made = _expect(torch.Tensor | Image.Image, transform(made), entry)
        return made if isinstance(made, Image.Image) else _as_picture(made)


def _as_picture(pixels: torch.Tensor) -> Image.Image:
    """Floats are from 0 to 1. torchvision would let what is beyond begin again at the other end; a little of it, as interpolation
    leaves, is cut off."""
    if pixels.is_floating_point():
        low, high = pixels.min().item(), pixels.max().item()
        if not (low > -0.5 and high < 1.5):
            raise AugmentationError(
                f"`{OPTION}` makes pixels from {low:.3g} to {high:.3g}, and those of a picture are from 0 to 1: clip them, and "
                "leave Normalize out, which the model's image processor does."
            )
        pixels = pixels.clamp(0, 1)
    return _v2().functional.to_pil_image(pixels)


def _named_transform(entry: Any) -> Transform:
    """{name: RandomRotation, degrees: 5} -> v2.RandomRotation(degrees=5); a name alone has no options. `transforms` are entries."""
    options = dict(entry) if isinstance(entry, dict) else {"name": entry}
    name = options.pop("name", None)
    if isinstance(name, str) and _is_of_pillow(name):  # YAML has lists where Pillow wants tuples
        return _OfPillow(name, {key: tuple(v) if isinstance(v, list) else v for key, v in options.items()})
    v2 = _v2()
    found = getattr(v2, name, None) if isinstance(name, str) else None
    if not (inspect.isclass(found) and issubclass(found, v2.Transform)):
        raise ValueError(
            f"`{OPTION}` has the entry {entry!r}; its `name` must be a transform of torchvision.transforms.v2, or of Pillow's "
            f"{', '.join(PILLOW)}, as in ImageOps.autocontrast."
        )
    if isinstance(options.get("transforms"), list | tuple):
        inner = options["transforms"]
        options["transforms"] = [one if callable(one) else _named_transform(one) for one in inner]
    try:
        return found(**options)
    except (TypeError, ValueError) as error:
        raise ValueError(f"`{OPTION}`: {name} does not take {options}: {error}.") from error


PILLOW: dict[str, tuple[ModuleType, Callable[[Image.Image, Any, dict[str, Any]], Any]]] = {
    "ImageOps": (ImageOps, lambda picture, function, options: function(picture, **options)),
    "ImageFilter": (ImageFilter, lambda picture, filter, options: picture.filter(filter(**options))),
    "ImageEnhance": (ImageEnhance, lambda picture, enhancer, options: enhancer(picture).enhance(**options)),
}
"""Modules that may be named -> how what stands in them is applied."""


def _is_of_pillow(name: str) -> bool:
    """Public, and defined in the module itself: what a module imports is not meant."""
    module, _, what = name.partition(".")
    found = getattr(PILLOW[module][0], what, None) if module in PILLOW and not what.startswith("_") else None
    return callable(found) and found.__module__ == PILLOW[module][0].__name__


@dataclass(frozen=True)
class _OfPillow:
    """`ImageOps.autocontrast` and its options, on a picture, or between transforms of torchvision on what they hand on."""

    name: str
    options: dict[str, Any]

    def __call__(self, picture: Image.Image | torch.Tensor) -> Any:
        if isinstance(picture, torch.Tensor):
            return _v2().functional.pil_to_tensor(self(_as_picture(picture)))
        module, _, what = self.name.partition(".")
        home, apply = PILLOW[module]
        return _expect(Image.Image, apply(picture, getattr(home, what), self.options), self.name)


@dataclass(frozen=True)
class _OfAlbumentations:
    """A transform of albumentations, on an array. It has generators of its own, which are seeded from those of the draw.

    By `set_random_state`: what `set_random_seed` makes of a seed may depend on the loader's worker.
    """

    transform: Any

    def __post_init__(self) -> None:
        if not hasattr(self.transform, "set_random_state"):
            raise ValueError(
                f"`{OPTION}` is of a version of albumentations that cannot be given generators (`set_random_state`), so that a "
                "resumed run would draw something else: install albumentations 2, or seed it in a function of your own."
            )

    def __call__(self, picture: Image.Image) -> Image.Image:
        seed = random.getrandbits(32)
        self.transform.set_random_state(np.random.default_rng(seed), random.Random(seed))
        with _said_of(f"{type(self.transform).__name__} of albumentations", picture):
            return Image.fromarray(self.transform(image=np.array(picture))["image"])


def _light(v2: Any, height: int, width: int) -> Sequence[Transform]:
    """No flips: text, digits, left and right are content."""
    aspect = width / height
    crop = v2.RandomResizedCrop((height, width), scale=(0.85, 1), ratio=(0.95 * aspect, 1.05 * aspect))
    return crop, v2.ColorJitter(0.2, 0.2, 0.2), v2.RandomGrayscale(0.05)


def _geometric(v2: Any, height: int, width: int) -> Sequence[Transform]:
    bilinear = {"interpolation": v2.InterpolationMode.BILINEAR, "fill": 127}
    affine = v2.RandomAffine(5, translate=(0.03, 0.03), scale=(0.9, 1.1), **bilinear)
    return affine, v2.RandomPerspective(0.1, **bilinear)


def _document(v2: Any, height: int, width: int) -> Sequence[Transform]:
    """What scanners and phones do to a page: blur, noise, and the traces of JPEG."""
    to_float, to_bytes = v2.ToDtype(torch.float32, scale=True), v2.ToDtype(torch.uint8, scale=True)
    return v2.GaussianBlur(3, (0.1, 1.0)), to_float, v2.GaussianNoise(sigma=0.03), to_bytes, _jpeg_traces


def _jpeg_traces(pixels: torch.Tensor) -> Image.Image:
    written = io.BytesIO()
    quality = int(torch.randint(40, 96, ()))
    Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(written, "JPEG", quality=quality)
    return Image.open(written, formats=("JPEG",))


BUILT_IN = {"light": _light, "geometric": _geometric, "document": _document}
KNOWN = (
    f"one of {', '.join(BUILT_IN)}, an import path module:function, a function that takes and gives a PIL image, a transform of "
    "torchvision or albumentations, or a list of {name: RandomRotation, degrees: 5}"
)


# ---- draws -----------------------------------------------------------------------------------------------------------------


def with_draws(unit: Unit, seed: int, epoch: int) -> Unit:
    """The unit whose images have draws. An image of a row has one, wherever it stands: on both sides of a pair, and in a twin."""
    return tuple(_drawn(sample, seed, epoch) for sample in unit)


def _drawn(sample: Sample, seed: int, epoch: int) -> Sample:
    twin = None if sample.twin is None else _drawn(sample.twin, seed, epoch)
    if not sample.images:
        return sample if twin is None else replace(sample, twin=twin)
    images = tuple(replace(image, draw=draw_of(seed, epoch, sample.row, image.key)) for image in sample.images)
    return replace(sample, images=images, twin=twin)


def draw_of(seed: int, epoch: int, row: int, key: bytes) -> int:
    """By the image's key instead of its number in the row, which a cut at the row's beginning would change."""
    return xxhash.xxh3_64_intdigest(ascii((seed, epoch, row, key)).encode()) >> 1  # torch takes 63 bits


class DrawnBatches:
    """A batch sampler whose keys carry the epoch; what it does not say itself is the sampler's."""

    def __init__(self, batches: Any) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[tuple[int, Any]]]:
        epoch = self.batches.epoch
        for keys in self.batches:
            yield [(epoch, key) for key in keys]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "batches":  # copying looks for these before __init__ has run
            raise AttributeError(name)
        return getattr(self.batches, name)


class DrawnRows:
    """Units by the keys of DrawnBatches."""

    def __init__(self, units: Any, seed: int) -> None:
        self.units, self.seed = units, seed

    def __len__(self) -> int:
        return len(self.units)

    def __getitem__(self, key: tuple[int, Any]) -> Unit:
        return with_draws(self.units[key[1]], self.seed, key[0])


class DrawnStream:
    """Units of a stream, which is read in the process that sets its epoch."""

    def __init__(self, units: Any, seed: int) -> None:
        self.units, self.seed, self.epoch = units, seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        if hasattr(self.units, "set_epoch"):
            self.units.set_epoch(epoch)

    def __iter__(self) -> Iterator[Unit]:
        epoch = self.epoch
        return (with_draws(unit, self.seed, epoch) for unit in self.units)
