"""A sweep's runs as job arrays on SLURM, through submitit."""

from __future__ import annotations

import contextlib
import io
import json
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurm import manifest, queue
from slurm.job import TrainingJob
from slurm.manifest import Submission
from slurm.resources import Resources
from slurm.status import RunStatus, error_output, sweep_status

if TYPE_CHECKING:
    from experiments.config import TrainConfig

LOGS = ".slurm"
LARGEST_ARRAY = 1000  # SLURM's default MaxArraySize is 1001


@dataclass(frozen=True)
class Request:
    """One run of a sweep: its checked configuration, and the overrides that made it, for people."""

    config: TrainConfig
    overrides: tuple[str, ...]


def submit(sweep: Path, requests: Sequence[Request], resources: Resources) -> list[Submission]:
    """Submit the runs that need it, one array for all that ask for the same resources, and note them in the manifest.

    Left out are runs whose record says finished (unless their configuration says ``rerun``), those that wait or run
    already (two jobs must not write one record), and repetitions within the sweep.

    Raises:
        ConfigError: if ranks do not fit on nodes as ``resources`` say.
        slurm.queue.SlurmError: if SLURM is not to be reached from here, or refuses the job.
    """
    sweep = sweep.resolve()
    layouts = [resources.submitit_parameters(request.config.world_size) for request in requests]
    if not queue.available():
        raise queue.SlurmError(
            "SLURM's programs (sbatch, srun, squeue) are not on this machine: submit from a login node, or try "
            "python -m slurm local-cluster up, or leave out hydra/launcher=slurm to run here"
        )
    sweep.mkdir(parents=True, exist_ok=True)
    known = {row.run_id: row for row in sweep_status(sweep)}
    groups: defaultdict[str, list[tuple[Request, dict[str, Any]]]] = defaultdict(list)
    taken: set[str] = set()
    for request, parameters in zip(requests, layouts, strict=True):
        run_id = request.config.run_id
        if why := _needless(request.config, known.get(run_id), run_id in taken):
            say(f"skipped    {run_id}: {why}")
            continue
        taken.add(run_id)
        groups[json.dumps(parameters, sort_keys=True)].append((request, parameters))
    submissions = []
    for members in groups.values():
        for first in range(0, len(members), LARGEST_ARRAY):
            chunk = members[first : first + LARGEST_ARRAY]
            submissions += _submit_array(sweep, [request for request, _ in chunk], chunk[0][1])
    return submissions


def wait(sweep: Path, submissions: Sequence[Submission], poll_s: float = 2.0) -> list[RunStatus]:
    """Follow jobs until all are over, telling each change, and return how they ended.

    Interrupting it leaves the jobs alone.
    """
    wanted = {submission.run_id for submission in submissions}
    told: dict[str, str] = {}
    while True:
        try:
            rows = [row for row in sweep_status(sweep) if row.run_id in wanted]
        except queue.SlurmError as error:  # a controller that restarts says nothing about the jobs
            say(f"waiting: {error}")
            rows = []
        for row in rows:
            if told.get(row.run_id) != row.state:
                told[row.run_id] = row.state
                say(f"{row.state:<10} {row.run_id} (job {row.job_id})" + (f": {row.reason}" if row.reason else ""))
        if rows and all(row.over for row in rows):
            return rows
        time.sleep(poll_s)


def failures(sweep: Path, submissions: Sequence[Submission], rows: Sequence[RunStatus]) -> str:
    """The runs that did not finish, each with the end of its error output; empty if all did."""
    by_run = {submission.run_id: submission for submission in submissions}
    texts = []
    for row in rows:
        if row.state != "finished":
            output = error_output(sweep, by_run[row.run_id])
            texts.append(f"{row.state}: {row.run_id} (job {row.job_id}) {row.reason}".rstrip())
            texts += [f"    {line}" for line in output.splitlines()]
    return "\n".join(texts)


def say(line: str) -> None:
    """A line for the person who waits, at once even in a pipe."""
    print(line, flush=True)  # noqa: T201


def _needless(config: TrainConfig, row: RunStatus | None, repeated: bool) -> str:
    if repeated:
        return "the same run is in this sweep already"
    if row is None:
        return ""
    if row.state == "finished" and not config.rerun:
        return "finished (rerun=true starts it over)"
    if row.job_id and not row.over:
        return f"{row.state} as job {row.job_id}"
    return ""


def _submit_array(sweep: Path, requests: Sequence[Request], parameters: dict[str, Any]) -> list[Submission]:
    import submitit

    executor = submitit.SlurmExecutor(folder=sweep / LOGS / "%j")
    executor.update_parameters(job_name=sweep.name, **parameters)
    # The record's place must not depend on where the job starts.
    configs = [replace(request.config, runs=str(Path(request.config.runs).resolve())) for request in requests]
    work = [TrainingJob(config.to_dict(), str(sweep / LOGS)) for config in configs]
    words = io.StringIO()
    try:
        # submitit prints what sbatch says of a failure, which is in its exception too.
        with contextlib.redirect_stderr(words), executor.batch():
            jobs = [executor.submit(job) for job in work]
    except submitit.core.utils.FailedJobError as error:
        raise queue.failure("sbatch", str(error)) from error
    sys.stderr.write(words.getvalue())
    now = datetime.now(UTC).isoformat(timespec="seconds")
    submissions = [
        Submission(
            run_id=config.run_id,
            job_id=job.job_id,
            submitted=now,
            overrides=request.overrides,
            world_size=config.world_size,
            resources=parameters,
            logs=f"{LOGS}/{job.job_id}",
        )
        for config, job, request in zip(configs, jobs, requests, strict=True)
    ]
    manifest.append(sweep, submissions)
    for submission in submissions:
        nodes = parameters["nodes"]
        where = f"{submission.world_size} ranks on {nodes} node{'s' if nodes > 1 else ''}"
        say(f"submitted  {submission.run_id} as job {submission.job_id} ({where})")
    return submissions
