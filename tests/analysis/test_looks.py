"""Lines of a report can be told apart without their colours, whatever page they are on, and what cannot is said."""

import re
from importlib import resources
from itertools import combinations

import pytest

from analysis.charts import Line, line_chart
from analysis.comparison import Comparison
from analysis.html_tables import html_table
from analysis.looks import COLORS, LOOKS, look
from analysis.report_pages import write_report
from analysis.tables import Column, Table
from tests.analysis.records import write_record
from tests.legibility import LEAST_LINE_LUMA, SIGHT, distance, luma


def without_color(number):
    of = look(number)
    return of.dash, of.mark, of.hollow, of.size


def test_lines_and_lone_points_differ_in_more_than_colour():
    assert LOOKS == 32
    for one, other in combinations(range(LOOKS), 2):
        assert without_color(one) != without_color(other)
        assert without_color(one)[1:] != without_color(other)[1:]  # a point has no dashes
    assert without_color(LOOKS) == without_color(LOOKS + 1)  # negative control: those that are called "others"


def themes():
    page = (resources.files("analysis") / "report.html").read_text()
    found = [dict(re.findall(r"--([a-z]+\d?): (#[0-9a-f]+)", of)) for of in re.findall(r":root \{[^}]*\}", page)]
    assert [len([name for name in of if re.fullmatch(r"c\d", name)]) for of in found] == [COLORS, COLORS]
    return found


@pytest.mark.parametrize("theme", themes(), ids=["light", "dark"])
def test_colours_stand_out_from_the_page_and_from_the_grey_of_the_others(theme):
    colors = [theme[f"c{i}"] for i in range(COLORS)]
    for color in [*colors, theme["rest"]]:
        assert abs(luma(color) - luma(theme["back"])) >= LEAST_LINE_LUMA
    for sight in SIGHT:
        alike = [pair for pair in combinations(colors, 2) if distance(*pair, sight) < 6]
        assert not alike


def test_the_chart_draws_each_look_and_marks_lines_that_lie_on_one_another_at_different_places():
    points = [(i, 1.0 + i) for i in range(40)]
    chart = line_chart([Line("a", 0, points), Line("b", 9, points), Line("c", LOOKS, points)], "x", "y")
    assert re.findall(r"stroke:(var\(--\w+\))", chart)[0] == "var(--c0)"
    assert chart.count("stroke-dasharray:7 3") == 1
    places = {
        color: re.findall(
            rf'<path class="mark" style="[^"]*{re.escape(color)}[^"]*" transform="translate\(([^)]*)', chart
        )
        for color in ("var(--c0)", "var(--c1)", "var(--rest)")
    }
    assert [len(of) for of in places.values()] == [4, 4, 0]
    assert not set(places["var(--c0)"]) & set(places["var(--c1)"])


def test_a_report_of_more_groups_than_looks_says_so(tmp_path):
    for i in range(LOOKS + 3):
        write_record(tmp_path, f"r{i:02d}", schedule=f"s{i:02d}", timelines=0)
    text = write_report(Comparison.of([tmp_path]), tmp_path)[0].read_text()
    assert "3 others, thin and grey" in text
    samples = re.findall(r'<svg class="sample".*?</svg>', text)
    assert len(samples) == LOOKS + 1
    assert len(set(samples)) == LOOKS + 1
    few = Comparison.of([tmp_path])
    few = write_report(
        Comparison(few.title, few.runs, few.groups[:LOOKS], (), few.baseline, few.samples_s), tmp_path / "few"
    )
    assert "thin and grey" not in few[0].read_text()


def table(columns):
    head = (
        Column("name", align="left"),
        *(Column(f"column number {i}", group="g" if i else "") for i in range(columns)),
    )
    return Table(
        "t",
        (*head, Column("shared")),
        tuple((f"row{i}", *(1000000 * i + j for j in range(columns)), 7) for i in (1, 2)),
    )


def test_wide_tables_say_that_they_go_on_and_narrow_ones_do_not():
    wide, middle, small = (html_table(table(columns)) for columns in (20, 8, 2))
    assert '<p class="hint">21 columns: scroll to the right' in wide  # the shared one is said below instead
    assert "All rows: shared 7." in wide
    assert '<p class="hint narrow">10 columns' in middle
    assert "All rows" not in middle
    assert "scroll to the right" not in small
    for text, count in ((wide, 21), (middle, 10), (small, 4)):
        rows = re.findall(r"<tr>(.*?)</tr>", text)
        assert sum(map(int, re.findall(r'colspan="(\d+)"', rows[0]))) == count
        assert {row.count("<td") for row in rows[2:]} == {count}
        assert rows[0].startswith('<th colspan="1">')  # what stays in its place covers nothing else
