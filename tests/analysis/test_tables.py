import csv
import io
import json
import re

import pytest

from analysis.tables import STYLES, Column, Table, blocks, for_screen, latex_escape

TABLE = Table(
    "Times of R&D in 100% of cases",
    (
        Column("model", align="left"),
        Column("a [s]", ".2f", group="published"),
        Column("b [s]", ".2f", group="published"),
        Column("a [s]", ".2f", group="simulated"),
        Column("n"),
    ),
    (("res_net", 1.23456, 2.0, 10.5, 3), ("x|y", None, 20.25, 0.125, None)),
    ("A note with 5_000.",),
)


def test_text_lines_up_and_rounds():
    lines = TABLE.render("text").splitlines()
    header, rule, first, second = lines[3:7]
    ends = [m.end() for m in re.finditer("-+", rule)]
    for line in (first, second):
        assert [m.end() for m in re.finditer(r"\S+", line)][1:] == ends[1:]
    assert first.split() == ["res_net", "1.23", "2.00", "10.50", "3"]
    assert second.split() == ["x|y", "-", "20.25", "0.12", "-"]
    assert header.split() == ["model", "a", "[s]", "b", "[s]", "a", "[s]", "n"]
    assert "published" in lines[2]
    assert lines[-1] == TABLE.notes[0]


def test_a_long_group_heading_keeps_the_columns_aligned():
    table = Table("t", (Column("a", group="a very long heading"), Column("b", group="c")), ((1, 2),))
    heading, titles, rule, row = table.render("text").splitlines()[2:]
    assert heading.index("c", heading.index("heading")) >= titles.index("a")
    assert len(titles) == len(rule) == len(row)
    assert titles.index("a") == row.index("1")


@pytest.mark.parametrize("width", [24, 30, 34, 200])
def test_blocks_fit_the_width_and_hold_every_cell_once(width):
    pieces = blocks(TABLE, width)
    assert (len(pieces) == 1) == (width == 200)
    assert all(len(line) <= width for piece in pieces for line in piece.render("text").splitlines()[2:])
    keys = 0 if width == 200 else 2  # the row's number and the first column, once more in every piece
    found = [[*TABLE.rows[i][: keys // 2], *(c for p in pieces for c in p.rows[i][keys:])] for i in range(2)]
    assert [tuple(row) for row in found] == list(TABLE.rows)
    assert not any(piece.notes for piece in pieces)


def test_only_a_narrow_terminal_gets_blocks(monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    assert for_screen(TABLE) == TABLE.render("text")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    shown = for_screen(TABLE)
    assert max(map(len, shown.splitlines())) <= 30
    assert shown.count(TABLE.title) == shown.count(TABLE.notes[0]) == 1
    monkeypatch.setenv("COLUMNS", "200")
    assert for_screen(TABLE) == TABLE.render("text")


def test_markdown_has_one_cell_per_column_and_keeps_the_tags():
    lines = [line for line in TABLE.render("markdown").splitlines() if line.startswith("|")]
    cells = [re.split(r"(?<!\\)\|", line)[1:-1] for line in lines]
    assert {len(row) for row in cells} == {5}
    assert [c.strip() for c in cells[0]] == ["model", "published a [s]", "published b [s]", "simulated a [s]", "n"]
    assert cells[1][0].strip() == ":--"
    assert cells[1][1].strip() == "--:"
    assert cells[3][0].strip() == "x\\|y"


def test_csv_reads_back_unrounded():
    header, *rows = list(csv.reader(io.StringIO(TABLE.render("csv"))))
    assert header[3] == "simulated a [s]"
    assert [float(x) if x else None for x in rows[0][1:4]] == [1.23456, 2.0, 10.5]
    assert rows[1][1] == ""


def test_json_reads_back():
    data = json.loads(TABLE.render("json"))
    assert data["rows"][0]["published a [s]"] == 1.23456
    assert data["rows"][1]["n"] is None
    assert data["notes"] == list(TABLE.notes)


def test_latex_is_booktabs_with_group_rules_and_escapes():
    text = TABLE.render("latex")
    assert text.count(r"\toprule") == text.count(r"\midrule") == text.count(r"\bottomrule") == 1
    assert r"\begin{tabular}{lrrrr}" in text
    assert r"\multicolumn{2}{c}{published}" in text
    assert r"\cmidrule(lr){2-3}\cmidrule(lr){4-4}" in text
    assert r"R\&D in 100\%" in text
    assert r"res\_net & 1.23 & 2.00 & 10.50 & 3 \\" in text
    body = text[text.index(r"\midrule") : text.index(r"\bottomrule")].splitlines()[1:]
    assert all(len(re.findall(r"(?<!\\)&", line)) == 4 for line in body)
    for name in ("table", "tabular"):
        assert text.count(rf"\begin{{{name}}}") == text.count(rf"\end{{{name}}}") == 1


def test_latex_group_line_spans_every_column():
    table = Table("t", (Column("a"), Column("b"), Column("c", group="g")), ((1, 2, 3),))
    line = next(x for x in table.render("latex").splitlines() if "multicolumn" in x)
    assert line.count("&") == 2


def test_latex_escape_handles_the_backslash_once():
    assert latex_escape("a\\_b") == r"a\textbackslash{}\_b"


def test_wrong_rows_and_styles_are_errors():
    with pytest.raises(ValueError, match="1 cells for 2 columns"):
        Table("t", (Column("a"), Column("b")), ((1,),))
    with pytest.raises(ValueError, match=", ".join(STYLES)):
        TABLE.render("html")
