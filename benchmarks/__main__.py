"""``python -m benchmarks``: the speed of the schedules over rate-limited links, measured side by side in one run."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks import overlap
from benchmarks.netns import NetworkError


def main() -> int:
    """Run the benchmark and print its report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    defaults = overlap.Setting()
    parser.add_argument("--model", default=defaults.model)
    parser.add_argument("--batch-size", type=int, default=defaults.batch_size, help="per rank")
    parser.add_argument("--rounds", type=int, default=defaults.rounds)
    parser.add_argument("--iterations", type=int, default=defaults.iterations, help="per block")
    parser.add_argument("--schedules", default=",".join(defaults.schedules), help="must contain dkfac")
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/out/overlap.json"), help="raw numbers")
    arguments = parser.parse_args()
    schedules = tuple(arguments.schedules.split(","))
    if "dkfac" not in schedules:
        parser.error("--schedules must contain dkfac, which the others are compared with")
    setting = overlap.Setting(arguments.model, arguments.batch_size, arguments.rounds, arguments.iterations, schedules)
    try:
        print(overlap.main(setting, arguments.world_size, arguments.output))
    except NetworkError as error:
        print(f"error: {error}\nThe benchmark needs root and network namespaces (Debian: iproute2).", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
