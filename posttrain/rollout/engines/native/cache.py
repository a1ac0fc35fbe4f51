"""Pages of keys and values.

A sequence is a list of pages of `PAGE` tokens. Samples of one prompt share the pages of its prefix; what each of them writes
begins on a page of its own, so that no page is ever written by two. Token number p of a sequence with a prefix of n tokens lies at

    place(p) = p                            for p < n
    place(p) = p + (-n mod PAGE)            else

of its list of pages; the places between are empty. Page 0 belongs to no request: rows of a step that are not in use write there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from posttrain.rollout.engines.native.eight_bits import EightBitPages, rounded

PAGE = 16
Pages = Tensor | EightBitPages
"""(pages, heads, PAGE, width)."""


@dataclass(frozen=True)
class LayerShape:
    """Of one token's keys and values in one layer."""

    heads: int
    key_width: int
    value_width: int  # another one in latent attention (DeepSeek)
    dtype: torch.dtype
    in_eight_bits: bool = False

    @property
    def bytes(self) -> int:
        """On pages; in 8 bits there is one byte more for the scale of each head's key, and of its value."""
        if self.in_eight_bits:
            return self.heads * (self.key_width + self.value_width + 2)
        return self.dense_bytes

    @property
    def dense_bytes(self) -> int:
        """In the model's own dtype."""
        return self.heads * (self.key_width + self.value_width) * self.dtype.itemsize

    def no_pages(self, width: int, device: torch.device) -> Pages:
        """Of keys or of values, which are so wide."""
        if self.in_eight_bits:
            made = torch.zeros(0, self.heads, PAGE, width, dtype=torch.uint8, device=device)
            return EightBitPages(made, made[..., 0].clone(), self.dtype)
        return torch.zeros(0, self.heads, PAGE, width, dtype=self.dtype, device=device)


def pages_for(tokens: int) -> int:
    return -(-tokens // PAGE)


class PagePool:
    """Which pages are free."""

    def __init__(self) -> None:
        self.size = 1
        self._free: list[int] = []

    @property
    def free(self) -> int:
        return len(self._free)

    def grow(self, size: int) -> None:
        self._free.extend(range(size - 1, self.size - 1, -1))
        self.size = max(size, self.size)

    def take(self, count: int) -> list[int]:
        taken = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        return taken[::-1]

    def give(self, pages: list[int]) -> None:
        self._free.extend(reversed(pages))


class KeyValueStore:
    """The tensors: for each layer keys and values, (pages, heads, PAGE, width).

    `addresses` (layers, 2) holds where they lie; in 8 bits (layers, 4), where their scales do as well. CUDA graphs read it, so that
    they stay right when the memory is freed after generation and comes back elsewhere.
    """

    def __init__(self, shapes: dict[int, LayerShape], device: torch.device) -> None:
        self.shapes, self.device = shapes, device
        self.place_of_layer = {layer: place for place, layer in enumerate(shapes)}
        self.in_eight_bits = any(shape.in_eight_bits for shape in shapes.values())
        self.addresses = torch.zeros(len(shapes), 4 if self.in_eight_bits else 2, dtype=torch.int64, device=device)
        self.keys: list[Pages] = []
        self.values: list[Pages] = []

    @property
    def token_bytes(self) -> int:
        return sum(shape.bytes for shape in self.shapes.values())

    @property
    def dense_token_bytes(self) -> int:
        return sum(shape.dense_bytes for shape in self.shapes.values())

    @property
    def page_bytes(self) -> int:
        return PAGE * self.token_bytes

    @property
    def pages(self) -> int:
        return len(self.keys[0]) if self.keys else 0

    def grow(self, pages: int) -> None:
        """Room for `pages`; what is there stays. Layer by layer, so that at most one layer is there twice."""
        for tensors, name in ((self.keys, "key_width"), (self.values, "value_width")):
            for place, shape in enumerate(self.shapes.values()):
                if place == len(tensors):
                    tensors.append(shape.no_pages(getattr(shape, name), self.device))
                tensors[place] = _grown(tensors[place], pages)
        found = [_addresses(key, value) for key, value in zip(self.keys, self.values)]
        self.addresses.copy_(torch.tensor(found, dtype=torch.int64))

    def as_kept(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """(..., width) as later steps will read them: every pass attends to these, so that tokens do not depend on which pass
        computed what they look at."""
        return (rounded(key), rounded(value)) if self.in_eight_bits else (key, value)

    def free(self) -> None:
        self.keys, self.values = [], []
        self.addresses.zero_()


def _grown(kept: Pages, pages: int) -> Pages:
    if isinstance(kept, EightBitPages):
        return EightBitPages(_grown(kept.q, pages), _grown(kept.exponents, pages), kept.dtype)
    new = kept.new_zeros(pages, *kept.shape[1:])
    new[: len(kept)] = kept
    return new


def _addresses(key: Pages, value: Pages) -> list[int]:
    if isinstance(key, EightBitPages):
        return [tensor.data_ptr() for tensor in (key.q, value.q, key.exponents, value.exponents)]
    return [key.data_ptr(), value.data_ptr()]
