"""Options of rollouts that are written while earlier ones are trained on; mixed into the configs of online methods."""

from __future__ import annotations

import json
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any

from posttrain.core.options import option
from posttrain.rollout.feed.pacing import DROP, FIRST_FINISHED, IN_ORDER, MASK, WAIT, WINDOW, Lead, Pace
from posttrain.rollout.feed.worker import CONTINUE, FINISH, KEEP, RECOMPUTE, RESTART
from posttrain.trainer.options.base import check_choice, check_range
from posttrain.trainer.options.vllm import COLOCATE

AUTO, RAY = "auto", "ray"
STEP_START, SAMPLER = "step_start", "sampler"


@dataclass
class AsyncConfig:
    """Every online method has this mode. With `async_lead=0` it is the synchronous run, to the bit."""

    # ---- rollouts beside training
    async_rollouts: bool = option(False, "Completions are written while earlier ones are trained on.")
    max_staleness: int = option(
        4, "Most optimizer steps between the weights that wrote a trained token and the step that trains on it."
    )
    async_lead: float | str = option(
        AUTO,
        "Generations by which groups are begun ahead of training, also a fraction; 0: synchronous. 'auto': as few as keep the "
        "trainer from waiting.",
    )
    async_order: str = option(
        WINDOW,
        "Which finished groups are trained next: 'in_order', by their number, which makes runs exact; 'window', the first of those "
        "that are old; 'first_finished', the first of all.",
    )
    on_stale: str = option(
        WAIT,
        "A group that would pass `max_staleness`: 'wait' for it before others are trained, 'mask' its tokens that are too old, or "
        "'drop' it.",
    )
    update_in_flight: str | None = option(
        None,
        "A completion that is being written when new weights arrive: 'continue' with them, 'finish' with its own, or 'restart'. "
        "None: 'finish' where `async_order` is 'in_order', else 'continue'.",
    )
    kv_after_update: str = option(
        RECOMPUTE,
        "With 'continue', keys and values of the old weights: 'recompute' or 'keep' them, for running completions only.",
    )
    proximal_policy: str = option(
        STEP_START,
        "Centre of the clip: 'step_start', the weights that a step begins with, where tokens of older ones are weighed; or "
        "'sampler', the weights that wrote the token.",
    )
    rollout_workers: int | str | None = option(
        None,
        "Child processes that write, for each training process: on GPUs that no training process has, where there are such; or "
        "'ray': actors of a Ray cluster. None: a thread of this process.",
    )
    ray_workers: int = option(
        1,
        "With `rollout_workers='ray'`: actors for each training process. Those for which there is no room yet join later.",
    )
    ray_address: str | None = option(
        None,
        "With `rollout_workers='ray'`: 'auto' or HOST:PORT of a cluster that runs. None: the environment's RAY_ADDRESS, or a "
        "cluster of this machine alone.",
    )
    worker_resources: dict[str, float] | str | None = option(
        None,
        "What each actor asks of Ray, such as {'GPU': 1, 'CPU': 4}. None: one GPU where the training has GPUs, else a CPU.",
    )
    queue_maxsize: int = option(
        1024, "Completions that are finished and not trained on yet, above which no group begins."
    )
    max_inflight_tasks: int = option(-1, "Completions that are being written at once. -1: as the lead has it.")
    heartbeat_stale_after_s: float = option(
        300.0,
        "Seconds without a finished group after which a trainer that waits ends the run, and says for whom it waited.",
    )
    weight_sync_steps: int = option(1, "Optimizer steps from one update of the rollout weights to the next.")
    keep_journal: bool = option(
        False,
        "Keep every finished group in `OUTPUT/rollout_journal`, so that the whole run can be replayed. False: those that a "
        "checkpoint needs.",
    )
    replay_from: str | None = option(
        None, "Folder of an earlier run: train on the groups of its journal, in its order. Nothing is written anew."
    )

    clips_ratios = False  # whether the loss bounds how far the policy moves away from an earlier one

    def check_async_options(self) -> None:
        """Raise for what cannot be, and for options that were set and would have no effect."""
        if not self.async_rollouts:
            if ignored := sorted({*AsyncConfig.__dataclass_fields__} & self.set_by_user() - {"async_rollouts"}):
                raise ValueError(f"`{ignored[0]}` is set, but `async_rollouts` is not: it would have no effect.")
            return
        if self.async_lead != AUTO:
            self.async_lead = _number_of_windows(self.async_lead)
        check_choice("async_order", self.async_order, (IN_ORDER, WINDOW, FIRST_FINISHED))
        check_choice("on_stale", self.on_stale, (WAIT, MASK, DROP))
        check_choice("kv_after_update", self.kv_after_update, (RECOMPUTE, KEEP))
        check_choice("proximal_policy", self.proximal_policy, (STEP_START, SAMPLER))
        if self.proximal_policy == SAMPLER and not self.clips_ratios:
            raise ValueError(
                f"`proximal_policy` is 'sampler', and the loss of {type(self).__name__} clips no ratio of two policies that could "
                "be centred on it: leave it out."
            )
        lows = {"max_staleness": 0, "weight_sync_steps": 1, "queue_maxsize": 1, "max_inflight_tasks": -1}
        for name, low in lows.items():
            _check_whole(name, getattr(self, name), low)
        check_range("heartbeat_stale_after_s", self.heartbeat_stale_after_s, 0, open_low=True)
        if self.replay_from is not None and Path(self.replay_from).resolve() == Path(self.output_dir).resolve():
            raise ValueError(
                f"`replay_from` and `output_dir` are both {self.output_dir}: write the replay somewhere else."
            )
        if self.schedule().splits_groups:
            raise ValueError(
                "Each process writes the groups that it trains on, and here some lie on several processes: make "
                "`per_device_train_batch_size` x `gradient_accumulation_steps` a multiple of `num_generations`."
            )
        share = self.schedule().share
        if self.queue_maxsize < share:
            raise ValueError(
                f"`queue_maxsize` is {self.queue_maxsize}, and a generation of one process has {share} completions: no step would "
                "ever have all of its own."
            )
        if self.max_inflight_tasks != -1:
            check_range("max_inflight_tasks", self.max_inflight_tasks, self.num_generations)
        self._check_workers()
        self._check_updates()
        self.check_writers()
        pace = self.pace()
        pace.check(0 if self.async_lead == AUTO else self.async_lead)

    def _check_updates(self) -> None:
        """Of completions that are being written when new weights arrive."""
        is_exact = self.async_order == IN_ORDER
        if self.update_in_flight is None:
            self.update_in_flight = FINISH if is_exact else CONTINUE
        check_choice("update_in_flight", self.update_in_flight, (CONTINUE, FINISH, RESTART))
        if is_exact and (self.async_lead == AUTO or not float(self.async_lead).is_integer()):
            raise ValueError(
                f"`async_order='in_order'` makes a run exact, and `async_lead` is {self.async_lead!r}: set it to a whole number."
            )
        if is_exact and (self.update_in_flight != FINISH or self.on_stale != WAIT):
            raise ValueError(
                "`async_order='in_order'` needs `update_in_flight='finish'` and `on_stale='wait'`: a completion is written by one "
                "version of the weights, whenever it is written."
            )
        if self.kv_after_update == KEEP and (self.update_in_flight != CONTINUE or self.async_lead == 0):
            why = "`async_lead` is 0" if self.async_lead == 0 else f"`update_in_flight` is {self.update_in_flight!r}"
            raise ValueError(
                f"`kv_after_update` is 'keep', and {why}: no completion continues with new weights, so that it would have "
                "no effect. Leave it out."
            )

    def check_writers(self) -> None:
        """Raise for what those cannot do who write. Asked again by a trainer: `use_vllm` may have been left to what it finds."""
        if self.use_vllm and self.vllm_mode == COLOCATE:
            raise ValueError(
                "vLLM in this process takes turns with the training: `vllm_mode='server'` writes beside it, and so does our own "
                "engine."
            )
        if self.use_vllm and self.kv_after_update == KEEP:
            raise ValueError("Servers compute keys and values of new weights again: leave `kv_after_update` out.")
        if self.use_vllm and self.rollout_workers is not None:
            raise ValueError(
                "`rollout_workers` are processes of our own engine, and `use_vllm` says that vLLM writes: leave one out."
            )
        if self.use_vllm and self.async_order == IN_ORDER and self.async_lead:
            raise ValueError(
                "In order, a group is written by the weights of exactly `async_lead` steps before, and servers have the newest "
                "alone: take `async_order='window'`, or our own engine."
            )
        reads_in_place = self.use_vllm is False and self.rollout_workers is None and self.sharding is None
        if reads_in_place and self.async_lead == 0 and self.weight_sync_steps > 1:
            raise ValueError(
                f"`weight_sync_steps` is {self.weight_sync_steps} and `async_lead` 0: a thread writes with the trainer's own "
                "weights, and nothing is sent, so that it would have no effect. Leave it out."
            )

    def _check_workers(self) -> None:
        if self.rollout_workers == RAY:
            _check_whole("ray_workers", self.ray_workers, 1)
            self.worker_resources = _resources(self.worker_resources)
            return
        if ignored := sorted({"ray_workers", "ray_address", "worker_resources"} & self.set_by_user()):
            raise ValueError(f"`{ignored[0]}` is set, and `rollout_workers` is not 'ray': it would have no effect.")
        if isinstance(self.rollout_workers, str) and self.rollout_workers.isdecimal():
            self.rollout_workers = int(self.rollout_workers)
        if self.rollout_workers is not None:
            _check_whole("rollout_workers", self.rollout_workers, 1, "a number of processes of 1 or more, or 'ray'")

    @property
    def centres_on_sampler(self) -> bool:
        """Whether ratios are taken to the weights that wrote a token, and not to those that its step begins with."""
        return self.async_rollouts and self.proximal_policy == SAMPLER

    @property
    def trains_on_older_tokens(self) -> bool:
        """Whether steps lie between the weights that write a token and those that are trained on it."""
        return self.async_rollouts and self.async_lead != 0

    def pace(self) -> Pace:
        schedule = self.schedule()
        steps = max(schedule.window // schedule.accumulation, 1)
        groups = schedule.prompts // schedule.world_size  # of each process
        in_flight = None if self.max_inflight_tasks == -1 else self.max_inflight_tasks // self.num_generations
        return Pace(
            groups,
            steps,
            self.max_staleness,
            self.async_order,
            self.on_stale,
            self.weight_sync_steps,
            most_waiting=self.queue_maxsize // self.num_generations,
            most_in_flight=in_flight,
        )

    def lead(self) -> Lead:
        adapts, most = self.async_lead == AUTO, float(self.pace().most_lead)
        return Lead(min(1.0, most) if adapts else self.async_lead, most, adapts)


def _check_whole(name: str, value: Any, low: int, takes: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, Integral) or value < low:
        raise ValueError(f"`{name}` is {value!r}; it takes {takes or f'a whole number of {low} or more'}.")


def _number_of_windows(lead: Any) -> float:
    try:
        found = -1.0 if isinstance(lead, bool) else float(lead)
    except (TypeError, ValueError):
        found = -1.0
    if not 0 <= found < float("inf"):
        raise ValueError(f"`async_lead` is {lead!r}; it takes a number of generations, 0 or more, or {AUTO!r}.")
    return found


def _resources(given: Any) -> dict[str, float] | None:
    """Also of a text, as the command line has it."""
    try:
        found = json.loads(given) if isinstance(given, str) else given
    except ValueError:
        found = given
    if found is not None and not isinstance(found, dict):
        raise ValueError(
            f'`worker_resources` is {given!r}; it takes names with amounts, such as {{"GPU": 1, "CPU": 4}}.'
        )
    for name, amount in (found or {}).items():
        if isinstance(amount, bool) or not isinstance(amount, int | float) or amount < 0:
            raise ValueError(f"`worker_resources[{name!r}]` is {amount!r}; it takes a number of 0 or more.")
    return found
