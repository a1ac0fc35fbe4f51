"""TRL's names and defaults of its asynchronous trainers; mixed into the configs of ours, before those of their methods."""

from __future__ import annotations

from dataclasses import dataclass, fields

from posttrain.core.options import default_of, refused
from posttrain.core.processes import of_every_process
from posttrain.core.transport import ServerError, ServerRefused, Transport
from posttrain.rollout.feed.pacing import IN_ORDER
from posttrain.trainer.options.base import check_choice, check_range, option
from posttrain.trainer.options.vllm import ONLY_SERVED, SERVER

FLOAT32 = "float32"
DTYPES = ("auto", "bfloat16", "float16", FLOAT32)
TIMEOUTS = {"request_timeout": "vllm_completion_timeout", "weight_sync_timeout": "vllm_commit_timeout"}
"""TRL's name -> ours."""
OURS_ALONE = (
    "rollout_workers", "rollout_engine", "max_rollout_slots", "rollout_kv_dtype", "rollout_weight_dtype", "rollout_drafts",
)  # fmt: skip
"""A run that sets one of them means our own engine, and not a server."""
HEALTH_SECONDS = 2.0


@dataclass
class TrlAsyncConfig:
    """Every option of the method is there besides."""

    async_rollouts: bool = refused(True, "Rollouts are always written beside training here; other configs have both.")
    dtype: str = option(
        FLOAT32,
        "What the weights are loaded in. float32: as always, masters in float32 whatever the model computes in (`bf16`).",
    )
    logging_steps: float = option(1, "Log every so many optimizer steps; below 1, a fraction of all steps.")
    ignore_data_skip: bool = option(True, "TRL's; it means nothing here: a resumed run continues where it was.")
    max_completion_length: int = option(2048, "Most tokens of a completion; with tools, of all its turns together.")
    use_vllm: bool | None = option(
        None,
        "Servers write the completions. None: where an option of servers is set, or one answers at `vllm_server_base_url`; else "
        "our own engine does.",
    )
    vllm_mode: str = option(SERVER, "Where vLLM runs: 'server', one or several `posttrain vllm-serve`.")
    vllm_server_base_url: list[str] | str | None = option(
        "http://localhost:8000", "Addresses of servers, a list or with commas between."
    )
    request_timeout: int = option(600, "Seconds that a server may take for one completion.")
    weight_sync_timeout: int = option(1800, "Seconds that servers may take for one update of the weights.")
    token_budget: int | None = option(
        None, "TRL's name of `max_tokens_per_pass`. 0 or less, and None: as if that were left out."
    )

    def __post_init__(self) -> None:
        self.ignore_data_skip = False
        chosen = {field.name for field in fields(self) if getattr(self, field.name) != default_of(field)}
        if self.use_vllm is None and chosen & {*ONLY_SERVED, *TIMEOUTS}:
            self.use_vllm = True
        if self.use_vllm is None and (chosen & {*OURS_ALONE} or self.async_order == IN_ORDER):
            self.use_vllm = False
        if (self.token_budget or 0) > 0:
            if self.max_tokens_per_pass not in (None, self.token_budget):
                raise ValueError("`token_budget` is TRL's name of `max_tokens_per_pass`, and they differ: give one.")
            self.max_tokens_per_pass = self.token_budget
        super().__post_init__()
        self._set_by_user &= chosen
        self._take_timeouts(chosen)
        check_choice("dtype", self.dtype, DTYPES)
        if self.dtype != FLOAT32:
            self.model_init_kwargs = {"dtype": self.dtype, **(self.model_init_kwargs or {})}

    def _take_timeouts(self, chosen: set[str]) -> None:
        for (theirs, ours), seconds in zip(TIMEOUTS.items(), (self.request_timeout, self.weight_sync_timeout)):
            check_range(theirs, seconds, 0, open_low=True)
            if theirs in chosen and self.use_vllm is False:
                raise ValueError(f"`{theirs}` is set, but `use_vllm` is False: it would have no effect.")
            if {theirs, ours} <= chosen and seconds != getattr(self, ours):
                raise ValueError(f"`{theirs}` is TRL's name of `{ours}`, and they differ: give one of them.")
            if ours not in chosen:
                setattr(self, ours, float(seconds))

    def look_for_servers(self) -> str:
        """Decides `use_vllm` where it was left open, by what the first process finds; returns the plan's line about it."""
        if self.use_vllm is not None:
            return ""
        address = self.vllm_addresses()[0]
        self.use_vllm = of_every_process(_answers(address), self.world_size)[0]
        found = "a server answers" if self.use_vllm else "no server answers, and none was asked for,"
        return f"{found} at {address}"


def _answers(address: str) -> bool:
    try:
        Transport(address, None, HEALTH_SECONDS).ask("GET", "/health", seconds=HEALTH_SECONDS, reads=False)
    except ServerRefused as refusal:
        return refusal.status in (401, 503)  # it wants a token, or is starting
    except ServerError:
        return False
    return True
