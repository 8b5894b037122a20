"""What a command of ``python -m analysis`` has to say, and where it goes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from analysis.columns import check_columns, for_page, with_columns
from analysis.export import TEXTS, check_suffix, write_tables
from analysis.tables import STYLES, Table, for_screen, printable

FOR_PROGRAMS = ("csv", "json", "parquet")
"""Formats that hold one table, with all columns there are."""


@dataclass(frozen=True)
class Answer:
    """The answer to one question.

    Args:
        tables: as people read them.
        data: the same as one table, for CSV, JSON and Parquet; by default the first.
        warnings: what was left out, and why.
        written: files that were written besides.
    """

    tables: Sequence[Table] = ()
    data: Table | None = None
    warnings: Sequence[str] = ()
    written: Sequence[Path] = ()


def add_output(parser: argparse.ArgumentParser) -> None:
    """``--format`` and ``--output``."""
    parser.add_argument("--format", default="text", choices=STYLES, help="how to write tables (%(default)s)")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="write tables there instead; the suffix says how: .csv, .json, .md, .tex, .txt, .parquet",
    )
    parser.add_argument(
        "--columns", metavar="NAME,...", help="only these, in this order; also patterns: 'schedule,iter*,config.kfac.*'"
    )


def checked(options: argparse.Namespace) -> argparse.Namespace:
    """The options; ValueError for a file that tables cannot be written to, before any work is done."""
    if options.output is not None:
        check_suffix(options.output)
    return options


def style_of(options: argparse.Namespace) -> str:
    """How tables are written: one of the formats, or ``parquet``."""
    return str(options.format) if options.output is None else TEXTS.get(options.output.suffix, "parquet")


def give(answer: Answer, options: argparse.Namespace) -> int:
    """Print or write it; returns the exit status.

    Raises:
        ValueError: for columns that are not there, or a file that cannot be written.
    """
    answer = _with_columns(answer, options)
    for warning in answer.warnings:
        sys.stderr.write(f"warning: {printable(warning)}\n")
    if answer.tables:
        data = answer.data or answer.tables[0]
        if options.output is not None:
            write_tables(answer.tables, data, options.output)
            sys.stdout.write(f"{options.output}\n")
        else:
            show([data] if options.format in FOR_PROGRAMS else answer.tables, options.format)
    sys.stdout.write("".join(f"{path}\n" for path in answer.written))
    return 0


def _with_columns(answer: Answer, options: argparse.Namespace) -> Answer:
    """With the columns that are asked for; LaTeX without what a printed page has no room for."""
    if not answer.tables:
        return answer
    wanted = [name.strip() for name in (options.columns or "").split(",") if name.strip()]
    if wanted:
        data = answer.data or answer.tables[0]
        check_columns([*answer.tables, data], wanted)
        slim = [found for table in answer.tables if (found := with_columns(table, wanted))]
        slim_data = with_columns(data, wanted) or slim[0]
        # Programs are given more columns than people are shown: any of those can be asked for.
        shown = {column.full_title for table in slim for column in table.columns}
        more = any(column.full_title not in shown for column in slim_data.columns)
        answer = replace(answer, tables=[slim_data] if more else slim, data=slim_data)
    if style_of(options) != "latex":
        return answer
    printed = [for_page(table) for table in answer.tables]
    faults = [fault for _, fault in printed if fault]
    return replace(answer, tables=[table for table, _ in printed], warnings=[*answer.warnings, *faults])


def show(tables: Iterable[Table], style: str) -> None:
    """Tables on standard output."""
    texts = [for_screen(table) if style == "text" else table.render(style) for table in tables]
    sys.stdout.write("\n".join(texts))
