"""``python -m benchmarks.optimisation``: steps and seconds to a target of K-FAC, SGD, AdamW and SOAP, tuned alike."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from benchmarks.arguments import count
from benchmarks.optimisation.comparison import Runner, Setting
from benchmarks.optimisation.contenders import CONTENDERS
from benchmarks.optimisation.report import tables, write
from benchmarks.optimisation.store import Store
from benchmarks.optimisation.workloads import WORKLOADS

ROOT = Path(__file__).resolve().parents[2]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what has no result yet, then report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.optimisation", description=__doc__)
    defaults = Setting()
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--optimizers", default=",".join(CONTENDERS))
    parser.add_argument("--trials", type=count, default=defaults.trials, help="of each optimizer on each workload")
    parser.add_argument("--processes", type=count, default=defaults.processes, help="trials at a time, one thread each")
    parser.add_argument("--quick", action="store_true", help="small forms of everything, for tests")
    parser.add_argument("--retime", action="store_true", help="measure the seconds per step again (a quiet machine!)")
    parser.add_argument("--results", type=Path, help="the file of all runs: those in it are not run again")
    parser.add_argument("--docs", type=Path, help="the folder of optimisation.md, optimisation.json and the picture")
    options = parser.parse_args(arguments)
    workloads = _chosen(parser, "--workloads", options.workloads, list(WORKLOADS))
    contenders = _chosen(parser, "--optimizers", options.optimizers, list(CONTENDERS))
    if any(name.startswith("soap") for name in contenders) and find_spec("pytorch_optimizer") is None:
        parser.error("SOAP needs pytorch_optimizer: pip install 'spdkfac[bench]', or leave it out of --optimizers")
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("benchmarks").setLevel(logging.INFO)
    setting = Setting(options.trials, options.processes, options.quick, options.retime)
    out = ROOT / "benchmarks" / "out"
    results = options.results or out / ("optimisation-quick.jsonl" if options.quick else "optimisation.jsonl")
    with Runner(setting, Store(results)) as runner:
        comparisons = [runner.compare(workload, contenders) for workload in workloads]
    print(tables(comparisons, setting))
    whole = not options.quick and len(workloads) == len(WORKLOADS) and len(contenders) == len(CONTENDERS)
    folder = options.docs or (ROOT / "docs" if whole else None)
    if folder is None:
        print("(a part only: docs/ stays as it is)", file=sys.stderr)
        return
    for path in write(comparisons, setting, folder):
        print(f"written: {path}", file=sys.stderr)


def _chosen(parser: argparse.ArgumentParser, option: str, text: str, choices: list[str]) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in choices:
            parser.error(f"{option}: {name!r} is not one of: {', '.join(choices)}")
    return [name for name in choices if name in names]


if __name__ == "__main__":
    main()
