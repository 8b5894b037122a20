"""The commands that answer questions: each number beside one worked out here from the records' own files."""

import json
from statistics import median

import pytest

from analysis.__main__ import main
from analysis.pairs import pair_up, pairs_table
from analysis.runs import load_runs, load_samples
from kfac.timeline import Span, Timeline
from tests.analysis.questions import rows_of
from tests.analysis.records import timeline, write_record


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
