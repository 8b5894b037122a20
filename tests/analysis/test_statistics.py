import statistics

import numpy as np
import pytest
import scipy.stats

from analysis import statistics as ours
from analysis.statistics import (
    bootstrap_difference,
    bootstrap_mean,
    bootstrap_median,
    bootstrap_speedup,
    central,
    resampled_medians,
    spread,
)
from tests.analysis.resampling import every


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


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6])
def test_resampled_medians_are_as_frequent_as_among_all_resamples(n):
    values = np.random.default_rng(n).permutation([1.0, 2.0, 4.0, 8.0, 16.0, 32.0][:n])
    found = resampled_medians(values, resamples=100_000, seed=5)
    expected = every(values, np.median)

    def p_value(of):
        atoms = np.unique(of)
        shares = np.array([np.mean(of == atom) for atom in atoms])
        seen = np.array([np.sum(found == atom) for atom in atoms])
        if seen.sum() < len(found):
            return 0.0  # there are medians that cannot be
        return scipy.stats.chisquare(seen, shares * len(found)).pvalue if len(atoms) > 1 else 1.0

    assert p_value(expected) > 1e-3
    if n > 2:  # negative control: the draws' lower middle one, and medians of fewer draws
        assert p_value(every(values, lambda draws, axis: np.sort(draws, axis)[:, n // 2 - 1])) < 1e-9
        fewer = resampled_medians(values[: n - 1], resamples=100_000, seed=5)
        assert scipy.stats.ks_2samp(fewer, found).pvalue < 1e-9


def test_different_streams_are_independent_and_equal_ones_equal():
    values = np.random.default_rng(6).normal(size=31)
    one, other = (resampled_medians(values, resamples=20_000, stream=stream) for stream in (0, 1))
    assert abs(scipy.stats.spearmanr(one, other).statistic) < 0.03
    assert np.array_equal(one, resampled_medians(values, resamples=20_000, stream=0))
    # Equal streams would make a ratio of equal samples certain.
    assert bootstrap_speedup(values + 9, values + 9)[0] < 1 < bootstrap_speedup(values + 9, values + 9)[1]


@pytest.mark.parametrize("of", ["ratio of medians", "difference of medians", "difference of means", "mean"])
def test_intervals_cover_what_is_true_as_often_as_they_say_and_narrower_ones_less(of):
    generator = np.random.default_rng(7)
    trials, covered, narrow = 600, 0, 0
    for trial in range(trials):
        first, second = generator.normal(4.0, 0.4, size=40), generator.normal(2.0, 0.4, size=30)

        def interval(level, first=first, second=second, trial=trial):
            options = {"level": level, "resamples": 400, "seed": trial}
            if of == "mean":
                return bootstrap_mean(first, **options)
            if of == "ratio of medians":
                return bootstrap_speedup(first, second, **options)
            return bootstrap_difference(first, second, of=of.split()[-1].removesuffix("s"), **options)

        truth = {"ratio of medians": 2.0, "mean": 4.0}.get(of, -2.0)
        low, high = interval(0.95)
        covered += low <= truth <= high
        low, high = interval(0.6)
        narrow += low <= truth <= high
    assert 0.91 <= covered / trials <= 0.975
    assert 0.5 <= narrow / trials <= 0.72  # negative control: the bounds above tell widths apart


def test_an_interval_of_a_difference_of_means_is_as_wide_as_welchs():
    generator = np.random.default_rng(8)
    first, second = generator.normal(4.0, 0.4, size=60), generator.normal(2.0, 0.2, size=60)
    low, high = bootstrap_difference(first, second, of="mean", resamples=20_000)
    welch = scipy.stats.ttest_ind(second, first, equal_var=False).confidence_interval()
    assert high - low == pytest.approx(welch.high - welch.low, rel=0.04)
    assert (low, high) == pytest.approx((welch.low, welch.high), abs=0.02)


def test_means_that_are_drawn_in_parts_are_means(monkeypatch):
    values = np.random.default_rng(9).normal(3.0, 1.0, size=50)
    whole = bootstrap_mean(values, resamples=5000)
    monkeypatch.setattr(ours, "PICKS_AT_ONCE", 333)
    parts = bootstrap_mean(values, resamples=5000)
    assert parts == pytest.approx(whole, abs=0.03)
    assert bootstrap_mean(values, resamples=5001)[0] > 2


def test_a_million_iterations_take_no_memory_of_resamples_times_iterations():
    values = np.random.default_rng(10).lognormal(size=1_000_000)
    low, high = central(resampled_medians(values))
    # The asymptotic width: 2 * 1.96 / (2 f(median) sqrt(n)), f(1) = 1 / sqrt(2 pi).
    assert high - low == pytest.approx(1.96 * np.sqrt(2 * np.pi) / 1000, rel=0.1)
