"""A sweep on this machine, a few runs at a time, with the same records, states and restarts as on SLURM.

``python -m slurm.local SWEEP RUN`` is one of its runs.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from slurm import manifest
from slurm.local_cluster.processes import start_time
from slurm.manifest import Submission
from slurm.queue import QueuedJob

POLL_S = 0.1
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def job_id() -> str:
    """The name of this process as the one that runs a sweep's runs."""
    return f"local:{socket.gethostname()}:{os.getpid()}:{start_time(os.getpid())}"


def is_local(job: str) -> bool:
    """Whether a job is a process of :func:`run_all`, not SLURM's."""
    return job.startswith("local:")


def _process(job: str) -> int | None:
    """The process id of a job that is alive on this machine; None otherwise."""
    _, host, process, started = job.split(":")
    here = host == socket.gethostname()
    return int(process) if here and start_time(int(process)) == started else None


def jobs(submissions: Iterable[Submission], recorded: Mapping[str, str | None]) -> dict[str, QueuedJob]:
    """What a queue would say of runs that are not over; those on other machines count as such while they say so."""
    found = {}
    for submission in submissions:
        _, host, *_ = submission.job_id.split(":")
        runs = recorded.get(submission.run_id) == "running"
        there = _process(submission.job_id) is not None if host == socket.gethostname() else runs
        if there and not submission.ended:
            found[submission.job_id] = QueuedJob("RUNNING" if runs else "PENDING", "", host)
    return found


def cancel(jobs_: Sequence[str]) -> None:
    """Ask the sweeps on this machine to stop; each of their runs leaves a checkpoint."""
    for process in {_process(job) for job in jobs_}:
        if process is not None:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGTERM)


def run_all(sweep: Path, submissions: Sequence[Submission], parallel: int) -> None:
    """Run what was handed over, ``parallel`` at a time; returns when all are over or a signal asked to stop.

    Crashed runs are started again as on SLURM. At a signal the runs stop with a checkpoint; a second one kills them.
    """
    from slurm.aftermath import settle

    waiting = list(submissions)
    running: dict[subprocess.Popen[bytes], Submission] = {}
    with _signals() as pending:
        passed_on = 0
        while running or (waiting and not pending):
            while waiting and len(running) < parallel and not pending:
                submission = waiting.pop(0)
                running[_start(sweep, submission)] = submission
            for child in [child for child in running if child.poll() is not None]:
                submission = running.pop(child)
                code = child.returncode
                again = code != 0 and settle(sweep, submission, code, {})
                if again and not pending:
                    waiting.insert(0, submission)
                else:
                    manifest.note_ended(sweep, submission.run_id)
            if len(pending) > passed_on:
                passed_on = len(pending)
                for child in running:
                    child.send_signal(signal.SIGTERM)
            time.sleep(POLL_S)
    if pending:
        raise KeyboardInterrupt


def _start(sweep: Path, submission: Submission) -> subprocess.Popen[bytes]:
    folder = sweep / submission.logs
    folder.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join(filter(None, [submission.code, os.environ.get("PYTHONPATH")]))
    environ = {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
    with (folder / "0_log.out").open("ab") as out, (folder / "0_log.err").open("ab") as err:
        return subprocess.Popen(
            [sys.executable, "-m", "slurm.local", str(sweep), submission.run_id],
            stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environ,
            start_new_session=True,  # Ctrl-C in the terminal is ours to pass on
        )  # fmt: skip


@contextmanager
def _signals() -> Iterator[list[int]]:
    pending: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        pending.append(number)

    before = {number: signal.signal(number, note) for number in STOP_SIGNALS}
    try:
        yield pending
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def main() -> int:
    """One run; exit status 0 (finished), 1 (failed), 2 (a mistake), 75 (stopped with a checkpoint)."""
    from experiments.command import FAILED, USAGE_ERROR, RunFailedError
    from experiments.config import TrainConfig
    from experiments.ranks import die_with_parent
    from experiments.settings import ConfigError
    from experiments.train import run_here
    from slurm.aftermath import STOPPED_SHORT

    die_with_parent(os.getppid())
    sweep, run_id = Path(sys.argv[1]), sys.argv[2]
    submission = manifest.read(sweep).submissions[run_id]
    again = (sweep / submission.logs / manifest.ATTEMPTS).exists()
    config = TrainConfig.from_dict({**submission.config, "rerun": submission.config["rerun"] and not again})
    try:
        run_here(config)
    except RunFailedError:
        return FAILED
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return USAGE_ERROR
    except KeyboardInterrupt:
        return STOPPED_SHORT
    return 0


if __name__ == "__main__":
    sys.exit(main())
