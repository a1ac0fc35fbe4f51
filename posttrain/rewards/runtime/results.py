"""What goes into a round of rewards and what comes out of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

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
