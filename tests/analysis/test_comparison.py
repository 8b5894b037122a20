"""A report compares what may be compared, shows every number with its interval, and is one file that loads nothing."""

import json
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest

from analysis.__main__ import main
from analysis.charts import Line, breakdown_chart, line_chart, timeline_chart
from analysis.comparison import Comparison, differences
from analysis.comparison_tables import all_tables, learning_table, overview_table, scaling_table
from analysis.report_pages import html_report, html_table, write_report
from analysis.statistics import bootstrap_median, bootstrap_speedup
from analysis.tables import Column, Table
from experiments.plotly_view import breakdown_figure, timeline_figure
from experiments.timeline_ranks import Shown
from kfac.timeline import KIND_COLORS, Span, Timeline
from tests.analysis.records import timeline, write_record


def write_sweep(tmp_path):
    for world_size in (2, 4):
        for seed in range(3):
            base = 0.4 + seed / 100 + (world_size - 2) / 20
            for schedule, factor in (("dkfac", 1.0), ("spdkfac", 0.5)):
                write_record(
                    tmp_path,
                    f"{schedule}-{world_size}-{seed}",
                    schedule=schedule,
                    world_size=world_size,
                    seed=seed,
                    times_s=(9.0, *([base * factor] * 6)),
                    kfac={"damping": 0.03},
                    schedule_={"name": schedule},
                )
    return tmp_path


@pytest.fixture
def comparison(tmp_path):
    return Comparison.of([write_sweep(tmp_path)])


def cells(table, title):
    index = [c.full_title for c in table.columns].index(title)
    return {row[0]: row[index] for row in table.rows}


def test_runs_that_differ_only_by_seed_are_one_group(comparison):
    assert [(group.label, len(group.runs)) for group in comparison.groups] == [
        ("dkfac w2", 3),
        ("dkfac w4", 3),
        ("spdkfac w2", 3),
        ("spdkfac w4", 3),
    ]


def test_the_overview_has_medians_and_intervals_over_runs(comparison):
    table = overview_table(comparison)
    assert cells(table, "iteration [ms] median")["dkfac w2"] == pytest.approx(410)
    assert cells(table, "speed-up over dkfac median")["spdkfac w4"] == pytest.approx(2)
    low, high = bootstrap_median([0.4, 0.41, 0.42])
    assert cells(table, "iteration [ms] low")["dkfac w2"] == pytest.approx(1e3 * low)
    assert cells(table, "iteration [ms] high")["dkfac w2"] == pytest.approx(1e3 * high)
    low, _ = bootstrap_speedup([0.5, 0.51, 0.52], [0.25, 0.255, 0.26])
    assert cells(table, "speed-up over dkfac low")["spdkfac w4"] == pytest.approx(low)


def test_one_run_has_an_interval_over_its_iterations(tmp_path):
    write_record(tmp_path, "s", times_s=(9.0, 0.1, 0.2, 0.3, 0.4, 0.5))
    table = overview_table(Comparison.of([tmp_path]))
    low, high = bootstrap_median([0.1, 0.2, 0.3, 0.4, 0.5])
    assert cells(table, "iteration [ms] low")["spdkfac"] == pytest.approx(1e3 * low)
    assert cells(table, "iteration [ms] high")["spdkfac"] == pytest.approx(1e3 * high)
    assert cells(table, "speed-up over dkfac median")["spdkfac"] is None


def test_scaling_is_over_the_smallest_world(comparison):
    table = scaling_table(comparison)
    assert [row[0] for row in table.rows] == [2, 4]
    titles = [c.full_title for c in table.columns]
    assert table.rows[1][titles.index("efficiency dkfac")] == pytest.approx(0.41 / 0.51)
    assert table.rows[0][titles.index("iteration [ms] spdkfac")] == pytest.approx(205)


def test_learning_and_differences(comparison):
    table = learning_table(comparison)
    # The helper's losses fall by 0.1 per iteration from 2.0 on; of 7, the last is 1.4.
    assert cells(table, "training loss after 100%")["dkfac w2, seed 0"] == pytest.approx(1.4)
    assert cells(table, "seconds")["spdkfac w2, seed 2"] == pytest.approx(9 + 6 * 0.21)
    assert "schedule_.name" in differences(comparison.groups)
    assert "kfac.damping" not in differences(comparison.groups)
    assert "seed" not in differences(comparison.groups)


class Outside(HTMLParser):
    """What a page would load, and whether its elements are closed."""

    def __init__(self):
        super().__init__()
        self.loads, self.open, self.tags = [], [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.loads += [
            value for name, value in attributes if name in ("src", "href") and not value.startswith(("#", "data:"))
        ]
        if tag not in ("meta", "link", "br", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_report_is_one_file_with_every_section(comparison, tmp_path, capsys):
    html, markdown = write_report(comparison, tmp_path / "out")
    page = Outside()
    page.feed(html.read_text())
    assert page.loads == []
    assert page.open == []
    sections = re.findall(r'<section id="([a-z-]+)"', html.read_text())
    assert sections == [
        *("overview", "breakdown", "learning", "timelines", "scaling", "runs", "differences", "provenance"),
    ]
    assert page.tags.count("iframe") == 4  # a timeline to zoom into per group
    samples = 4 + 2  # in the legends of learning, and of scaling
    assert page.tags.count("svg") == 2 + 4 + 4 * 2 + 1 + samples
    text = markdown.read_text()
    assert text.count("\n## ") == 8
    assert "| spdkfac w4 |" in text
    for name, table in all_tables(comparison).items():
        assert f"**{table.title}**" in text, name
    assert html_report(comparison, all_tables(comparison)) == html.read_text()  # nothing in it depends on the time


def test_nothing_in_a_name_becomes_markup(tmp_path):
    write_record(tmp_path, "x", schedule="<script>alert(1)</script>&__BODY__")
    html, _ = write_report(Comparison.of([tmp_path]), tmp_path)
    assert "<script>alert" not in re.sub(r'srcdoc="[^"]*"', "", html.read_text())
    assert html.read_text().count("<main>") == 1


def test_what_cannot_be_read_is_named(tmp_path, capsys):
    write_sweep(tmp_path)
    (write_record(tmp_path, "bad") / "run.json").write_text("{")
    assert main(["report", str(tmp_path), "--output", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr()
    assert "warning: skipped" in shown.err
    assert "Left out" in (tmp_path / "out" / "report.html").read_text()
    assert shown.out.split() == [str(tmp_path / "out" / f"report.{kind}") for kind in ("html", "md")]


def test_runs_without_timelines_or_rows_have_a_report_too(tmp_path):
    write_record(tmp_path, "a", times_s=(), timelines=0, summary=False, status="interrupted")
    html, _ = write_report(Comparison.of([tmp_path]), tmp_path)
    assert 'id="timelines"' not in html.read_text()


def test_no_runs_are_a_mistake(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    assert "no run records below" in capsys.readouterr().err


SVG = "{http://www.w3.org/2000/svg}"


def parsed(svg):
    return ET.fromstring(svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1))


def test_lines_run_through_their_points():
    chart = parsed(line_chart([Line("a", 0, [(0, 1.0), (10, 3.0), (5, 2.0)])], "x", "y", width=476, height=250))
    points = [tuple(map(float, p.split(","))) for p in chart.find(f"{SVG}polyline").attrib["points"].split()]
    assert [x for x, _ in points] == pytest.approx([66, 466, 266], abs=0.1)  # between the margins of 66 and 10
    assert points[2][1] == pytest.approx((points[0][1] + points[1][1]) / 2, abs=0.1)
    assert points[1][1] < points[0][1]  # upwards


def test_wide_ranges_are_logarithmic_and_long_lines_are_averaged():
    chart = parsed(line_chart([Line("a", 0, [(0, 1.0), (1, 10.0), (2, 100.0)])], "x", "y"))
    ys = [float(p.split(",")[1]) for p in chart.find(f"{SVG}polyline").attrib["points"].split()]
    assert ys[0] - ys[1] == pytest.approx(ys[1] - ys[2], abs=0.2)
    long = line_chart([Line("a", 0, [(i, float(i % 2)) for i in range(1600)])], "x", "y")
    assert len(parsed(long).find(f"{SVG}polyline").attrib["points"].split()) == 160
    assert line_chart([Line("a", 0, [(0, float("nan"))])], "x", "y") == ""


def test_bars_are_as_long_as_the_spans():
    spans = (Span(0, "compute", "FF", "f", 0, 0.25), Span(0, "communication", "GradComm", "m", 0.25, 1.0))
    chart = parsed(timeline_chart(Timeline(spans), [Shown(0)], width=1128, until_s=2.0))
    bars = [(r.attrib["fill"], float(r.attrib["x"]), float(r.attrib["width"])) for r in chart.iter(f"{SVG}rect")]
    assert bars == [  # 1000 pixels between the margins of 120 and 8
        (KIND_COLORS["FF"], 120, 125),
        (KIND_COLORS["GradComm"], 245, 375),
    ] or bars == [(KIND_COLORS["GradComm"], 245, 375), (KIND_COLORS["FF"], 120, 125)]
    stacked = parsed(breakdown_chart({"a": {"FF": 1.0, "BP": 3.0}, "b": {"FF": 2.0}}, width=1000))
    widths = [float(r.attrib["width"]) for r in stacked.iter(f"{SVG}rect")]
    assert widths == pytest.approx([widths[0], 3 * widths[0], 2 * widths[0]], abs=0.2)


def test_many_small_spans_are_drawn_as_few_bars():
    spans = tuple(Span(0, "compute", "FF", "f", i * 1e-6, (i + 1) * 1e-6) for i in range(5000))
    chart = parsed(timeline_chart(Timeline(spans), [Shown(0)], width=1000, until_s=5e-3))
    bars = list(chart.iter(f"{SVG}rect"))
    assert len(bars) < 2000
    assert sum(float(bar.attrib["width"]) for bar in bars) >= 800


def test_tables_are_escaped_and_grouped():
    table = Table("t", (Column("a<b", align="left"), Column("x", ".1f", group="g")), (("<i>", 0.25),), ("n & m",))
    text = html_table(table)
    assert "<th class=left>a&lt;b</th>" in text
    assert '<tr><th colspan="1"></th><th colspan="1" class=group>g</th></tr>' in text
    assert "<td class=left>&lt;i&gt;</td><td class=right>0.2</td>" in text
    assert "<p class=note>n &amp; m</p>" in text


def test_plotly_figures_hold_every_span_and_are_valid():
    go = pytest.importorskip("plotly.graph_objects")
    one = timeline(0, 0.01)
    figure = timeline_figure({"measured": one, "simulated": timeline(1, 0.005)}, "title")
    assert go.Figure(figure)  # Plotly's own check of every key
    bars = {
        (bar["name"], bar["y"][0][i], bar["y"][1][i], bar["base"][i], bar["x"][i])
        for bar in figure["data"]
        if "name" in bar
        for i in range(len(bar["x"]))
    }
    views = (("measured", one), ("simulated", timeline(1, 0.005)))
    expected = {
        (s.kind, f"rank {s.rank}, {name}", s.lane, round(1e3 * s.start_s, 6), round(1e3 * s.duration_s, 6))
        for name, of in views
        for s in of.spans
    }
    assert bars == expected
    many = tuple(Span(r, "compute", "FF", "f", 0, 1 + 0.1 * (r % 20)) for r in range(40))
    figure = timeline_figure({"measured": Timeline((*many, Span(0, "compute", "BP", "none", 2, 2)))}, "title")
    names = set(figure["data"][0]["y"][0])
    assert len(names) == 16
    assert "rank 19 (busiest, of 2 alike)" in names
    assert "16 of 40 ranks, those that differ most" in figure["layout"]["title"]["text"]
    few = timeline_figure({"measured": one}, "title")["layout"]
    assert figure["layout"]["margin"]["t"] > few["margin"]["t"]  # room for that line
    assert [bar["name"] for bar in figure["data"] if "name" in bar] == ["FF"]  # nothing of BP can be seen
    shares = breakdown_figure({"a": {"FF": 0.5, "BP": 0.25}})
    assert go.Figure(shares)
    assert [(bar["name"], bar["x"]) for bar in shares["data"]] == [("FF", [500.0]), ("BP", [250.0])]
    assert json.dumps(figure)
