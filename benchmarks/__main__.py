"""``python -m benchmarks [NAME]``: measured speed, side by side in one run. Without a name, all of them."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import cost, overlap
from benchmarks.netns import NetworkError

OUTPUT = Path("benchmarks/out")


def run_overlap(arguments: Sequence[str]) -> int:
    """The speed of the schedules over rate-limited links."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks overlap", description=run_overlap.__doc__)
    defaults = overlap.Setting()
    parser.add_argument("--model", default=defaults.model)
    parser.add_argument("--batch-size", type=int, default=defaults.batch_size, help="per rank")
    parser.add_argument("--rounds", type=int, default=defaults.rounds)
    parser.add_argument("--iterations", type=int, default=defaults.iterations, help="per block")
    parser.add_argument("--schedules", default=",".join(defaults.schedules), help="must contain dkfac")
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--output", type=Path, default=OUTPUT / "overlap.json", help="raw numbers")
    options = parser.parse_args(arguments)
    schedules = tuple(options.schedules.split(","))
    if "dkfac" not in schedules:
        parser.error("--schedules must contain dkfac, which the others are compared with")
    setting = overlap.Setting(options.model, options.batch_size, options.rounds, options.iterations, schedules)
    try:
        print(overlap.main(setting, options.world_size, options.output))
    except NetworkError as error:
        print(f"error: {error}\nThe benchmark needs root and network namespaces (Debian: iproute2).", file=sys.stderr)
        return 1
    return 0


def run_cost(arguments: Sequence[str]) -> int:
    """What K-FAC costs on one process, in time and memory, beside kfac-pytorch (about 10 GB of memory)."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks cost", description=run_cost.__doc__)
    defaults = cost.Setting()
    parser.add_argument("--workloads", default=",".join(defaults.workloads))
    parser.add_argument("--rounds", type=int, default=defaults.rounds)
    parser.add_argument("--threads", type=int, default=defaults.threads, help="of each process")
    parser.add_argument("--quick", action="store_true", help="seconds instead of minutes; no measurement")
    parser.add_argument("--docs", action="store_true", help="also into docs/cost.md and docs/cost.json")
    parser.add_argument("--output", type=Path, default=OUTPUT / "cost.json", help="raw numbers")
    options = parser.parse_args(arguments)
    if options.quick and options.docs:
        parser.error("--quick is no measurement: nothing for the docs")
    workloads = ("tiny",) if options.quick else tuple(options.workloads.split(","))
    rounds = min(2, options.rounds) if options.quick else options.rounds
    path = os.environ.get("KAISA")
    try:
        setting = cost.Setting(workloads, rounds, options.threads, Path(path) if path else None)
        print(cost.main(setting, options.output, options.docs))
    except (ValueError, cost.CostError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if not path:
        print("\nKAISA=PATH, a checkout of kfac-pytorch, measures that as well.")
    return 0


BENCHMARKS: dict[str, Callable[[Sequence[str]], int]] = {"overlap": run_overlap, "cost": run_cost}


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark that is named; options alone are those of ``overlap``."""
    if not arguments:
        return max([run(()) for run in BENCHMARKS.values()])
    if arguments[0] in BENCHMARKS:
        return BENCHMARKS[arguments[0]](arguments[1:])
    if arguments[0] not in ("-h", "--help") and arguments[0].startswith("-"):
        return run_overlap(arguments)
    print(__doc__)
    for name, run in BENCHMARKS.items():
        print(f"  {name:10}{run.__doc__}")
    return 0 if arguments[0] in ("-h", "--help") else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
