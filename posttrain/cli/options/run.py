"""Options of a run that no config has: which model, which data, which rewards, how many processes. Names are those of TRL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from posttrain.core.options import option
from posttrain.data.sources.options import DatasetOptions
from posttrain.models.load.options import ModelOptions


@dataclass
class DataOptions(DatasetOptions):
    """Which rows are trained on, and which are evaluated."""

    dataset_columns: dict[str, str] | None = option(
        None, 'Their column -> the column that the method reads, such as {"question": "prompt"}.'
    )
    eval_dataset_name: str | None = option(None, "Dataset to evaluate on, where it is another one.")
    test_split_size: float | None = option(
        None, "Share (below 1) or number of rows held out of training to evaluate on."
    )
    datasets: list[str | dict[str, Any]] | None = option(
        None,
        "Several datasets, each a path, or an entry with `path` and, where needed, `name`, `split`, `columns`, `weight`, "
        "`fraction`, `data_files`, `data_dir`; goes before `dataset_name`.",
    )
    mixing: str = option("concatenate", "How several datasets are mixed: concatenate or interleave.")
    streaming: bool = option(False, "TRL's name of `dataset_streaming` for several datasets.")
    evals: list[dict[str, Any]] | None = option(
        None,
        "Tasks whose prompts are answered and judged during the run, each with `data`, `reward` and, where needed, `name`, "
        "`samples`, `max_new_tokens`, `temperature`, `limit`, `every`, `threshold`, `patience`, `max_drop`, `columns`, `seed`.",
    )


@dataclass
class RewardOptions:
    """What online methods are rewarded for, and what the model may call."""

    reward_funcs: list[str] | None = option(
        None,
        "Rewards: built-in names, dotted paths (my_package.rewards.exact), files (rewards.py:exact), reward models as below, or "
        "one judge, as in judge:MODEL@http://HOST/v1 or judge:REWARD_MODEL.",
    )
    reward_model_name_or_path: list[str] | None = option(
        None,
        "Reward models: Hub ids or folders. Process rewards take options, as in runs/prm?aggregate=mean&rule=blank_line.",
    )
    tools: list[str] | None = option(
        None, "Functions that the model may call: dotted paths or files (tools.py:search)."
    )
    environment_factory: str | None = option(
        None, "What makes an episode's environment: a dotted path or file.py:Name."
    )
    group_filter_func: str | None = option(
        None, "GFPO: a function of yours that scores the completions of groups: a dotted path or file.py:name."
    )
    rollout_func: str | None = option(
        None, "A function of yours that writes the rollouts: a dotted path or file.py:name."
    )


@dataclass
class LaunchOptions:
    """How a run is started: afresh or not, in how many processes, on which machines."""

    fresh: bool = option(
        False, "Start from the beginning, whatever checkpoints `output_dir` holds. Off: continue from the newest one."
    )

    num_processes: int | None = option(None, "Processes in all, one for each GPU. None: one for each visible GPU.")
    num_machines: int | None = option(None, "Machines; the command is started on each of them.")
    machine_rank: int | None = option(None, "Number of this machine, from 0.")
    main_process_ip: str | None = option(None, "Address of machine 0.")
    main_process_port: int | None = option(None, "A free port of machine 0.")
    accelerate_config: str | None = option(
        None, "Profile (single_gpu, ddp, fsdp2, hsdp, zero2, zero3) or a config file of accelerate."
    )
    gpu_ids: str | None = option(None, "GPUs to use, such as 0,1. None: all that are visible.")


GROUPS: dict[str, type] = {
    "model": ModelOptions,
    "data": DataOptions,
    "rewards": RewardOptions,
    "launch": LaunchOptions,
}
"""Every method has these, `rewards` only those that are rewarded."""
ALIASES = {
    "model": "model_name_or_path",
    "config_file": "accelerate_config",
    "dataset": "dataset_name",
    "torch_dtype": "dtype",
}
"""Short or older names -> the option. (`multi_gpu` and `fsdp1` are names of profiles: see `launch`.)"""
