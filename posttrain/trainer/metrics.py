"""MetricStore: numbers added up on the device, read by the host only when they are logged."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class MetricStore:
    """name -> (sum, count), apart for training and evaluation. One reduction over the processes per log.

    A metric is the mean over every value that was added since the last flush, over all processes. `totals` run on for ever.
    """

    def __init__(self) -> None:
        self._sums: dict[str, dict[str, Tensor]] = {"train": {}, "eval": {}}  # name -> [sum, count]
        self.totals: dict[str, float] = {}

    def add(self, mode: str, values: dict[str, Tensor]) -> None:
        """Add values of any shape; an empty tensor adds nothing. NaN marks a value that is not applicable."""
        for name, value in values.items():
            value = value.detach().to(torch.promote_types(value.dtype, torch.float32)).flatten()
            known = ~torch.isnan(value)
            pair = torch.stack([torch.where(known, value, 0).sum(), known.sum().to(value.dtype)])
            store = self._sums[mode]
            store[name] = store[name] + pair if name in store else pair

    def count(self, name: str, amount: float) -> None:
        """Add to a running total, such as the tokens seen since the beginning of the run."""
        self.totals[name] = self.totals.get(name, 0) + amount

    def flush(self, mode: str, device: torch.device, world_size: int = 1) -> dict[str, float]:
        """Means since the last flush, as Python numbers. Collective when `world_size` > 1."""
        names = sorted(self._sums[mode])  # the same on every process: an empty batch adds its metrics with a count of 0
        if not names:
            return {}
        pairs = torch.stack([self._sums[mode][name].to(device, torch.float64) for name in names])
        if world_size > 1:
            dist.all_reduce(pairs)
        self._sums[mode] = {}
        return {name: s / n for name, (s, n) in zip(names, pairs.tolist()) if n > 0}

    def state(self) -> dict[str, Any]:
        """Everything that has been added and not yet logged, as JSON-ready numbers."""
        return {
            "train": {name: pair.double().tolist() for name, pair in self._sums["train"].items()},
            "dtypes": {name: str(pair.dtype).removeprefix("torch.") for name, pair in self._sums["train"].items()},
            "totals": dict(self.totals),
        }

    def load_state(self, state: dict[str, Any], device: torch.device) -> None:
        self._sums["train"] = {
            name: torch.tensor(pair, dtype=getattr(torch, state["dtypes"][name]), device=device)
            for name, pair in state["train"].items()
        }
        self.totals = dict(state["totals"])
