"""``python -m analysis``: tables of runs and of their timelines, from run records alone."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from analysis.options import with_differing_options
from analysis.report import BASELINE, breakdown_table, runs_table, timeline_tables, wide_table
from analysis.runs import Run, load_runs, load_samples, paper_order
from analysis.tables import STYLES, Table, for_screen

_EPILOG = """\
examples:
  python -m analysis runs                           all runs, speed-ups over dkfac, where the time goes
  python -m analysis runs --baseline mpdkfac --intervals
  python -m analysis runs --model resnet20 --format csv > runs.csv
  python -m analysis timeline runs/single/RUN       exposed and hidden milliseconds per rank and kind
  python -m analysis report runs/SWEEP              one HTML file and Markdown; --wandb: also in W&B
  python -m analysis sync runs/SWEEP                upload to W&B, read back, compare
  python -m analysis import TEAM/PROJECT            records of runs that are known only from W&B
"""


def _runs_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m analysis",
        usage="python -m analysis RUNS_DIR [RUNS_DIR ...] [options]\n"
        "       python -m analysis timeline RUN [options]\n"
        "       python -m analysis {report,sync,import} --help",
        description="Compare runs from their records: iteration times, speed-ups, breakdown, loss and accuracy.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="RUNS_DIR", help="folders with run records below them")
    parser.add_argument(
        "--baseline", default=BASELINE, metavar="SCHEDULE", help="what speed-ups are over (%(default)s)"
    )
    parser.add_argument("--intervals", action="store_true", help="bootstrap intervals of the speed-ups")
    for key in ("schedule", "model", "data", "status"):
        parser.add_argument(f"--{key}", action="append", metavar="NAME", help=f"only runs with this {key} (repeatable)")
    _add_format(parser)
    return parser


def _timeline_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m analysis timeline",
        description="Exposed and hidden milliseconds per rank and kind of a run's recorded iterations.",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the directory of a run record")
    parser.add_argument("--iteration", action="append", type=int, metavar="N", help="only this one (repeatable)")
    _add_format(parser)
    return parser


def _add_format(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--format", default="text", choices=STYLES, help="how to write tables (%(default)s)")


def _selected(options: argparse.Namespace) -> Callable[[Run], bool]:
    wanted = {k: v for k in ("schedule", "model", "data", "status") if (v := getattr(options, k)) is not None}
    return lambda run: all(getattr(run, key) in values for key, values in wanted.items())


def _show_runs(arguments: Sequence[str]) -> int:
    options = _runs_parser().parse_args(arguments)
    runs, problems = load_runs(options.folders)
    samples_s, damaged = load_samples(runs) if options.intervals else (None, [])
    for problem in (*problems, *damaged):
        print(f"warning: {problem}", file=sys.stderr)
    # The filter comes after reading: a baseline that is not shown still counts.
    shown = sorted(filter(_selected(options), runs), key=paper_order)
    if not shown:
        where = ", ".join(map(str, options.folders))
        print(f"no run records{' of that kind' if runs else ''} below {where}", file=sys.stderr)
        return 1
    tables = [runs_table(shown, options.baseline, among=runs, samples_s=samples_s), breakdown_table(shown)]
    tables = [with_differing_options(table, shown) for table in tables]
    if options.format in ("csv", "json"):
        tables = [wide_table(tables)]
    _print(tables, options.format)
    return 0


def _print(tables: Sequence[Table], style: str) -> None:
    print("\n".join(for_screen(table) if style == "text" else table.render(style) for table in tables), end="")


def _show_timelines(arguments: Sequence[str]) -> int:
    options = _timeline_parser().parse_args(arguments)
    tables = timeline_tables(options.run, options.iteration)
    _print(tables, options.format)
    return 0


def _report_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m analysis report",
        description="Compare runs in one HTML file that loads nothing, and in Markdown; with --wandb also in W&B.",
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="RUNS_DIR", help="folders with run records below them")
    parser.add_argument(
        "--baseline", default=BASELINE, metavar="SCHEDULE", help="what speed-ups are over (%(default)s)"
    )
    parser.add_argument("--output", type=Path, metavar="DIR", help="where to write (the first RUNS_DIR)")
    parser.add_argument("--wandb", action="store_true", help="also save a report and a workspace in W&B (after sync)")
    parser.add_argument("--project", help="the W&B project, by default the runs' own")
    parser.add_argument("--entity", help="the W&B user or team, by default the runs' own or yours")
    parser.add_argument("--draft", action="store_true", help="save the W&B report as a draft that only you see")
    return parser


def _report(arguments: Sequence[str]) -> int:
    from analysis.comparison import Comparison
    from analysis.report_pages import write_report

    options = _report_parser().parse_args(arguments)
    comparison = Comparison.of(options.folders, options.baseline)
    for problem in comparison.problems:
        print(f"warning: {problem}", file=sys.stderr)
    for path in write_report(comparison, options.output or options.folders[0]):
        print(path)
    if options.wandb:
        try:
            import wandb_workspaces  # noqa: F401
        except ImportError as error:
            raise ValueError("--wandb needs wandb and wandb-workspaces: pip install 'spdkfac[wandb]'") from error
        from analysis.wandb_report import Place, save_report, save_workspace

        os.environ.setdefault("WANDB_SILENT", "true")
        place = Place.of(comparison, options.project, options.entity)
        print(save_report(comparison, place, draft=options.draft))
        print(save_workspace(comparison, place))
    return 0


def _import_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m analysis import",
        description="Make records of runs that are known only from W&B: its offline files, or a project on a server.",
    )
    parser.add_argument(
        "sources", nargs="+", metavar="SOURCE", help="a folder with offline-run-* folders, or ENTITY/PROJECT[/RUN]"
    )
    parser.add_argument(
        "--into", type=Path, default=Path("runs/imported"), metavar="DIR", help="where to (%(default)s)"
    )
    parser.add_argument(
        "--column", action="append", default=[], metavar="OURS=THEIRS", help="as in train.loss=loss/total (repeatable)"
    )
    parser.add_argument(
        "--fact", action="append", default=[], metavar="NAME=VALUE", help="as in schedule=dkfac (repeatable)"
    )
    return parser


def _pairs(option: str, texts: Sequence[str]) -> dict[str, str]:
    for text in texts:
        if "=" not in text:
            raise ValueError(f"{option} {text}: give NAME=VALUE")
    return dict(text.split("=", 1) for text in texts)


def _import(arguments: Sequence[str]) -> int:
    from analysis.importing import from_api, from_offline, import_run

    options = _import_parser().parse_args(arguments)
    columns, facts = _pairs("--column", options.column), _pairs("--fact", options.fact)
    status = 0
    for source in options.sources:
        for run in from_offline([Path(source)]) if Path(source).exists() else from_api(source):
            try:
                print(import_run(run, options.into, columns, facts))
            except ValueError as error:
                print(f"warning: {run.id} is left out: {error}", file=sys.stderr)
                status = 1
    return status


def _sync_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m analysis sync",
        description="Upload runs to W&B from a machine with a network, read them back and compare with the records.",
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="RUNS_DIR", help="folders with run records below them")
    parser.add_argument("--project", help="the W&B project, by default the runs' own")
    parser.add_argument("--entity", help="the W&B user or team, by default the runs' own or yours")
    parser.add_argument("--retries", type=int, default=2, help="how often to send again what is missing (%(default)s)")
    parser.add_argument("--timeout", type=float, default=300.0, metavar="S", help="seconds per upload (%(default)g)")
    parser.add_argument("--force", action="store_true", help="verify also what was verified before")
    _add_format(parser)
    return parser


def _sync(arguments: Sequence[str]) -> int:
    options = _sync_parser().parse_args(arguments)
    try:
        import wandb  # noqa: F401
    except ImportError as error:
        raise ValueError("sync needs wandb: pip install 'spdkfac[wandb]'") from error
    from analysis.sync import SyncOptions, sync, sync_table

    how = SyncOptions(
        project=options.project,
        entity=options.entity,
        retries=options.retries,
        timeout_s=options.timeout,
        force=options.force,
    )
    os.environ.setdefault("WANDB_SILENT", "true")
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    outcomes = sync(options.folders, how, lambda o: print(f"{o.run.name}: {o.result}", file=sys.stderr, flush=True))
    if not outcomes:
        print(f"no run records below {', '.join(map(str, options.folders))}", file=sys.stderr)
        return 1
    _print([sync_table(outcomes)], options.format)
    return 0 if all(outcome.good for outcome in outcomes) else 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        if arguments[:1] == ["timeline"]:
            return _show_timelines(arguments[1:])
        if arguments[:1] == ["report"]:
            return _report(arguments[1:])
        if arguments[:1] == ["sync"]:
            return _sync(arguments[1:])
        if arguments[:1] == ["import"]:
            return _import(arguments[1:])
        return _show_runs(arguments)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
