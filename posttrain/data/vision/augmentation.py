"""Augmentation of training images: what an option names, and draws that depend on seed, epoch, row and image alone.

A draw is an integer that a span carries into the loader worker that makes its pixels. It is made where a unit is read, from the
epoch that the batch sampler hands out with the row: a worker that lives for several epochs learns of a new one in no other way.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import os
import pickle
import random
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import xxhash
from PIL import Image

from posttrain.core.sample import Sample, Unit

OPTION = "image_augmentation"
Transform = Callable[[Any], Any]


# ---- what is applied -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Augmentation:
    """A transform whose randomness is that of a draw, and whose result has the size of what it was given."""

    transform: Callable[[Image.Image], Any]

    def __call__(self, picture: Image.Image, draw: int) -> Image.Image:
        """The number of placeholders was fixed at preparation, by the size: any other size is resized back to it."""
        with drawn_from(draw):
            made = self.transform(picture.copy())
        if not isinstance(made, Image.Image):
            raise TypeError(f"`{OPTION}` gave back a {type(made).__name__}; it must give a PIL image for a PIL image.")
        made = made.convert("RGB")
        return made if made.size == picture.size else made.resize(picture.size, Image.Resampling.BICUBIC)


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
    """Of a built-in's name, an import path `module:function`, a callable, or a list of {name: ..., option: ...} of torchvision."""
    if isinstance(given, str):
        return Augmentation(_OfTorchvision(given) if given in BUILT_IN else _imported(given))
    if isinstance(given, list | tuple):
        return Augmentation(_OfTorchvision([_named_transform(entry) for entry in given]))
    if not callable(given):
        raise ValueError(f"`{OPTION}` is {given!r}; it takes {KNOWN}.")
    try:
        pickle.dumps(given)
    except Exception as error:
        raise ValueError(
            f"`{OPTION}` is {given!r}, which cannot be pickled for checkpoints and loader workers ({error}): define it at the "
            "top of a module."
        ) from error
    is_theirs = type(given).__module__.startswith("torchvision.transforms")
    return Augmentation(_OfTorchvision([given]) if is_theirs else given)


def described(given: Any) -> Any:
    """An augmentation in words that are the same in every process: what a resumed run compares."""
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
    return augmentation_of(found).transform


# ---- transforms of torchvision ---------------------------------------------------------------------------------------------


def _v2() -> Any:
    try:
        from torchvision.transforms import v2
    except ImportError as error:
        raise ValueError(
            f"`{OPTION}` names transforms of torchvision, which cannot be imported ({error}): install it, or give a function of "
            "your own that takes and gives a PIL image."
        ) from error
    return v2


class _OfTorchvision:
    """Transforms of torchvision on uint8 tensors (channels, height, width): a list of them, or those of a built-in."""

    def __init__(self, transforms: str | list[Transform]) -> None:
        self.transforms = transforms
        _v2()

    def __call__(self, picture: Image.Image) -> Image.Image:
        v2, made = _v2(), self.transforms
        made = BUILT_IN[made](v2, picture.height, picture.width) if isinstance(made, str) else made
        pixels = v2.functional.pil_to_tensor(picture)
        for transform in made:
            pixels = transform(pixels)
        return pixels if isinstance(pixels, Image.Image) else v2.functional.to_pil_image(pixels)


def _named_transform(entry: Any) -> Transform:
    """{name: RandomRotation, degrees: 5} -> v2.RandomRotation(degrees=5); a name alone has no options."""
    options = dict(entry) if isinstance(entry, dict) else {"name": entry}
    name, v2 = options.pop("name", None), _v2()
    found = getattr(v2, name, None) if isinstance(name, str) else None
    if not (inspect.isclass(found) and issubclass(found, v2.Transform)):
        raise ValueError(
            f"`{OPTION}` has the entry {entry!r}; its `name` must be a transform of torchvision.transforms.v2."
        )
    try:
        return found(**options)
    except (TypeError, ValueError) as error:
        raise ValueError(f"`{OPTION}`: {name} does not take {options}: {error}.") from error


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
    "torchvision, or a list of {name: RandomRotation, degrees: 5}"
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
