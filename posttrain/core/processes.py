"""What the processes of a run tell each other, where it is not a tensor."""

from __future__ import annotations

from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


def of_every_process(mine: T, world_size: int, group: Any = None) -> list[T]:
    """What each process (of a group) has to say, in the order of the processes. Collective when there are several."""
    if world_size == 1:
        return [mine]
    every: list[Any] = [None] * world_size
    dist.all_gather_object(every, mine, group=group)
    return every
