"""MetricStore and EvaluationLoss: numbers added up where they are computed, read from the device only when they are logged."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from posttrain.core.batch import StepTotals
from posttrain.core.processes import of_every_process
from posttrain.core.results import Extremum, LossOutput, Metrics

MODES = ("train", "eval")
K = TypeVar("K", str, tuple[str, int])


DIFFERENCES = {"rewards/margins": ("rewards/chosen", "rewards/rejected")}
"""Metric -> the two whose means it is the difference of, where rows have no such number themselves: unpaired ones."""
VARIANCES = {"val/ratio_var": ("val/ratio", 1.0)}
"""Metric, whose values are squares of distances from a number -> the metric whose variance it becomes, and the number."""


class MetricStore:
    """name -> (sum, count) or the largest so far, apart for training and evaluation.

    A metric is the mean over every value that was added since the last flush, over all processes; an Extremum is the smallest
    or the largest of them. `totals` are never reset.
    """

    def __init__(self) -> None:
        self._sums: dict[str, dict[str, Tensor]] = {mode: {} for mode in MODES}  # name -> [sum, count]
        self._largest: dict[str, dict[tuple[str, int], Tensor]] = {mode: {} for mode in MODES}
        """(name, sign) -> the largest sign * value, float64; -inf: there was none. The sign of a smallest value is -1."""
        self.totals: dict[str, float] = {}

    def add(self, mode: str, values: Metrics) -> None:
        """Add values of any shape; an empty tensor adds nothing. NaN marks a value that is not applicable."""
        for name, value in values.items():
            if isinstance(value, Extremum):
                self._add_extremum(self._largest[mode], name, value)
                continue
            value = value.detach().to(torch.promote_types(value.dtype, torch.float32)).flatten()
            known = ~torch.isnan(value)
            pair = torch.stack([torch.where(known, value, 0).sum(), known.sum().to(value.dtype)])
            store = self._sums[mode]
            store[name] = _at(store[name], pair) + pair if name in store else pair

    @staticmethod
    def _add_extremum(store: dict[tuple[str, int], Tensor], name: str, extremum: Extremum) -> None:
        key = (name, 1 if extremum.is_largest else -1)
        signed = key[1] * extremum.values.detach().double().flatten()
        nothing = signed.new_full((1,), -math.inf)
        largest = torch.cat([nothing, signed.nan_to_num(-math.inf, math.inf, -math.inf)]).amax()
        store[key] = torch.maximum(_at(store[key], largest), largest) if key in store else largest

    def count(self, name: str, amount: float) -> None:
        """Add to a running total, such as the tokens seen since the beginning of the run."""
        self.totals[name] = self.totals.get(name, 0) + amount

    def flush(self, mode: str, device: torch.device, world_size: int = 1) -> dict[str, float]:
        """Metrics since the last flush, as Python numbers. Collective when `world_size` > 1."""
        sums, largest = self._sums[mode], self._largest[mode]
        self._sums[mode], self._largest[mode] = {}, {}
        means = _means(sums, device, world_size)
        for name, (one, other) in DIFFERENCES.items():
            if name not in means and one in means and other in means:
                means[name] = means[one] - means[other]
        for name, (of, centre) in VARIANCES.items():
            if name in means and of in means:
                means[name] = max(means[name] - (means[of] - centre) ** 2, 0.0)
        return {**means, **_extrema(largest, device, world_size)}

    def state(self) -> dict[str, Any]:
        """Everything that has been added and not yet logged, as JSON-ready numbers."""
        largest = {key: float(value) for key, value in self._largest["train"].items()}
        return {
            "train": {name: pair.double().tolist() for name, pair in self._sums["train"].items()},
            "dtypes": {name: str(pair.dtype).removeprefix("torch.") for name, pair in self._sums["train"].items()},
            "extrema": [[*key, None if value == -math.inf else value] for key, value in largest.items()],
            "totals": dict(self.totals),
        }

    def load_state(self, *states: dict[str, Any]) -> None:
        """What processes have saved, as if it had been added here: of this one, or of none or several of another number of them."""
        sums, largest, self.totals = {}, {}, {}
        for state in states:
            for name, pair in state["train"].items():
                sums[name] = sums.get(name, 0) + torch.tensor(pair, dtype=getattr(torch, state["dtypes"][name]))
            for name, sign, value in state["extrema"]:
                found = torch.tensor(-math.inf if value is None else value, dtype=torch.float64)
                largest[name, sign] = torch.maximum(largest.get((name, sign), found), found)
            for name, amount in state["totals"].items():
                self.count(name, amount)
        self._sums["train"], self._largest["train"] = sums, largest


def _at(stored: Tensor, new: Tensor) -> Tensor:
    """What was loaded with a checkpoint lies on the host; it joins the numbers of its name where they are computed."""
    return stored.to(new.device, non_blocking=True)


def _of_all_processes(mine: Iterable[K], world_size: int) -> list[K]:
    """The keys that any process has, in an order that all agree on."""
    return sorted(set().union(*of_every_process(list(mine), world_size)))


def _means(sums: dict[str, Tensor], device: torch.device, world_size: int) -> dict[str, float]:
    names = _of_all_processes(sums, world_size)
    if not names:
        return {}
    nothing = torch.zeros(2)  # a reward may speak of a metric on one process alone
    pairs = torch.stack([sums.get(name, nothing).to(device, torch.float64) for name in names])
    if world_size > 1:
        dist.all_reduce(pairs)
    return {name: s / n for name, (s, n) in zip(names, pairs.tolist()) if n > 0}


def _extrema(largest: dict[tuple[str, int], Tensor], device: torch.device, world_size: int) -> dict[str, float]:
    keys = _of_all_processes(largest, world_size)
    if not keys:
        return {}
    nothing = torch.tensor(-math.inf, dtype=torch.float64)
    found = torch.stack([largest.get(key, nothing).to(device) for key in keys])
    if world_size > 1:
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return {name: sign * value for (name, sign), value in zip(keys, found.tolist()) if value != -math.inf}


class EvaluationLoss:
    """The loss of an evaluation is that of all of its rows as one batch: it does not depend on how they are cut into batches."""

    def __init__(self) -> None:
        self._batches: list[tuple[list[tuple[Tensor, str]], StepTotals]] = []  # sums, and what they are divided by

    def add(self, output: LossOutput, totals: StepTotals) -> None:
        self._batches.append(([(term.weight * term.values.sum(), term.per) for term in output.terms], totals))

    def value(self, world_size: int = 1) -> float | None:
        """Over all processes; None where there was no batch."""
        if not self._batches:
            return None
        pairs = []
        for name in dict.fromkeys(per for terms, _ in self._batches for _, per in terms):
            total = sum(value for terms, _ in self._batches for value, per in terms if per == name)
            count = sum(totals.counts[name] for _, totals in self._batches)
            pairs.append(torch.stack([total.double(), total.new_tensor(count).double()]))
        sums = torch.stack(pairs)
        if world_size > 1:
            dist.all_reduce(sums)
        return float((sums[:, 0] / sums[:, 1].clamp(min=1)).sum())
