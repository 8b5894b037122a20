"""The commands that answer questions: each number beside one worked out here from the records' own files."""

import csv
import io
import json
import sys
from statistics import median

import numpy as np
import pytest

from analysis.__main__ import main
from analysis.pairs import pair_up, pairs_table
from analysis.runs import load_runs, load_samples
from kfac.timeline import Span, Timeline
from tests.analysis.records import timeline, write_record
from tests.analysis.resampling import ends, every


@pytest.fixture
def runs(tmp_path):
    """Three seeds of two schedules, on 2 ranks; the second one's factors and times are known."""
    for seed in range(3):
        write_record(tmp_path, f"d{seed}", schedule="dkfac", seed=seed, times_s=(9.0, 0.4 + seed / 100, 0.4, 0.5))
        path = write_record(
            tmp_path, f"s{seed}", schedule="spdkfac", seed=seed, times_s=(9.0, 0.2, 0.2 + seed / 100, 0.3)
        )
        summary = json.loads((path / "summary.json").read_text())
        summary["breakdown_s"] |= {"FactorComm": 0.001 * (seed + 1)}
        summary["hidden_s"] |= {"FactorComm": 0.05}
        (path / "summary.json").write_text(json.dumps(summary))
    return tmp_path


def rows_of(capsys, *arguments):
    assert main([*map(str, arguments), "--format", "json"]) == 0
    return json.loads(capsys.readouterr().out)["rows"]


def test_compare_has_every_component_with_intervals(runs, capsys):
    rows = {row["component"]: row for row in rows_of(capsys, "compare", "dkfac", "spdkfac", "--among", runs)}
    medians = [
        [median(times) for times in side]
        for side in (
            [(0.4, 0.4, 0.5), (0.41, 0.4, 0.5), (0.42, 0.4, 0.5)],
            [(0.2, 0.2, 0.3), (0.2, 0.21, 0.3), (0.2, 0.22, 0.3)],
        )
    ]
    first, second = (1e3 * median(side) for side in medians)
    iteration = rows["iteration"]
    assert (iteration["dkfac [ms] middle"], iteration["spdkfac [ms] middle"]) == pytest.approx((first, second))
    assert iteration["difference [ms] middle"] == pytest.approx(second - first)
    assert iteration["times as fast middle"] == pytest.approx(first / second)
    assert iteration["difference [ms] low"] <= second - first <= iteration["difference [ms] high"] < 0
    # Any resample of three lies between the least and the greatest.
    low, high = iteration["dkfac [ms] low"], iteration["dkfac [ms] high"]
    assert 1e3 * min(medians[0]) - 1e-9 <= low <= first <= high <= 1e3 * max(medians[0]) + 1e-9
    factors = rows["FactorComm"]
    assert factors["spdkfac [ms] middle"] == pytest.approx(2.0)
    assert factors["difference [ms] middle"] == pytest.approx(2.0 - 10.0)
    assert rows["FactorComm hidden"]["difference [ms] middle"] == pytest.approx(20.0)
    assert rows["FactorComm hidden"]["times as fast middle"] is None
    assert {row["interval over"] for row in rows.values()} == {"runs"}


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


def test_compare_of_single_runs_has_intervals_over_their_iterations(runs, capsys):
    rows = rows_of(capsys, "compare", runs / "single" / "d0", runs / "single" / "s0")
    assert [row["interval over"] for row in rows if row["component"] == "iteration"] == ["iterations"]
    # One iteration was recorded: its components have no interval.
    assert {row["interval over"] for row in rows if row["component"] != "iteration"} == {""}


def test_the_components_of_single_runs_come_from_their_timelines(tmp_path, capsys):
    for name, units in (("a", (1, 3)), ("b", (2, 4))):
        path = write_record(tmp_path, name, timelines=0)
        for i, unit in enumerate(units):
            for rank in range(2):
                timeline(rank, 0.01 * unit).to_chrome_trace(path / "timelines" / f"iter{i:06d}.rank{rank}.json")
    rows = {r["component"]: r for r in rows_of(capsys, "compare", tmp_path / "single/a", tmp_path / "single/b")}
    # InverseComp is 2 units of 10 ms: 20 and 60, 40 and 80.
    inverse = rows["InverseComp"]
    assert inverse["difference [ms] middle"] == pytest.approx(20.0)
    low, high = inverse["difference [ms] low"], inverse["difference [ms] high"]
    assert (low, high) == pytest.approx((-20.0, 60.0))


def test_runs_of_other_settings_are_not_compared_and_are_named(runs, capsys):
    write_record(runs, "w4", schedule="spdkfac", world_size=4)
    rows = rows_of(capsys, "compare", "dkfac", "spdkfac", "--among", runs)
    assert len([row for row in rows if row["component"] == "iteration"]) == 1
    assert main(["compare", "dkfac", "spdkfac", "--among", str(runs)]) == 0
    assert "warning: only B has resnet20 on digits, 4 ranks, batch 32" in capsys.readouterr().err
    found, _ = load_runs([runs])
    both = [run for run in found if run.world_size == 4], [run for run in found if run.world_size == 2]
    assert pair_up(*both)[0] == []
    assert main(["compare", str(runs / "single" / "w4"), str(runs / "single" / "d0")]) == 2
    assert "no setting in common" in capsys.readouterr().err


def test_several_settings_have_their_own_rows(runs):
    write_record(runs, "d4", schedule="dkfac", world_size=4)
    write_record(runs, "s4", schedule="spdkfac", world_size=4)
    found, _ = load_runs([runs])
    sides = [[run for run in found if run.schedule == name] for name in ("dkfac", "spdkfac")]
    table, problems = pairs_table(pair_up(*sides)[0], ("A", "B"), load_samples(found)[0])
    assert not problems
    ranks = [c.title for c in table.columns].index("ranks")
    assert {row[ranks] for row in table.rows} == {2, 4}


def test_a_killed_run_counts_only_where_no_other_is_there(runs):
    write_record(runs, "killed", schedule="dkfac", status="running", summary=False, times_s=(9.0, 5.0, 5.0, 5.0))
    found, _ = load_runs([runs])
    sides = [[run for run in found if run.schedule == name] for name in ("dkfac", "spdkfac")]
    ((pair,), _) = pair_up(*sides)
    assert [run.run_id for run in pair.first] == ["d0", "d1", "d2"]
    alone = [run for run in found if run.run_id == "killed"]
    assert [run.run_id for run in pair_up(alone, sides[1])[0][0].first] == ["killed"]


def test_breakdown_per_group(runs, capsys):
    rows = {row["runs of"]: row for row in rows_of(capsys, "breakdown", runs)}
    assert rows["spdkfac"]["exposed [ms] FactorComm"] == pytest.approx(2.0)
    assert rows["spdkfac"]["iteration [ms]"] == pytest.approx(20 + 40 + 2 + 20 + 10)
    assert rows["spdkfac"]["hidden of communication"] == pytest.approx(50 / 52)
    shares = {row["runs of"]: row for row in rows_of(capsys, "breakdown", runs, "--share")}
    exposed = [value for key, value in shares["spdkfac"].items() if key.startswith("exposed")]
    assert sum(exposed) == pytest.approx(1.0)


def test_scaling(runs, capsys):
    write_record(runs, "d4", schedule="dkfac", world_size=4, times_s=(9.0, 0.5, 0.5, 0.5))
    rows = {row["ranks"]: row for row in rows_of(capsys, "scaling", runs, "--schedule", "dkfac")}
    (efficiency,) = [value for key, value in rows[4].items() if key.startswith("efficiency")]
    assert efficiency == pytest.approx(0.41 / 0.5) or efficiency == pytest.approx(0.4 / 0.5)


def test_exported_runs_have_every_key_of_their_configuration(runs, capsys):
    assert main(["export", str(runs)]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert len(rows) == 6
    assert [row["config.warmup"] for row in rows] == ["1"] * 6
    assert rows[0]["commit"] == "0" * 40
    assert float(rows[0]["exposed [ms] BP"]) == pytest.approx(40.0)


def test_exported_iterations_and_spans(runs, capsys):
    rows = rows_of(capsys, "export", runs, "--rows", "iterations", "--schedule", "dkfac")
    assert len(rows) == 3 * 5
    assert [row["iteration_s"] for row in rows[:4]] == [9.0, 0.4, 0.4, 0.5]
    assert rows[4]["kind"] == "eval"
    spans = rows_of(capsys, "export", runs, "--rows", "spans", "--schedule", "dkfac")
    assert len(spans) == 3 * 2 * 4
    assert (spans[0]["kind"], spans[0]["start_s"], spans[0]["end_s"]) == ("FactorComm", 0.03, 0.07)


def test_parquet_holds_what_csv_does(runs, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    write_record(runs, "g", schedule="sgd", seed=7, kfac={"damping": "auto"})
    write_record(runs, "h", schedule="kfac", seed=8, kfac={"damping": 0.5})
    for suffix in ("csv", "parquet"):
        assert main(["export", str(runs), "--output", str(tmp_path / f"out.{suffix}")]) == 0
    table = parquet.read_table(tmp_path / "out.parquet")
    expected = list(csv.reader((tmp_path / "out.csv").open()))
    assert table.column_names == expected[0]
    for i, name in enumerate(table.column_names):
        for value, text in zip(table[name].to_pylist(), (row[i] for row in expected[1:]), strict=True):
            assert ("" if value is None else str(value)) == text or float(value) == float(text)
    assert str(table.schema.field("seed").type) == "int64"
    assert table.schema.metadata[b"title"] == b"Runs"


def test_columns_are_chosen_by_name_or_pattern_in_the_given_order(runs, tmp_path, capsys):
    options = ["--columns", "seed, Schedule,config.w*,median"]
    assert main(["export", str(runs), *options]) == 0
    header, *rows = csv.reader(io.StringIO(capsys.readouterr().out))
    assert header == ["seed", "schedule", "config.warmup", "iteration median [ms]"]
    assert [row[:2] for row in rows] == [[str(seed), name] for name in ("dkfac", "spdkfac") for seed in range(3)]
    assert [float(row[3]) for row in rows[:3]] == pytest.approx([400, 410, 420])
    for suffix in ("md", "tex", "txt"):  # also of columns that people are not shown otherwise
        assert main(["export", str(runs), *options, "--output", str(tmp_path / f"x.{suffix}")]) == 0
        text = (tmp_path / f"x.{suffix}").read_text()
        assert "config.warmup" in text
        assert "FactorComm" not in text
    assert main([str(runs), "--columns", "schedule,FF"]) == 0  # each table has those that it knows
    out = capsys.readouterr().out
    assert "exposed [ms]" in out
    assert "iteration" not in out.split("Iteration times")[0]
    assert main(["timeline", str(runs / "single" / "d0"), "--columns", "rank,kind,exposed"]) == 0
    assert "hidden [ms]" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ("warm", "did you mean config.warmup?"),
        ("sched", "did you mean schedule"),
        ("zzzz", "there are: schedule, model"),
    ],
)
def test_a_column_that_is_not_there_is_named_with_some_that_are(runs, capsys, columns, words):
    assert main(["export", str(runs), "--columns", f"schedule,{columns}"]) == 2
    shown = capsys.readouterr()
    assert f"error: --columns: no column '{columns}'; {words}" in shown.err
    assert (shown.err.count("\n"), shown.out) == (1, "")


def test_latex_has_the_columns_that_a_page_has_room_for(runs, capsys):
    write_record(runs, "k", schedule="kfac", seed=9, kfac={f"option{i}": i for i in range(130)})
    write_record(runs, "l", schedule="kfac", seed=8, kfac={f"option{i}": -i for i in range(130)})
    assert main(["export", str(runs), "--format", "csv"]) == 0
    assert len(capsys.readouterr().out.splitlines()[0].split(",")) > 130
    assert main(["export", str(runs), "--schedule", "dkfac", "--format", "latex"]) == 0
    shown = capsys.readouterr()
    aligns = [line.split("}{")[1] for line in shown.out.splitlines() if line.startswith(r"\begin{tabular}")]
    assert [len(of) - 1 <= 16 for of in aligns] == [True, True]
    assert "All rows: schedule dkfac, model resnet20, data digits, ranks 2" in shown.out
    assert shown.err == ""
    # What cannot be set is said, with the remedy.
    assert main(["export", str(runs), "--schedule", "kfac", "--format", "latex"]) == 0
    assert "columns: choose some with --columns, as in --columns 'seed,kfac.option1" in capsys.readouterr().err
    for i in range(70):
        write_record(runs, f"m{i}", schedule="mpdkfac", seed=i)
    assert main(["export", str(runs), "--schedule", "mpdkfac", "--format", "latex"]) == 0
    assert "70 rows: choose some of the runs" in capsys.readouterr().err


def test_parquet_without_its_library_names_the_extra(runs, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert main(["export", str(runs), "--output", str(tmp_path / "x.parquet")]) == 2
    assert "pip install 'spdkfac[parquet]'" in capsys.readouterr().err
    assert not (tmp_path / "x.parquet").exists()


@pytest.mark.parametrize(("suffix", "mark"), [(".md", "| dkfac |"), (".tex", "\\toprule"), (".txt", "exposed [ms]")])
def test_output_files(runs, tmp_path, capsys, suffix, mark):
    path = tmp_path / "new" / f"t{suffix}"
    assert main([str(runs), "--output", str(path)]) == 0
    assert mark in path.read_text()
    assert capsys.readouterr().out == f"{path}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compare", "nowhere", "{runs}"], "no folder nowhere; for a schedule or a run's id say --among"),
        (["compare", "dkfac", "nonsense", "--among", "{runs}"], "'nonsense' below"),
        (["compair", "{runs}"], "no folder compair and no command of that name; commands: timeline, diff"),
        (["scaling", "{runs}"], "world_size=1,2,4"),
        (["export", "{runs}", "--output", "x.xls"], "choices: .csv"),
        (["diff", "nowhere"], "no run record in nowhere"),
        (["diff", "nowhere.json", "{runs}/single/d0"], "no nowhere.json: give a run's directory"),
        (["diff", "{runs}/single/d0"], "cannot be simulated: it has no plan.json"),
        (["diff", "{runs}/single/d0", "{runs}/single/s0", "--iteration", "7"], "no timeline of iteration 7; it has: 0"),
        (["convert", "{runs}/single/d0", "--output", "x.pdf"], "choices: .json"),
        (["convert", "{runs}/single/d0", "{runs}/single/s0", "--output", "x.json"], "rank 0 is in several"),
        (["timeline", "{runs}/single/d0/run.json"], "nor is it a trace of torch.profiler"),
        (["{runs}", "--schedule", "nonsense"], "there are schedule: dkfac, spdkfac"),
    ],
)
def test_mistakes_name_the_fault_and_the_remedy(runs, capsys, arguments, message):
    assert main([text.replace("{runs}", str(runs)) for text in arguments]) in (1, 2)
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.err.count("\n") == 1
    assert shown.out == ""


def test_a_run_without_iterations_or_timelines(tmp_path, capsys):
    write_record(tmp_path, "new", times_s=(), status="running", summary=False, timelines=0)
    assert main([str(tmp_path)]) == 0
    assert main(["breakdown", str(tmp_path)]) == 2
    assert "timeline.count=1" in capsys.readouterr().err
    assert main(["compare", str(tmp_path), str(tmp_path)]) == 2
    assert "has finished an iteration" in capsys.readouterr().err


def test_every_damaged_record_is_named(runs, capsys):
    for i, text in enumerate(("{", "", "[]", '{"schema": 99}', "\x00")):
        (write_record(runs, f"bad{i}") / "run.json").write_text(text)
    (write_record(runs, "binary") / "config.json").write_bytes(b"\xff\xfe")
    (write_record(runs, "short") / "summary.json").unlink()
    for command in ("breakdown", "export"):
        assert main([command, str(runs)]) == 0
        shown = capsys.readouterr().err
        for name in ("bad0", "bad1", "bad2", "bad3", "bad4", "binary", "short"):
            assert f"warning: skipped {runs / 'single' / name}: " in shown


def test_diff_of_two_runs(runs, tmp_path, capsys):
    page = tmp_path / "d.html"
    arguments = ("diff", runs / "single" / "d0", runs / "single" / "s0", "--html", page)
    assert main([*map(str, arguments)]) == 0
    out = capsys.readouterr().out
    assert "s0 against d0: +0.00 ms" in out
    assert "By layer and message" in out
    text = page.read_text()
    assert "Difference per kind" in text
    assert "Difference per layer and message" in text
    assert not [word for word in ("http:", "https:", "src=", "<link") if word in text]


def test_convert_writes_what_it_reads(runs, tmp_path, capsys):
    source = runs / "single" / "d0"
    for suffix in ("json", "html", "png", "et"):
        assert main(["convert", str(source), "--output", str(tmp_path / f"t.{suffix}")]) == 0
    read = Timeline.from_chrome_trace(tmp_path / "t.json")
    assert read.spans == Timeline.merge([timeline(0, 0.01), timeline(1, 0.01)]).spans
    assert [(tmp_path / f"t.{rank}.et").exists() for rank in range(3)] == [True, True, False]
    # The traces of two ranks, given one by one, are the run again.
    ranks = [str(source / "timelines" / f"iter000000.rank{rank}.json") for rank in range(2)]
    assert main(["convert", *ranks, "--output", str(tmp_path / "both.json")]) == 0
    assert Timeline.from_chrome_trace(tmp_path / "both.json").spans == read.spans


def test_simulated_against_measured_of_a_run_with_profiles(tmp_path, capsys):
    from kfac.planning import ClusterProfile, LinearCost, ModelProfile, PolynomialCost
    from kfac.planning.profiles import LayerProfile
    from kfac.schedules import make_plan

    layer = LayerProfile(name="fc", a_dim=10, g_dim=5, gradient_elements=50, forward_s=0.001, backward_s=0.002)
    model = ModelProfile(name="m", layers=(layer,))
    line, cube = LinearCost(1e-4, 0.0), PolynomialCost((1e-3,))
    cluster = ClusterProfile(world_size=2, all_reduce=line, reduce=line, broadcast=line, inverse=cube)
    path = write_record(tmp_path, "a", timelines=0)
    plan = make_plan("dkfac", model, cluster)
    for name, value in (("plan", plan), ("model_profile", model), ("cluster_profile", cluster)):
        (path / f"{name}.json").write_text(json.dumps(value.to_dict()))
    spans = (Span(0, "compute", "FF", "forward", 0, 0.004), Span(1, "compute", "FF", "forward", 0, 0.004))
    for span in spans:
        Timeline((span,)).to_chrome_trace(path / "timelines" / f"iter000003.rank{span.rank}.json")
    assert main(["diff", str(path), "--iteration", "3"]) == 0
    out = capsys.readouterr().out
    assert "a against a, simulated" in out
    (forward,) = [line.split() for line in out.splitlines() if line.startswith("FF")][:1]
    assert (forward[1], forward[4], forward[7]) == ("1.00", "4.00", "+3.00")
