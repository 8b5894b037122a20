import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import matplotlib.image
import numpy as np
import pytest

from kfac.planning.shipped_profiles import load_shipped_cluster, load_shipped_model
from kfac.schedules import make_plan
from kfac.simulation import simulate
from paper_figures import breakdown, convergence, factor_sizes, interference, inverse_costs, motivation, published
from paper_figures.__main__ import ITEMS, main
from paper_figures.bars import HATCHES, TAGS, draw
from paper_figures.item import Provenance
from paper_figures.style import paper_style
from tests.analysis.records import write_record
from tests.paper_figures.conftest import FILES, rows


def test_every_item_writes_its_files_with_provenance(out):
    expected = {f"{name}{suffix}" for name, suffixes in FILES.items() for suffix in (*suffixes, ".provenance.json")}
    assert {path.name for path in out.iterdir()} == expected
    assert set(FILES) == set(ITEMS)


def test_iteration_time_table_holds_the_published_numbers_exactly(out):
    for key, row in zip(published.model_keys(), rows(out / "iteration_time.csv"), strict=True):
        d, mpd, spd = (float(row[f"published {a}"]) for a in published.ALGORITHMS)
        assert [d, mpd, spd] == [float(published.iteration_s(key, a)) for a in published.ALGORITHMS]
        entry = published.load()["iteration_time"][key]
        assert float(row["published SP1"]) == pytest.approx(entry["speedup_over_D-KFAC"], abs=5e-5)
        assert float(row["published SP2"]) == pytest.approx(entry["speedup_over_MPD-KFAC"], abs=5e-5)


@pytest.mark.parametrize(("algorithm", "schedule"), [("D-KFAC", "dkfac"), ("SPD, cost rule", "spdkfac")])
def test_simulated_column_is_what_the_named_schedule_simulates_to(out, algorithm, schedule):
    model, cluster = load_shipped_model("resnet50"), load_shipped_cluster("paper64")
    expected_s = simulate(make_plan(schedule, model, cluster), model, cluster).iteration_s
    row = rows(out / "iteration_time.csv")[0]
    assert float(row[f"simulated ideally {algorithm}"]) == expected_s


def test_the_rows_with_interference_are_the_fits(out):
    recorded = json.loads(interference.PATH.read_text())["relative_error"]
    for key, row in zip(published.model_keys(), rows(out / "iteration_time.csv"), strict=True):
        for algorithm, error in recorded[key].items():
            seconds = float(row[f"simulated with interference {algorithm}"])
            assert seconds / float(row[f"published {algorithm}"]) - 1 == pytest.approx(error, abs=6e-5)


def test_all_four_cells_of_the_ablation_are_simulated(out):
    for key, row in zip(published.model_keys(), rows(out / "ablation.csv"), strict=True):
        cells = ("-Pipe-LBP", "+Pipe-LBP", "-Pipe+LBP", "+Pipe+LBP")
        assert [float(row[f"published {c}"]) for c in cells] == [float(published.ablation_s(key, c)) for c in cells]
        neither, pipe, lbp, both = (float(row[f"simulated with interference {c}"]) for c in cells)
        assert both < min(pipe, lbp) <= max(pipe, lbp) < neither
        table = json.loads((out / "iteration_time.provenance.json").read_text())["numbers"]
        assert neither == table[f"{key}/simulated with interference/D-KFAC"]["value"]
        assert both == table[f"{key}/simulated with interference/SPD-KFAC"]["value"]


def test_overlap_table_agrees_with_the_published_bars(out):
    found = [row for row in rows(out / "overlap.csv") if row["tag"] == "published"]
    for key, row in zip(published.model_keys(), found, strict=True):
        d, spd = (float(published.breakdown_s(key, a)["FactorComm"]) for a in ("D-KFAC", "SPD-KFAC"))
        assert float(row["hidden"]) == pytest.approx(1 - spd / d)
        assert 0 < float(row["possible (derived)"]) <= 1
    (measured,) = (row for row in rows(out / "overlap.csv") if row["tag"] == "measured")
    assert float(measured["hidden"]) == pytest.approx(3 / 4)  # of every record's timeline: 3 hidden, 1 exposed


def test_measured_points_of_the_profile_are_drawn_and_led_back_to(out):
    for name, path, seconds in (
        ("communication_costs", "measured/all_reduce/1e+06", 0.011),
        ("inverse_costs", "measured/inverse/512", 6e-4),
    ):
        data = json.loads((out / f"{name}.provenance.json").read_text())
        assert data["numbers"][path]["value"] == seconds
        assert data["inputs"]["profile"]["file"] == "profiles/cluster_profile.json"
    assert not any("0.0159" in path.read_text() for path in out.glob("*costs.provenance.json"))  # recollection


def test_the_crossing_is_where_both_cost_the_same():
    inverse, broadcast = inverse_costs.curves()[1].cost, inverse_costs.broadcasts()[1].cost
    (dim,) = inverse_costs.crossings(inverse, broadcast)
    assert inverse(dim) == pytest.approx(broadcast(dim), rel=0.01)
    assert inverse(dim / 2) < broadcast(dim / 2)
    assert inverse(2 * dim) > broadcast(2 * dim)


def test_factor_sizes_count_every_factor_once():
    for key in published.model_keys():
        sizes = factor_sizes.sizes(key)
        model = published.model(key)
        assert (sum(sizes["A"]), sum(sizes["G"])) == (model.a_elements, model.g_elements)
        every = sizes["A"] + sizes["G"]
        entry = published.load()["models"][key]
        assert (min(every), max(every)) == (entry["min_packed_elements"], entry["max_packed_elements"])
        assert factor_sizes.EDGES[0] <= min(every)
        assert max(every) < factor_sizes.EDGES[-1]


def test_convergence_draws_the_median_and_range_of_seeds():
    seeds = [
        {"curve": [[1, 5.0], [2, 1.0]]},
        {"curve": [[1, 3.0], [2, 2.0], [3, 0.0]]},
        {"curve": [[1, 4.0], [2, 9.0]]},
    ]
    assert convergence.curve(seeds) == [(1, 3.0, 4.0, 5.0), (2, 1.0, 2.0, 9.0)]
    assert convergence.curve([]) == []


def test_motivation_bars_add_up():
    for bar in motivation.bars(Provenance("motivation")):
        if bar.tag == "P":
            total = published.load()["motivation"]["total_s"][bar.group]
            assert bar.total_s == pytest.approx(total, abs=1.01e-4)
        else:  # of another run of D-KFAC, 2.1 % faster
            assert bar.total_s == pytest.approx(published.load()["motivation"]["total_s"][bar.group], rel=0.03)


def test_models_table_holds_the_published_counts(out):
    for key, row in zip(published.model_keys(), rows(out / "models.csv"), strict=True):
        model = published.model(key)
        assert (int(row["A elements"]), int(row["G elements"])) == (model.a_elements, model.g_elements)
        assert (int(row["parameters"]), int(row["batch/GPU"])) == (model.parameters, model.batch_size)


def test_measured_table_groups_seeds_and_leaves_out_what_is_not_finished(out):
    by_schedule = {row["schedule"]: row for row in rows(out / "measured_iteration_time.csv")}
    assert list(by_schedule) == ["kfac", "dkfac", "mpdkfac", "spdkfac"]
    spd = by_schedule["spdkfac"]
    assert float(spd["measured median [ms]"]) == pytest.approx(210.0)  # of 200 and 220
    assert (int(spd["measured runs"]), int(spd["measured n"])) == (2, 6)
    assert float(spd["measured dkfac / schedule"]) == pytest.approx(400 / 210)
    assert float(spd["measured mpdkfac / schedule"]) == pytest.approx(300 / 210)
    assert by_schedule["kfac"]["measured dkfac / schedule"] == ""


def test_every_number_leads_to_a_source_an_input_or_a_run(out, runs):
    for name in FILES:
        data = json.loads((out / f"{name}.provenance.json").read_text())
        assert data["numbers"]
        for path, number in data["numbers"].items():
            tag = number["tag"]
            if "one_minus" in number:
                assert number["value"] == pytest.approx(1 - data["numbers"][number["one_minus"]]["value"])
            elif "ratio_of" in number:
                top, bottom = (data["numbers"][p]["value"] for p in number["ratio_of"])
                assert number["value"] == pytest.approx(top / bottom)
            elif tag == "published":
                assert number["source"], path
            elif tag == "measured" and "input" not in number:
                for run in number["runs"]:
                    assert (runs / data["inputs"]["runs"][run]["path"] / "run.json").exists()
            else:
                assert tag in ("simulated", "traced", "derived", "code", "measured")
                assert number["input"] in data["inputs"], path
            assert tag in path or tag in ("measured", "traced") or name in ("models", "overlap")


COUNTS = ("ranks", "batch/rank", "measured runs", "measured n")
"""Columns that say what a row is of."""


def cells_without_provenance(out, name):
    """Numbers of a table, in its units or in thousandths of them, that its provenance does not know."""
    known = [n["value"] for n in json.loads((out / f"{name}.provenance.json").read_text())["numbers"].values()]
    known = np.array([value for value in known if value is not None], dtype=float)
    lost = []
    for row in rows(out / f"{name}.csv"):
        for column, text in row.items():
            try:
                value = float(text)
            except ValueError:
                continue
            if column not in COUNTS and not np.isclose(known[:, None] * [1, 1e3, 1e-6], value, rtol=1e-6).any():
                lost.append((column, value))
    return lost


@pytest.mark.parametrize("name", [name for name, suffixes in FILES.items() if ".csv" in suffixes])
def test_every_number_of_a_table_has_provenance(out, name, tmp_path):
    assert cells_without_provenance(out, name) == []
    for suffix in (".csv", ".provenance.json"):
        (tmp_path / f"{name}{suffix}").write_text((out / f"{name}{suffix}").read_text())
    data = json.loads((tmp_path / f"{name}.provenance.json").read_text())
    half = dict(list(data["numbers"].items())[::2])
    (tmp_path / f"{name}.provenance.json").write_text(json.dumps({**data, "numbers": half}))
    assert cells_without_provenance(tmp_path, name), "a number that is not there is missed"


def test_tables_say_published_simulated_and_measured(out):
    text = (out / "iteration_time.tex").read_text()
    assert r"\multicolumn{5}{c}{published} & \multicolumn{5}{c}{simulated with interference}" in text
    assert "ResNet-50 & 0.8525 & 0.7635 & 0.6755 & 1.26 & 1.13 &" in text
    assert "published D-KFAC" in (out / "iteration_time.md").read_text()
    assert " measured" not in text
    assert "Which of the paper's SP1 and SP2 is which is inferred." in text
    assert "Preconditioning is inside FactorComp" in text
    assert "published" not in (out / "measured_iteration_time.md").read_text()


def test_bars_of_the_figure_are_as_high_as_the_numbers():
    keys = published.model_keys()
    with paper_style():
        figure = draw({key: breakdown.bars(key, Provenance(key)) for key in keys}, "s")
    assert len(set(HATCHES.values())) == len(TAGS)
    for key, axes in zip(keys, figure.axes, strict=True):
        tops = {}
        for patch in axes.patches:
            x = round(patch.get_x(), 6)
            tops[x] = max(tops.get(x, 0.0), patch.get_y() + patch.get_height())
        heights = [tops[x] for x in sorted(tops)]
        assert len(heights) == 9  # per algorithm: published, with interference, ideally
        expected = [float(published.iteration_s(key, a)) for a in published.ALGORITHMS]
        assert heights[::3] == pytest.approx(expected, abs=1.01e-4)
        assert axes.get_ylim()[1] > max(heights)


def test_pictures_open_at_the_width_of_a_page(out):
    assert matplotlib.image.imread(out / "breakdown.png").shape[1] == 2100
    assert matplotlib.image.imread(out / "measured_breakdown.png").shape[1] == 1020
    for name in ("breakdown", "measured_breakdown"):
        data = (out / f"{name}.pdf").read_bytes()
        assert data.startswith(b"%PDF")
        assert b"CreationDate" not in data


def test_the_table_is_printed_and_the_damaged_record_named(runs, tmp_path, capsys):
    assert main(["iteration_time", "measured_iteration_time", "--out", str(tmp_path), "--runs", str(runs)]) == 0
    shown = capsys.readouterr()
    line = next(x for x in shown.out.splitlines() if x.startswith("ResNet-50"))
    assert line.split()[1:6] == ["0.8525", "0.7635", "0.6755", "1.26", "1.13"]
    assert f"skipped {runs / 'single' / 'damaged'}" in shown.err


def test_without_runs_the_measured_table_says_so_and_an_old_figure_goes(tmp_path, capsys):
    old = tmp_path / "measured_breakdown.png"
    old.write_bytes(b"old")
    (tmp_path / "none").mkdir()
    names = ["measured_iteration_time", "measured_breakdown"]
    assert main([*names, "--out", str(tmp_path), "--runs", str(tmp_path / "none")]) == 0
    assert "No finished run records" in capsys.readouterr().out
    assert "No finished run records" in (tmp_path / "measured_iteration_time.md").read_text()
    assert not old.exists()


def test_unknown_names_are_an_error_that_names_the_choices(capsys):
    assert main(["nothing"]) == 2
    assert "models, factor_sizes, motivation" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["--out", "/dev/null"], ["--out", "/proc/x"], ["--out", "OUT", "--runs", "nothere"]]
)
def test_folders_that_do_not_serve_are_one_line(tmp_path, capsys, arguments):
    arguments = [str(tmp_path) if argument == "OUT" else argument for argument in arguments]
    assert main(["models", *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert arguments[-1] in shown.err


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("run.json", "[]"),
        ("run.json", '{"schema": 1}'),
        ("summary.json", '{"iterations": 1, "iteration_s": {"median": "x", "q25": 0.1, "q75": 0.1, "n": 1}}'),
        ("summary.json", '{"iterations": 1, "iteration_s": {"median": 0, "q25": 0, "q75": 0, "n": 1}}'),
        ("environment.json", "[]"),
        ("environment.json", '{"gpus": null}'),
    ],
)
def test_a_bad_record_leaves_the_others_and_is_named(tmp_path, capsys, file, text):
    write_record(tmp_path / "runs", "good", schedule="dkfac")
    bad = write_record(tmp_path / "runs", "bad", schedule="spdkfac")
    (bad / file).write_text(text)
    (bad / "timelines" / "iterfoo.rank0.json").write_text("{")
    names = ["measured_iteration_time", "measured_breakdown"]
    assert main([*names, "--out", str(tmp_path), "--runs", str(tmp_path / "runs")]) == 0
    assert [row["schedule"] for row in rows(tmp_path / "measured_iteration_time.csv")] == ["dkfac"]
    (warning,) = capsys.readouterr().err.splitlines()
    assert warning.startswith(f"warning: skipped {bad}: ")
    assert file in warning


def test_listing_and_help_without_torch():
    shown = subprocess.run(
        [sys.executable, "-m", "paper_figures", "--help"], capture_output=True, text=True, check=True
    )
    assert all(name in shown.stdout for name in ITEMS)
    code = "import sys, paper_figures.__main__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_share_of_communication_stands_beside_the_measured_times(tmp_path):
    """Made by hand: 10 + 20 + 30 ms of computing; 3 ms of traffic exposed and 12 ms hidden: 15 / 60."""
    from paper_figures.measured import Measured

    run = SimpleNamespace(
        breakdown_s={"FF": 0.01, "BP": 0.02, "FactorComp": 0.03, "FactorComm": 0.002, "GradComm": 0.001, "Other": 0.5},
        hidden_s={"FactorComm": 0.008, "GradComm": 0.004, "InverseComm": 1.0},
    )
    assert Measured((run,), Path()).communication_share() == pytest.approx(0.25)
    assert Measured((SimpleNamespace(breakdown_s={}, hidden_s={}),), Path()).communication_share() is None


def test_the_published_share_of_communication():
    """ResNet-50: (0.1700 + 0.0648) / (0.1320 + 0.2115) s."""
    assert published.communication_share("resnet50") == pytest.approx(0.2348 / 0.3435)
    assert published.communication_share("resnet152") == pytest.approx(0.5981 / 0.3067)
