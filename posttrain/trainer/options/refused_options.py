"""Options of TRL that mean nothing here. Each is known by its name, and refused with what to use instead.

An option that is accepted and has no effect would let someone believe in it; one that is unknown would end in a TypeError without
a reason.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from posttrain.core.options import default_of, is_refused, refused


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
    vllm_group_port: int = refused(
        51216, "Weights go to a server over the connection that prompts go over: there is no second port."
    )

    # ---- images
    log_multimodal: bool = refused(True, "Prompts are texts: there are no images to leave out of a log.")


def refuse_options(config: Any) -> None:
    """Raise for the first of them that was set."""
    for field in fields(config):
        value = getattr(config, field.name)
        if is_refused(field) and value != default_of(field):
            raise ValueError(f"`{field.name}` is {value!r}, which has no effect here. {field.metadata['help']}")
