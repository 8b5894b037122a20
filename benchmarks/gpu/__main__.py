"""``python -m benchmarks gpu``, or ``python -m benchmarks.gpu``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.arguments import check_folder, count, seconds
from benchmarks.gpu.command import Setting, main


def run(arguments: Sequence[str]) -> int:
    """K-FAC's parts on one GPU against its roofline, and its profile for the planner: at most 8 minutes."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks gpu", description=run.__doc__)
    defaults = Setting()
    parser.add_argument("--device", choices=("cuda", "cpu"), default=defaults.device)
    parser.add_argument("--quick", action="store_true", help="seconds instead of minutes; no measurement")
    parser.add_argument("--seconds", type=seconds, default=defaults.limit_s, help="what does not fit is left out")
    parser.add_argument("--repeats", type=count, default=defaults.repeats)
    parser.add_argument("--collectives", default=defaults.collectives, help="shipped profile to take them from")
    parser.add_argument("--no-tests", action="store_true", help="do not run the tests marked gpu")
    parser.add_argument("--docs", action="store_true", help="also into docs/gpu.md and docs/gpu.json")
    parser.add_argument("--ship", metavar="NAME", help="also as cluster profile NAME of the planner")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/out/gpu"), help="folder of raw numbers")
    options = parser.parse_args(arguments)
    if not arguments and not torch.cuda.is_available():
        print("gpu: there is none here, nothing was measured (--device cpu --quick tries the code)")
        return 0
    setting = Setting(options.device, options.quick, options.seconds, options.repeats, options.collectives)
    try:
        check_folder(options.output)
        print(main(setting, options.output, tests=not options.no_tests, docs=options.docs, ship=options.ship))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
