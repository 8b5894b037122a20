"""A real SLURM for the tests that need one, and stand-ins for its programs for those that do not."""

import os
import subprocess
import sys
from pathlib import Path

import hydra
import pytest

from experiments.command import plain
from experiments.config import TrainConfig
from slurm.local_cluster.cluster import client_environment
from slurm.plan import Request
from slurm.site import Site

ROOT = Path(__file__).parents[2]


def command(*arguments: str, environment: dict[str, str] | None = None, timeout_s: float = 240):
    """Run ``python -m ...`` in the checkout as a user would."""
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=ROOT, env={**os.environ, **(environment or {})},
        capture_output=True, text=True, timeout=timeout_s, check=False,
    )  # fmt: skip


def compose(runs: Path, *overrides: str) -> Request:
    """One run as the command line would make it."""
    with hydra.initialize_config_module("experiments.conf", version_base="1.3"):
        data = plain(hydra.compose("train", [f"runs={runs}", *overrides]))
    return Request(TrainConfig.from_dict(data), Site.of(data), overrides)


def scontrol(*arguments: str, environment: dict[str, str] | None = None) -> str:
    """What scontrol says."""
    variables = {**client_environment(), **(environment or {})}
    return subprocess.run(["scontrol", *arguments], env=variables, capture_output=True, text=True, check=True).stdout


def processes_of(directory: Path) -> list[str]:
    """Command lines that name ``directory``."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if str(directory) in line:
                found.append(line)
    return found


@pytest.fixture(scope="session")
def slurm_environment(tmp_path_factory):
    """SLURM_CONF of a cluster that the tests share; brought up, and down, by its command line."""
    directory = tmp_path_factory.mktemp("cluster")
    up = command("slurm", "local-cluster", "up", str(directory), "--nodes", "4", "--gpus", "2")
    assert up.returncode == 0, up.stderr
    name, _, conf = up.stdout.strip().removeprefix("export ").partition("=")
    try:
        yield {name: conf}
    finally:
        down = command("slurm", "local-cluster", "down", str(directory))
    assert down.stdout == "down\n"
    assert processes_of(directory) == []


@pytest.fixture(scope="module")
def slurm_in_process(slurm_environment):
    """The same cluster for SLURM's programs that this process starts."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in slurm_environment.items():
            patch.setenv(name, value)
        yield slurm_environment


@pytest.fixture
def stand_ins(tmp_path, monkeypatch):
    """sbatch, srun, squeue, sacct and scancel as scripts: they note what they get; squeue prints the file ``queue``,
    sacct the file ``accounting``, and fails without it as where there is no accounting."""
    folder = tmp_path / "bin"
    folder.mkdir()
    scripts = {
        "sbatch": f"number=$(ls {tmp_path} | grep -c ^script)\n"
        f'cp "$1" {tmp_path}/script$number\necho "Submitted batch job $((101 + number))"',
        "srun": "exit 1",
        "squeue": f"cat {tmp_path}/queue 2>/dev/null || true",
        "sacct": f"cat {tmp_path}/accounting",
        "scancel": f'echo "$@" >>{tmp_path}/cancelled',
    }
    for name, body in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return tmp_path
