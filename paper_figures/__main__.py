"""``python -m paper_figures``: the tables and figures, from published numbers, simulation and run records."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from paper_figures import (
    ablation,
    breakdown,
    communication_costs,
    convergence,
    factor_sizes,
    inverse_costs,
    inverse_placement,
    iteration_time,
    measured_breakdown,
    measured_iteration_time,
    models_table,
    motivation,
    overlap,
    pipelining,
    placement_bounds,
    scaling,
)
from paper_figures.item import Context

ITEMS: dict[str, ModuleType] = {
    item.NAME: item
    for item in (
        models_table,
        factor_sizes,
        motivation,
        communication_costs,
        inverse_costs,
        iteration_time,
        breakdown,
        pipelining,
        inverse_placement,
        ablation,
        overlap,
        scaling,
        placement_bounds,
        convergence,
        measured_iteration_time,
        measured_breakdown,
    )
}
"""Every table and figure by its name, in the order in which they are made."""
MEASURED = tuple(
    item.NAME for item in (communication_costs, inverse_costs, overlap, measured_iteration_time, measured_breakdown)
)
"""Those that read run records or this machine's profile."""
RUNS = (Path("runs/reproduce"), Path("runs"))
"""Where run records are unless the user says so: the first of these that exists."""


def _listing() -> str:
    width = max(map(len, ITEMS))
    return "\n".join(f"  {name:<{width}}  {(item.__doc__ or '').splitlines()[0]}" for name, item in ITEMS.items())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m paper_figures",
        description="Make the tables and figures, each with a provenance file that leads from its numbers to their "
        "runs, profiles or sources.",
        epilog=f"tables and figures:\n{_listing()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="which ones (default: all; see below)")
    parser.add_argument("--out", type=Path, default=Path("paper_figures/out"), help="where to (%(default)s)")
    parser.add_argument(
        "--runs", type=Path, help=f"folder of the run records ({RUNS[0]} if there is one, else {RUNS[1]})"
    )
    parser.add_argument("--list", action="store_true", help="list the names and stop")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    options = _parser().parse_args(arguments)
    if options.list:
        print(_listing())
        return 0
    unknown = [name for name in options.names if name not in ITEMS]
    if unknown:
        print(f"error: no table or figure {unknown[0]!r}; there are: {', '.join(ITEMS)}", file=sys.stderr)
        return 2
    if options.runs and not options.runs.is_dir():
        print(f"error: no folder {options.runs} to read run records from", file=sys.stderr)
        return 2
    runs = options.runs or next((folder for folder in RUNS if folder.is_dir()), RUNS[-1])
    names = [name for name in ITEMS if name in options.names or not options.names]
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        _make(names, Context(options.out, runs))
    except OSError as error:
        print(f"error: cannot write to {options.out}: {error}", file=sys.stderr)
        return 2
    return 0


def _make(names: Sequence[str], context: Context) -> None:
    if set(MEASURED).intersection(names):
        print(f"what is measured comes from the run records in {context.runs}\n")
    warned: set[str] = set()
    for name in names:
        item = ITEMS[name]
        made = item.make(context)
        for warning in made.warnings:
            if warning not in warned:
                print(f"warning: {warning}", file=sys.stderr)
        warned.update(made.warnings)
        if made.text:
            print(made.text)
        first, *others = made.paths
        print(f"wrote {first}" + "".join(f", {path.name.removeprefix(name)}" for path in others) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
