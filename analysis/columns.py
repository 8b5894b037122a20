"""Which columns of a table are shown: those that were asked for, or those that fit a printed page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from difflib import get_close_matches
from fnmatch import fnmatchcase

from analysis.tables import LONGEST, Column, Table, shortened

PAGE_COLUMNS = 16
"""More do not fit the width of a page even in small print."""
PAGE_ROWS = 60
"""More do not fit its height; a ``table`` is not broken over pages."""


def check_columns(tables: Sequence[Table], wanted: Sequence[str]) -> None:
    """Raise ValueError for a name that no column of any of the tables has, naming some that there are."""
    for name in wanted:
        if not any(_is(column, name) for table in tables for column in table.columns):
            raise ValueError(f"--columns: no column {name!r}; {_there(tables, name)}")


def with_columns(table: Table, wanted: Sequence[str]) -> Table | None:
    """The table with the columns that are named, in that order; None where it has none of them.

    Args:
        table: to choose from.
        wanted: titles, with or without their group, or patterns such as ``config.kfac.*``; case does not matter.
    """
    picked = [i for name in wanted for i, column in enumerate(table.columns) if _is(column, name)]
    return _picked(table, list(dict.fromkeys(picked))) if picked else None


def for_page(table: Table) -> tuple[Table, str]:
    """The table as it can be printed, and what is still wrong with it, or an empty text.

    Columns without any value are left out; what all rows share is said in a note below the table instead.
    """
    varying, shared = [], []
    for i, column in enumerate(table.columns):
        cells = {row[i] for row in table.rows}
        if len(table.rows) < 2 or len(cells) > 1:
            varying.append(i)
        elif cells != {None}:
            shared.append(f"{shortened(column.full_title, LONGEST)} {column.show(table.rows[0][i])}")
    slim = _picked(table, varying)
    if shared:
        slim = replace(slim, notes=(f"All rows: {', '.join(shared)}.", *slim.notes))
    faults = []
    if len(slim.columns) > PAGE_COLUMNS:
        some = ",".join(column.full_title for column in slim.columns[:3])
        faults.append(f"{len(slim.columns)} columns: choose some with --columns, as in --columns {some!r}")
    if len(slim.rows) > PAGE_ROWS:
        faults.append(f"{len(slim.rows)} rows: choose some of the runs, or fewer of their rows")
    return slim, f"{table.title!r} does not fit a printed page, {'; '.join(faults)}" if faults else ""


def _picked(table: Table, places: Sequence[int]) -> Table:
    columns = tuple(table.columns[i] for i in places)
    return replace(table, columns=columns, rows=tuple(tuple(row[i] for i in places) for row in table.rows))


def _is(column: Column, name: str) -> bool:
    wanted = name.casefold()
    titles = [title.casefold() for title in (column.full_title, column.title)]
    titles += [title.partition(" [")[0] for title in titles]  # without the unit
    return wanted in titles or any(fnmatchcase(title, wanted) for title in titles)


def _there(tables: Sequence[Table], name: str) -> str:
    titles = list(dict.fromkeys(column.full_title for table in tables for column in table.columns))
    near = [title for title in titles if name.casefold() in title.casefold()][:4]
    near = near or get_close_matches(name, titles, n=4, cutoff=0.5)
    if near:
        return f"did you mean {', '.join(near)}?"
    return f"there are: {', '.join(titles[:12])}{', ...' if len(titles) > 12 else ''}"
