"""Numbers and rows of all processes as one."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from posttrain.core.batch import StepTotals, TokenBatch
from posttrain.trainer.options.base import BaseConfig

T = TypeVar("T")


def over_processes(amount: float, args: BaseConfig, operation: Any = dist.ReduceOp.SUM) -> float:
    """The sum (or the largest, the smallest) of a number over the processes. Collective when there are several."""
    if args.world_size == 1:
        return amount
    total = torch.tensor(amount, dtype=torch.float64, device=args.device)
    dist.all_reduce(total, op=operation)
    return total.item()


def summed_over_processes(values: Tensor, args: BaseConfig) -> Tensor:
    """A tensor on the host, added up over the processes. Collective when there are several."""
    if args.world_size == 1:
        return values
    total = values.to(args.device)
    dist.all_reduce(total)
    return total.to(values.device)


def any_process(here: bool, args: BaseConfig) -> bool:
    """Whether something is true of any process. Collective."""
    return bool(over_processes(here, args, dist.ReduceOp.MAX))


def step_totals(passes: list[TokenBatch], args: BaseConfig) -> StepTotals:
    """Denominators of a step, over its passes and over the processes. Collective when there are several."""
    totals = StepTotals.of(passes)
    if args.world_size > 1:
        counts = torch.tensor(list(totals.counts.values()), dtype=torch.float64, device=args.device)
        dist.all_reduce(counts)
        counts /= args.sequence_parallel_size  # as many have counted the same rows
        totals = StepTotals(dict(zip(totals.counts, counts.unbind())))
    return totals


def gathered_rows(record: T, args: BaseConfig) -> tuple[T, int]:
    """(a dataclass of (U,) tensors with the rows of all processes, index of this process's first row in it)."""
    if args.world_size == 1:
        return record, 0
    tensors = {f.name: getattr(record, f.name) for f in fields(record) if isinstance(getattr(record, f.name), Tensor)}
    first = next(iter(tensors.values()))
    sizes, each = _sizes(first, args.world_size), args.sequence_parallel_size
    whole = {name: _gather(tensor, sizes, each) for name, tensor in tensors.items()}
    return replace(record, **whole), sum(sizes[: args.reader * each : each])


def gathered_values(values: Tensor, args: BaseConfig) -> Tensor:
    """(n,) of this process -> those of all processes, whatever their numbers."""
    if args.world_size == 1:
        return values
    return _gather(values, _sizes(values, args.world_size), args.sequence_parallel_size)


def _sizes(tensor: Tensor, world_size: int) -> list[int]:
    """How many rows each process holds."""
    counts = [torch.zeros(1, dtype=torch.long, device=tensor.device) for _ in range(world_size)]
    dist.all_gather(counts, torch.tensor([len(tensor)], device=tensor.device))
    return [int(count) for count in counts]


def _gather(tensor: Tensor, sizes: list[int], each: int) -> Tensor:
    """Processes may hold different numbers of rows; all send as many as the longest. `each` of them hold the same."""
    filled = tensor.new_zeros(max(sizes), *tensor.shape[1:])
    filled[: len(tensor)] = tensor
    parts = [torch.empty_like(filled) for _ in sizes]
    dist.all_gather(parts, filled)
    return torch.cat([part[:size] for part, size in zip(parts[::each], sizes[::each])])
