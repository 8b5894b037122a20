"""Tables as values, written as aligned text, Markdown, LaTeX (booktabs), CSV or JSON.

A column may belong to a group (``published``, ``simulated``): LaTeX and text show it above the columns that share it,
the flat formats put it into the column's title, so that no number loses its tag.
"""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Literal

Cell = str | int | float | None
LONGEST = 200
"""People are shown so many characters of a text."""
MISSING = "-"
"""What a cell without a value shows where people read it."""
HUGE = 1e12
"""Numbers from here on are written with an exponent."""
NOTE_WIDTH = 80
"""Notes in text are wrapped at the table's width, but not below this."""
WIDE_COLUMNS = 7
"""A LaTeX table of more columns does not fit one column of a two-column page."""
PAGE_CHARACTERS = 110
"""A LaTeX table of longer lines is made smaller, so that it fits the page."""
_UNSEEN = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")


def printable(text: str) -> str:
    """Text with what would move the cursor, turn the writing's direction or hide itself spelt out, as ``\\n``."""
    return _UNSEEN.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def encodable(text: str) -> str:
    """Text that any file can hold: halves of characters (lone surrogates) spelt out."""
    return text.encode("utf-8", "backslashreplace").decode()


def shortened(text: str, length: int) -> str:
    """Text of at most so many characters; where some are left out, dots."""
    return text if len(text) <= length else f"{text[: length - 3]}..."


def _seen(text: str) -> str:
    return shortened(printable(text), LONGEST)


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

    @property
    def heading(self) -> str:
        """The title as people read it."""
        return _seen(self.title)

    def show(self, cell: Cell) -> str:
        """A cell as people read it."""
        if cell is None:
            return MISSING
        if isinstance(cell, str):
            return _seen(cell)
        if isinstance(cell, float) and abs(cell) >= HUGE:
            return f"{cell:.3e}"
        return format(cell, self.spec)


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
    return [(_seen(name), len(list(members))) for name, members in groupby(c.group for c in columns)]


def _pad(text: str, width: int, align: str) -> str:
    return text.ljust(width) if align == "left" else text.rjust(width)


def _widths(table: Table, shown: Sequence[Sequence[str]] | None = None) -> list[int]:
    lines = [[c.heading for c in table.columns], *(table.shown() if shown is None else shown)]
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
    titles = [c.heading for c in table.columns]

    def line(cells: Sequence[str]) -> str:
        padded = (_pad(cell, w, c.align) for cell, w, c in zip(cells, widths, table.columns, strict=True))
        return "  ".join(padded).rstrip()

    lines = [printable(table.title), ""]
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


def markdown_escape(text: str) -> str:
    """Text in which nothing is an HTML tag or a link."""
    return re.sub(r"<(?=[A-Za-z/!?])", "&lt;", printable(text)).replace("](", "]\\(")


def to_markdown(table: Table) -> str:
    """A pipe table (GitHub's Markdown), with its title above and its notes below."""

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(markdown_escape(cell).replace("|", "\\|") for cell in cells) + " |"

    rule = [":--" if c.align == "left" else "--:" for c in table.columns]
    lines = [f"**{markdown_escape(table.title)}**", "", line([_seen(c.full_title) for c in table.columns]), line(rule)]
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
    return "".join(_LATEX.get(c, c) for c in printable(text))


def to_latex(table: Table) -> str:
    """A ``table`` with booktabs rules (``\\usepackage{booktabs}``); a wide one spans both columns of a page.

    One that is still too wide is made smaller, which takes ``\\usepackage{graphicx}``.
    """

    def line(cells: Sequence[str]) -> str:
        text = " & ".join(map(latex_escape, cells)) + r" \\"
        return "{}" + text if text[:1] in ("[", "*") else text  # which the line above would take for its argument

    align = "".join("l" if c.align == "left" else "r" for c in table.columns)
    environment = "table*" if len(table.columns) > WIDE_COLUMNS else "table"
    lines = [rf"\begin{{{environment}}}", r"\centering", rf"\caption{{{latex_escape(table.title)}}}"]
    shrunk = _line_width(_widths(table)) > PAGE_CHARACTERS
    lines += [r"\resizebox{\textwidth}{!}{%"] if shrunk else []
    lines += [rf"\begin{{tabular}}{{{align}}}", r"\toprule"]
    if any(c.group for c in table.columns):
        headings, rules, start = [], [], 1
        for name, count in _groups(table.columns):
            headings.append(rf"\multicolumn{{{count}}}{{c}}{{{latex_escape(name)}}}" if name else " & " * (count - 1))
            if name:
                rules.append(rf"\cmidrule(lr){{{start}-{start + count - 1}}}")
            start += count
        lines += [" & ".join(headings) + r" \\", "".join(rules)]
    lines += [line([c.heading for c in table.columns]), r"\midrule", *map(line, table.shown())]
    lines += [r"\bottomrule", r"\end{tabular}" + "}" * shrunk]
    lines += [r"\par\smallskip\footnotesize " + latex_escape(note) for note in table.notes]
    return "\n".join([*lines, rf"\end{{{environment}}}"]) + "\n"


def to_csv(table: Table) -> str:
    """Comma-separated values, unrounded; an empty field where there is no value.

    Texts that a spreadsheet would take for a formula begin with an apostrophe, which makes it show them as they are.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([_field(c.full_title) for c in table.columns])
    writer.writerows(map(_field, row) for row in table.rows)
    return text.getvalue()


def _field(cell: Cell) -> str | int | float:
    if not isinstance(cell, str):
        return "" if cell is None else cell
    formula = cell[:1] in _FORMULA and len(cell) > 1 and not _NUMBER.fullmatch(cell)
    return encodable("'" + cell if formula else cell)


_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?|[+-](inf|infinity|nan)", re.IGNORECASE)


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
