"""JointExport: weights that FSDP or DeepSpeed holds in pieces, on their way to an engine that wants them whole.

Every tensor is gathered by all processes together, so all of them must walk through all tensors, in the same order and to the end:
those that send nothing, and the one whose engine has had enough after the first. Otherwise the others would wait indefinitely.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from posttrain.models.load.weight_export import exported_adapter, exported_weights

Result = TypeVar("Result")
Weights = Iterator[tuple[str, Tensor]]
EVERY_NAME = 1 << 31  # a comparison that stopped at the first difference would leave the others behind


class JointExport:
    """The export of one model. What is read through `weights` or `adapter` inside of `read_by` is walked to its end."""

    def __init__(self, model: nn.Module, dtype: torch.dtype | None, by_adapter: bool) -> None:
        """`dtype` of whole weights (None: their own). `by_adapter`: the LoRA adapter alone is sent."""
        self.model, self.dtype, self.by_adapter = model, dtype, by_adapter
        self._walked: Weights | None = None

    def weights(self) -> Weights:
        self._walked = exported_weights(self.model, self.dtype)
        return self._walked

    def adapter(self) -> tuple[dict[str, Any], Weights]:
        config, self._walked = exported_adapter(self.model)
        return config, self._walked

    def walk(self) -> None:
        """Take part in a walk that another process reads."""
        for _ in self.adapter()[1] if self.by_adapter else self.weights():
            pass

    def read_by(self, read: Callable[[], Result]) -> Result:
        """`read()` walks once, or a part of the way, or not at all; here the rest is walked."""
        self._walked = None
        try:
            return read()
        finally:
            if self._walked is None:
                self.walk()
            else:
                for _ in self._walked:
                    pass

    # ---- engines ---------------------------------------------------------------------------------------------------------

    def load(self, engine: Any, version: int) -> None:
        """Into an engine of this process's own; every process has one."""
        self._handed_to(lambda tensors: engine.load_weights(tensors, version))

    def probed(
        self, engine: Any, sequences: Sequence[np.ndarray]
    ) -> list[tuple[list[np.ndarray], Callable[[int], list[str]] | None]]:
        """As `engine.probed`, with the comparison of all tensors made by all processes together."""
        shared = hasattr(engine, "follow")  # servers are compared by process 0, an engine of its own by each
        first = torch.distributed.get_rank() == 0
        differing: list[str] = []
        if shared and not first:
            self.walk()
        elif shared:
            differing = self.read_by(lambda: engine.differing_tensors(EVERY_NAME))
        else:
            differing = self._handed_to(lambda tensors: engine.differing_tensors(EVERY_NAME, tensors))
        scored = engine.probed(sequences)
        return [(scores, (lambda _: differing) if number == 0 else None) for number, (scores, _) in enumerate(scored)]

    def _handed_to(self, use: Callable[[Weights], Result]) -> Result:
        """`use(tensors)`, by an engine of this process's own, which may fail at any tensor: the others must not wait for it in a
        gather. An adapter is small and gathered first."""
        if self.by_adapter:
            tensors = list(self.adapter()[1])
            return use(tensors)
        return self.read_by(lambda: use(self.weights()))
