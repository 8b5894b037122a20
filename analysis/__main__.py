"""``python -m analysis``: tables of runs and of their timelines, from run records alone."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from analysis import run_commands, timeline_commands
from analysis.output import add_output, show
from analysis.report import BASELINE
from analysis.tables import STYLES, printable

_EPILOG = """\
questions and the commands that answer them (each has --help):
  python -m analysis runs                           all runs, speed-ups over dkfac, where the time goes
  python -m analysis runs --baseline mpdkfac --intervals
  python -m analysis compare dkfac spdkfac --among runs/SWEEP     per component, with intervals
  python -m analysis compare runs/A runs/B
  python -m analysis breakdown runs/SWEEP --share   where the time goes, per group of seeds
  python -m analysis scaling runs/SWEEP             iteration time and efficiency over the ranks
  python -m analysis export runs --output runs.parquet            --rows runs, iterations or spans
  python -m analysis timeline runs/single/RUN       exposed and hidden milliseconds per rank and kind
  python -m analysis diff RUN_A RUN_B --html d.html where the time went; with one run: simulated against measured
  python -m analysis convert RUN --output t.et      trace for Perfetto (.json), page (.html), Chakra (.et)
  python -m analysis report runs/SWEEP              one HTML file and Markdown; --wandb: also in W&B
  python -m analysis sync runs/SWEEP                upload to W&B, read back, compare
  python -m analysis import TEAM/PROJECT            records of runs that are known only from W&B
"""


def _runs_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m analysis",
        usage="python -m analysis RUNS_DIR [RUNS_DIR ...] [options]\n"
        "       python -m analysis timeline RUN [options]\n"
        "       python -m analysis {compare,breakdown,scaling,export,diff,convert,report,sync,import} --help",
        description="Compare runs from their records: iteration times, speed-ups, breakdown, loss and accuracy.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    run_commands.add_folders(parser)
    run_commands.add_baseline(parser)
    parser.add_argument("--intervals", action="store_true", help="bootstrap intervals of the speed-ups")
    add_output(parser)
    return parser


def _show_runs(arguments: Sequence[str]) -> int:
    return run_commands.table_of_runs(_runs_parser(), arguments)


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
    parser.add_argument("--format", default="text", choices=STYLES, help="how to write tables (%(default)s)")
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
    show([sync_table(outcomes)], options.format)
    return 0 if all(outcome.good for outcome in outcomes) else 1


_COMMANDS: Mapping[str, Callable[[Sequence[str]], int]] = {
    "timeline": timeline_commands.timeline,
    "diff": timeline_commands.diff,
    "convert": timeline_commands.convert,
    "compare": run_commands.compare,
    "breakdown": run_commands.breakdown,
    "scaling": run_commands.scaling,
    "export": run_commands.export,
    "report": _report,
    "sync": _sync,
    "import": _import,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        if arguments and arguments[0] in _COMMANDS:
            return _COMMANDS[arguments[0]](arguments[1:])
        if arguments and not arguments[0].startswith("-") and not Path(arguments[0]).exists():
            raise ValueError(f"no folder {arguments[0]} and no command of that name; commands: {', '.join(_COMMANDS)}")
        return _show_runs(arguments)
    except run_commands.NoRunsError as error:
        print(printable(str(error)), file=sys.stderr)
        return 1
    except ValueError as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # as of "| head"
        sys.stderr.close()
        return 1


if __name__ == "__main__":
    gc.set_threshold(200_000)  # of thousands of records nothing is garbage: to look for some took a quarter of the time
    raise SystemExit(main())
