"""Intervals of what is compared: against all resamples, by hand."""

import json

import numpy as np
import pytest

from tests.analysis.questions import rows_of
from tests.analysis.records import write_record
from tests.analysis.resampling import ends, every

FIRST_S, SECOND_S = (0.40, 0.43, 0.47, 0.52, 0.58), (0.20, 0.26, 0.27, 0.31, 0.33)
"""What five runs, or five iterations of one, took."""


def exact_intervals(first, second):
    """Of the medians of each side, of their difference and of their ratio, in the units of the tables."""
    one, other = every(first, np.median), every(second, np.median)
    return {
        "A [ms]": ends(1e3 * one),
        "B [ms]": ends(1e3 * other),
        "difference [ms]": ends(1e3 * one, 1e3 * other, lambda a, b: b - a),
        "times as fast": ends(one, other, np.divide),
    }


def shown_intervals(row, names):
    groups = {"A [ms]": f"{names[0]} [ms]", "B [ms]": f"{names[1]} [ms]"}
    return {
        key: tuple(row[f"{groups.get(key, key)} {end}"] for end in ("low", "high"))
        for key in exact_intervals((1,), (1,))
    }


def agree(found, expected):
    """Whether each end is where it must be, but for a tenth of the interval: 2000 resamples are not all there are."""
    return all(
        abs(end - true) <= 0.1 * (of[1] - of[0])
        for key, of in expected.items()
        for end, true in zip(found[key], of, strict=True)
    )


@pytest.mark.parametrize("over", ["runs", "iterations"])
def test_intervals_are_as_wide_as_those_of_all_resamples(tmp_path, capsys, over):
    for schedule, times_s in (("dkfac", FIRST_S), ("spdkfac", SECOND_S)):
        if over == "runs":
            for seed, of_run in enumerate(times_s):
                write_record(
                    tmp_path, f"{schedule}{seed}", schedule=schedule, seed=seed, times_s=(9.0, *(3 * [of_run]))
                )
        else:
            write_record(tmp_path, schedule, schedule=schedule, times_s=(9.0, *times_s))
    rows = rows_of(capsys, "compare", "dkfac", "spdkfac", "--among", tmp_path)
    (row,) = (row for row in rows if row["component"] == "iteration")
    assert row["interval over"] == over
    found = shown_intervals(row, ("dkfac", "spdkfac"))
    assert agree(found, exact_intervals(FIRST_S, SECOND_S))
    # Negative control: of other values, of a narrower level, and of swapped sides they are seen to be wrong.
    assert not agree(found, exact_intervals(FIRST_S, [0.3 + 2 * (s - 0.3) for s in SECOND_S]))
    assert not agree(found, exact_intervals([0.45 + 0.5 * (s - 0.45) for s in FIRST_S], SECOND_S))
    assert not agree(found, exact_intervals(SECOND_S, FIRST_S))


def test_intervals_of_components_are_those_of_all_resamples_means(tmp_path, capsys):
    values_s = {"dkfac": (0.010, 0.014, 0.016, 0.021, 0.030), "spdkfac": (0.001, 0.004, 0.006, 0.007, 0.011)}
    for schedule, of in values_s.items():
        for seed, seconds in enumerate(of):
            path = write_record(tmp_path, f"{schedule}{seed}", schedule=schedule, seed=seed)
            summary = json.loads((path / "summary.json").read_text())
            summary["breakdown_s"]["FactorComm"] = seconds
            (path / "summary.json").write_text(json.dumps(summary))
    rows = {row["component"]: row for row in rows_of(capsys, "compare", "dkfac", "spdkfac", "--among", tmp_path)}
    first, second = (1e3 * every(of, np.mean) for of in values_s.values())
    low, high = ends(first, second, lambda a, b: b - a)
    found = tuple(rows["FactorComm"][f"difference [ms] {end}"] for end in ("low", "high"))
    assert found == pytest.approx((low, high), abs=0.05 * (high - low))
    # Negative control: medians have other intervals, and so has one side alone.
    for other in (ends(*(1e3 * every(of, np.median) for of in values_s.values()), lambda a, b: b - a), ends(-first)):
        assert found != pytest.approx(other, abs=0.05 * (high - low))
    assert rows["FactorComm"]["dkfac [ms] low"] == pytest.approx(ends(first)[0], abs=0.3)
    assert rows["FactorComm"]["dkfac [ms] high"] == pytest.approx(ends(first)[1], abs=0.3)


def test_intervals_of_the_table_of_runs_pool_the_baselines_iterations(tmp_path, capsys):
    pooled_s = ((0.40, 0.47), (0.50, 0.58, 0.60))
    for seed, times_s in enumerate(pooled_s):
        write_record(tmp_path, f"d{seed}", schedule="dkfac", seed=seed, times_s=(9.0, *times_s))
    write_record(tmp_path, "s", schedule="spdkfac", times_s=(9.0, *SECOND_S))
    row = next(row for row in rows_of(capsys, tmp_path, "--intervals") if row["schedule"] == "spdkfac")
    found = (row["low of speed-up"], row["high of speed-up"])
    under = every(SECOND_S, np.median)
    (low, high), *others = (
        ends(every(of, np.median), under, np.divide) for of in (sum(pooled_s, ()), pooled_s[0], pooled_s[1])
    )
    assert found == pytest.approx((low, high), abs=0.1 * (high - low))
    for other in others:  # negative control: one baseline run alone
        assert found != pytest.approx(other, abs=0.1 * (high - low))
