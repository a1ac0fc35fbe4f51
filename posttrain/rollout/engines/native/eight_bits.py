"""Keys and values in 8 bits: e4m3 floats, with one power of two for each token and head as their scale.

    x ~ q * 2^(e - 127)        q in e4m3, e in one byte: the exponent of a float32 without fraction

The scale is the smallest that leaves the token's largest number at most 464, which e4m3 rounds to its own largest, 448. It is exact
in every dtype, and rounding what was rounded changes no bit: the largest |q| lies between 240 and 448, so that it leads to the same
scale, and every q is a number that e4m3 has. What a page holds is therefore the same however often a token was put on one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from posttrain.models.layers.fp8 import E4M3, LEAST_CAPABILITY

FRACTION = 23  # bits of it in a float32
ROOM = 0x17FFFF  # added to a float32's bits, it raises the exponent of those above 1.8125 = 464 / 256
TOP = 8  # of 256, the power of two in 464
LEAST = 127 - 15
"""Of e: 2^-15 times e4m3's smallest number is float16's smallest. Keys and values below 2^-25 become 0, in whatever dtype."""


def why_not(device: torch.device) -> str | None:
    """None where a device reads 8-bit floats; else the reason, as the end of a sentence."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        return f"{torch.cuda.get_device_name(device)} has no 8-bit floats; Ada and Hopper GPUs, and newer ones, have"
    return None


def in_eight_bits(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """(..., width) -> the bytes of q (..., width), and of e (...)."""
    numbers = numbers.float()
    largest = numbers.abs().amax(-1)
    exponents = (((largest.view(torch.int32) + ROOM) >> FRACTION) - TOP).clamp(min=LEAST)
    scaled = numbers * _power(254 - exponents)[..., None]
    return scaled.to(E4M3).view(torch.uint8), exponents.to(torch.uint8)


def from_eight_bits(q: Tensor, exponents: Tensor, dtype: torch.dtype) -> Tensor:
    return (q.view(E4M3).float() * _power(exponents.int())[..., None]).to(dtype)


def rounded(numbers: Tensor) -> Tensor:
    """What a page would give back."""
    return from_eight_bits(*in_eight_bits(numbers), numbers.dtype)


def _power(exponents: Tensor) -> Tensor:
    """2^(e - 127)."""
    return (exponents << FRACTION).view(torch.float32)


@dataclass(frozen=True)
class EightBitPages:
    """Indexed like a tensor (pages, heads, PAGE, width): what is put there is rounded, what is read is in `dtype`."""

    q: Tensor  # uint8, since tensors of 8-bit floats cannot be indexed everywhere
    exponents: Tensor  # (pages, heads, PAGE) uint8
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        return self.q.shape

    def __len__(self) -> int:
        return len(self.q)

    def __setitem__(self, places: Any, numbers: Tensor) -> None:
        self.q[places], self.exponents[places] = in_eight_bits(numbers)

    def __getitem__(self, places: Any) -> Tensor:
        return from_eight_bits(self.q[places], self.exponents[places], self.dtype)
