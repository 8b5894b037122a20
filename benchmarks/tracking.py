"""``python -m benchmarks.tracking``: what a training step pays for each tracker, beside the machine's load.

Steps as the training loop makes them: each logs a row, each tenth offers the rows to the sinks, and in between the
machine is left alone for as long as an iteration takes.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.arguments import count, seconds
from experiments.records import RunRecord
from experiments.tracking import TrackingSettings, open_tracker

SINKS: dict[str, dict[str, Any]] = {
    "none": {},
    "offline": {"wandb": "offline"},
    "tensorboard": {"tensorboard": True},
    "trackio": {"trackio": True},
}
PROGRESS = 10
"""Steps between offers, as ``progress`` has it."""


def costs_s(settings: TrackingSettings, steps: int, iteration_s: float, folder: Path) -> list[float]:
    """Seconds that tracking takes of each step.

    Args:
        settings: which sinks.
        steps: how many.
        iteration_s: from step to step.
        folder: for the record.
    """
    facts = {"schedule": "spdkfac", "model": "none", "data": "none", "world_size": 1, "seed": 0}
    record = RunRecord.open(folder / "sweep" / "run", run_id="run", name="run", facts=facts, config={})
    record.begin_segment()
    tracker = open_tracker(settings, record)
    costs = []
    for step in range(steps):
        row = {"kind": "train", "iter": step, "epoch": step / 100, "loss": 1 / (step + 1), "accuracy": 0.5}
        row |= {"lr": 0.1, "iteration_s": iteration_s}
        start_s = time.perf_counter()
        tracker.log(row)
        if step % PROGRESS == PROGRESS - 1:
            tracker.offer()
        costs.append(time.perf_counter() - start_s)
        time.sleep(iteration_s)
    tracker.finish("finished")
    record.end_segment("finished")
    record.close()
    return costs


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tracking", description=__doc__)
    parser.add_argument("sinks", nargs="*", metavar="SINK", help=f"of: {', '.join(SINKS)} (default: all)")
    parser.add_argument("--steps", type=count, default=1200)
    parser.add_argument("--iteration-s", type=seconds, default=0.02, help="from step to step")
    options = parser.parse_args()
    print(f"{'':12s}{'load':>6s}{'median [ms]':>13s}{'mean [ms]':>11s}{'longest [ms]':>14s}", flush=True)  # noqa: T201
    for name in options.sinks or SINKS:
        with tempfile.TemporaryDirectory() as folder:
            costs = costs_s(TrackingSettings(**SINKS[name]), options.steps, options.iteration_s, Path(folder))
        cells = (os.getloadavg()[0], 1e3 * median(costs), 1e3 * fmean(costs), 1e3 * max(costs))
        print(f"{name:12s}" + "{:6.1f}{:13.4f}{:11.4f}{:14.1f}".format(*cells), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
