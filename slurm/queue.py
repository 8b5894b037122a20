"""The one place that talks to SLURM's programs about jobs.

The controller (squeue) is asked first. Accounting (sacct), which many small clusters lack, is asked only for jobs that
the controller has forgotten, and where it does not answer nothing is lost but the reason.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

TIMEOUT_S = 60.0
IDS_PER_CALL = 2000
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
    """A job as SLURM shows it: its long state name, why it waits (or ended so), and its nodes."""

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
    """The jobs that SLURM still knows, by id (``ARRAY_TASK`` for those of arrays).

    Raises:
        SlurmError: if the controller cannot be asked, which says nothing about the jobs.
    """
    wanted = set(job_ids)
    arrays = sorted({_array(job_id) for job_id in wanted})
    found: dict[str, QueuedJob] = {}
    for first in range(0, len(arrays), IDS_PER_CALL):
        found |= _squeue(arrays[first : first + IDS_PER_CALL])
    # Tasks that were cancelled before they started have no line of their own: the array's stands for them.
    lines = {job_id: found.get(job_id) or found.get(_array(job_id)) for job_id in wanted}
    known = {job_id: job for job_id, job in lines.items() if job is not None}
    forgotten = wanted - known.keys()
    return known | _from_accounting(forgotten)


def cancel(job_ids: Sequence[str]) -> None:
    """Cancel jobs; those that are over already do not matter."""
    for first in range(0, len(job_ids), IDS_PER_CALL):
        done = _run(["scancel", *job_ids[first : first + IDS_PER_CALL]])
        if done.returncode and "Invalid job id" not in done.stderr:
            raise failure("scancel", done.stderr)


def _array(job_id: str) -> str:
    return job_id.split("_", maxsplit=1)[0]


def _squeue(arrays: Sequence[str]) -> Mapping[str, QueuedJob]:
    done = _run(["squeue", "-r", "-h", "--states=all", "-o", "%i|%T|%r|%N", "-j", ",".join(arrays)])
    if done.returncode and "Invalid job id" not in done.stderr:  # the one asked for was forgotten: an answer, too
        raise failure("squeue", done.stderr)
    found = {}
    for line in done.stdout.splitlines():
        job_id, state, reason, nodes = line.split("|", 3)
        found[job_id] = QueuedJob(state, "" if reason == "None" else reason, nodes)
    return found


def _from_accounting(job_ids: set[str]) -> dict[str, QueuedJob]:
    """What accounting knows of jobs; nothing where there is none."""
    if not job_ids or shutil.which("sacct") is None:
        return {}
    found = {}
    arrays = sorted({_array(job_id) for job_id in job_ids})
    for first in range(0, len(arrays), IDS_PER_CALL):
        chunk = ",".join(arrays[first : first + IDS_PER_CALL])
        try:
            done = _run(["sacct", "-n", "-P", "-X", "-o", "JobID,State,NodeList", "-j", chunk])
        except SlurmError:
            return {}
        if done.returncode:
            return {}
        for line in done.stdout.splitlines():
            job_id, state, nodes = line.split("|", 2)
            word = state.split()[0]  # of "CANCELLED by 1000"
            if (
                job_id in job_ids and word in ENDED
            ):  # what the controller has lost, accounting may call running for ever
                found[job_id] = QueuedJob(word, "", nodes)
    return found


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "LC_ALL": "C"}
    try:
        return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except FileNotFoundError as error:
        raise SlurmError(f"{command[0]} is not on this machine: run this where sbatch works") from error
    except subprocess.TimeoutExpired as error:
        raise SlurmError(f"{command[0]} did not answer within {TIMEOUT_S:.0f} s") from error
