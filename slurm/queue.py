"""What SLURM's controller knows of jobs; accounting (sacct), which many small clusters lack, is not asked."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

TIMEOUT_S = 60.0
WAITING = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT"}
UNREACHABLE = (
    "Unable to contact slurm controller", "Could not establish a configuration source", "DNS SRV lookup failed",
    "Connection refused", "Unable to establish control",
)  # fmt: skip
"""What SLURM's programs say where they find no controller."""
ENDED = {
    "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE", "PREEMPTED",
    "REVOKED",
}  # fmt: skip


class SlurmError(RuntimeError):
    """SLURM is not installed here, its controller does not answer, or it refuses what was asked."""


def failure(program: str, output: str) -> SlurmError:
    """The error for what a program of SLURM said when it failed; one line, with the remedy if it found no SLURM."""
    text = " ".join(output.split())
    if not any(sign in text for sign in UNREACHABLE):
        return SlurmError(f"{program} failed: {text}")
    conf = os.environ.get("SLURM_CONF")
    where = f"SLURM_CONF={conf}: does it still run?" if conf else "SLURM_CONF is not set: is this a login node?"
    return SlurmError(
        f"{program} reaches no SLURM controller ({where} For one on this machine: "
        'eval "$(python -m slurm local-cluster up)")'
    )


@dataclass(frozen=True)
class QueuedJob:
    """A job as squeue shows it: SLURM's long state name, why it waits (or ended so), and its nodes."""

    state: str
    reason: str
    nodes: str

    @property
    def waits(self) -> bool:
        """Whether it has not started (again) yet."""
        return self.state in WAITING

    @property
    def ended(self) -> bool:
        """Whether it is over; squeue shows such jobs for a while (MinJobAge, five minutes by default)."""
        return self.state in ENDED


def available() -> bool:
    """Whether SLURM's client programs are on this machine."""
    return shutil.which("squeue") is not None


def jobs(job_ids: Iterable[str]) -> dict[str, QueuedJob]:
    """The jobs that the controller still knows, by id (``ARRAY_TASK`` for those of arrays).

    Raises:
        SlurmError: if it cannot be asked, which says nothing about the jobs.
    """
    wanted = set(job_ids)
    arrays = sorted({job_id.split("_")[0] for job_id in wanted})
    if not arrays:
        return {}
    command = ["squeue", "-r", "-h", "--states=all", "-o", "%i|%T|%r|%N", "-j", ",".join(arrays)]
    done = _run(command)
    if done.returncode and "Invalid job id" not in done.stderr:  # the one asked for was forgotten: an answer, too
        raise failure("squeue", done.stderr)
    found = {}
    for line in done.stdout.splitlines():
        job_id, state, reason, nodes = line.split("|", 3)
        found[job_id] = QueuedJob(state, "" if reason == "None" else reason, nodes)
    # Tasks that were cancelled before they started have no line of their own: the array's stands for them.
    lines = {job_id: found.get(job_id) or found.get(job_id.split("_")[0]) for job_id in wanted}
    return {job_id: job for job_id, job in lines.items() if job is not None}


def cancel(job_ids: Sequence[str]) -> None:
    """Cancel jobs; those that are over already do not matter."""
    if job_ids:
        done = _run(["scancel", *job_ids])
        if done.returncode and "Invalid job id" not in done.stderr:
            raise failure("scancel", done.stderr)


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "LC_ALL": "C"}
    try:
        return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except FileNotFoundError as error:
        raise SlurmError(f"{command[0]} is not on this machine: run this where sbatch works") from error
    except subprocess.TimeoutExpired as error:
        raise SlurmError(f"{command[0]} did not answer within {TIMEOUT_S:.0f} s") from error
