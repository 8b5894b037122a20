"""Medians, quartiles and bootstrap intervals of iteration times.

Iterations of one run are not independent (a busy machine slows many in a row), so an interval over the iterations of a
single run says how well that run's median is known, not how much it would change in another run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

Samples = Sequence[float]


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


def _resampled(
    values: Samples, resamples: int, generator: np.random.Generator, statistic: Callable[..., Any]
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    data = np.asarray(values, dtype=np.float64)
    picks = generator.integers(0, len(data), size=(resamples, len(data)))
    found: np.ndarray[tuple[int], np.dtype[np.float64]] = statistic(data[picks], axis=1)
    return found


def _resampled_medians(
    values: Samples, resamples: int, generator: np.random.Generator
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return _resampled(values, resamples, generator, np.median)


def bootstrap_median(
    values: Samples, *, level: float = 0.95, resamples: int = 2000, seed: int = 0
) -> tuple[float, float]:
    """The percentile bootstrap interval of the median.

    Args:
        values: the sample.
        level: of confidence, between 0 and 1.
        resamples: how often to resample.
        seed: of the resampling; equal seeds give equal intervals.
    """
    medians = _resampled_medians(values, resamples, np.random.default_rng(seed))
    return _central(medians, level)


def bootstrap_speedup(
    baseline: Samples, values: Samples, *, level: float = 0.95, resamples: int = 2000, seed: int = 0
) -> tuple[float, float]:
    """The percentile bootstrap interval of ``median(baseline) / median(values)``, resampling both."""
    generator = np.random.default_rng(seed)
    over = _resampled_medians(baseline, resamples, generator)
    under = _resampled_medians(values, resamples, generator)
    return _central(over / under, level)


def bootstrap_mean(
    values: Samples, *, level: float = 0.95, resamples: int = 2000, seed: int = 0
) -> tuple[float, float]:
    """The percentile bootstrap interval of the mean."""
    return _central(_resampled(values, resamples, np.random.default_rng(seed), np.mean), level)


def bootstrap_difference(
    first: Samples,
    second: Samples,
    *,
    of: Literal["median", "mean"],
    level: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> tuple[float, float]:
    """The percentile bootstrap interval of the second sample's median or mean less the first one's, resampling both."""
    generator = np.random.default_rng(seed)
    statistic: Callable[..., Any] = np.median if of == "median" else np.mean
    start, end = (_resampled(values, resamples, generator, statistic) for values in (first, second))
    return _central(end - start, level)


def _central(statistic: np.ndarray[tuple[int], np.dtype[np.float64]], level: float) -> tuple[float, float]:
    if not 0.0 < level < 1.0:
        raise ValueError(f"level={level} is not between 0 and 1")
    low, high = np.quantile(statistic, [(1.0 - level) / 2.0, (1.0 + level) / 2.0])
    return float(low), float(high)
