"""Arena: tensors one after the other in memory that other processes of this machine map; they must be handed it."""

from __future__ import annotations

import mmap
import os
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 64


@dataclass(frozen=True)
class Layout:
    """Shapes and types of the tensors of an arena."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> Layout:
        return cls(tuple(tuple(tensor.shape) for tensor in tensors), tuple(tensor.dtype for tensor in tensors))

    def starts(self) -> list[int]:
        """Where each begins, and where the last one ends."""
        found = [0]
        for shape, dtype in zip(self.shapes, self.dtypes):
            size = torch.Size(shape).numel() * dtype.itemsize
            found.append(found[-1] + -(-size // ALIGNMENT) * ALIGNMENT)
        return found

    def over(self, memory: Any) -> list[Tensor]:
        """The tensors that lie in `memory`, which may be for reading only."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable")
            return [
                torch.frombuffer(memory, dtype=dtype, count=torch.Size(shape).numel(), offset=start).view(shape)
                if torch.Size(shape).numel()
                else torch.empty(shape, dtype=dtype)
                for shape, dtype, start in zip(self.shapes, self.dtypes, self.starts())
            ]


class Arena:
    """`descriptor` None: a new one."""

    def __init__(self, layout: Layout, descriptor: int | None = None) -> None:
        size = max(layout.starts()[-1], 1)
        self.descriptor = _new_memory(size) if descriptor is None else descriptor
        self.memory = mmap.mmap(self.descriptor, size)
        self.tensors = layout.over(self.memory)

    def close(self) -> None:
        """The memory lives for as long as some process maps it."""
        os.close(self.descriptor)


def _new_memory(size: int) -> int:
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("posttrain", 0)
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size)
    return descriptor
