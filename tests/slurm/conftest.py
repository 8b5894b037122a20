"""A real SLURM for the tests that need one, and stand-ins for its programs for those that do not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def command(*arguments: str, environment: dict[str, str] | None = None, timeout_s: float = 240):
    """Run ``python -m ...`` in the checkout as a user would."""
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=ROOT, env={**os.environ, **(environment or {})},
        capture_output=True, text=True, timeout=timeout_s, check=False,
    )  # fmt: skip


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


@pytest.fixture
def stand_ins(tmp_path, monkeypatch):
    """sbatch, srun, squeue and scancel as scripts: they note what they get, and squeue prints the file ``queue``."""
    folder = tmp_path / "bin"
    folder.mkdir()
    scripts = {
        "sbatch": f"number=$(ls {tmp_path} | grep -c ^script)\n"
        f'cp "$1" {tmp_path}/script$number\necho "Submitted batch job $((101 + number))"',
        "srun": "exit 1",
        "squeue": f"cat {tmp_path}/queue 2>/dev/null || true",
        "scancel": f'echo "$@" >>{tmp_path}/cancelled',
    }
    for name, body in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return tmp_path
