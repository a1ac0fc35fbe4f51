"""How rewards are run: limits, processes, what happens when one fails."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from posttrain.core.machine import training_processes, usable_cores

AUTO, PROCESS, IN_PROCESS = "auto", "process", "in_process"
MASK, DEFAULT, FAIL = "mask", "default", "fail"
BY_SAMPLE, BY_GROUP, ALL_AT_ONCE = "sample", "group", "all"
MAX_WORKERS = 8


@dataclass(frozen=True)
class RewardOptions:
    """Options of the reward runtime.

    timeout: seconds one call may take; the worker is killed when they are over. None: no limit.
    workers: worker processes. None: one for each core of this process, at most 8.
    concurrency: calls of async functions that run at once in one worker.
    retries: how often a sample that failed alone (error, timeout, crash) is tried again.
    on_error: "mask" leaves a failed sample out of everything, "default" gives it `default_value`, "fail" ends the run.
    stop_above: share of failed samples in a round (of 8 samples or more) above which the run ends whatever `on_error` says;
        1.0: never. A function that always raises is a mistake to be shown, not a run to be masked away.
    isolation: "auto" runs a function in worker processes where it can travel, else in this process, and says so; "process"
        refuses functions that cannot travel; "in_process" sends none. A function in a worker has its own copy of every
        variable it refers to: one that counts or collects in a variable of the script needs "in_process".
    reward_batching: "group" calls a function with each group as it is finished, beside generation; "all" calls it once with
        the whole round, for functions that compare across groups; "sample" calls it with one sample at a time, which spreads a
        slow function over the workers best and is for functions that compare nothing.
    cache: remember the values of functions whose value depends on nothing but the sample, up to `cache_size` of them.
    worker_calls, worker_memory: a worker is replaced after so many calls (None: never) or when it holds more bytes.
    """

    timeout: float | None = 60.0
    workers: int | None = None
    concurrency: int = 16
    retries: int = 0
    on_error: str = MASK
    default_value: float = 0.0
    stop_above: float = 0.5
    isolation: str = AUTO
    reward_batching: str = BY_GROUP
    cache: bool = False
    cache_size: int = 100_000
    worker_calls: int | None = 10_000
    worker_memory: int | None = 8 * 2**30

    def __post_init__(self) -> None:
        for name in ("timeout", "workers", "concurrency", "cache_size", "worker_calls", "worker_memory"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"The reward option `{name}` is {value}; it must be positive.")
        if self.retries < 0:
            raise ValueError(f"The reward option `retries` is {self.retries}; it must be 0 or more.")
        if not 0 <= self.stop_above <= 1:
            raise ValueError(f"The reward option `stop_above` is {self.stop_above}; it is a share between 0 and 1.")
        _one_of("on_error", self.on_error, (MASK, DEFAULT, FAIL))
        _one_of("isolation", self.isolation, (AUTO, PROCESS, IN_PROCESS))
        _one_of("reward_batching", self.reward_batching, (BY_SAMPLE, BY_GROUP, ALL_AT_ONCE))

    @property
    def num_workers(self) -> int:
        """Cores are shared with the other training processes of this machine."""
        if self.workers is not None:
            return self.workers
        return max(1, min(MAX_WORKERS, usable_cores() // training_processes()))


def _one_of(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"The reward option `{name}` is {value!r}; it must be one of {', '.join(map(repr, allowed))}.")
