"""What each process of a run is to the others: another copy of the model, another shard of it, another part of the same row."""

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
    sequence_parallel_size: int
    parallelism_config: ParallelismConfig | None


def lay_out_processes(args: ProcessOptions) -> None:
    """Make one of our options and of accelerate's `ParallelismConfig`, given as an option or by `accelerate launch`."""
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
    _check_shared_rows(args)
    args.parallelism_config = None  # accelerate's own sequence parallelism is DeepSpeed's
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
            f"shards x {given.sp_size} parts of a row), and there are {args.world_size}."
        )
    sizes = {"sequence_parallel_size": given.sp_size}
    if given.dp_shard_size > 1:  # without shards, copies are what several processes have anyway
        sizes["dp_replicate_size"] = given.dp_replicate_size
    for name, size in sizes.items():
        own = getattr(args, name)
        if own not in (1, size):
            raise ValueError(f"`{name}` is {own}, and `parallelism_config` has {size}: set one of them.")
        setattr(args, name, size)


def _check_shared_rows(args: Any) -> None:
    size, processes = args.sequence_parallel_size, args.world_size
    if size == 1:
        return
    if size < 1 or processes % size:
        raise ValueError(
            f"`sequence_parallel_size` is {size}, with {processes} process{'es' * (processes > 1)}: so many share a row, and all "
            "processes must be in such groups. Start a multiple of it with torchrun, or lower it."
        )
    if args.sharding == "deepspeed":
        raise ValueError("`sequence_parallel_size` is for whole models and for FSDP2; under DeepSpeed leave it at 1.")
    if args.padding_free is False or args.neftune_noise_alpha is not None:
        raise ValueError(
            "`sequence_parallel_size` cuts ragged rows; `padding_free=False` and `neftune_noise_alpha` need padded ones. Leave "
            "one of them out."
        )
    if getattr(args, "async_rollouts", False):
        raise ValueError("`sequence_parallel_size` is not known to `async_rollouts` yet: leave one of them out.")
