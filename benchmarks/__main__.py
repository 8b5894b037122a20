"""``python -m benchmarks [NAME]``: measured speed, side by side in one run. Without a name, all of them."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import cost
from benchmarks.arguments import check_folder, count, counts
from benchmarks.gpu.__main__ import run as run_gpu
from benchmarks.netns import NetworkError
from benchmarks.speed import command
from benchmarks.speed.measure import UnlikeLayersError

OUTPUT = Path("benchmarks/out")
KAISA_HINT = "\nKAISA=PATH, a checkout of kfac-pytorch, measures that as well."


def run_speed(arguments: Sequence[str]) -> int:
    """Every schedule over rate-limited links, beside kfac-pytorch: about 50 minutes, goes on where it was."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks speed", description=run_speed.__doc__)
    defaults = command.Setting()
    parser.add_argument("--workloads", default=",".join(defaults.workloads))
    parser.add_argument("--workers", type=counts, default=defaults.workers, help="numbers of ranks, as in 2,4")
    parser.add_argument("--links", default="", help="only parts on these, such as ResNet-50,unlimited; default: all")
    parser.add_argument("--quick", action="store_true", help="seconds instead of minutes; no measurement")
    parser.add_argument("--stored", action="store_true", help="measure nothing: report what there is")
    parser.add_argument("--docs", action="store_true", help="also into docs: speed.md, validation.md")
    parser.add_argument("--output", type=Path, default=OUTPUT / "speed", help="folder of results and pictures")
    options = parser.parse_args(arguments)
    if options.quick and options.docs:
        parser.error("--quick is no measurement: nothing for the docs")
    path = os.environ.get("KAISA")
    try:
        workloads = ("tiny",) if options.quick else tuple(options.workloads.split(","))
        links = tuple(options.links.split(",")) if options.links else ()
        workers = (2,) if options.quick else options.workers
        setting = command.Setting(workloads, workers, Path(path) if path else None, links)
        if not options.stored:
            check_folder(options.output)
        print(command.main(setting, options.output, options.docs, not options.stored))
    except NetworkError as error:
        print(f"error: {error}\nThe benchmark needs root and network namespaces (Debian: iproute2).", file=sys.stderr)
        return 1
    except (ValueError, UnlikeLayersError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if not path and not options.stored:
        print(KAISA_HINT)
    return 0


def run_cost(arguments: Sequence[str]) -> int:
    """What K-FAC costs on one process, in time and memory, beside kfac-pytorch (about 10 GB of memory)."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks cost", description=run_cost.__doc__)
    defaults = cost.Setting()
    parser.add_argument("--workloads", default=",".join(defaults.workloads))
    parser.add_argument("--rounds", type=count, default=defaults.rounds)
    parser.add_argument("--threads", type=count, default=defaults.threads, help="of each process")
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
        check_folder(options.output.parent)
        print(cost.main(setting, options.output, options.docs))
    except (ValueError, cost.CostError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if not path:
        print(KAISA_HINT)
    return 0


BENCHMARKS: dict[str, Callable[[Sequence[str]], int]] = {"speed": run_speed, "cost": run_cost, "gpu": run_gpu}


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark that is named; options alone are those of ``speed``."""
    if not arguments:
        return max([run(()) for run in BENCHMARKS.values()])
    if arguments[0] in BENCHMARKS:
        return BENCHMARKS[arguments[0]](arguments[1:])
    if arguments[0] not in ("-h", "--help") and arguments[0].startswith("-"):
        return run_speed(arguments)
    if arguments[0] not in ("-h", "--help"):
        print(f"error: no benchmark {arguments[0]!r}; choose from: {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
    print(__doc__)
    for name, run in BENCHMARKS.items():
        print(f"  {name:10}{run.__doc__}")
    return 0


if __name__ == "__main__":
    # Ended from outside, it removes what it has made of networks, as it does after Ctrl-C.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main(sys.argv[1:]))
