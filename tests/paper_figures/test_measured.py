"""What is measured in several sweeps and settings: nothing on one axis that is not comparable, every label legible."""

import json
from dataclasses import replace

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from paper_figures import measured_breakdown
from paper_figures.__main__ import main
from paper_figures.measured import Measured, Setting, measured, settings
from paper_figures.style import COLUMN_IN, PAGE_IN, paper_style
from tests.analysis.records import write_record
from tests.legibility import problems

LONG = "spdkfac+pipelining=none+inverse_broadcast=at_end"


@pytest.fixture
def drawn():
    """Draws the figure of a folder; fonts and sizes stay as drawn until the test is over."""

    def draw(folder):
        figure = measured_breakdown.draw(measured(folder)[0])
        FigureCanvasAgg(figure).draw()
        return figure

    with paper_style():
        yield draw


def assert_legible(figure):
    assert problems(figure) == []


def test_each_sweep_model_and_setting_has_its_own_panel(tmp_path, drawn):
    for sweep, seconds in (("fast", 0.01), ("slow", 4.0)):
        for schedule in ("dkfac", "spdkfac"):
            times_s = (9.0, seconds, seconds, seconds)
            write_record(tmp_path, f"run-{schedule}", schedule=schedule, sweep=sweep, times_s=times_s)
    write_record(tmp_path, "damped", schedule="dkfac", sweep="slow", kfac={"damping": 0.1, "fisher": "empirical"})
    write_record(tmp_path, "less", schedule="dkfac", sweep="slow", kfac={"damping": 0.01, "fisher": "empirical"})
    shown = drawn(tmp_path)
    start, end = "resnet20, digits, batch 32 per rank, ", ", measured"
    titles = [axes.get_title().replace("\n", " ").split(start) for axes in shown.axes]
    assert titles[0] == ["fast: ", "measured"]
    assert {title for sweep, title in titles if sweep == "slow: "} == {
        f"kfac=None{end}",
        f"kfac.damping=0.1, kfac.fisher=empirical{end}",
        f"kfac.damping=0.01, kfac.fisher=empirical{end}",
    }
    assert [len(axes.get_xticklabels()) for axes in shown.axes if "None" in axes.get_title()] == [2]
    assert_legible(shown)


def test_the_caption_counts_recorded_and_all_iterations(tmp_path, drawn):
    write_record(tmp_path, "a", schedule="dkfac", timelines=2)
    write_record(tmp_path, "b", schedule="dkfac", seed=1, timelines=3)
    write_record(tmp_path, "c", schedule="spdkfac", timelines=1, times_s=(9.0, 0.1, 0.1, 0.1, 0.1))
    caption = drawn(tmp_path).axes[0].get_xlabel().replace("\n", " ")
    assert caption == "bars: mean of 1-5 recorded iterations; dot: median and quartiles of all 4-6"


@pytest.mark.parametrize(
    ("schedules", "ranks", "width_in", "rotation"),
    [
        (("dkfac", "spdkfac"), 1, COLUMN_IN, 0),
        (("dkfac", "mpdkfac", "spdkfac", "spdkfac+pipelining=none"), 1, PAGE_IN, 0),
        (("dkfac", "spdkfac", LONG), 3, PAGE_IN, 90),
        (("dkfac", "spdkfac", LONG), 9, None, 90),
    ],
)
def test_labels_neither_touch_nor_leave_the_page(tmp_path, drawn, schedules, ranks, width_in, rotation):
    for i, schedule in enumerate(schedules):
        for n in range(ranks):
            times_s = (9.0, 4.0, 3.0, 5.0)  # four digits of milliseconds
            name = f"{i}-{n}"
            write_record(tmp_path, name, schedule=schedule, world_size=n + 1, times_s=times_s, timelines=1)
    shown = drawn(tmp_path)
    (axes,) = shown.axes
    labels = [label.get_text() for label in axes.get_xticklabels()]
    assert len(set(labels)) == len(labels) == len(schedules) * ranks
    assert {label.get_rotation() for label in axes.get_xticklabels()} == {rotation}
    assert shown.get_figwidth() == width_in or (width_in is None and shown.get_figwidth() > PAGE_IN)
    assert_legible(shown)


def test_one_run_id_in_two_sweeps_is_two_numbers(tmp_path):
    for sweep in ("one", "two"):
        write_record(tmp_path / "runs", "same", schedule="dkfac", sweep=sweep)
    names = ["measured_iteration_time", "measured_breakdown"]
    assert main([*names, "--runs", str(tmp_path / "runs"), "--out", str(tmp_path)]) == 0
    for name in names:
        data = json.loads((tmp_path / f"{name}.provenance.json").read_text())
        assert set(data["inputs"]["runs"]) == {"one/same", "two/same"}
    lines = (tmp_path / "measured_iteration_time.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ["sweep", "one", "two"]


@pytest.mark.parametrize(("sweeps", "folder"), [(("try", "reproduce"), "runs/reproduce"), (("try",), "runs")])
def test_runs_of_make_reproduce_are_the_default(tmp_path, monkeypatch, capsys, sweeps, folder):
    for sweep in sweeps:
        write_record(tmp_path / "runs", "a", schedule="dkfac", sweep=sweep)
    monkeypatch.chdir(tmp_path)
    assert main(["measured_iteration_time", "--out", "out"]) == 0
    assert f"run records in {folder}\n" in capsys.readouterr().out
    data = json.loads((tmp_path / "out/measured_iteration_time.provenance.json").read_text())
    assert list(data["inputs"]["runs"]) == ["a" if "reproduce" in sweeps else "try/a"]
    assert main(["models", "--out", "out"]) == 0
    assert "run records" not in capsys.readouterr().out


def test_the_check_of_labels_finds_a_clipped_one(tmp_path, drawn):
    write_record(tmp_path, "a", schedule="dkfac", times_s=(9.0, 4.0, 3.0, 5.0))
    shown = drawn(tmp_path)
    assert_legible(shown)
    shown.set_layout_engine("none")
    shown.axes[0].set_position((0.05, 0.2, 0.9, 0.5))
    FigureCanvasAgg(shown).draw()
    with pytest.raises(AssertionError, match="iteration time"):
        assert_legible(shown)


def test_the_work_grows_with_the_number_of_records_not_of_pairs(tmp_path, monkeypatch):
    write_record(tmp_path, "a", schedule="dkfac")
    run = measured(tmp_path)[0][0].run
    groups = [Measured((replace(run, config={**run.config, "kfac": {"damping": i}}),), tmp_path) for i in range(50)]
    compared = []
    monkeypatch.setattr(Setting, "__eq__", lambda a, b: compared.append(a) or vars(a) == vars(b))
    found = settings(groups)
    assert len({setting.others for setting in found}) == 50
    assert len(compared) <= 10 * len(groups)  # of 2,500 pairs
