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
from typing import TextIO

SWEEP = "reproduce"
WORLD_SIZE = 2
INTERRUPTED = 130
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

    def done_before(self) -> Path | None:
        """What shows that the step need not run again; of a training, its finished record. None if it must run."""
        path = finished_record(self.arguments) if self.module == "experiments.train" else self.skip_if
        return path if path is not None and path.exists() else None


def finished_record(overrides: Sequence[str]) -> Path | None:
    """The record of the training run of these overrides if it has finished.

    None for a mistake, too: the command itself tells it.
    """
    import hydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from experiments.command import CONFIG_SOURCE, plain
    from experiments.config import TrainConfig
    from experiments.records import FINISHED, RunRecord

    try:
        with hydra.initialize_config_module(CONFIG_SOURCE.removeprefix("pkg://"), version_base="1.3"):
            config = TrainConfig.from_dict(plain(hydra.compose("train", list(overrides))))
        finished = RunRecord.load(config.record_path).status == FINISHED
    except (ValueError, HydraException, OmegaConfBaseException):
        return None
    return config.record_path if finished and not config.rerun else None


PAPER_LAYERS = "kfac.layers=[linear,convolution]"
"""The paper preconditions linear layers and convolutions; norms keep their plain gradient."""


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
    workload = [*workload, PAPER_LAYERS]
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
        _say(f"\n[{number}/{len(todo)}] {step.title}")
        if found := step.done_before():
            _say(f"done before: {found}")
            took.append((step.title, "done before"))
            continue
        begin = time.monotonic()
        code = _run(step)
        if code == INTERRUPTED:
            _say(f"interrupted in step {number}; the same command goes on from here", sys.stderr)
            return INTERRUPTED
        if code:
            _say(f"error: step {number} ({step.title}) failed with exit code {code}:", sys.stderr)
            _say(f"  {' '.join(step.command)}", sys.stderr)
            return code
        took.append((step.title, _duration(time.monotonic() - begin)))
    _say("\nSummary")
    for title, duration in took:
        _say(f"  {duration:>12}  {title}")
    _say(f"  {_duration(time.monotonic() - start):>12}  in all")
    return 0


def _run(step: Step) -> int:
    """A step's exit code; that of an interruption if Ctrl-C was pressed, and none of it shows a traceback."""
    process: subprocess.Popen[bytes] | None = None
    interrupts = 0
    while True:
        try:
            process = process or subprocess.Popen(step.command)
            code = process.wait()
            return INTERRUPTED if interrupts else code
        except KeyboardInterrupt:
            # The terminal has sent the signal to the step too, which ends its ranks and keeps what it has.
            interrupts += 1
            if process is None:
                return INTERRUPTED
            if interrupts == 1:
                _say("\nstopping ...", sys.stderr)
            else:
                process.terminate()


def _say(line: str, stream: TextIO | None = None) -> None:
    """A line at once, so that it stands in order with those of the steps also in a file."""
    print(line, file=stream, flush=True)


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
    try:
        code = run(steps(arguments.runs, arguments.out, arguments.epochs, arguments.overrides))
    except KeyboardInterrupt:  # between two steps
        return INTERRUPTED
    if code == 0:
        _say(f"\nrecords: {arguments.runs / SWEEP}   tables and figures: {arguments.out}")
    return code


if __name__ == "__main__":
    sys.exit(main())
