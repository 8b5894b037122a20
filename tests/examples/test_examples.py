"""The README's examples run and learn."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PROCESSES = {"one_process": 1, "two_processes": 2, "data_parallel": 2, "deepspeed_engine": 2}

TRANSFORMER = "transformer"


def run(name: str, processes: int) -> str:
    launcher = (
        [] if processes == 1 else ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    )
    command = [sys.executable, *launcher, str(EXAMPLES / f"{name}.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", PROCESSES)
def test_example_learns(name):
    output = run(name, PROCESSES[name])
    accuracies = [float(percent) for percent in re.findall(r"accuracy ([\d.]+)%", output)]
    assert len(accuracies) == 3
    assert accuracies[-1] > 90, "after three epochs nine in ten digits are right; chance is one in ten"


def test_transformer_learns():
    output = run(TRANSFORMER, 1)
    assert "100.0% of" in output
    losses = [float(loss) for loss in re.findall(r"test loss ([\d.]+)", output)]
    assert len(losses) == 3
    assert losses[-1] < 2.6, "nats per character; how often each occurs gives 3.3"


def test_every_example_is_tested():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*PROCESSES, TRANSFORMER}
