"""One command, several processes: `accelerate launch` with a profile, or with a config file of the user's."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain.cli.errors import UsageError, nearest

if TYPE_CHECKING:
    from posttrain.cli.options.arguments import RunConfig

PROFILES = ("single_gpu", "ddp", "fsdp2", "hsdp", "zero2", "zero3")
PROFILE_ALIASES = {"multi_gpu": "ddp", "fsdp1": "fsdp2", "zero1": "zero2"}
"""TRL's names of what we have under another name, or of an older form of it."""
FORWARDED_OPTIONS = ("num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port", "gpu_ids")
STARTED = ("RANK", "LOCAL_RANK", "ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "POSTTRAIN_LAUNCHED")
"""Variables that a launcher sets for the processes that it starts."""
TORCHRUN = "torch.distributed.run"
SECONDS_TO_SAVE = "600"
"""torchrun kills workers that have not ended so long after a signal; its own 30 seconds are too few to save a large model in."""


def is_started() -> bool:
    """Whether this process is one of those that a launcher (ours, accelerate, torchrun, srun with torchrun) has started."""
    return any(name in os.environ for name in STARTED)


def command_of(config: RunConfig, words: list[str]) -> list[str] | None:
    """The command that starts the run's processes; None: this process is enough."""
    _check_counts(config)
    profile = config_file(config.get("accelerate_config"))
    count = config.get("num_processes") or (None if profile else visible_gpus(config.get("gpu_ids")))
    several = (count or 1) > 1 or (config.get("num_machines") or 1) > 1
    chosen = config.get("gpu_ids") not in (None, "all")
    if config.get("accelerate_config") in (None, "single_gpu") and not several and not chosen:
        return None
    run_again = ["-m", "posttrain.cli.main", config.method, *words]
    if profile is None and several and not _has_gpu():
        return [*_processes_on_a_cpu(config, count), *run_again]
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch"]
    command += ["--config_file", str(profile or _profile_file("ddp" if several else "single_gpu"))]
    given = {name: config.get(name) for name in FORWARDED_OPTIONS} | {"num_processes": count}
    for name, value in given.items():
        if value is not None:
            command += [f"--{name}", str(value)]
    if config.get("accelerate_config") == "hsdp":
        command += _whole_copies(config, count)
    return [*command, *run_again]


def _check_counts(config: RunConfig) -> None:
    for name in ("num_processes", "num_machines"):
        value = config.get(name)
        if value is not None and value < 1:
            raise UsageError(f"{config.where(name)} is {value}; it takes a whole number of 1 or more.")
    ids = config.get("gpu_ids")
    if ids is not None and not all(word.strip() for word in ids.split(",")):
        raise UsageError(f"{config.where('gpu_ids')} is {ids!r}; it takes numbers of GPUs such as 0,1, or all.")


def _processes_on_a_cpu(config: RunConfig, count: int) -> list[str]:
    """torchrun: accelerate would ask for MPI."""
    machines = config.get("num_machines") or 1
    count = count or machines
    if count % machines:
        raise UsageError(f"{config.where('num_processes')} is {count}, which {machines} machines do not share evenly.")
    command = [sys.executable, "-m", TORCHRUN, f"--nproc_per_node={count // machines}"]
    if machines == 1:
        return [*command, "--standalone"]
    master = {"master_addr": config.get("main_process_ip"), "master_port": config.get("main_process_port")}
    rank = {"nnodes": machines, "node_rank": config.get("machine_rank") or 0}
    return [*command, *(f"--{name}={value}" for name, value in (rank | master).items() if value is not None)]


def _whole_copies(config: RunConfig, count: int | None) -> list[str]:
    """HSDP: weights are in pieces inside of a machine, and each machine has all of them."""
    machines = config.get("num_machines") or 1
    if not count or count % machines or machines < 2:
        raise UsageError(
            f"`accelerate_config` hsdp needs --num_machines of 2 or more and --num_processes that they share evenly; there are "
            f"{machines} and {count or 'no'}. On one machine use fsdp2."
        )
    sizes = {"dp_replicate_size": machines, "dp_shard_size": count // machines}
    pairs = [word for name, size in sizes.items() for word in (f"--parallelism_config_{name}", str(size))]
    # accelerate refuses the third word without the two before it, whatever the file says
    return ["--use_fsdp", "--fsdp_version", "2", "--use_parallelism_config", *pairs]


def run(command: list[str], environment: dict[str, str]) -> int:
    """Run it to its end; see `run_child` for what Control-C does."""
    from posttrain.cli.running.child_process import run_child

    own = {"POSTTRAIN_LAUNCHED": "1", **(_on_a_cpu() if TORCHRUN in command else {})}
    inherited = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": SECONDS_TO_SAVE, **os.environ}
    return run_child(command, env={**inherited, **environment, **own}).code


def _on_a_cpu() -> dict[str, str]:
    """Without it, accelerate sees no device that could have several processes, and each takes itself for the only one."""
    import torch

    device = torch.accelerator.current_accelerator(check_available=True)
    return {"ACCELERATE_USE_CPU": "true"} if device is None or device.type == "mps" else {}


def config_file(given: str | None, option: str = "`accelerate_config`") -> Path | None:
    if given is None:
        return None
    name = PROFILE_ALIASES.get(given, given)
    if name in PROFILES:
        return _profile_file(name)
    if Path(given).expanduser().is_file():
        return Path(given).expanduser()
    hint = nearest(given, PROFILES)
    raise UsageError(
        f"{option} is {given!r}: neither a file nor a profile ({', '.join(PROFILES)}).{hint} `accelerate config` writes "
        "such a file."
    )


def _profile_file(name: str) -> Path:
    return Path(str(files("posttrain").joinpath("launch_profiles", f"{name}.yaml")))


def visible_gpus(gpu_ids: str | None) -> int:
    if gpu_ids and gpu_ids != "all":
        return len(gpu_ids.split(","))
    import torch

    return torch.cuda.device_count()


def processes_of(config: RunConfig) -> int:
    """Of the run: those named, or one for each GPU that `posttrain METHOD` would find here."""
    named = config.get("num_processes")
    if named or config.get("accelerate_config") or config.get("use_cpu"):
        return named or 1
    return max(visible_gpus(config.get("gpu_ids")), 1)


@contextmanager
def as_planned(config: RunConfig) -> Iterator[None]:
    """Inside, configs belong to a run of as many processes as it will have, though there is this one only."""
    from posttrain.trainer.options.base import BaseConfig

    count = processes_of(config)
    if count == 1:
        yield
        return
    BaseConfig.world_size = property(lambda args: count)
    try:
        yield
    finally:
        del BaseConfig.world_size  # transformers' own again


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
