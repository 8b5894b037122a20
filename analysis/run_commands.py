"""The commands about many runs: the table of runs, ``compare``, ``breakdown``, ``scaling`` and ``export``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from analysis.comparison import Comparison, group
from analysis.comparison_tables import groups_breakdown_table, scaling_table
from analysis.export import ROWS, iterations_data, runs_data, spans_data
from analysis.options import differing_cells, with_differing_options
from analysis.output import FOR_PROGRAMS, Answer, add_output, checked, give, style_of
from analysis.pairs import ENOUGH_RUNS, pair_up, pairs_table
from analysis.report import BASELINE, breakdown_table, runs_table, wide_table
from analysis.runs import Problem, Run, load_runs, load_samples, paper_order

SELECTED_BY = ("schedule", "model", "data", "status")


class NoRunsError(ValueError):
    """There is nothing to show: no record, or none of the kind that was asked for."""


def add_folders(parser: argparse.ArgumentParser) -> None:
    """The folders with runs, and what selects among them."""
    parser.add_argument("folders", nargs="+", type=Path, metavar="RUNS_DIR", help="folders with run records below them")
    for key in SELECTED_BY:
        parser.add_argument(f"--{key}", action="append", metavar="NAME", help=f"only runs with this {key} (repeatable)")


def add_baseline(parser: argparse.ArgumentParser) -> None:
    """The schedule that others are compared with."""
    what = "what speed-ups are over (%(default)s)"
    parser.add_argument("--baseline", default=BASELINE, metavar="SCHEDULE", help=what)


def read(options: argparse.Namespace) -> tuple[list[Run], list[Run], list[Problem]]:
    """The selected runs as the paper orders them, all runs, and what was left out.

    Raises:
        NoRunsError: if none is left, saying what there is.
    """
    runs, problems = load_runs(options.folders)
    wanted = {key: value for key in SELECTED_BY if (value := getattr(options, key)) is not None}
    shown = sorted((run for run in runs if all(getattr(run, k) in of for k, of in wanted.items())), key=paper_order)
    if shown:
        return shown, runs, problems
    where = ", ".join(map(str, options.folders))
    if not runs:
        damaged = "".join(f"; {problem}" for problem in problems[:1])
        more = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
        raise NoRunsError(f"no run records below {where}{damaged}{more}")
    there = "; ".join(f"{key}: {', '.join(sorted({getattr(run, key) for run in runs}))}" for key in wanted)
    raise NoRunsError(f"no run records of that kind below {where}; there are {there}")


def table_of_runs(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> int:
    """One row per run: times, speed-ups, where the time goes."""
    options = checked(parser.parse_args(arguments))
    # The selection comes after reading: a baseline that is not shown still counts.
    shown, runs, problems = read(options)
    samples_s, damaged = load_samples(runs) if options.intervals else (None, [])
    tables = [runs_table(shown, options.baseline, among=runs, samples_s=samples_s), breakdown_table(shown)]
    choice = differing_cells(shown)
    tables = [with_differing_options(table, shown, choice) for table in tables]
    warnings = [str(problem) for problem in (*problems, *damaged)]
    return give(Answer(tables, wide_table(tables), warnings), options)


def compare(arguments: Sequence[str]) -> int:
    """Two sets of runs, component by component."""
    parser = argparse.ArgumentParser(
        prog="python -m analysis compare",
        description="B against A, per component and with intervals, for each model, data set, number of ranks and "
        "batch size that both have.",
        epilog="A and B are runs or folders of runs; with --among, schedules or ids of runs below that folder.",
    )
    parser.add_argument("first", metavar="A", help="what to compare with")
    parser.add_argument("second", metavar="B", help="what to compare")
    parser.add_argument("--among", type=Path, metavar="RUNS_DIR", help="where runs of these schedules or ids are")
    add_output(parser)
    options = checked(parser.parse_args(arguments))
    sides, problems = _sides(options)
    pairs, alone = pair_up(*sides)
    if not pairs:
        raise ValueError(f"{options.first} and {options.second} have no setting in common: {'; '.join(alone)}")
    # Only where there are few runs are their iterations needed: reading them all takes longer than everything else.
    few = [pair for pair in pairs if min(len(pair.first), len(pair.second)) < ENOUGH_RUNS]
    samples_s, damaged = load_samples(run for pair in few for run in (*pair.first, *pair.second))
    table, lost = pairs_table(pairs, (options.first, options.second), samples_s)
    return give(Answer([table], warnings=[*alone, *map(str, (*problems, *damaged, *lost))]), options)


def _sides(options: argparse.Namespace) -> tuple[list[list[Run]], list[Problem]]:
    names = (options.first, options.second)
    if options.among is None:
        for name in names:
            if not Path(name).is_dir():
                raise ValueError(f"no folder {name}; for a schedule or a run's id say --among RUNS_DIR")
        loaded = [load_runs([Path(name)]) for name in names]
        sides, problems = [runs for runs, _ in loaded], [p for _, of in loaded for p in of]
    else:
        runs, problems = load_runs([options.among])
        sides = [[run for run in runs if name in (run.schedule, run.run_id, run.name)] for name in names]
    for name, side in zip(names, sides, strict=True):
        if not side and options.among is not None:
            there = ", ".join(sorted({run.schedule for run in runs})) or "no runs"
            raise ValueError(f"no run of schedule or id {name!r} below {options.among}; there are: {there}")
        if not side:
            raise ValueError(f"no run records below {name}" + "".join(f"; {problem}" for problem in problems[:1]))
        if not any(run.iteration_s for run in side):
            raise ValueError(f"no run of {name} has finished an iteration: there are no times to compare")
    return sides, problems


def _folder_command(name: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m analysis {name}", description=description)
    add_folders(parser)
    return parser


def breakdown(arguments: Sequence[str]) -> int:
    """Where the time goes, one row per group of runs."""
    parser = _folder_command("breakdown", "Where the time goes, per group of runs that differ only by their seed.")
    parser.add_argument("--share", action="store_true", help="as a share of the iteration instead of milliseconds")
    add_output(parser)
    options = checked(parser.parse_args(arguments))
    shown, _, problems = read(options)
    recorded = [run for run in shown if run.breakdown_s]
    if not recorded:
        raise ValueError("none of these runs has recorded a timeline: train with timeline.count=1 or more")
    table = groups_breakdown_table(group(recorded), share=options.share)
    return give(Answer([table], warnings=list(map(str, problems))), options)


def scaling(arguments: Sequence[str]) -> int:
    """Iteration time and efficiency over the number of ranks."""
    parser = _folder_command("scaling", "Iteration time and efficiency over the number of ranks.")
    add_output(parser)
    options = checked(parser.parse_args(arguments))
    shown, _, problems = read(options)
    table = scaling_table(Comparison("", tuple(shown), tuple(group(shown)), tuple(problems), BASELINE, {}))
    if table is None:
        sizes = ", ".join(map(str, sorted({run.world_size for run in shown})))
        raise ValueError(
            f"scaling needs runs on several numbers of ranks, these have {sizes}: world_size=1,2,4 with -m"
        )
    return give(Answer([table], warnings=list(map(str, problems))), options)


def export(arguments: Sequence[str]) -> int:
    """Everything about runs as rows for other programs."""
    parser = _folder_command("export", "Rows for other programs: CSV, JSON, Parquet, LaTeX or Markdown.")
    parser.add_argument("--rows", default=ROWS[0], choices=ROWS, help="what one row is (%(default)s)")
    add_baseline(parser)
    add_output(parser)
    options = checked(parser.parse_args(arguments))
    if options.output is None and options.format == "text":
        options.format = "csv"
    shown, runs, problems = read(options)
    damaged: list[Problem] = []
    if options.rows == "runs":
        # Programs get all columns there are; people are shown those that tell the runs apart, unless they ask for more.
        for_people = style_of(options) not in FOR_PROGRAMS
        data = runs_data(shown, options.baseline, runs) if options.columns or not for_people else None
        tables = [data] if data is not None else []
        if for_people:
            speeds = runs_table(shown, options.baseline, among=runs)
            tables = [with_differing_options(speeds, shown), breakdown_table(shown)]
    else:
        data, damaged = (iterations_data if options.rows == "iterations" else spans_data)(shown)
        tables = [data]
    return give(Answer(tables, data, warnings=list(map(str, (*problems, *damaged)))), options)
