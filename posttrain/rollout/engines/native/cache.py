"""Pages of keys and values.

A sequence is a list of pages of `PAGE` tokens. Samples of one prompt share the pages of its prefix; what each of them writes
begins on a page of its own, so that no page is ever written by two. Token number p of a sequence with a prefix of n tokens lies at

    place(p) = p                            for p < n
    place(p) = p + (-n mod PAGE)            else

of its list of pages; the places between are empty. Page 0 belongs to nobody: rows of a step that are not in use write there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

PAGE = 16


@dataclass(frozen=True)
class LayerShape:
    """Of one token's keys and values in one layer."""

    heads: int
    key_width: int
    value_width: int  # another one in latent attention (DeepSeek)
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return self.heads * (self.key_width + self.value_width) * self.dtype.itemsize


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

    `addresses` (layers, 2) holds where they lie. CUDA graphs read it, so that they stay right when the memory is freed after
    generation and comes back elsewhere.
    """

    def __init__(self, shapes: dict[int, LayerShape], device: torch.device) -> None:
        self.shapes, self.device = shapes, device
        self.place_of_layer = {layer: place for place, layer in enumerate(shapes)}
        self.addresses = torch.zeros(len(shapes), 2, dtype=torch.int64, device=device)
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    @property
    def token_bytes(self) -> int:
        return sum(shape.bytes for shape in self.shapes.values())

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
                new = torch.zeros(pages, shape.heads, PAGE, getattr(shape, name), dtype=shape.dtype, device=self.device)
                if place < len(tensors):
                    new[: len(tensors[place])] = tensors[place]
                    tensors[place] = new
                else:
                    tensors.append(new)
        found = [[key.data_ptr(), value.data_ptr()] for key, value in zip(self.keys, self.values)]
        self.addresses.copy_(torch.tensor(found, dtype=torch.int64))

    def free(self) -> None:
        self.keys, self.values = [], []
        self.addresses.zero_()
