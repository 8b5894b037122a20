"""What a command of ``python -m analysis`` has to say, and where it goes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from analysis.export import check_suffix, write_tables
from analysis.tables import STYLES, Table, for_screen


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


def checked(options: argparse.Namespace) -> argparse.Namespace:
    """The options; ValueError for a file that tables cannot be written to, before any work is done."""
    if options.output is not None:
        check_suffix(options.output)
    return options


def give(answer: Answer, options: argparse.Namespace) -> int:
    """Print or write it; returns the exit status."""
    for warning in answer.warnings:
        sys.stderr.write(f"warning: {warning}\n")
    if answer.tables:
        data = answer.data or answer.tables[0]
        if options.output is not None:
            write_tables(answer.tables, data, options.output)
            sys.stdout.write(f"{options.output}\n")
        else:
            show([data] if options.format in ("csv", "json") else answer.tables, options.format)
    sys.stdout.write("".join(f"{path}\n" for path in answer.written))
    return 0


def show(tables: Iterable[Table], style: str) -> None:
    """Tables on standard output."""
    texts = [for_screen(table) if style == "text" else table.render(style) for table in tables]
    sys.stdout.write("\n".join(texts))
