"""A sweep's runs handed over: as job arrays to SLURM, through submitit, or to this machine."""

from __future__ import annotations

import contextlib
import fcntl
import io
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from experiments.records import now
from experiments.settings import ConfigError
from slurm import local, manifest, queue
from slurm.job import TrainingJob
from slurm.manifest import Submission
from slurm.plan import Plan, Request, counted, freeze, make_plan, present_code
from slurm.site import SLURM, Site
from slurm.snapshot import take_snapshot
from slurm.status import RunStatus, error_output, sweep_status

LOGS = ".jobs"
CODE_SHOWN = "CODE"  # in a plan's script: the snapshot is not taken yet


def submit(sweep: Path, requests: Sequence[Request], *, asked: Sequence[str] = ()) -> list[Submission]:
    """Hand over the runs that need it and note them in the manifest; what becomes of each run is told.

    Runs for SLURM are submitted, one array for all that ask for the same; runs for this machine are run, a few at a
    time, and are over when this returns. The code that runs is a copy taken now.

    Args:
        sweep: its folder.
        requests: the grid.
        asked: the overrides of the whole grid, for people.

    Raises:
        ConfigError: if ranks do not fit on nodes as the site says.
        slurm.queue.SlurmError: if SLURM is not to be reached from here, or refuses the job.
    """
    sweep = sweep.resolve()
    if any(request.site.scheduler == SLURM for request in requests) and not queue.available():
        raise queue.SlurmError(
            "SLURM's programs (sbatch, srun, squeue) are not on this machine: submit from a login node, or try "
            "python -m slurm local-cluster up, or run here with site=local"
        )
    make_plan(requests, {}, same={})  # raises before anything is written
    with _alone(sweep):
        submissions, here = _hand_over(sweep, requests, asked)
    if here:
        local.run_all(sweep, here, max(request.site.parallel for request in requests))
    return submissions + here


@contextlib.contextmanager
def _alone(sweep: Path) -> Iterator[None]:
    """Two who submit the same sweep at once do it one after the other; the second finds the first one's jobs."""
    (sweep / LOGS).mkdir(parents=True, exist_ok=True)
    with (sweep / LOGS / "lock").open("w") as lock:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _hand_over(
    sweep: Path, requests: Sequence[Request], asked: Sequence[str]
) -> tuple[list[Submission], list[Submission]]:
    """What was submitted to SLURM, and what is to run here."""
    plan = plan_for(sweep, requests)
    needed = {request.config.run_id for request in plan.runs}
    for run_id, note in plan.notes.items():
        if run_id not in needed:
            say(f"skipped    {run_id}: {note}")
    submissions: list[Submission] = []
    here: list[Submission] = []
    if plan.new:
        dependencies = [_dependency(sweep, group[0].site) for group in plan.new]
        code = take_snapshot(sweep / LOGS)
        manifest.note_grid(sweep, overrides=list(asked), runs=len(requests), submitted=now(), code=code.name)
        for group, dependency in zip(plan.new, dependencies, strict=True):
            frozen = [freeze(request, sweep / LOGS / "inputs") for request in group]
            if group[0].site.scheduler == SLURM:
                submissions += _submit_array(sweep, frozen, code, dependency, plan)
            else:
                here += _note_local(sweep, frozen, code, plan)
    return submissions, here


def plan_for(sweep: Path, requests: Sequence[Request]) -> Plan:
    """What handing over these runs would do."""
    known = {row.run_id: row for row in sweep_status(sweep)} if sweep.is_dir() else {}
    return make_plan(requests, known, same=present_code())


def dry_run(sweep: Path, requests: Sequence[Request]) -> str:
    """The plan as text, with each array's script; nothing is written or submitted."""
    sweep = sweep.resolve()
    plan = plan_for(sweep, requests)
    texts = [plan.describe()]
    for group in plan.new:
        site, size = group[0].site, group[0].config.world_size
        if site.scheduler == SLURM:
            executor = _executor(sweep, site, size, CODE_SHOWN, _dependency(sweep, site), check=False)
            if len(group) > 1:
                executor.parameters["map_count"] = len(group)
            texts.append(executor._make_submission_file_text(executor._submitit_command_str, ""))
    return "\n\n".join(texts)


def resubmit(sweep: Path, states: set[str]) -> list[Submission]:
    """Hand over again the runs of a sweep that are in one of these states, as they were asked for, with today's code.

    Raises:
        slurm.queue.SlurmError: as :func:`submit`.
    """
    from experiments.config import TrainConfig

    known = manifest.read(sweep).submissions
    chosen = [known[row.run_id] for row in sweep_status(sweep) if row.state in states and row.run_id in known]
    requests = [
        Request(TrainConfig.from_dict({**s.config, "rerun": False}), Site.from_dict(s.site), s.overrides)
        for s in chosen
    ]
    return submit(sweep, requests, asked=[f"again: {', '.join(sorted(states))}"]) if requests else []


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


def _executor(sweep: Path, site: Site, size: int, code: str, dependency: str | None, *, check: bool = True) -> Any:
    import submitit

    class Unchecked(submitit.SlurmExecutor):  # type: ignore[misc]
        @classmethod
        def affinity(cls) -> int:
            return 2  # a script can be shown where there is no SLURM

    kind = submitit.SlurmExecutor if check else Unchecked
    executor = kind(folder=sweep / LOGS / "%j", python=site.command)
    parameters = site.submitit_parameters(size, sweep=str(sweep), code=code, dependency=dependency)
    executor.update_parameters(job_name=sweep.name, **parameters)
    return executor


def _submit_array(
    sweep: Path, requests: Sequence[Request], code: Path, dependency: str | None, plan: Plan
) -> list[Submission]:
    import submitit

    site, size = requests[0].site, requests[0].config.world_size
    executor = _executor(sweep, site, size, str(code), dependency)
    meeting = str(sweep / LOGS / "meetings" / uuid.uuid4().hex[:12])  # SLURM may count jobs from 1 again
    work = [TrainingJob(r.config.to_dict(), meeting, site.interface, site.start_timeout_s) for r in requests]
    words = io.StringIO()
    try:
        # submitit prints what sbatch says of a failure, which is in its exception too.
        with contextlib.redirect_stderr(words), executor.batch():
            jobs = [executor.submit(job) for job in work]
    except submitit.core.utils.FailedJobError as error:
        raise queue.failure("sbatch", str(error)) from error
    sys.stderr.write(words.getvalue())
    submissions = [
        _submission(request, code, job.job_id, f"{LOGS}/{job.job_id}")
        for request, job in zip(requests, jobs, strict=True)
    ]
    manifest.append(sweep, submissions)
    nodes, _ = site.layout(size)
    for submission in submissions:
        note = plan.notes[submission.run_id]
        where = f"{counted(size, 'rank')} on {counted(nodes, 'node')}" + (f"; {note}" if note else "")
        say(f"submitted  {submission.run_id} as job {submission.job_id} ({where})")
    return submissions


def _note_local(sweep: Path, requests: Sequence[Request], code: Path, plan: Plan) -> list[Submission]:
    stamp = f"local.{int(time.time() * 1000):x}"
    submissions = [
        _submission(request, code, local.job_id(), f"{LOGS}/{stamp}.{number}")
        for number, request in enumerate(requests)
    ]
    manifest.append(sweep, submissions)
    for submission in submissions:
        note = plan.notes[submission.run_id]
        what = counted(submission.world_size, "rank") + (f"; {note}" if note else "")
        say(f"runs here  {submission.run_id} ({what})")
    return submissions


def _submission(request: Request, code: Path, job_id: str, logs: str) -> Submission:
    return Submission(
        run_id=request.config.run_id,
        job_id=job_id,
        submitted=now(),
        overrides=request.overrides,
        config=request.config.to_dict(),
        site=request.site.to_dict(),
        code=str(code),
        logs=logs,
    )


def _dependency(sweep: Path, site: Site) -> str | None:
    """The jobs of the sweep that must have ended well before, as sbatch wants them; those that have need no mention."""
    if site.after is None or site.scheduler != SLURM:
        return None
    other = next((path for path in (sweep.parent / site.after, Path(site.after)) if path.is_dir()), None)
    if other is None:
        raise ConfigError(f"site.after={site.after}: no such sweep in {sweep.parent}")
    rows = sweep_status(other)
    if bad := [row for row in rows if row.over and row.state != "finished"]:
        raise ConfigError(f"site.after={site.after}: {bad[0].run_id} is {bad[0].state}")
    jobs = sorted({row.job_id for row in rows if not row.over and row.job_id and not local.is_local(row.job_id)})
    return "afterok:" + ":".join(jobs) if jobs else None
