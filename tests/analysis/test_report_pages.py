"""What the report's page says of curves that coincide, of simulations on another run's costs, and of hidden columns."""

import json
import re

import pytest

from analysis.charts import Line, line_chart
from analysis.comparison import Comparison
from analysis.report_pages import headline, html_report, markdown_report
from experiments.simulated import simulated_timeline
from tests.experiments.tracked import write_run


def comparison_of(folder):
    return Comparison.of([folder])


@pytest.fixture
def pair(tmp_path):
    """A run with cost profiles, and one of another schedule without, which learned the same."""
    measured = write_run(tmp_path)
    other = write_run(tmp_path, run_id="resnet50-dkfac-w2-s0-01234567")
    head = json.loads((other.path / "run.json").read_text())
    (other.path / "run.json").write_text(json.dumps({**head, "schedule": "dkfac"}))
    for name in ("model_profile.json", "cluster_profile.json"):
        (other.path / name).unlink()
    return measured, other


def test_a_plan_without_costs_of_its_own_is_simulated_with_those_of_a_run_like_it(tmp_path, pair):
    measured, other = pair
    assert simulated_timeline(other) is None
    found = {p.label: p for p in comparison_of(tmp_path).pictured()}
    assert found["spdkfac"].costs_of == ""
    assert found["dkfac"].costs_of == measured.head["run_id"]
    assert found["dkfac"].simulated == simulated_timeline(measured)  # the same plan, here
    page = html_report(comparison_of(tmp_path), {})
    assert f"simulated with the costs that {measured.head['run_id']} measured" in page


def test_costs_of_another_machine_or_batch_are_not_taken(tmp_path, pair):
    _, other = pair
    config = json.loads((other.path / "config.json").read_text())
    (other.path / "config.json").write_text(json.dumps({**config, "batch_size": 64}))
    found = {p.run: p for p in comparison_of(tmp_path).pictured()}
    assert found[other.head["run_id"]].simulated is None
    assert "not simulated: no run of this model" in html_report(comparison_of(tmp_path), {})
    assert ", not simulated" in markdown_report(comparison_of(tmp_path), {})


def test_curves_that_lie_on_one_another_are_named_and_show_as_stripes(tmp_path, pair):
    page = html_report(comparison_of(tmp_path), {})
    assert "The losses of spdkfac, dkfac are equal to the last bit" in page or "The losses of dkfac, spdkfac" in page
    same, other = [(0, 1), (1, 2)], [(0, 1), (1, 3)]
    chart = line_chart([Line("a", 0, same), Line("b", 1, other), Line("c", 2, same)], "x", "y")
    assert [float(width) for width in re.findall(r"stroke-width:([\d.]+)", chart)] == [4.6, 1.8, 1.8]


def test_curves_that_differ_are_not_called_equal(tmp_path, pair):
    measured, _ = pair
    file = measured.path / "metrics.jsonl"
    file.write_text(file.read_text().replace('"loss": 0.5', '"loss": 0.5000001', 1))
    assert "equal to the last bit" not in html_report(comparison_of(tmp_path), {})


def test_between_numbers_of_ranks_there_is_nothing():
    lines = [Line("a", 0, [(1, 10.0), (2, 12.0)], dots=True)]
    assert ">1.5<" in line_chart(lines, "ranks", "ms")
    whole = line_chart(lines, "ranks", "ms", whole=True)
    assert ">1.5<" not in whole
    assert ">2<" in whole


def test_the_headline_tells_the_time_for_people(tmp_path, pair):
    assert re.search(r"the latest of 20\d\d-\d\d-\d\d \d\d:\d\d UTC\.$", headline(comparison_of(tmp_path)))
