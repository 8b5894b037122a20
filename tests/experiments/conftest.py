"""What the tests of commands share."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.wandb_server.fixtures import server, wandb_client

__all__ = ["command", "server", "wandb_client"]
ROOT = Path(__file__).resolve().parents[2]
SMALL = ("model=mlp", "model.hidden=[16]", "data.image_size=8", "tracking=none", "cluster=default", "optimizer.lr=0.02")
"""Overrides for runs that take as long as starting the processes does."""


@pytest.fixture
def command(tmp_path):
    """Runs ``python -m experiments.NAME`` with overrides in an empty folder outside the checkout."""

    def run(name, *overrides, check=True, **variables):
        environ = {k: v for k, v in os.environ.items() if not k.startswith(("RANK", "SLURM_", "HYDRA_"))}
        environ |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
        done = subprocess.run(
            [sys.executable, "-m", f"experiments.{name}", *overrides],
            cwd=tmp_path,
            env=environ,
            capture_output=True,
            text=True,
            check=False,
        )
        if check and done.returncode:
            pytest.fail(f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}")
        return done

    return run
