"""What is known so far about the samples of a round. Written on the runner's thread, read when all calls have ended."""

from __future__ import annotations

import dataclasses
import pickle
import types
from functools import cached_property
from typing import Any

import numpy as np

from posttrain.rewards.runtime.options import DEFAULT, FAIL, MASK, RewardOptions
from posttrain.rewards.runtime.results import RewardError, RewardFailure, RewardResults

PLAIN = (type(None), bool, int, float, str)


class Outcomes:
    """Values, failures and logs by reward (its column) and sample (its number in the round)."""

    def __init__(self, names: list[str], options: RewardOptions, trainer_state: Any) -> None:
        self.names, self.options, self.trainer_state = names, options, trainer_state
        self._values: dict[tuple[int, int], float | None] = {}
        self._failures: dict[tuple[int, int], RewardFailure] = {}
        self._extras: dict[tuple[int, int], dict[str, Any]] = {}
        self._metrics: list[tuple[int, int, str, float]] = []
        self._seconds = [0.0] * len(names)

    @cached_property
    def _packed_state(self) -> bytes:
        return pickle.dumps(plain_copy(self.trainer_state))

    def packed_state(self) -> bytes:
        """The trainer's state for the workers: the same object for all calls of the round, sent to each worker once."""
        return self._packed_state

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
        return RewardResults(
            self._table(samples),
            masked,
            failures,
            self._columns(samples),
            self._metric_lists(),
            self._seconds_by_name(),
        )

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

    def _seconds_by_name(self) -> dict[str, float]:
        return dict(zip(self.names, self._seconds))


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
