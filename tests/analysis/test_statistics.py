import statistics

import numpy as np
import pytest
import scipy.stats

from analysis.statistics import bootstrap_median, bootstrap_speedup, spread


@pytest.mark.parametrize("n", [2, 3, 4, 7, 100])
def test_quartiles_are_the_standard_librarys_inclusive_ones(n):
    values = np.random.default_rng(n).lognormal(size=n).tolist()
    found = spread(values)
    assert (found.q25, found.median, found.q75) == pytest.approx(
        tuple(statistics.quantiles(values, n=4, method="inclusive")), rel=1e-12
    )
    assert found.n == n
    assert found.interquartile == pytest.approx(scipy.stats.iqr(values))


def test_one_value_has_no_spread_and_none_is_an_error():
    assert spread([2.0]) == spread([2.0, 2.0, 2.0]).__class__(2.0, 2.0, 2.0, 1)
    with pytest.raises(ValueError, match="no values"):
        spread([])


def test_bootstrap_interval_agrees_with_scipys():
    values = np.random.default_rng(0).lognormal(sigma=0.3, size=200)
    reference = scipy.stats.bootstrap(
        (values,), np.median, method="percentile", n_resamples=20_000, rng=np.random.default_rng(1), batch=1000
    ).confidence_interval
    found = bootstrap_median(values.tolist(), resamples=20_000, seed=2)
    width = reference.high - reference.low
    assert found == pytest.approx((reference.low, reference.high), abs=0.05 * width)


def test_bootstrap_interval_covers_the_true_median_as_often_as_it_says():
    generator = np.random.default_rng(3)
    covered = 0
    for trial in range(300):
        low, high = bootstrap_median(generator.normal(5.0, 1.0, size=40).tolist(), resamples=400, seed=trial)
        covered += low <= 5.0 <= high
    assert 0.90 <= covered / 300 <= 0.99


def test_speedup_interval_contains_the_ratio_and_shrinks_with_more_values():
    generator = np.random.default_rng(4)
    slow, fast = generator.normal(2.0, 0.1, size=400), generator.normal(1.0, 0.05, size=400)
    wide = bootstrap_speedup(slow[:20].tolist(), fast[:20].tolist())
    narrow = bootstrap_speedup(slow.tolist(), fast.tolist())
    assert narrow[0] < 2.0 < narrow[1]
    assert narrow[1] - narrow[0] < wide[1] - wide[0]
    assert narrow == bootstrap_speedup(slow.tolist(), fast.tolist())
    assert bootstrap_speedup(fast.tolist(), slow.tolist())[1] < 0.6


def test_a_level_outside_zero_and_one_is_an_error():
    with pytest.raises(ValueError, match="level=95"):
        bootstrap_median([1.0, 2.0], level=95)
