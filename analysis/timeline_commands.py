"""The commands about single iterations: ``timeline``, ``diff`` and ``convert``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from analysis.chakra import write_chakra
from analysis.diff_tables import diff_page, kinds_table, parts_table, side_names
from analysis.kineto_labels import parse_rules
from analysis.output import Answer, add_output, checked, give
from analysis.report import timeline_table, timeline_tables
from analysis.sources import SIMULATED, Source, merged, read_source
from analysis.tables import Table
from analysis.timeline_diff import difference
from experiments.timeline_view import page_text, write_png

_SOURCE = f"a run's directory, RUN{SIMULATED} (its plan on its own profiles), or a trace: ours or torch.profiler's"


def _source_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--iteration", action="append", type=int, metavar="N", help="only this one (repeatable)")
    parser.add_argument(
        "--rule",
        action="append",
        default=[],
        metavar="PATTERN=KIND",
        help="in a trace of torch.profiler, events whose names the pattern finds are of this kind (repeatable)",
    )


def timeline(arguments: Sequence[str]) -> int:
    """Exposed and hidden time per rank and kind."""
    parser = argparse.ArgumentParser(
        prog="python -m analysis timeline",
        description="Exposed and hidden milliseconds per rank and kind of recorded iterations.",
    )
    parser.add_argument("run", metavar="SOURCE", help=_SOURCE)
    _source_options(parser)
    add_output(parser)
    options = checked(parser.parse_args(arguments))
    if (path := Path(options.run)).is_dir() or not (path.exists() or options.run.endswith(SIMULATED)):
        tables = timeline_tables(path, options.iteration)
    else:
        source = read_source(options.run, parse_rules(options.rule)).only(options.iteration)
        tables = [timeline_table(f"{source.name}, iteration {i}", t) for i, t in source.timelines.items()]
    return give(Answer(tables, _stacked(tables)), options)


def _stacked(tables: Sequence[Table]) -> Table:
    """The iterations' tables as one, for other programs; the title says which where there are several."""
    first = tables[0]
    rows = tuple(row for table in tables for row in table.rows)
    return first if len(tables) == 1 else Table("Timelines", first.columns, rows, first.notes)


def diff(arguments: Sequence[str]) -> int:
    """Where the time went between two iterations."""
    parser = argparse.ArgumentParser(
        prog="python -m analysis diff",
        usage="python -m analysis diff A [B] [options]",
        description="Where the time went between A and B: exposed, hidden and total milliseconds per kind, layer and "
        f"message. A and B: {_SOURCE}. With one run: its simulation against what was measured.",
    )
    parser.add_argument("first", metavar="A", help="what to compare with")
    parser.add_argument("second", metavar="B", nargs="?", help="what to compare")
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="also a page: both timelines on one axis, what differs"
    )
    parser.add_argument("--parts", type=int, default=15, metavar="N", help="layers and messages shown (%(default)s)")
    _source_options(parser)
    add_output(parser)
    options = checked(parser.parse_args(arguments))
    rules = parse_rules(options.rule)
    texts = (options.first, options.second) if options.second else (options.first + SIMULATED, options.first)
    first, second = (read_source(text, rules).only(options.iteration) for text in texts)
    found = difference(first.timelines.values(), second.timelines.values())
    names = side_names(first, second)
    written = []
    if options.html is not None:
        written.append(_write_text(options.html, diff_page(found, first, second)))
    tables = [kinds_table(found, names), parts_table(found, names, options.parts)]
    return give(Answer(tables, parts_table(found, names), written=written), options)


def convert(arguments: Sequence[str]) -> int:
    """Timelines in other forms."""
    parser = argparse.ArgumentParser(
        prog="python -m analysis convert",
        description="An iteration as our Chrome trace for Perfetto (.json), a page that zooms (.html), a picture "
        "(.png), or a Chakra execution trace per rank for other simulators (PREFIX.et).",
    )
    parser.add_argument("sources", nargs="+", metavar="SOURCE", help=f"{_SOURCE}; several: one per rank")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="the suffix says what to write")
    _source_options(parser)
    options = parser.parse_args(arguments)
    rules = parse_rules(options.rule)
    source = merged([read_source(text, rules) for text in options.sources]).only(options.iteration)
    return give(Answer(written=_converted(source, options.output)), options)


def _converted(source: Source, output: Path) -> list[Path]:
    shown = source.typical
    if output.suffix == ".et":
        return write_chakra(shown, output.with_suffix(""), source.messages)
    if output.suffix == ".html":
        return [_write_text(output, page_text({shown.source: shown}, source.name))]
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        if output.suffix == ".json":
            shown.to_chrome_trace(output)
        elif output.suffix == ".png":
            write_png(shown, output, source.name)
        else:
            raise ValueError(f"--output {output}: its suffix says what to write; choices: .json, .html, .png, .et")
    except OSError as error:
        raise ValueError(f"{output} cannot be written: {error}") from error
    return [output]


def _write_text(path: Path, text: str) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error}") from error
    return path
