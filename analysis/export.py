"""Tables as files: the suffix says how. Rows for other programs: runs with all their options, iterations, spans."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from analysis.report import breakdown_table, runs_table, wide_table
from analysis.runs import Problem, Run, load_timelines
from analysis.tables import Cell, Column, Table, encodable
from experiments.records import RunRecord

TEXTS = {".csv": "csv", ".json": "json", ".md": "markdown", ".tex": "latex", ".txt": "text"}
PARQUET = ".parquet"
SUFFIXES = (*TEXTS, PARQUET)
ROWS = ("runs", "iterations", "spans")
"""What one row of an export can be."""


def write_tables(tables: Sequence[Table], data: Table, path: Path) -> None:
    """Write tables to a file.

    Args:
        tables: as people read them, for ``.md``, ``.tex`` and ``.txt``.
        data: the same as one table, for ``.csv``, ``.json`` and ``.parquet``.
        path: whose suffix says how.

    Raises:
        ValueError: for another suffix, a file that cannot be written, or Parquet without pyarrow.
    """
    check_suffix(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == PARQUET:
            _write_parquet(data, path)
        else:
            style = TEXTS[path.suffix]
            shown = [data] if style in ("csv", "json") else tables
            path.write_text("\n".join(table.render(style) for table in shown), encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error}") from error


def check_suffix(path: Path) -> None:
    """Raise ValueError, naming the choices, if tables cannot be written to such a file, before they are worked out."""
    if path.suffix not in SUFFIXES:
        raise ValueError(f"--output {path}: its suffix says how to write; choices: {', '.join(SUFFIXES)}")
    if path.suffix == PARQUET:
        _pyarrow()


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError("Parquet needs pyarrow: pip install 'spdkfac[parquet]'; or write .csv") from error
    return pyarrow


def _write_parquet(table: Table, path: Path) -> None:
    arrow = _pyarrow()
    columns = [[row[i] for row in table.rows] for i in range(len(table.columns))]
    arrays = [arrow.array(*_typed(arrow, column)) for column in columns]
    notes = {"title": table.title, "notes": "\n".join(table.notes)}
    made = arrow.Table.from_arrays(arrays, names=[encodable(column.full_title) for column in table.columns])
    arrow.parquet.write_table(made.replace_schema_metadata(notes), path)


def _typed(arrow: Any, column: Sequence[Cell]) -> tuple[list[Any], Any]:
    """A column's values and type: whole numbers, numbers, or text where there is any."""
    there = [cell for cell in column if cell is not None]
    if there and all(isinstance(cell, int) and abs(cell) < 1 << 63 for cell in there):
        return list(column), arrow.int64()
    if all(isinstance(cell, float) or (isinstance(cell, int) and abs(cell) < 1 << 63) for cell in there):
        return [None if cell is None else float(cell) for cell in column], arrow.float64()
    return [None if cell is None else encodable(str(cell)) for cell in column], arrow.string()


def runs_data(runs: Sequence[Run], baseline: str, among: Sequence[Run]) -> Table:
    """One row per run: times, speed-up, breakdown, provenance, and every key of its configuration."""
    known = wide_table([runs_table(runs, baseline, among=among), breakdown_table(runs)])
    facts = ("name", "created", "host", "commit", "path")
    flat = [_flat(run.config) for run in runs]
    keys = list(dict.fromkeys(key for config in flat for key in config))
    settings = (Column(f"config.{key}", align="left") for key in keys)
    columns = (*known.columns, *(Column(title, align="left") for title in facts), *settings)
    rows = []
    for row, run, config in zip(known.rows, runs, flat, strict=True):
        commit = str(run.code.get("commit") or run.code.get("version") or "")
        own = (run.name, run.created, run.host, commit, run.path.as_posix())
        rows.append((*row, *own, *(config.get(key) for key in keys)))
    return Table(known.title, columns, tuple(rows), known.notes)


def iterations_data(runs: Iterable[Run]) -> tuple[Table, list[Problem]]:
    """One row per training iteration and evaluation of each run; and the metrics that had to be left out."""
    found: list[tuple[Run, Mapping[str, Any]]] = []
    problems = []
    for run in runs:
        try:
            found += [(run, row) for row in RunRecord.load(run.path).rows()]
        except (OSError, ValueError) as error:
            problems.append(Problem(run.path / "metrics.jsonl", str(error)))
    keys = list(dict.fromkeys(key for _, row in found for key in row))
    columns = (*_RUN_COLUMNS, *(Column(key) for key in keys))
    rows = tuple((*_run_cells(run), *(_cell(row.get(key)) for key in keys)) for run, row in found)
    return Table("Iterations", columns, rows), problems


def spans_data(runs: Iterable[Run]) -> tuple[Table, list[Problem]]:
    """One row per span of every recorded iteration of each run; and the timelines that had to be left out."""
    texts, numbers = ("lane", "kind", "name"), ("start_s", "end_s")
    columns = (
        *_RUN_COLUMNS,
        *(Column(title, "d") for title in ("iter", "rank")),
        *(Column(title, align="left") for title in texts),
        *(Column(title, ".6f") for title in numbers),
    )
    rows: list[tuple[Cell, ...]] = []
    problems = []
    for run in runs:
        try:
            timelines = load_timelines(run.path)
        except ValueError as error:
            problems.append(Problem(run.path / "timelines", str(error)))
            continue
        for number, timeline in timelines.items():
            for s in timeline.spans:
                own = (number, s.rank, s.lane, s.kind, s.name, s.start_s, s.end_s)
                rows.append((*_run_cells(run), *own))
    return Table("Spans", columns, tuple(rows)), problems


_RUN_COLUMNS = (
    Column("run", align="left"),
    Column("schedule", align="left"),
    Column("model", align="left"),
    Column("data", align="left"),
    Column("ranks", "d"),
    Column("seed", "d"),
)


def _run_cells(run: Run) -> tuple[Cell, ...]:
    return (run.run_id, run.schedule, run.model, run.data, run.world_size, run.seed)


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Cell]:
    found: dict[str, Cell] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = _cell(value)
    return found


def _cell(value: Any) -> Cell:
    if value is None or isinstance(value, str) or (isinstance(value, (int, float)) and not isinstance(value, bool)):
        return value
    return json.dumps(value)
