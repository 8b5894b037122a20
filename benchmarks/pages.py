"""Pages of the docs that hold what was measured: tables in Markdown, and where in a page they stand."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
"""Around what a benchmark writes into its page."""


def into_page(page: str, report: str) -> str:
    """The page with a report between its markers."""
    before, _, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"the page has no {BEGIN} ... {END}")
    return f"{before}{BEGIN}\n\n{report}\n\n{END}{after}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table for pages and terminals; all but the first column to the right."""
    cells = [list(header), *(list(row) for row in rows)]
    widths = [max(3, *(len(row[column]) for row in cells)) for column in range(len(header))]
    cells.insert(1, ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])])
    return "\n".join(f"| {_line(row, widths)} |" for row in cells)


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    first, *rest = zip(row, widths, strict=True)
    return " | ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in rest)])


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """First quartile, median, third quartile."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, median, high
