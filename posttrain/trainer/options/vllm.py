"""Options of rollouts by vLLM, in this process or as servers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from posttrain.rollout.engines.vllm.params import PROCESSED, RAW
from posttrain.rollout.engines.vllm.weight_channel import TRANSPORTS
from posttrain.trainer.options.base import check_choice, check_range, option

COLOCATE, SERVER = "colocate", "server"
MODES = (COLOCATE, SERVER)
ADAPTER, WEIGHTS, AUTO = "adapter", "weights", "auto"

ONLY_COLOCATED = (
    "vllm_model_impl",
    "vllm_enable_sleep_mode",
    "vllm_gpu_memory_utilization",
    "vllm_max_model_length",
    "vllm_tensor_parallel_size",
    "vllm_engine_args",
)
"""Where vLLM is a server these are options of its start (`posttrain vllm-serve --help`)."""
ONLY_SERVED = (
    "vllm_server_base_url",
    "vllm_server_host",
    "vllm_server_port",
    "vllm_server_timeout",
    "vllm_server_token_file",
    "vllm_completion_timeout",
    "vllm_server_adapter_folder",
    "vllm_server_logprobs_mode",
    "vllm_weight_transport",
)


@dataclass
class VLLMConfig:
    """Mixed into the configs of online methods."""

    use_vllm: bool = option(False, "vLLM writes the completions, as `vllm_mode` says. False: `rollout_engine` does.")
    vllm_mode: str = option(
        COLOCATE,
        "Where vLLM runs: 'colocate', in this process on its GPU; 'server', one or several `posttrain vllm-serve`.",
    )
    vllm_sync: str = option(
        AUTO,
        "What vLLM is sent: whole 'weights' (adapters merged into copies), the LoRA 'adapter' alone, or 'auto': the adapter "
        "where there is one and vLLM can take it.",
    )
    vllm_sync_tolerance: float | None = option(
        None,
        "Mean difference of log-probs of vLLM and trainer, on a fixed batch after every update, above which the run stops. "
        "None: by the dtype (1e-3 in float32, 0.1 in bfloat16).",
    )

    # ---- in this process
    vllm_model_impl: str = option("vllm", "Colocated: vLLM's own model code ('vllm'), 'transformers' or 'auto'.")
    vllm_enable_sleep_mode: bool = option(
        False, "Colocated: vLLM gives its GPU memory back while the model is trained."
    )
    vllm_gpu_memory_utilization: float = option(0.3, "Colocated: share of the GPU's memory that vLLM may take.")
    vllm_max_model_length: int | None = option(
        None,
        "Colocated: most tokens of prompt and completion together. None: the model's own context; with images, what the data need.",
    )
    vllm_tensor_parallel_size: int = option(
        1, "Colocated: training processes that hold one vLLM model together; must divide their number."
    )
    vllm_engine_args: dict[str, Any] | str | None = option(
        None, "Colocated: further arguments of vLLM's engine, such as {'enforce_eager': true}."
    )

    # ---- as servers
    vllm_server_base_url: list[str] | str | None = option(
        None, "Addresses of servers, a list or with commas between. None: `vllm_server_host` and `vllm_server_port`."
    )
    vllm_server_host: str = option("0.0.0.0", "Host of the server; 0.0.0.0 means this machine.")
    vllm_server_port: int = option(8000, "Port of the server.")
    vllm_server_timeout: float = option(240.0, "Seconds to wait for a server at the start, or for one that went away.")
    vllm_server_token_file: str | None = option(
        None,
        "File with the servers' token, of mode 0600. None: the variable POSTTRAIN_SERVE_TOKEN, or for a server of yours on this "
        "machine the token that it has drawn.",
    )
    vllm_completion_timeout: float = option(1800.0, "Seconds that a server may take for one completion.")
    vllm_server_adapter_folder: str | None = option(
        None, "For a plain `vllm serve`, which takes adapters by their path: a folder that trainer and server both see."
    )
    vllm_server_logprobs_mode: str = option(
        RAW, "For a plain `vllm serve`, which does not say: the --logprobs-mode that it was started with."
    )

    vllm_weight_transport: str = option(
        AUTO,
        "How weights reach a server of ours: 'cuda_ipc' (one GPU) and 'collective' (NCCL; gloo on the CPU) straight into its "
        "engine, 'shared_memory' (one machine) and 'http' staged beside the weights that serve, or 'auto': the fastest that both "
        "sides can. All are verified by checksums.",
    )

    vllm_commit_timeout = 600.0  # seconds until running requests of a server have ended and new weights are loaded

    def check_vllm_options(self) -> None:
        """Raise for what cannot be, and for options that were set and would have no effect."""
        if isinstance(self.vllm_engine_args, str):
            self.vllm_engine_args = json.loads(self.vllm_engine_args)
        check_choice("vllm_mode", self.vllm_mode, MODES)
        check_choice("vllm_sync", self.vllm_sync, (AUTO, WEIGHTS, ADAPTER))
        check_choice("vllm_weight_transport", self.vllm_weight_transport, TRANSPORTS)
        check_choice("vllm_server_logprobs_mode", self.vllm_server_logprobs_mode, (PROCESSED, RAW))
        check_choice("vllm_model_impl", self.vllm_model_impl, ("vllm", "transformers", "auto"))
        check_range("vllm_gpu_memory_utilization", self.vllm_gpu_memory_utilization, 0, 1, open_low=True)
        for name in ("vllm_server_timeout", "vllm_completion_timeout"):
            check_range(name, getattr(self, name), 0, open_low=True)
        self._refuse_without_effect(self.set_by_user())
        check_range("vllm_tensor_parallel_size", self.vllm_tensor_parallel_size, 1)
        if self.world_size % self.vllm_tensor_parallel_size:
            raise ValueError(
                f"`vllm_tensor_parallel_size` is {self.vllm_tensor_parallel_size} and does not divide the {self.world_size} "
                "processes of this run: each vLLM is held by that many of them."
            )

    def _refuse_without_effect(self, chosen: set[str]) -> None:
        changed = [name for name in VLLMConfig.__dataclass_fields__ if name in chosen]
        if not self.use_vllm:
            # That one is read for every engine with weights of its own, also one that is handed to the trainer: see WeightSync.
            if changed := [name for name in changed if name not in ("vllm_sync_tolerance", "use_vllm")]:
                raise ValueError(f"`{changed[0]}` is set, but `use_vllm` is not: it would have no effect.")
            return
        others = ONLY_SERVED if self.vllm_mode == COLOCATE else ONLY_COLOCATED
        if ignored := [name for name in changed if name in others]:
            where = (
                "says how servers are reached" if self.vllm_mode == COLOCATE else "is said when the server is started"
            )
            raise ValueError(
                f"`{ignored[0]}` {where}; with `vllm_mode={self.vllm_mode!r}` it has no effect. Leave it out."
            )
        if "rollout_engine" in chosen:
            raise ValueError("`rollout_engine` and `use_vllm` both say who writes completions: choose one.")

    @property
    def vllm_share(self) -> float:
        """Of this device's memory, that a vLLM in this process takes to generate."""
        return self.vllm_gpu_memory_utilization if self.use_vllm and self.vllm_mode == COLOCATE else 0.0

    @property
    def vllm_resident_share(self) -> float:
        """What it keeps of it during the update."""
        return 0.0 if self.vllm_enable_sleep_mode else self.vllm_share

    def vllm_addresses(self) -> list[str]:
        """Of all servers."""
        given = self.vllm_server_base_url
        if given is None:
            host = "127.0.0.1" if self.vllm_server_host == "0.0.0.0" else self.vllm_server_host
            return [f"http://{host}:{self.vllm_server_port}"]
        parts = given.split(",") if isinstance(given, str) else given
        return [part.strip().rstrip("/") for part in parts if part.strip()]
