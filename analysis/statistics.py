"""Medians, quartiles and bootstrap intervals of iteration times.

Iterations of one run are not independent (a busy machine slows many in a row), so an interval over the iterations of a
single run says how well that run's median is known, not how much it would change in another run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

Samples = Sequence[float]
Resampled = np.ndarray[tuple[int], np.dtype[np.float64]]
"""A statistic of each resample."""
Places = np.ndarray[tuple[int], np.dtype[np.int64]]
RESAMPLES = 2000
PICKS_AT_ONCE = 1_000_000
"""So many values are drawn at a time: of long runs all at once would fill the memory."""


@dataclass(frozen=True)
class Spread:
    """The middle of a sample and its noise.

    Args:
        median, q25, q75: the quartiles.
        n: number of values.
    """

    median: float
    q25: float
    q75: float
    n: int

    @property
    def interquartile(self) -> float:
        """``q75 - q25``."""
        return self.q75 - self.q25


def spread(values: Samples) -> Spread:
    """Quartiles with linear interpolation between order statistics.

    Raises:
        ValueError: if there are no values.
    """
    if len(values) == 0:
        raise ValueError("no values: a spread needs at least one")
    q25, median, q75 = np.quantile(np.asarray(values, dtype=np.float64), [0.25, 0.5, 0.75])
    return Spread(float(median), float(q25), float(q75), len(values))


def _resampled_means(values: Samples, resamples: int, generator: np.random.Generator) -> Resampled:
    data = np.asarray(values, dtype=np.float64)
    at_once = max(1, PICKS_AT_ONCE // len(data))
    parts = (min(at_once, resamples - start) for start in range(0, resamples, at_once))
    return np.concatenate([data[generator.integers(0, len(data), size=(n, len(data)))].mean(axis=1) for n in parts])


@lru_cache(maxsize=256)
def _median_places(count: int, resamples: int, seed: int, stream: int) -> tuple[Places, Places]:
    """Which two of ``count`` sorted values are in the middle of each resample: of an odd count, one and the same.

    Drawing with replacement is ``values[floor(count * u)]`` for uniform u, so the k-th smallest draw is at the k-th
    smallest u, and that has the distribution Beta(k, count + 1 - k) (David and Nagaraja, Order Statistics, 2003, 2.3).
    One or two random numbers thus do exactly what ``count`` draws and their sorting would.
    """
    generator = np.random.default_rng([seed, stream, count])
    middle = (count + 1) // 2
    lower = generator.beta(middle, count + 1 - middle, size=resamples)
    # Above the middle one lie count - middle more, uniform between it and 1: the next is the least of them.
    upper = lower if count % 2 else lower + (1 - lower) * generator.beta(1, count - middle, size=resamples)
    low, high = (np.minimum((count * u).astype(np.int64), count - 1) for u in (lower, upper))
    return low, high


def resampled_medians(values: Samples, *, resamples: int = RESAMPLES, seed: int = 0, stream: int = 0) -> Resampled:
    """The medians of bootstrap resamples of a sample.

    Args:
        values: the sample.
        resamples: how many.
        seed: of the resampling; equal seeds give equal medians.
        stream: samples that are resampled independently of each other need different ones.
    """
    data = np.sort(np.asarray(values, dtype=np.float64))
    low, high = _median_places(len(data), resamples, seed, stream)
    return data[low] + 0.5 * (data[high] - data[low])


def bootstrap_median(
    values: Samples, *, level: float = 0.95, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float, float]:
    """The percentile bootstrap interval of the median.

    Args:
        values: the sample.
        level: of confidence, between 0 and 1.
        resamples: how often to resample.
        seed: of the resampling; equal seeds give equal intervals.
    """
    return central(resampled_medians(values, resamples=resamples, seed=seed), level)


def bootstrap_speedup(
    baseline: Samples, values: Samples, *, level: float = 0.95, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float, float]:
    """The percentile bootstrap interval of ``median(baseline) / median(values)``, resampling both."""
    over = resampled_medians(baseline, resamples=resamples, seed=seed)
    return central(over / resampled_medians(values, resamples=resamples, seed=seed, stream=1), level)


def bootstrap_mean(
    values: Samples, *, level: float = 0.95, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float, float]:
    """The percentile bootstrap interval of the mean."""
    return central(_resampled_means(values, resamples, np.random.default_rng(seed)), level)


def bootstrap_difference(
    first: Samples,
    second: Samples,
    *,
    of: Literal["median", "mean"],
    level: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> tuple[float, float]:
    """The percentile bootstrap interval of the second sample's median or mean less the first one's, resampling both."""
    if of == "median":
        start, end = (
            resampled_medians(values, resamples=resamples, seed=seed, stream=i)
            for i, values in enumerate((first, second))
        )
    else:
        generator = np.random.default_rng(seed)
        start, end = (_resampled_means(values, resamples, generator) for values in (first, second))
    return central(end - start, level)


def central(statistic: Resampled, level: float = 0.95) -> tuple[float, float]:
    """The ends between which the middle share of a resampled statistic lies.

    Raises:
        ValueError: if the share is not between 0 and 1.
    """
    if not 0.0 < level < 1.0:
        raise ValueError(f"level={level} is not between 0 and 1")
    low, high = np.quantile(statistic, [(1.0 - level) / 2.0, (1.0 + level) / 2.0])
    return float(low), float(high)
