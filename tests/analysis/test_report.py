from dataclasses import replace

import pytest

from analysis import report
from analysis.report import Baselines, breakdown_table, runs_table, timeline_table, timeline_tables, wide_table
from analysis.runs import Run, load_runs, load_samples
from kfac.timeline import Timeline
from tests.analysis.records import timeline, write_record


def column(table, title):
    index = [c.full_title for c in table.columns].index(title)
    return [row[index] for row in table.rows]


@pytest.fixture
def runs(tmp_path):
    write_record(tmp_path, "d0", schedule="dkfac", times_s=(9.0, 0.4, 0.4, 0.4))
    write_record(tmp_path, "d1", schedule="dkfac", seed=1, times_s=(9.0, 0.6, 0.6, 0.6))
    write_record(tmp_path, "d2", schedule="dkfac", seed=2, times_s=(9.0, 0.5, 0.5, 0.5))
    write_record(tmp_path, "k", schedule="kfac", world_size=1)
    write_record(tmp_path, "s0", schedule="spdkfac", times_s=(9.0, 0.2, 0.1, 0.3))
    return load_runs([tmp_path])[0]


def test_speedup_is_over_the_median_of_the_comparable_baselines(runs):
    by_id = {run.run_id: run for run in runs}
    baselines = Baselines.among(runs, "dkfac")
    assert baselines.speedup(by_id["s0"]) == pytest.approx(0.5 / 0.2)
    assert baselines.speedup(by_id["d1"]) == pytest.approx(0.5 / 0.6)
    assert baselines.speedup(by_id["k"]) is None  # one rank is compared with one rank only
    assert Baselines.among(runs, "mpdkfac").speedup(by_id["s0"]) is None


def test_another_batch_size_is_no_baseline(tmp_path):
    write_record(tmp_path, "d", schedule="dkfac", batch_size=16)
    write_record(tmp_path, "s", schedule="spdkfac", batch_size=32)
    runs = load_runs([tmp_path])[0]
    assert column(runs_table(runs), "speed-up over dkfac") == [pytest.approx(1.0), None]


def test_only_finished_runs_of_the_same_sweep_are_a_baseline(tmp_path):
    write_record(tmp_path, "d", schedule="dkfac", sweep="one", times_s=(9.0, 0.4, 0.4, 0.4))
    write_record(tmp_path, "s", schedule="spdkfac", sweep="one", times_s=(9.0, 0.2, 0.2, 0.2))
    write_record(tmp_path, "d", schedule="dkfac", sweep="two", times_s=(9.0, 0.8, 0.8, 0.8))
    for status in ("interrupted", "running", "failed"):
        write_record(tmp_path, status, schedule="dkfac", sweep="one", status=status, times_s=(9.0, 1.0, 1.0, 1.0))
    write_record(tmp_path, "s", schedule="spdkfac", sweep="three", times_s=(9.0, 0.2, 0.2, 0.2))
    runs = load_runs([tmp_path])[0]
    baselines = Baselines.among(runs, "dkfac")
    found = {(run.sweep.name, run.run_id): baselines.speedup(run) for run in runs}
    assert found["one", "s"] == pytest.approx(2.0)
    assert found["one", "d"] == found["two", "d"] == 1.0
    assert found["one", "running"] == pytest.approx(0.4)
    assert found["three", "s"] is None
    for table in (runs_table(runs), breakdown_table(runs)):
        assert column(table, "sweep") == [run.sweep.name for run in runs]
    alone = [run for run in runs if run.sweep.name == "one"]
    assert "sweep" not in {c.title for c in runs_table(alone).columns}


def test_sweeps_of_one_name_are_told_apart_by_their_paths(tmp_path):
    for folder in ("a", "b"):
        write_record(tmp_path / folder, "d", schedule="dkfac")
    runs = load_runs([tmp_path])[0]
    assert column(runs_table(runs), "sweep") == [(tmp_path / f / "single").as_posix() for f in ("a", "b")]


def test_a_run_without_iterations_has_no_number_of_them(tmp_path):
    write_record(tmp_path, "none", status="failed", times_s=(), timelines=0, summary=False)
    table = runs_table(load_runs([tmp_path])[0])
    for title in ("iterations", "iteration median [ms]", "iteration n", "speed-up over dkfac"):
        assert column(table, title) == [None]


def test_runs_table_shows_milliseconds_and_intervals_around_the_speedup(runs):
    table = runs_table(runs, samples_s=load_samples(runs)[0])
    assert column(table, "run") == ["d0", "d1", "d2", "k", "s0"]
    assert column(table, "iteration median [ms]")[-1] == pytest.approx(200.0)
    assert column(table, "iteration q25 [ms]")[-1] == pytest.approx(100.0)
    low, high = column(table, "low of speed-up")[-1], column(table, "high of speed-up")[-1]
    assert low <= 2.5 <= high
    assert (low, high) == pytest.approx((0.5 / 0.3, 0.5 / 0.1), rel=0.3)
    assert column(table, "low of speed-up")[3] is None


def test_each_run_is_compared_once_however_many_there_are(runs, monkeypatch):
    """Linear work: with 2,000 records in one sweep, every pair of them took minutes."""
    looked, many = [], [replace(run, seed=seed) for seed in range(40) for run in runs]
    comparable = Run.comparable.func
    monkeypatch.setattr(Run, "comparable", property(lambda run: looked.append(run) or comparable(run)))
    table = runs_table(many)
    assert len(looked) <= 2 * len(many)  # as a baseline and as a row
    assert column(table, "speed-up over dkfac")[-1] == pytest.approx(0.5 / 0.2)


def test_the_baselines_iterations_are_resampled_once_for_all_runs(runs, monkeypatch):
    """They are many, and so are the runs: for each one anew, 10,000 runs took minutes."""
    sizes = []
    real = report.resampled_medians
    monkeypatch.setattr(report, "resampled_medians", lambda of, **options: sizes.append(len(of)) or real(of, **options))
    many = [replace(run, seed=seed) for seed in range(10) for run in runs]
    table = runs_table(many, samples_s=load_samples(runs)[0])
    assert sizes.count(9 * 10) == 1  # of three runs with three iterations each, ten times
    assert len(sizes) == 1 + 4 * 10  # and each run that has a baseline
    assert len(set(column(table, "low of speed-up"))) == 5  # None for the one without


def test_breakdown_table_has_every_kind(runs):
    table = breakdown_table(runs)
    assert column(table, "exposed [ms] BP") == [pytest.approx(40.0)] * 5
    whole = [
        sum(cell or 0.0 for c, cell in zip(table.columns, row, strict=True) if c.group == "exposed [ms]")
        for row in table.rows
    ]
    assert column(table, "recorded [ms]") == [pytest.approx(of) for of in whole]
    assert column(table, "hidden [ms] FactorComm") == [pytest.approx(30.0)] * 5
    assert column(table, "exposed [ms] Precondition") == [None] * 5


def test_wide_table_has_each_column_once(runs):
    wide = wide_table([runs_table(runs), breakdown_table(runs)])
    titles = [c.full_title for c in wide.columns]
    assert len(titles) == len(set(titles))
    assert column(wide, "exposed [ms] BP") == [pytest.approx(40.0)] * 5
    assert column(wide, "run") == [run.run_id for run in runs]


def test_timeline_table_counts_per_rank_what_is_exposed_and_hidden():
    table = timeline_table("x", Timeline.merge([timeline(0, 0.001), timeline(1, 0.001)]))
    rows = {(row[0], row[1]): row[2:] for row in table.rows}
    for rank in (0, 1):
        assert rows[rank, "FactorComm"] == pytest.approx((1, 4.0, 1.0, 3.0, 0.1))
        assert rows[rank, "BP"][:3] == pytest.approx((1, 4.0, 4.0))
        assert rows[rank, "BP"][3] is None
        assert rows[rank, "Other"][2] == pytest.approx(1.0)
        assert "waiting for slower ranks included" in table.notes[0]
        assert sum(r[2] for (k, _), r in rows.items() if k == rank) == pytest.approx(10.0)
    assert "10.00 ms" in table.title


def test_timeline_tables_of_a_run_and_their_errors(tmp_path):
    path = write_record(tmp_path, "a", timelines=2)
    assert len(timeline_tables(path)) == 2
    (one,) = timeline_tables(path, [1])
    assert "iteration 1" in one.title
    with pytest.raises(ValueError, match="iteration 7; it has: 0, 1"):
        timeline_tables(path, [7])
    with pytest.raises(ValueError, match="no timelines"):
        timeline_tables(write_record(tmp_path, "b", timelines=0))
    (tmp_path / "single" / "b" / "timelines" / "iterfoo.rank0.json").write_text("{}")
    with pytest.raises(ValueError, match=r"no timelines: .*iterfoo\.rank0\.json is none"):
        timeline_tables(tmp_path / "single" / "b")
