"""What each process of a run is to the others: a copy of the model, a shard of one."""

from __future__ import annotations

import os
from typing import Any, Protocol

from accelerate import ParallelismConfig

NOT_RUN = {"tp_size": "tensor parallel", "cp_size": "context parallel (ring)"}


class ProcessOptions(Protocol):
    """The options that decide it."""

    world_size: int
    sharding: str | None
    dp_replicate_size: int
    parallelism_config: ParallelismConfig | None


def lay_out_processes(args: ProcessOptions) -> None:
    """Make one of our option and of accelerate's `ParallelismConfig`, given as an option or by `accelerate launch`."""
    given = args.parallelism_config
    if given is None and os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "false").lower() == "true":
        given = ParallelismConfig()
    if given is not None:
        _take_over(args, given)
    copies, processes = args.dp_replicate_size, args.world_size
    if copies < 1 or (copies > 1 and (args.sharding != "fsdp" or processes % copies or processes == copies)):
        raise ValueError(
            f"`dp_replicate_size` is {copies}, with {processes} process{'es' * (processes > 1)}: so many whole copies of the "
            "model, each in shards on several processes, need `fsdp=True` and a number of processes that they share evenly. For "
            "whole copies without shards leave both out."
        )
    args.parallelism_config = None
    if copies > 1:
        args.parallelism_config = ParallelismConfig(dp_replicate_size=copies, dp_shard_size=processes // copies)


def _take_over(args: Any, given: ParallelismConfig) -> None:
    """The sizes that accelerate was given, as our options."""
    for name, what in NOT_RUN.items():
        if getattr(given, name) > 1:
            raise ValueError(
                f"`parallelism_config` has {name}={getattr(given, name)}: {what} training is not offered here."
            )
    if given.total_size not in (1, args.world_size):
        raise ValueError(
            f"`parallelism_config` is for {given.total_size} processes ({given.dp_replicate_size} copies x {given.dp_shard_size} "
            f"shards), and there are {args.world_size}."
        )
    if given.dp_shard_size > 1:  # without shards, copies are what several processes have anyway
        if args.dp_replicate_size not in (1, given.dp_replicate_size):
            raise ValueError(
                f"`dp_replicate_size` is {args.dp_replicate_size}, and `parallelism_config` has {given.dp_replicate_size}: "
                "set one of them."
            )
        args.dp_replicate_size = given.dp_replicate_size
