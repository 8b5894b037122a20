"""Two sets of runs compared: iteration time and each component, with intervals, setting by setting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from analysis.report import BREAKDOWN_KINDS, HIDDEN_NOTE
from analysis.runs import Problem, Run, load_timelines
from analysis.statistics import bootstrap_difference, bootstrap_mean, bootstrap_median, bootstrap_speedup
from analysis.tables import Cell, Column, Table
from kfac.timeline import COMMUNICATION_KINDS

ENOUGH_RUNS = 3
"""From so many runs on either side an interval is over runs; with fewer, over iterations."""
HIDDEN = " hidden"
"""Ends the names of what computing hides."""
_MS = 1e3

Setting = tuple[str, str, int, int | None]
"""Model, data, ranks, samples per rank: runs that differ in these are not compared with each other."""


def setting_of(run: Run) -> Setting:
    """What a run shares with those that it may be compared with."""
    return (run.model, run.data, run.world_size, run.batch_size)


@dataclass(frozen=True)
class Samples:
    """The values of one component on one side.

    Args:
        values: one per run, or one per iteration.
        over: ``runs`` or ``iterations``.
    """

    values: Sequence[float]
    over: str


@dataclass(frozen=True)
class Pair:
    """The runs of one setting on both sides."""

    setting: Setting
    first: tuple[Run, ...]
    second: tuple[Run, ...]


def pair_up(first: Sequence[Run], second: Sequence[Run]) -> tuple[list[Pair], list[str]]:
    """The settings that both sides have, and in words those that only one has."""
    sides = [_by_setting(runs) for runs in (first, second)]
    common = [setting for setting in sides[0] if setting in sides[1]]
    alone = [f"only A has {_words(setting)}" for setting in sides[0] if setting not in sides[1]]
    alone += [f"only B has {_words(setting)}" for setting in sides[1] if setting not in sides[0]]
    return [Pair(setting, tuple(sides[0][setting]), tuple(sides[1][setting])) for setting in common], alone


def _by_setting(runs: Sequence[Run]) -> dict[Setting, list[Run]]:
    """Runs with iteration times by setting; those that have not finished only where no other is there."""
    found: dict[Setting, list[Run]] = {}
    for run in runs:
        if run.iteration_s:
            found.setdefault(setting_of(run), []).append(run)
    return {of: [run for run in mine if run.status == "finished"] or mine for of, mine in found.items()}


def _words(setting: Setting) -> str:
    model, data, ranks, batch = setting
    return f"{model} on {data}, {ranks} ranks" + (f", batch {batch}" if batch is not None else "")


def pairs_table(
    pairs: Sequence[Pair], names: tuple[str, str], samples_s: Mapping[Path, Sequence[float]]
) -> tuple[Table, list[Problem]]:
    """Per setting one row for the iteration and one per component: both sides, the difference and the ratio.

    Args:
        pairs: the settings.
        names: of the sides.
        samples_s: seconds of each iteration by the runs' directories.

    Returns:
        The table, and the timelines that had to be left out.
    """
    several = len(pairs) > 1
    identity = ("model", "data", "ranks", "batch/rank") if several else ()
    columns = (
        *(Column(title, align="left" if title in ("model", "data") else "right") for title in identity),
        Column("component", align="left"),
        *(Column(title, ".2f", group=f"{name} [ms]") for name in names for title in ("middle", "low", "high")),
        *(Column(title, "+.2f", group="difference [ms]") for title in ("middle", "low", "high")),
        *(Column(title, ".3f", group="times as fast") for title in ("middle", "low", "high")),
        Column("interval over", align="left"),
    )
    rows: list[tuple[Cell, ...]] = []
    problems: list[Problem] = []
    for pair in pairs:
        of = pair.setting if several else ()
        rows.append((*of, "iteration", *_iteration_cells(pair, samples_s)))
        components, damaged = _components(pair)
        problems += damaged
        rows += [(*of, name, *_component_cells(name, *sides)) for name, sides in components.items()]
    counts = " and ".join(f"{sum(len(side) for side in of)} of {n}" for n, of in _sides(pairs, names))
    notes = (
        f"{counts} runs. Iteration: medians; components: exposed means, which sum to the mean recorded iteration, and "
        f"what is hidden. low and high: 95 % bootstrap interval over runs where both sides have {ENOUGH_RUNS}, else "
        f"over iterations, which says nothing of how runs differ. {HIDDEN_NOTE}",
    )
    return Table(f"{names[1]} against {names[0]}", columns, tuple(rows), notes), problems


def _sides(pairs: Sequence[Pair], names: tuple[str, str]) -> list[tuple[str, list[tuple[Run, ...]]]]:
    return [(names[0], [pair.first for pair in pairs]), (names[1], [pair.second for pair in pairs])]


def _iteration_cells(pair: Pair, samples_s: Mapping[Path, Sequence[float]]) -> tuple[Cell, ...]:
    sides = [[run.iteration_s.median for run in of if run.iteration_s] for of in (pair.first, pair.second)]
    middles = [median(side) for side in sides]
    over = "runs"
    if min(map(len, sides)) < ENOUGH_RUNS:
        sides = [[s for run in of for s in samples_s.get(run.path, ())] for of in (pair.first, pair.second)]
        over = "iterations"
    if min(map(len, sides)) < 2:
        return _cells(middles, None, None, None, "")
    ends = [bootstrap_median(side) for side in sides]
    difference = bootstrap_difference(sides[0], sides[1], of="median")
    return _cells(middles, ends, difference, bootstrap_speedup(sides[0], sides[1]), over)


def _component_cells(name: str, first: Samples, second: Samples) -> tuple[Cell, ...]:
    sides = (first.values, second.values)
    middles = [fmean(side) for side in sides]
    if min(map(len, sides)) < 2:
        cells = _cells(middles, None, None, None, "")
    else:
        ends = [bootstrap_mean(side) for side in sides]
        cells = _cells(middles, ends, bootstrap_difference(*sides, of="mean"), None, first.over)
    return (*cells[:9], None, *cells[10:]) if name.endswith(HIDDEN) else cells  # no speed: that it runs is no loss


def _cells(
    middles: Sequence[float],
    ends: Sequence[tuple[float, float]] | None,
    difference: tuple[float, float] | None,
    ratio: tuple[float, float] | None,
    over: str,
) -> tuple[Cell, ...]:
    none = (None, None)
    cells: list[Cell] = []
    for i, middle in enumerate(middles):
        cells += [middle * _MS, *((end * _MS for end in ends[i]) if ends else none)]
    cells += [(middles[1] - middles[0]) * _MS, *((end * _MS for end in difference) if difference else none)]
    cells += [middles[0] / middles[1] if min(middles) > 0 else None, *(ratio or none)]
    return (*cells, over)


def _components(pair: Pair) -> tuple[dict[str, tuple[Samples, Samples]], list[Problem]]:
    """Both sides' samples of each component that either has: by run where there are enough, else by iteration."""
    recorded = [[run for run in of if run.breakdown_s] for of in (pair.first, pair.second)]
    if not all(recorded):
        return {}, []
    problems: list[Problem] = []
    if min(map(len, recorded)) >= ENOUGH_RUNS:
        over = "runs"
        sides = [[(run.breakdown_s, run.hidden_s) for run in of] for of in recorded]
    else:
        over = "iterations"
        sides = []
        for of in recorded:
            found: list[tuple[Mapping[str, float], Mapping[str, float]]] = []
            for run in of:
                try:
                    found += [(t.breakdown_s(), t.hidden_s()) for t in load_timelines(run.path).values()]
                except ValueError as error:
                    problems.append(Problem(run.path / "timelines", str(error)))
            # Where the timelines themselves are gone, the summary's means are left.
            sides.append(found or [(run.breakdown_s, run.hidden_s) for run in of])
    names = [(kind, 0) for kind in BREAKDOWN_KINDS] + [(kind, 1) for kind in COMMUNICATION_KINDS]
    components = {}
    for kind, which in names:
        first, second = (Samples([of[which].get(kind, 0.0) for of in side], over) for side in sides)
        if any(first.values) or any(second.values):
            components[kind + HIDDEN if which else kind] = (first, second)
    return components, problems
