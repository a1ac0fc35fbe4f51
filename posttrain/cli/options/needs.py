"""What a run needs besides its rows: packages, rewards and tools, and the columns that they read. For `check` and `explain`."""

from __future__ import annotations

import importlib.util
import socket
import urllib.parse
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from posttrain.cli.options.arguments import RunConfig

PACKAGES: dict[str, tuple[str, str]] = {
    "vllm_structured_outputs_regex": ("outlines_core", "outlines-core"),
    "use_liger_kernel": ("liger_kernel", "'posttrain[gpu]'"),
    "load_in_4bit": ("bitsandbytes", "'posttrain[quant]'"),
    "load_in_8bit": ("bitsandbytes", "'posttrain[quant]'"),
    "deepspeed": ("deepspeed", "'posttrain[deepspeed]'"),
    "use_vllm": ("vllm", "'posttrain[vllm]'"),
}
"""Option -> the module that a run with it imports, and what to install."""


def missing_packages(config: RunConfig, args: Any) -> list[str]:
    """A sentence, without its full stop, for each package that the options ask for and that is not installed here."""
    from transformers.integrations.integration_utils import get_available_reporting_integrations

    options = config.table.options
    given = {name: getattr(args, name, None) or (name in options and config.get(name)) for name in PACKAGES}
    if getattr(args, "use_vllm", False):  # vLLM brings a grammar of its own; a server has an environment of its own
        given["vllm_structured_outputs_regex"] = False
        given["use_vllm"] = args.vllm_mode == "colocate"
    elif (getattr(args, "generation_kwargs", None) or {}).get("regex"):
        given["vllm_structured_outputs_regex"] = True
    asked = [(f"`{name}`", *PACKAGES[name]) for name, value in given.items() if value]
    asked += [(f"`report_to` {name}", "", name) for name in args.report_to if name != "flyte"]
    if config.get("attn_implementation") == "flash_attention_2":
        asked.append(("`attn_implementation` flash_attention_2", "flash_attn", "flash-attn"))
    trackers = set(get_available_reporting_integrations())
    return [
        f"{what} needs a package that is not installed on this machine: pip install {install}"
        for what, module, install in asked
        if (install not in trackers if not module else importlib.util.find_spec(module) is None)
    ]


def notes_on_servers(addresses: list[str], processes: int, gpus: int) -> list[str]:
    """A sentence for each server on this machine, whose GPU may be the trainer's; `gpus` of them are visible here."""
    here = {"127.0.0.1", "localhost", "::1", socket.gethostname()}
    local = [address for address in addresses if urllib.parse.urlsplit(address).hostname in here]
    shares = f"shares a GPU with the trainer, which takes all {gpus} of this machine" if 0 < gpus <= processes else (
        "may share a GPU with the trainer"
    )  # fmt: skip
    return [
        f"The server {address} is on the trainer's machine and {shares}; its memory is not counted here. Give it a GPU of its own "
        "(CUDA_VISIBLE_DEVICES where it is started), a small --memory-share, or use `vllm_mode` colocate."
        for address in local
    ]


def give_agents(side: Any, given: dict[str, Any], args: Any) -> None:
    """The tools and environments of the options, for a trainer without a model."""
    from posttrain.trainer.online.agents import make_agents, refuse_agent_options
    from posttrain.trainer.online_trainer import OnlineTrainer

    if isinstance(side, OnlineTrainer):
        side.rollout_func = given.get("rollout_func")
        side.agents = make_agents(given.get("tools"), given.get("environment_factory"), side.rollout_func)
        if side.agents is None:
            refuse_agent_options(args)


class RewardColumns:
    """Which columns of a dataset the rewards of a run read, and which of them are not there."""

    def __init__(self, side: Any, given: dict[str, Any]) -> None:
        from posttrain.rewards.reward_set import reward_name
        from posttrain.rewards.runtime.invoke import Wants

        agents = getattr(side, "agents", None)
        self.environments = None if agents is None else agents.environments
        functions = [reward for reward in given.get("reward_funcs", ()) if callable(reward)]
        self.wants = {reward_name(function): Wants(function) for function in functions}
        self.reads_all = given.get("rollout_func") is not None or any(wants.everything for wants in self.wants.values())

    def missing(self, columns: Iterable[str]) -> list[str]:
        """A sentence for each reward that needs a column that is not there."""
        from posttrain.rewards.reward_set import missing_arguments

        columns = set(columns) - {"prompt"}
        with_environments = self.environments is not None
        found = [missing_arguments(name, wants, columns, with_environments) for name, wants in self.wants.items()]
        return [one for one in found if one is not None]

    def read(self, columns: Iterable[str]) -> set[str]:
        """Those of the columns that a reward or an environment takes."""
        if self.reads_all or self.environments is not None:
            return set(columns)
        return {name for name in columns if any(wants.accepts(name) for wants in self.wants.values())}
