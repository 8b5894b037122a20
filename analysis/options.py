"""Which options tell runs apart, as columns of a table that has one row per run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from analysis.runs import Run
from analysis.tables import Cell, Column, Table

GROUPS = ("kfac", "optimizer")
"""The groups of the configuration whose options are shown; what else makes runs different has columns of its own."""
AFTER = "seed"
"""The column that they stand behind."""


def differing_options(runs: Sequence[Run]) -> list[str]:
    """The dotted keys of the options that some of the runs have differently, in the configurations' order.

    An option that a run has not (K-FAC's, of a run without it; one that was added later) makes no difference.
    """
    return _differing([_options(run) for run in runs])


def _differing(options: Sequence[Mapping[str, Any]]) -> list[str]:
    first = {key: value for of_run in reversed(options) for key, value in of_run.items()}
    order = dict.fromkeys(key for of_run in options for key in of_run)
    return [key for key in order if not all(_same(first[key], of[key]) for of in options if key in of)]


def _same(one: Any, other: Any) -> bool:
    """Quick for thousands of runs; 1, 1.0 and true are not the same."""
    if type(one) is not type(other):
        return False
    if one is None or isinstance(one, (str, int, float)):
        return bool(one == other)
    if repr(one) == repr(other):
        return True
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


@dataclass(frozen=True)
class Choice:
    """The options that differ between runs.

    Args:
        keys: theirs, as :func:`differing_options` orders them.
        cells: of each run, one per key.
    """

    keys: Sequence[str]
    cells: Sequence[tuple[Cell, ...]]


def differing_cells(runs: Sequence[Run]) -> Choice:
    """What :func:`with_differing_options` shows."""
    options = [_options(run) for run in runs]
    keys = _differing(options)
    return Choice(keys, [tuple(_cell(of[key]) if key in of else None for key in keys) for of in options])


def with_differing_options(table: Table, runs: Sequence[Run], choice: Choice | None = None) -> Table:
    """The table with a column for each of :func:`differing_options`.

    Args:
        table: one row per run, in the order of ``runs``.
        runs: the rows' runs.
        choice: :func:`differing_cells` of the runs, where it is known.

    Raises:
        ValueError: if there are more rows than runs, or fewer.
    """
    choice = choice or differing_cells(runs)
    place = 1 + [column.title for column in table.columns].index(AFTER)
    rows = [(*row[:place], *cells, *row[place:]) for row, cells in zip(table.rows, choice.cells, strict=True)]
    columns = (*table.columns[:place], *map(Column, choice.keys), *table.columns[place:])
    return replace(table, columns=columns, rows=tuple(rows))


def _options(run: Run) -> dict[str, Any]:
    """A run's options by dotted key; those of K-FAC where the run has K-FAC."""
    schedule = run.config.get("schedule")
    curvature = not isinstance(schedule, Mapping) or schedule.get("curvature", True)
    groups = {name: run.config.get(name) for name in GROUPS if curvature or name != "kfac"}
    return {
        f"{name}.{key}": value
        for name, group in groups.items()
        if isinstance(group, Mapping)
        for key, value in group.items()
    }


def _cell(value: Any) -> Cell:
    if isinstance(value, str) or (isinstance(value, (int, float)) and not isinstance(value, bool)):
        return value
    if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        return "+".join(value)
    return json.dumps(value)
