"""What goes into a round of rewards and what comes out of it."""

from __future__ import annotations

import dataclasses
import pickle
import types
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from posttrain.rewards.runtime.options import DEFAULT, FAIL, MASK, RewardOptions

Message = dict[str, Any]


@dataclass
class Judged:
    """One finished sample, as reward functions see it."""

    prompt: str | list[Message]
    completion: str | list[Message]
    completion_ids: list[int]
    columns: dict[str, Any] = field(default_factory=dict)  # the rest of the dataset row, and what a rollout_func added
    environment: Any = None


@dataclass(frozen=True)
class RewardFailure:
    """A reward that has no usable value for a sample."""

    sample: int  # in the order in which samples were added to the round
    reward: str
    kind: str  # "error", "timeout", "invalid" or "crash"
    message: str

    def __str__(self) -> str:
        return f"Reward {self.reward}, sample {self.sample} ({self.kind}): {self.message}"


@dataclass
class RewardResults:
    """N samples judged by K rewards."""

    values: np.ndarray  # (N, K) float64; NaN: no opinion (None), or failed and masked
    masked: np.ndarray  # (N,) bool: a reward failed for this sample under the policy "mask": it takes part in nothing
    failures: list[RewardFailure]
    extras: dict[str, list[Any]]  # columns of `log_extra`, one entry a sample (None where a call did not set it)
    metrics: dict[str, list[float]]  # values of `log_metric`, in the order of the samples
    seconds: dict[str, float]  # by reward: time spent in it, over all workers

    def failure_counts(self) -> Counter[str]:
        """How many failures of each kind; for metrics."""
        return Counter(failure.kind for failure in self.failures)


def joined_results(parts: Sequence[RewardResults]) -> RewardResults:
    """The results of several rounds as those of one."""
    firsts = np.cumsum([0, *(len(part.masked) for part in parts[:-1])]).tolist()
    nothing = [[None] * len(part.masked) for part in parts]
    extras, metrics, rewards = (
        list(dict.fromkeys(name for part in parts for name in getattr(part, kind)))
        for kind in ("extras", "metrics", "seconds")
    )
    return RewardResults(
        np.concatenate([part.values for part in parts]),
        np.concatenate([part.masked for part in parts]),
        [
            replace(failure, sample=failure.sample + first)
            for part, first in zip(parts, firsts)
            for failure in part.failures
        ],
        {name: [v for part, none in zip(parts, nothing) for v in part.extras.get(name, none)] for name in extras},
        {name: [value for part in parts for value in part.metrics.get(name, ())] for name in metrics},
        {name: sum(part.seconds.get(name, 0.0) for part in parts) for name in rewards},
    )


class RewardError(RuntimeError):
    """Rewards failed and the policy is to end the run."""


def too_many_failures(failures: list[RewardFailure], samples: int, stop_above: float) -> str:
    failed = len({failure.sample for failure in failures})
    kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(f.kind for f in failures).most_common())
    first = "\n".join(f"  {failure}" for failure in failures[:3])
    return (
        f"Rewards failed for {failed} of the {samples} samples of a round ({kinds}); more than {stop_above:.0%} of them end the "
        f"run. The first:\n{first}"
    )


PLAIN = (type(None), bool, int, float, str)


class Outcomes:
    """Values, failures and logs so far, by reward (its column) and sample (its number in the round).

    Written on the runner's thread, read when all calls have ended.
    """

    def __init__(self, names: list[str], options: RewardOptions, trainer_state: Any) -> None:
        self.names, self.options, self.trainer_state = names, options, trainer_state
        self._values: dict[tuple[int, int], float | None] = {}
        self._failures: dict[tuple[int, int], RewardFailure] = {}
        self._extras: dict[tuple[int, int], dict[str, Any]] = {}
        self._metrics: list[tuple[int, int, str, float]] = []
        self._seconds = [0.0] * len(names)

    @cached_property
    def packed_state(self) -> bytes:
        """The trainer's state for the workers: the same object for all calls of the round, sent to each worker once."""
        return pickle.dumps(plain_copy(self.trainer_state))

    def settle(self, reward: int, sample: int, value: float | None, extras: dict[str, Any]) -> None:
        self._values[reward, sample] = value
        if extras:
            self._extras[reward, sample] = extras

    def fail(self, reward: int, sample: int, kind: str, message: str) -> None:
        failure = RewardFailure(sample, self.names[reward], kind, message)
        if self.options.on_error == FAIL:
            raise RewardError(f'{failure} (`on_error` is "fail".)')
        self._failures[reward, sample] = failure

    def metric(self, reward: int, sample: int, name: str, value: float) -> None:
        self._metrics.append((sample, reward, name, value))

    def spent(self, reward: int, seconds: float) -> None:
        self._seconds[reward] += seconds

    def results(self, samples: int) -> RewardResults:
        """Everything in the order of the samples, whatever the order was in which calls ended."""
        failures = sorted(self._failures.values(), key=lambda failure: failure.sample)
        masked = np.zeros(samples, dtype=bool)
        if self.options.on_error == MASK:
            masked[[failure.sample for failure in failures]] = True
        logged = (self._columns(samples), self._metric_lists())
        return RewardResults(self._table(samples), masked, failures, *logged, dict(zip(self.names, self._seconds)))

    def _table(self, samples: int) -> np.ndarray:
        values = np.full((samples, len(self.names)), np.nan)
        for (reward, sample), value in self._values.items():
            values[sample, reward] = np.nan if value is None else value
        if self.options.on_error == DEFAULT:
            for reward, sample in self._failures:
                values[sample, reward] = self.options.default_value
        return values

    def _columns(self, samples: int) -> dict[str, list[Any]]:
        columns: dict[str, list[Any]] = {}
        for (_, sample), extras in sorted(self._extras.items(), key=lambda item: item[0]):
            for name, value in extras.items():
                columns.setdefault(name, [None] * samples)[sample] = value
        return columns

    def _metric_lists(self) -> dict[str, list[float]]:
        lists: dict[str, list[float]] = {}
        for _, _, name, value in sorted(self._metrics, key=lambda entry: entry[:2]):
            lists.setdefault(name, []).append(value)
        return lists


def plain_copy(state: Any) -> types.SimpleNamespace | None:
    """The plain data of transformers' TrainerState, under the same names: workers do not import transformers for it."""
    if state is None:
        return None
    if dataclasses.is_dataclass(state):
        fields = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
    else:
        fields = dict(vars(state))
    return types.SimpleNamespace(**{name: value for name, value in fields.items() if _is_plain(value)})


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(_is_plain(name) and _is_plain(item) for name, item in value.items())
    return isinstance(value, PLAIN)
