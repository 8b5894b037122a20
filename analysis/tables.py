"""Tables as values, written as aligned text, Markdown, LaTeX (booktabs), CSV or JSON.

A column may belong to a group (``published``, ``simulated``): LaTeX and text show it above the columns that share it,
the flat formats put it into the column's title, so that no number loses its tag.
"""

from __future__ import annotations

import csv
import io
import json
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Literal

Cell = str | int | float | None
MISSING = "-"
"""What a cell without a value shows where people read it."""
NOTE_WIDTH = 80
"""Notes in text are wrapped at the table's width, but not below this."""
WIDE_COLUMNS = 7
"""A LaTeX table of more columns does not fit one column of a two-column page."""


@dataclass(frozen=True)
class Column:
    """One column.

    Args:
        title: its heading; with the unit where it has one.
        spec: the format specification of its numbers for people (``.4f``); CSV and JSON keep them unrounded.
        group: a heading that it shares with its neighbours, or none.
        align: ``left`` for text, ``right`` for numbers.
    """

    title: str
    spec: str = ""
    group: str = ""
    align: Literal["left", "right"] = "right"

    @property
    def full_title(self) -> str:
        """The title with the group in front."""
        return f"{self.group} {self.title}" if self.group else self.title

    def show(self, cell: Cell) -> str:
        """A cell as people read it."""
        if cell is None:
            return MISSING
        return cell if isinstance(cell, str) else format(cell, self.spec)


@dataclass(frozen=True)
class Table:
    """A table.

    Args:
        title: one line: what it shows.
        columns: its columns.
        rows: one cell per column each.
        notes: sentences that belong below it.

    Raises:
        ValueError: if a row has another number of cells than there are columns.
    """

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"table {self.title!r}: {len(row)} cells for {len(self.columns)} columns in {row}")

    def render(self, style: str) -> str:
        """The table in one of :data:`STYLES`.

        Raises:
            ValueError: for another style, naming the choices.
        """
        if style not in STYLES:
            raise ValueError(f"unknown table format {style!r}; choices: {', '.join(STYLES)}")
        return STYLES[style](self)

    def shown(self) -> list[list[str]]:
        """The rows as people read them."""
        if not self.rows:
            return []
        columns = [
            list(map(c.show, cells)) for c, cells in zip(self.columns, zip(*self.rows, strict=True), strict=True)
        ]
        return list(map(list, zip(*columns, strict=True)))


def _groups(columns: Sequence[Column]) -> list[tuple[str, int]]:
    """Runs of neighbouring columns with one group: its name and how many they are."""
    return [(name, len(list(members))) for name, members in groupby(c.group for c in columns)]


def _pad(text: str, width: int, align: str) -> str:
    return text.ljust(width) if align == "left" else text.rjust(width)


def _widths(table: Table, shown: Sequence[Sequence[str]] | None = None) -> list[int]:
    lines = [[c.title for c in table.columns], *(table.shown() if shown is None else shown)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    start = 0
    for name, count in _groups(table.columns):  # a group's heading must fit above its columns
        missing = len(name) - (sum(widths[start : start + count]) + 2 * (count - 1))
        widths[start + count - 1] += max(0, missing)
        start += count
    return widths


def _line_width(widths: Sequence[int]) -> int:
    return sum(widths) + 2 * (len(widths) - 1)


def to_text(table: Table) -> str:
    """Aligned columns for a terminal."""
    body = table.shown()
    widths = _widths(table, body)
    titles = [c.title for c in table.columns]

    def line(cells: Sequence[str]) -> str:
        padded = (_pad(cell, w, c.align) for cell, w, c in zip(cells, widths, table.columns, strict=True))
        return "  ".join(padded).rstrip()

    lines = [table.title, ""]
    if any(c.group for c in table.columns):
        headings, start = [], 0
        for name, count in _groups(table.columns):
            width = sum(widths[start : start + count]) + 2 * (count - 1)
            headings.append(f" {name} ".center(width, "-") if name and len(name) + 2 <= width else name.ljust(width))
            start += count
        lines.append("  ".join(headings).rstrip())
    lines += [line(titles), "  ".join("-" * w for w in widths), *map(line, body)]
    if table.notes:
        width = max(NOTE_WIDTH, _line_width(widths))
        lines += ["", *(textwrap.fill(note, width) for note in table.notes)]
    return "\n".join(lines) + "\n"


def blocks(table: Table, width: int) -> list[Table]:
    """The table in pieces of at most ``width`` characters a line, one below the other.

    Every piece starts with the rows' numbers and the first column, the first one has the title and none the notes; a
    single wide column stays as it is. A table that fits is the only piece.
    """
    bare = replace(table, notes=())
    if _line_width(_widths(table)) <= width:
        return [bare]

    def piece(chosen: Sequence[int], title: str) -> Table:
        rows = tuple((i, row[0], *(row[c] for c in chosen)) for i, row in enumerate(table.rows, 1))
        return Table(title, (Column("#", "d"), table.columns[0], *(table.columns[c] for c in chosen)), rows)

    chosen: list[list[int]] = [[]]
    for i in range(1, len(table.columns)):
        if chosen[-1] and _line_width(_widths(piece([*chosen[-1], i], ""))) > width:
            chosen.append([])
        chosen[-1].append(i)
    return [piece(of_piece, "" if n else table.title) for n, of_piece in enumerate(chosen)]


def for_screen(table: Table) -> str:
    """Text for standard output: in pieces where that is a terminal narrower than the table."""
    width = shutil.get_terminal_size().columns
    if not sys.stdout.isatty() or _line_width(_widths(table)) <= width:
        return to_text(table)
    notes = "".join("\n" + textwrap.fill(note, width) for note in table.notes)
    text = "\n".join(to_text(piece).lstrip("\n") for piece in blocks(table, width))
    return f"{text}{notes}\n" if notes else text


def to_markdown(table: Table) -> str:
    """A pipe table (GitHub's Markdown), with its title above and its notes below."""

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    rule = [":--" if c.align == "left" else "--:" for c in table.columns]
    lines = [f"**{table.title}**", "", line([c.full_title for c in table.columns]), line(rule)]
    lines += [line(row) for row in table.shown()]
    for note in table.notes:
        lines += ["", note]
    return "\n".join(lines) + "\n"


_LATEX = {
    "\\": r"\textbackslash{}",
    **{c: "\\" + c for c in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
}


def latex_escape(text: str) -> str:
    """Text as LaTeX prints it."""
    return "".join(_LATEX.get(c, c) for c in text)


def to_latex(table: Table) -> str:
    """A ``table`` with booktabs rules (``\\usepackage{booktabs}``); a wide one spans both columns of a page."""

    def line(cells: Sequence[str]) -> str:
        return " & ".join(map(latex_escape, cells)) + r" \\"

    align = "".join("l" if c.align == "left" else "r" for c in table.columns)
    environment = "table*" if len(table.columns) > WIDE_COLUMNS else "table"
    lines = [rf"\begin{{{environment}}}", r"\centering", rf"\caption{{{latex_escape(table.title)}}}"]
    lines += [rf"\begin{{tabular}}{{{align}}}", r"\toprule"]
    if any(c.group for c in table.columns):
        headings, rules, start = [], [], 1
        for name, count in _groups(table.columns):
            headings.append(rf"\multicolumn{{{count}}}{{c}}{{{latex_escape(name)}}}" if name else " & " * (count - 1))
            if name:
                rules.append(rf"\cmidrule(lr){{{start}-{start + count - 1}}}")
            start += count
        lines += [" & ".join(headings) + r" \\", "".join(rules)]
    lines += [line([c.title for c in table.columns]), r"\midrule", *map(line, table.shown())]
    lines += [r"\bottomrule", r"\end{tabular}"]
    lines += [r"\par\smallskip\footnotesize " + latex_escape(note) for note in table.notes]
    return "\n".join([*lines, rf"\end{{{environment}}}"]) + "\n"


def to_csv(table: Table) -> str:
    """Comma-separated values, unrounded; an empty field where there is no value."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([c.full_title for c in table.columns])
    writer.writerows(["" if cell is None else cell for cell in row] for row in table.rows)
    return text.getvalue()


def to_json(table: Table) -> str:
    """Title, notes and one object per row, keyed by the columns' full titles, unrounded."""
    keys = [c.full_title for c in table.columns]
    rows: list[dict[str, Any]] = [dict(zip(keys, row, strict=True)) for row in table.rows]
    return json.dumps({"title": table.title, "rows": rows, "notes": list(table.notes)}, indent=1) + "\n"


STYLES: dict[str, Callable[[Table], str]] = {
    "text": to_text,
    "markdown": to_markdown,
    "csv": to_csv,
    "json": to_json,
    "latex": to_latex,
}
"""How a table can be written."""
