"""Options of TRL that mean nothing here. Each is known by its name, and refused with what to use instead.

An option that is accepted and has no effect would let someone believe in it; one that is unknown would end in a TypeError without
a reason.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, fields
from typing import Any

from posttrain.trainer.config import default_of

REFUSED = "refused"
NO_VLLM = "vLLM is not connected yet"


def refused(default: Any, sentence: str) -> Any:
    """A config field that may only have its default. `sentence` says why, and what to use instead."""
    return dataclasses.field(default=default, metadata={REFUSED: sentence, "help": sentence})


@dataclass
class RefusedOptions:
    """Options of TRL's GRPOConfig and RLOOConfig without a meaning here; mixed into the configs of online methods."""

    remove_unused_columns: bool | None = refused(
        False, "Rewards are given the columns that they name: remove others from the dataset itself."
    )

    # ---- transformers' `generate`
    ds3_gather_for_generation: bool = refused(
        True, "Rollouts are not written under DeepSpeed, so there is nothing to gather: use one process per GPU."
    )
    cache_implementation: str | None = refused(
        None,
        "The native engine keeps keys and values in pages of its own, the transformers engine in the model's own cache: choose "
        "between them with `rollout_engine`.",
    )
    use_transformers_continuous_batching: bool = refused(
        False, "The native engine, which is the default, fills free slots while other completions are being written."
    )
    use_transformers_paged: bool = refused(
        False, "The native engine, which is the default, keeps keys and values in pages."
    )
    transformers_continuous_batching_config: dict[str, Any] | str | None = refused(
        None, "The native engine takes the memory that is free; `max_rollout_slots` bounds what it writes side by side."
    )

    # ---- vLLM
    use_vllm: bool = refused(
        False,
        f"{NO_VLLM}: `rollout_engine='native'`, the default, writes completions with the weights that are trained.",
    )
    vllm_mode: str = refused("colocate", f"{NO_VLLM}, in this process or as a server: see `rollout_engine`.")
    vllm_model_impl: str = refused("vllm", f"{NO_VLLM}: engines run the very model that is trained.")
    vllm_enable_sleep_mode: bool = refused(
        False, f"{NO_VLLM}, and the native engine has memory for keys and values during generation only."
    )
    vllm_server_base_url: str | None = refused(None, f"{NO_VLLM}: there is no server to be found under an address.")
    vllm_server_host: str = refused("0.0.0.0", f"{NO_VLLM}: there is no server, and no host of one.")
    vllm_server_port: int = refused(8000, f"{NO_VLLM}: there is no server, and no port of one.")
    vllm_server_timeout: float = refused(240.0, f"{NO_VLLM}: there is no server to wait for.")
    vllm_group_port: int = refused(51216, f"{NO_VLLM}: engines read weights in place, and none are sent.")
    vllm_gpu_memory_utilization: float = refused(
        0.3,
        f"{NO_VLLM}; the native engine takes what memory is free, for as many completions as `max_rollout_slots` says.",
    )
    vllm_max_model_length: int | None = refused(
        None,
        f"{NO_VLLM}; the model's own context counts. `max_length` and `max_completion_length` bound what is in it.",
    )
    vllm_tensor_parallel_size: int = refused(1, f"{NO_VLLM}: each process writes with whole weights of its own.")

    # ---- images
    log_multimodal: bool = refused(True, "Prompts are texts: there are no images to leave out of a log.")


def refuse_options(config: Any) -> None:
    """Raise for the first of them that was set."""
    for field in fields(config):
        value = getattr(config, field.name)
        if REFUSED in field.metadata and value != default_of(field):
            raise ValueError(f"`{field.name}` is {value!r}, which has no effect here. {field.metadata[REFUSED]}")
