"""What an evaluation found: every answer's reward, and the scores made of them, with intervals.

Prompts are what is drawn at random; the answers to one prompt are not independent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any

import numpy as np

from posttrain.evaluation.spec import EvalSpec

LEVEL = 0.95
Z = 1.959963984540054  # of the normal distribution, two-sided
RESAMPLES = 2000
NUMBERS_AT_ONCE = 4_000_000
WILSON, BOOTSTRAP, NONE = "wilson", "bootstrap", "none"


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts and its interval of 95%; NaN where there is nothing to say."""

    value: float
    low: float
    high: float
    method: str  # "wilson", "bootstrap" or "none"

    def as_json(self) -> dict[str, float | str | None]:
        numbers = {"value": self.value, "low": self.low, "high": self.high}
        return {**{name: None if math.isnan(x) else x for name, x in numbers.items()}, "interval": self.method}


@cache
def pass_at_k(samples: int, right: int, k: int) -> float:
    """How likely one of k answers is right, from `right` among `samples`; NaN where there are fewer than k.

    1 - C(n - c, k) / C(n, k) with c right answers among n has no bias (Chen et al., arXiv:2107.03374).
    """
    if samples < k:
        return math.nan
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def wilson(mean: float, count: int) -> tuple[float, float]:
    """The interval of a share. Also valid, if wide, for the mean of any numbers between 0 and 1: none varies more.

    (p + z^2/2n +- z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n)          (Wilson, JASA 22, 1927)
    """
    middle = mean + Z * Z / (2 * count)
    half = Z * math.sqrt(mean * (1 - mean) / count + Z * Z / (4 * count * count))
    scale = 1 + Z * Z / count
    # The ends are exact where nothing or everything is right; rounding would put the mean outside of its interval.
    return min(max((middle - half) / scale, 0.0), mean), max(min((middle + half) / scale, 1.0), mean)


def bootstrap(columns: np.ndarray, seed: int, resamples: int = RESAMPLES) -> np.ndarray:
    """(prompts, M) -> (M, 2): percentile intervals of the columns' means, prompts drawn with replacement (Efron, 1979).

    NaN stands for a prompt that says nothing about a column. The same seed draws the same prompts.
    """
    count = len(columns)
    rng = np.random.default_rng(seed)
    valid = ~np.isnan(columns)
    values, weights = np.where(valid, columns, 0.0), valid.astype(float)
    means = []
    block = max(NUMBERS_AT_ONCE // count, 1)
    for start in range(0, resamples, block):
        drawn = rng.multinomial(count, np.full(count, 1 / count), size=min(block, resamples - start))
        sums, counts = drawn @ values, drawn @ weights
        means.append(np.divide(sums, counts, out=np.full_like(sums, np.nan), where=counts > 0))
    tail = 100 * (1 - LEVEL) / 2
    return np.nanpercentile(np.concatenate(means), [tail, 100 - tail], axis=0).T


def estimates(columns: dict[str, np.ndarray], shares: set[str], binomial: bool, seed: int) -> dict[str, Estimate]:
    """Column -> its mean over prompts with an interval.

    `shares` are columns of numbers between 0 and 1. Of those Wilson's interval is taken where each prompt was asked once
    (`binomial`) and where all prompts agree, of which a bootstrap would say that there is no doubt at all.
    """
    table = np.stack([*columns.values()], 1)
    known = {name: values[~np.isnan(values)] for name, values in columns.items()}
    varies = [name for name, values in known.items() if len(values) > 1]
    intervals = dict(zip(columns, bootstrap(table, seed))) if varies else {}
    found = {}
    for name, values in known.items():
        mean = float(values.mean()) if len(values) else math.nan
        if name in shares and len(values) and (binomial or np.ptp(values) == 0):
            found[name] = Estimate(mean, *wilson(mean, len(values)), WILSON)
        elif name in varies:
            found[name] = Estimate(mean, *map(float, intervals[name]), BOOTSTRAP)
        else:
            found[name] = Estimate(mean, math.nan, math.nan, NONE)
    return found


REWARD, GAIN = "reward", "gain"


@dataclass
class Answers:
    """N answers, in whatever order."""

    rows: np.ndarray  # (N,) of the dataset
    rewards: np.ndarray  # (N, K) by reward; NaN: no opinion
    totals: np.ndarray  # (N,) weighted sum; NaN: not judged
    lengths: np.ndarray  # (N,) tokens
    truncated: np.ndarray  # (N,) bool
    failed: np.ndarray  # (N,) bool: could not be written, or a reward failed

    @classmethod
    def joined(cls, parts: list[Answers]) -> Answers:
        """Those of several processes, ordered by row."""
        whole = {one.name: np.concatenate([getattr(part, one.name) for part in parts]) for one in fields(cls)}
        order = np.argsort(whole["rows"], kind="stable")
        return cls(**{name: values[order] for name, values in whole.items()})


@dataclass
class EvalResult:
    """The scores of one task."""

    spec: EvalSpec
    reward_names: list[str]
    answers: Answers
    seconds: dict[str, float] = field(default_factory=dict)  # "generate", "reward"
    engine: str = ""
    samples: list[dict[str, Any]] = field(default_factory=list)  # texts, where they were asked for

    def __post_init__(self) -> None:
        self.scores = self._scores()

    @property
    def threshold(self) -> float | None:
        """The reward from which on an answer passes; None: rewards are not of that kind."""
        if self.spec.threshold is not None:
            return self.spec.threshold
        judged = self.answers.totals[~np.isnan(self.answers.totals)]
        return 1.0 if len(judged) and np.isin(judged, (0.0, 1.0)).all() else None

    def _scores(self) -> dict[str, Estimate]:
        """`reward`, and `pass@1` to `pass@K` where answers pass or do not."""
        answers, samples = self.answers, self.spec.samples
        prompts, place = np.unique(answers.rows, return_inverse=True)
        judged = ~np.isnan(answers.totals)
        counts = np.bincount(place[judged], minlength=len(prompts))
        sums = np.bincount(place[judged], weights=answers.totals[judged], minlength=len(prompts))
        columns = {REWARD: np.divide(sums, counts, out=np.full(len(prompts), np.nan), where=counts > 0)}
        if self.threshold is not None:
            right = np.bincount(place[judged & (answers.totals >= self.threshold)], minlength=len(prompts))
            for k in range(1, samples + 1):
                pairs = zip(counts.tolist(), right.tolist())
                columns[f"pass@{k}"] = np.array([pass_at_k(n, c, k) for n, c in pairs])
        judged_totals = answers.totals[judged]
        is_share = bool(len(judged_totals)) and bool(np.isin(judged_totals, (0.0, 1.0)).all())
        picked = self._picked()
        shares = {name for name in columns if name != REWARD or is_share}
        shares |= {name for name in picked if is_share and name != GAIN}
        return estimates(columns | picked, shares, samples == 1, self.spec.seed)

    def _picked(self) -> dict[str, np.ndarray]:
        """(prompts,) rewards of the first answer and of the one that `select_by` picks, and their difference; NaN where a prompt
        has no reward for one of them."""
        count = self.spec.best_of
        if count is None:
            return {}
        totals = self.answers.totals.reshape(-1, count)
        liked = np.where(np.isnan(totals), np.nan, self.answers.rewards[:, -1].reshape(-1, count))
        picked = np.nan_to_num(liked, nan=-np.inf).argmax(1)
        best = np.where(np.isnan(liked).all(1), np.nan, totals[np.arange(len(totals)), picked])
        gain = best - totals[:, 0]
        known = ~np.isnan(gain)
        first, best = (np.where(known, values, np.nan) for values in (totals[:, 0], best))
        return {f"first-of-{count}": first, f"best-of-{count}": best, GAIN: gain}

    def standard_errors(self) -> dict[str, float]:
        """Of what `best_of` has found: the deviation between prompts, divided by the root of their number."""
        known = {name: values[~np.isnan(values)] for name, values in self._picked().items()}
        return {n: float(v.std(ddof=1) / math.sqrt(len(v))) for n, v in known.items() if len(v) > 1}

    @property
    def score(self) -> Estimate:
        """The one number: pass@1 where answers pass or do not, else the mean reward."""
        return self.scores.get("pass@1", self.scores[REWARD])

    @property
    def prompts(self) -> int:
        return len(np.unique(self.answers.rows))

    @property
    def tokens_per_second(self) -> float:
        return float(self.answers.lengths.sum() / max(self.seconds.get("generate", 0.0), 1e-9))

    def metrics(self) -> dict[str, float]:
        """Plain numbers for a log: of pass@k those of k = 1, 2, 4, ... and the last."""
        shown = {REWARD, *(f"pass@{2**i}" for i in range(12)), f"pass@{self.spec.samples}", *self._picked()}
        found = {"score": self.score.value}
        for name, estimate in self.scores.items():
            if name in shown:
                found |= {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}
        found |= {f"rewards/{name}": value for name, value in self._rewards_by_name().items()}
        found |= {"truncated": float(self.answers.truncated.mean()), "length": float(self.answers.lengths.mean())}
        found |= {"failed": float(self.answers.failed.sum()), "seconds": sum(self.seconds.values())}
        return {name: value for name, value in found.items() if not math.isnan(value)}

    def _rewards_by_name(self) -> dict[str, float]:
        """Means of the single rewards, where there are several."""
        if len(self.reward_names) < 2:
            return {}
        columns = zip(self.reward_names, self.answers.rewards.T)
        return {name: float(np.nanmean(values)) for name, values in columns if not np.isnan(values).all()}

    def as_json(self) -> dict[str, Any]:
        spec = self.spec
        asked = {
            name: getattr(spec, name)
            for name in ("name", "samples", "temperature", "top_p", "top_k", "max_new_tokens", "limit", "seed")
        }
        return {
            **asked,
            "data": str(spec.data) if isinstance(spec.data, str) else None,
            "rewards": self.reward_names,
            "threshold": self.threshold,
            "prompts": self.prompts,
            "answers": len(self.answers.rows),
            "failed": int(self.answers.failed.sum()),
            "score": self.score.as_json(),
            **{name: estimate.as_json() for name, estimate in self.scores.items()},
            **({"standard_errors": self.standard_errors()} if spec.best_of else {}),
            "reward_means": self._rewards_by_name(),
            "truncated": float(self.answers.truncated.mean()),
            "mean_length": float(self.answers.lengths.mean()),
            "tokens_per_second": self.tokens_per_second,
            "seconds": self.seconds,
            "engine": self.engine,
        }
