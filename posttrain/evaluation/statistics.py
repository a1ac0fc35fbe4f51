"""Scores and how sure one can be of them. Prompts are what is drawn at random; the answers to one prompt are not independent.

pass@k   1 - C(n - c, k) / C(n, k)  for a prompt with c right answers among n, then the mean over prompts: without bias
         (Chen et al., arXiv:2107.03374)
Wilson   (p + z^2/2n +- z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n)          (Wilson, JASA 22, 1927)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import numpy as np

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
    """How likely one of k answers is right, from `right` among `samples`; NaN where there are fewer than k."""
    if samples < k:
        return math.nan
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def wilson(mean: float, count: int) -> tuple[float, float]:
    """The interval of a share. Also valid, if wide, for the mean of any numbers between 0 and 1: none varies more."""
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
    told = {name: values[~np.isnan(values)] for name, values in columns.items()}
    varies = [name for name, values in told.items() if len(values) > 1]
    intervals = dict(zip(columns, bootstrap(table, seed))) if varies else {}
    found = {}
    for name, values in told.items():
        mean = float(values.mean()) if len(values) else math.nan
        if name in shares and len(values) and (binomial or np.ptp(values) == 0):
            found[name] = Estimate(mean, *wilson(mean, len(values)), WILSON)
        elif name in varies:
            found[name] = Estimate(mean, *map(float, intervals[name]), BOOTSTRAP)
        else:
            found[name] = Estimate(mean, math.nan, math.nan, NONE)
    return found
