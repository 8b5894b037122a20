"""What a rank of a submitted job runs: the configuration as it was at submission."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class TrainingJob:
    """One training run, pickled at submission and called once per rank by submitit.

    ``config`` is plain resolved data: nothing is composed again on the node, so that files edited while the job waits
    do not change it. An exception leaves the process with a non-zero exit status, which SLURM shows as FAILED.
    """

    config: Mapping[str, Any]
    run_directory: str

    def __call__(self) -> None:
        """Train as the rank that SLURM's variables name."""
        from experiments.train import run_rank

        variables = os.environ
        restarts = int(variables.get("SLURM_RESTART_COUNT", "0"))
        run_rank(
            # A requeued job continues what it began, also when it was asked to start over.
            {**self.config, "rerun": self.config["rerun"] and restarts == 0},
            rank=int(variables["SLURM_PROCID"]),
            world_size=int(variables["SLURM_NTASKS"]),
            init_method=rendezvous(Path(self.run_directory), variables),
            local_rank=int(variables["SLURM_LOCALID"]),
        )


def rendezvous(run_directory: Path, variables: Mapping[str, str]) -> str:
    """Where the ranks of one start of one job meet: a file of their own on the shared file system.

    It needs no port and no host name that resolves. The name holds the job and how often it was requeued, since a file
    that an earlier start left behind would bring dead ranks' addresses.
    """
    start = f"{variables['SLURM_JOB_ID']}.{variables.get('SLURM_RESTART_COUNT', '0')}"
    run_directory.mkdir(parents=True, exist_ok=True)
    return f"file://{run_directory.resolve()}/rendezvous.{start}"
