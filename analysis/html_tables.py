"""Tables of the report's page."""

from __future__ import annotations

from html import escape
from itertools import groupby

from analysis.columns import for_page
from analysis.tables import LONGEST, Table, printable, shortened

WIDE_PX, NARROW_PX = 1040, 350
"""What a page has room for; on small screens."""
CHARACTER_PX, PADDING_PX = 7.0, 14
"""Of a table's text, and beside each cell."""


def html_table(table: Table) -> str:
    """A table with its notes.

    One that is wider than the page has a line below for what all its rows share instead of columns. If it is still
    wider it scrolls by itself, the first column stays, and a line above says that there is more.
    """
    if _width_px(table) > WIDE_PX:
        table, _ = for_page(table)
    heads = [_group_row(table)] if any(column.group for column in table.columns) else []
    heads.append("".join(f"<th class={c.align}>{escape(c.heading)}</th>" for c in table.columns))
    head = "".join(f"<tr>{cells}</tr>" for cells in heads)
    aligns = [column.align for column in table.columns]
    rows = "".join(
        "<tr>" + "".join(f"<td class={a}>{escape(cell)}</td>" for a, cell in zip(aligns, row, strict=True)) + "</tr>"
        for row in table.shown()
    )
    notes = "".join(f"<p class=note>{escape(printable(note))}</p>" for note in table.notes)
    body = f"<div class=scroll tabindex=0><table><thead>{head}</thead><tbody>{rows}</tbody></table></div>"
    return f"{_hint(table)}{body}{notes}"


def _group_row(table: Table) -> str:
    """The groups above their columns; the first column, which stays, has a cell of its own."""
    spans = [(table.columns[0].group, 1)]
    spans += [(name, len(list(of))) for name, of in groupby(column.group for column in table.columns[1:])]
    cells = ((n, " class=group" if name else "", escape(shortened(printable(name), LONGEST))) for name, n in spans)
    return "".join(f'<th colspan="{n}"{group}>{text}</th>' for n, group, text in cells)


def _width_px(table: Table) -> float:
    """How wide it is at least: headings are broken between words, cells are not."""
    characters = sum(
        max(map(len, [*column.heading.split(), *cells]), default=0)
        for column, cells in zip(table.columns, zip(*table.shown(), strict=True), strict=True)
    )
    return characters * CHARACTER_PX + len(table.columns) * PADDING_PX


def _hint(table: Table) -> str:
    """What says that a table goes on to the right, on pages of either width, where it is wider than they are."""
    width = _width_px(table)
    where = "" if width > WIDE_PX else " narrow"
    text = f"{len(table.columns)} columns: scroll to the right for more \N{RIGHTWARDS ARROW}"
    return f'<p class="hint{where}">{text}</p>' if width > NARROW_PX else ""
