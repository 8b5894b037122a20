"""What a rank of a submitted job runs: the configuration as it was at submission."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

USAGE_ERROR = 2


@dataclass(frozen=True)
class TrainingJob:
    """One training run, pickled at submission and called once per rank by submitit.

    ``config`` is plain resolved data: nothing is composed again on the node, so that files edited while the job waits
    do not change it. An exception leaves the process with a non-zero exit status, which SLURM shows as FAILED. The
    ranks meet through a file in ``meeting_folder``, which all nodes must see.
    """

    config: Mapping[str, Any]
    meeting_folder: str
    interface: str | None
    start_timeout_s: float

    def __call__(self) -> None:
        """Train as the rank that SLURM's variables name."""
        from experiments.ranks import StopRequest, rank_from_environment

        logging.getLogger("submitit").propagate = False  # it has its own output
        stop = StopRequest().listen()  # instead of submitit's, which knows nothing of the other ranks
        from experiments.launch import THREAD_VARIABLES
        from experiments.settings import ConfigError

        os.environ |= dict.fromkeys(THREAD_VARIABLES, str(self.config["threads"]))  # read when torch is loaded
        from experiments.train import run_rank

        # Only SLURM's: what the submitting shell had of RANK or MASTER_ADDR is not about this job.
        variables = {name: value for name, value in os.environ.items() if name.startswith("SLURM_")}
        rank = rank_from_environment(
            variables, self.config["world_size"], Path(self.meeting_folder), timeout_s=self.start_timeout_s,
            interface=self.interface,
        )  # fmt: skip
        if rank is None:
            raise RuntimeError("a TrainingJob runs under srun, but SLURM_PROCID is not set")
        # A requeued job continues what it began, also when it was asked to start over.
        first = variables.get("SLURM_RESTART_COUNT", "0") == "0"
        try:
            # Asked to stop, it returns as if finished: the record tells the difference (slurm.aftermath), and srun,
            # which ends all ranks when one exits with an error, is not needed for it.
            run_rank({**self.config, "rerun": self.config["rerun"] and first}, rank, stop)
        except ConfigError as error:
            self._leave_word(rank.rank, error)
            print(f"error: {error}", file=sys.stderr)  # noqa: T201
            sys.exit(USAGE_ERROR)
        except Exception as error:
            self._leave_word(rank.rank, error)
            raise

    def _leave_word(self, rank: int, error: Exception) -> None:
        """Whichever rank fails first says why: there may be no record yet, as where the ranks did not meet."""
        from experiments.locks import job_facts

        facts = job_facts()
        file = error_file(Path(self.meeting_folder).parents[1] / str(facts["job"]), facts["restart"])
        name = type(error).__name__
        text = json.dumps({"rank": rank, "type": name, "message": f"failed: {name}: {error}", "traceback": ""})
        with suppress(OSError), file.open("x") as words:
            words.write(text)


def error_file(logs: Path, restart: int) -> Path:
    """Where the first rank that fails says why, in the folder of a job's logs."""
    return logs / f"error.{restart}.json"
