"""Shadow: the weights that an engine beside the trainer reads. They are written into between two looks, and never rebound.

Weights that are not trained (the base of an adapter) are shared with the trainer; those that are have a copy. What the trainer
publishes waits in buffers of its own, so that neither side ever reads what the other is writing.
"""

from __future__ import annotations

import copy
import threading

import torch
from torch import Tensor, nn


class Shadow:
    """`model` is the copy."""

    def __init__(self, model: nn.Module, label: int) -> None:
        self._source = [parameter for parameter in model.parameters() if parameter.requires_grad]
        shared = {id(tensor): tensor for tensor in model.parameters() if not tensor.requires_grad}
        self.model: nn.Module = copy.deepcopy(model, shared)
        self._own = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        for parameter in self._own:
            parameter.requires_grad_(False)
            parameter.grad = None
        self.label = label
        self._waiting: dict[int, list[Tensor]] = {}
        self._spare: list[list[Tensor]] = []
        self._lock = threading.Lock()

    @torch.no_grad()
    def publish(self, label: int, keeps_older: bool) -> None:
        """By the trainer, between two steps. `keeps_older`: every label is wanted, and not just the newest."""
        with self._lock:
            if not keeps_older:
                self._spare += self._waiting.values()
                self._waiting.clear()
            buffer = self._spare.pop() if self._spare else [torch.empty_like(weight) for weight in self._source]
        for kept, weight in zip(buffer, self._source):
            kept.copy_(weight)
        with self._lock:
            self._waiting[label] = buffer

    def next_label(self) -> int | None:
        """The oldest that waits; None: there is nothing newer than what is read."""
        with self._lock:
            return min(self._waiting, default=None)

    @torch.no_grad()
    def load(self, label: int) -> None:
        """By whoever runs the engine, between two looks."""
        with self._lock:
            buffer = self._waiting.pop(label)
        for own, kept in zip(self._own, buffer):
            own.copy_(kept)
        self.label = label
        with self._lock:
            self._spare.append(buffer)
