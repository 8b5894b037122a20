"""``python -m experiments.reproduce``: the main job, from this machine's profile to the paper's comparison.

Each step is one of the project's own commands, run as a user would run it. An interrupted job that is started again
goes on: finished runs are kept, an interrupted one continues from its checkpoint.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SWEEP = "reproduce"
WORLD_SIZE = 2
DISTRIBUTED = ("sgd", "dkfac", "mpdkfac", "spdkfac")


@dataclass(frozen=True)
class Step:
    """One command.

    Args:
        title: what it does, for people.
        module: the command.
        arguments: of the command.
        skip_if: a file that shows that the step has been done.
    """

    title: str
    module: str
    arguments: tuple[str, ...]
    skip_if: Path | None = None

    @property
    def command(self) -> list[str]:
        """As it is run."""
        return [sys.executable, "-m", self.module, *self.arguments]


def steps(runs: Path, out: Path, epochs: int, workload: Sequence[str]) -> list[Step]:
    """The job's steps.

    Args:
        runs: folder of the run records.
        out: folder of the tables and figures.
        epochs: of each training run.
        workload: overrides of model and data.
    """
    profiles = runs / SWEEP / "profiles"
    cluster, model = profiles / "cluster_profile.json", profiles / "model_profile.json"
    common = [*workload, f"runs={runs}", f"sweep={SWEEP}", f"epochs={epochs}", "optimizer.schedule=cosine"]
    planned = [f"cluster={cluster}", f"model_profile={model}"]
    profile = [*workload, f"world_size={WORLD_SIZE}", f"output={profiles}"]
    result = [Step("profile this machine", "experiments.profile", tuple(profile), cluster)]
    for schedule in DISTRIBUTED:
        arguments = (*common, *planned, f"schedule={schedule}", f"world_size={WORLD_SIZE}")
        result.append(Step(f"train with {schedule} on {WORLD_SIZE} processes", "experiments.train", arguments))
    alone = (*common, *planned, "schedule=kfac", "world_size=1")
    result.append(Step("train with kfac on one process", "experiments.train", alone))
    result.append(Step("compare the runs", "analysis", (str(runs / SWEEP),)))
    figures = ("--runs", str(runs / SWEEP), "--out", str(out))
    result.append(Step("simulate the paper's cluster; tables and figures", "paper_figures", figures))
    return result


def _duration(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d} min"


def run(todo: Sequence[Step]) -> int:
    """Run the steps in order.

    Returns:
        0, or the exit code of the step that failed or was interrupted; what was done before it is kept.
    """
    start = time.monotonic()
    took: list[tuple[str, str]] = []
    for number, step in enumerate(todo, start=1):
        print(f"\n[{number}/{len(todo)}] {step.title}", flush=True)
        if step.skip_if is not None and step.skip_if.exists():
            print(f"done before: {step.skip_if}")
            took.append((step.title, "done before"))
            continue
        begin = time.monotonic()
        process = subprocess.Popen(step.command)
        try:
            code = process.wait()
        except KeyboardInterrupt:
            # The terminal has sent the signal to the step too, which ends its ranks and keeps what it has.
            process.wait()
            print(f"\ninterrupted in step {number}; the same command goes on from here", file=sys.stderr)
            return 130
        if code:
            print(f"error: step {number} ({step.title}) failed with exit code {code}:", file=sys.stderr)
            print(f"  {' '.join(step.command)}", file=sys.stderr)
            return code
        took.append((step.title, _duration(time.monotonic() - begin)))
    print("\nSummary")
    for title, duration in took:
        print(f"  {duration:>12}  {title}")
    print(f"  {_duration(time.monotonic() - start):>12}  in all")
    return 0


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m experiments.reproduce", description=__doc__)
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of the run records (runs)")
    parser.add_argument("--out", type=Path, default=Path("paper_figures/out"), help="folder of tables and figures")
    parser.add_argument("--epochs", type=int, default=3, help="of each training run (3)")
    parser.add_argument(
        "overrides",
        nargs="*",
        default=["model=resnet20", "data=digits"],
        help="model and data, as experiments.train takes them (model=resnet20 data=digits)",
    )
    arguments = parser.parse_args()
    code = run(steps(arguments.runs, arguments.out, arguments.epochs, arguments.overrides))
    if code == 0:
        print(f"\nrecords: {arguments.runs / SWEEP}   tables and figures: {arguments.out}")
    return code


if __name__ == "__main__":
    sys.exit(main())
