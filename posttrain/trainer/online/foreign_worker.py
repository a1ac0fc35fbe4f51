"""ForeignRollouts: a worker of the user's writes, scores and judges (TRL's `rollout_worker` and `weight_transfer`).

Such a worker puts finished samples into its `rollout_buffer`; versions say when it gets weights: those that are sent before it
starts are version 1, and each transfer adds one. A sample says which version wrote it. Nothing is known of what it has begun, so
that a sample that is too old cannot be waited for: it is dropped and counted, as in TRL.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import numpy as np
from torch import Tensor
from transformers import TrainerCallback

from posttrain.core.processes import RollCall, of_every_process
from posttrain.core.sample import Sample
from posttrain.models.load.weight_export import exported_weights
from posttrain.rewards.runtime.results import RewardResults
from posttrain.rollout.collector import Written
from posttrain.rollout.engines.weight_sync import on_all_processes
from posttrain.rollout.rollout import Request, Rollout

LOOK_SECONDS = 1.0
TRL_NUMBERS: dict[str, tuple[str, bool]] = {
    "sample/staleness_mean": ("async/group_age/mean", False),
    "sample/staleness_max": ("async/group_age/max", False),
    "sample/time_in_queue_s": ("async/queue_s", False),
    "sample/rollout_queue_size": ("async/waiting", True),
    "sample/dropped_stale_total": ("async/dropped/stale", True),
    "rollout/inflight": ("async/in_flight", True),
    "perf/rollout_wait_s": ("async/wait_s", False),
    "perf/weight_sync_s": ("sync/trainer_held_s", False),
}
"""Metric of TRL's asynchronous trainers -> ours, and whether TRL counts samples where ours counts groups."""


def under_trl_names(numbers: dict[str, Any], samples: int) -> dict[str, Any]:
    """`samples` of a group."""
    found = {theirs: (numbers[ours], counted) for theirs, (ours, counted) in TRL_NUMBERS.items() if ours in numbers}
    return {name: number * samples if counted else number for name, (number, counted) in found.items()}


class ForeignWorker(Protocol):
    """TRL's protocol of that name."""

    rollout_buffer: Any
    metrics_queue: Any

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def update_model_version(self, model_version: int) -> None: ...

    def check_health(self, stale_after_s: float) -> None: ...


class WeightTransfer(Protocol):
    """TRL's protocol of that name."""

    def init_weight_transfer(self) -> None: ...

    def pause(self) -> None: ...

    def send_weights(self, iterator: Iterator[tuple[str, Tensor]]) -> None: ...

    def resume(self) -> None: ...

    def destroy(self) -> None: ...


class ForeignRollouts(TrainerCallback):
    """As `groups` of a FedSource it hands out windows; as a callback it sends weights. The first process speaks for all."""

    def __init__(
        self,
        run: Any,
        worker: ForeignWorker,
        transfer: WeightTransfer,
        tokens_of: Callable[[Any], tuple[np.ndarray, dict[str, np.ndarray]]],
        group_of: Callable[[Any], int],
    ) -> None:
        """`tokens_of` a sample of the worker's: which are trained, and what is known of them; `group_of`: its prompt's number."""
        self.run, self.worker, self.transfer = run, worker, transfer
        self.tokens_of, self.group_of = tokens_of, group_of
        self.labels: dict[int, int] = {}  # version -> the step that made it
        self.is_started, self.dropped = False, 0
        self.roll_call = RollCall(run.args.process_index, run.args.world_size, run.args.ddp_timeout)

    @property
    def version(self) -> int:
        return max(self.labels, default=0)

    # ---- as groups of a source ---------------------------------------------------------------------------------------

    def next_window(self) -> Written:
        args, began = self.run.args, time.perf_counter()
        share, rank = args.schedule().share, args.process_index
        if not self.is_started:
            on_all_processes(self._start, args.world_size, "could not start the rollouts")
        with self.roll_call.together():
            read = self._read(share * args.world_size)
        rollouts, numbers = of_every_process(read, args.world_size)[0]
        rollouts = rollouts[rank * share : (rank + 1) * share]
        nothing = np.zeros((len(rollouts), 0))
        results = RewardResults(nothing, np.zeros(len(rollouts), bool), [], {}, {}, {})
        return Written(
            rollouts, nothing, results, {"generate": time.perf_counter() - began, "reward_wait": 0.0}, numbers
        )

    def _read(self, wanted: int) -> tuple[list[Rollout], dict[str, Any]]:
        if self.run.args.process_index:
            return [], {}
        given = [self._next() for _ in range(wanted)]
        places: dict[int, int] = {}
        rollouts = [self._rollout(one, places) for one in given]
        ages = [self.run.state.global_step - rollout.sample.policy_version for rollout in rollouts]
        numbers = {"async/token_age/mean": ages, "async/dropped/stale": float(self.dropped)}
        numbers |= {"async/group_age/mean": float(np.mean(ages)), "async/group_age/max": float(max(ages))}
        own = self._worker_numbers([one.metrics for one in given])
        return rollouts, under_trl_names(numbers, samples=1) | own | numbers

    def _next(self) -> Any:
        while True:
            try:
                one = self.worker.rollout_buffer.get(timeout=LOOK_SECONDS)
            except queue.Empty:
                self.worker.check_health(self.run.args.heartbeat_stale_after_s)
                self.roll_call.waits()
                continue
            if self.version - one.model_version <= self.run.args.max_staleness:
                return one
            self.dropped += 1

    def _rollout(self, one: Any, places: dict[int, int]) -> Rollout:
        group, (trained, columns) = self.group_of(one), self.tokens_of(one)
        places[group] = place = places.get(group, -1) + 1
        label = self.labels.get(one.model_version, 0)
        sample = Sample(one.input_ids, trained, columns, group=group, policy_version=label)
        length = int(trained.argmax()) if trained.any() else len(trained)
        return Rollout(Request(-1, group, place), one.prompt, one.completion, sample, length)

    def _worker_numbers(self, measured: Iterable[dict[str, Any]]) -> dict[str, Any]:
        """What it says of samples, and of itself; lengths are counted here."""
        found: dict[str, list[Any]] = {}
        for numbers in (*measured, *_drained(self.worker.metrics_queue)):
            for name, value in numbers.items():
                found.setdefault(name, []).append(value)
        return {name: reduced(name, values) for name, values in found.items() if not name.startswith("completions/")}

    def state(self) -> dict[str, Any]:
        return {"labels": self.labels, "dropped": self.dropped}

    def load_state(self, state: dict[str, Any]) -> None:
        """Versions continue; what the worker had in work is its own."""
        self.labels, self.dropped = {int(version): step for version, step in state["labels"].items()}, state["dropped"]

    # ---- weights -----------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self.is_started = True
        is_first = self.run.args.process_index == 0
        if is_first:
            self.transfer.init_weight_transfer()
        self._send(self.run.state.global_step)
        if is_first:
            self.worker.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.is_started and state.global_step % args.weight_sync_steps == 0:
            send = lambda: self._send(state.global_step)  # noqa: E731
            on_all_processes(send, args.world_size, "could not send the weights")

    def _send(self, step: int) -> None:
        """Sharded weights are gathered by all processes together, to the last one, although only the first reads them."""
        is_first, weights = self.run.args.process_index == 0, exported_weights(self.run.model)
        if is_first:
            self.transfer.pause()
            self.transfer.send_weights(weights)
        if self.run.gathers_together:
            for _ in weights:
                pass
        self.labels[self.version + 1] = step
        if is_first:
            self.transfer.resume()
            self.worker.update_model_version(self.version)

    def stop(self) -> None:
        if self.run.args.process_index == 0:
            self.worker.stop()
            self.transfer.destroy()


def _drained(numbers: Any) -> Iterator[dict[str, Any]]:
    while True:
        try:
            yield numbers.get_nowait()
        except queue.Empty:
            return


def reduced(name: str, values: list[Any]) -> float:
    """By what a name says: totals are added up, extrema stay extrema, pairs are (numerator, denominator), others have a mean."""
    if isinstance(values[0], tuple):
        above, below = map(sum, zip(*values))
        return above / below if below else float("nan")
    words = {*name.rsplit("/", 1)[-1].split("_")}
    rules = {"total": np.nansum, "max": np.nanmax, "min": np.nanmin}
    rule = next((rules[word] for word in rules if word in words), np.nanmean)
    known = np.asarray(values, dtype=np.float64)
    return float("nan") if np.isnan(known).all() else float(rule(known))
