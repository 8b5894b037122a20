"""``python -m slurm.aftermath SWEEP JOB CODE``: what to do when a job's ranks have ended without finishing the run.

The job's script asks this (exit status 0: queue the job again). Preempted and timed-out runs that have come further go
on as often as it takes; crashes, and stops without progress, only ``site.retries`` times; mistakes and numerical
failures not at all, since they would fail again.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from experiments.locks import job_facts
from experiments.patience import patiently
from experiments.records import FAILED, FINISHED, INTERRUPTED, RUNNING, RunRecord, write_text
from experiments.settings import read
from experiments.tracking import TrackingSettings, tell_failure
from slurm import manifest
from slurm.job import error_file
from slurm.manifest import Submission
from slurm.site import Site

logger = logging.getLogger(__name__)

HOPELESS = ("ConfigError", "NonFiniteError", "FactorInversionError")
STOPPED = (128 + 12, 128 + 15, -12, -15)
"""Ended by SIGUSR2 or SIGTERM itself: asked to stop before it could listen."""
MANIFEST_WAIT_S = 30.0
DONE = 3
STOPPED_SHORT = 75
"""Exit status of what was asked to stop and can be continued (sysexits.h: EX_TEMPFAIL)."""


@dataclass(frozen=True)
class Attempt:
    """A start of a job that did not finish its run: how and why it ended, and the iterations done by then."""

    restart: int
    outcome: str
    iteration: int
    reason: str = ""


def outcome(
    head: Mapping[str, Any], code: int, facts: Mapping[str, Any], word: Mapping[str, Any] | None = None
) -> tuple[str, Mapping[str, Any]]:
    """How a start of a job ended, and the error that ended it.

    Args:
        head: the content of the record's ``run.json``; empty if there is none.
        code: the exit status.
        facts: ``job`` and ``restart`` of this start, as the record's segments have them.
        word: what the first rank that failed has left (:func:`slurm.job.error_file`).

    Returns:
        ``finished``, ``interrupted`` or ``failed``; and the error's ``type``, ``message`` and more.
    """
    segments = head.get("segments") or [{}]
    mine = all(segments[-1].get(name) == value for name, value in facts.items()) and bool(head)
    status = head.get("status")
    if status == FINISHED:
        return FINISHED, {}
    if mine and status in (FAILED, INTERRUPTED):
        return status, head.get("error") or {}
    if word:  # also where srun reports that the other ranks were terminated for it
        return FAILED, word
    text = f"killed: exit status {code}" + (f" (signal {code - 128})" if 128 < code < 160 else "")
    error = {"rank": None, "type": "", "message": text, "traceback": ""}
    return INTERRUPTED if code in STOPPED else FAILED, error


def goes_on(attempts: Sequence[Attempt], retries: int, error_type: str = "") -> bool:
    """Whether a job is started again after its last attempt.

    Args:
        attempts: all of this job so far.
        retries: how many may be of no use.
        error_type: of the exception that ended the last one.
    """
    if not attempts or attempts[-1].outcome == FINISHED or error_type in HOPELESS:
        return False
    useless, best, of_use = 0, -1, False
    for attempt in attempts:
        of_use = attempt.outcome == INTERRUPTED and attempt.iteration > best
        useless += not of_use
        best = max(best, attempt.iteration)
    return of_use or useless <= retries


def settle(sweep: Path, submission: Submission, code: int, facts: Mapping[str, Any]) -> bool:
    """Close the books of a start that ended without finishing, and say whether it is to be started again."""
    path, restart = record_path(submission), int(facts.get("restart", 0))
    try:
        record = RunRecord.load(path)
        head = record.head
    except ValueError:
        record, head = None, {}
    how, error = outcome(head, code, facts, _read(error_file(sweep / submission.logs, restart)))
    if how == FINISHED:
        return False
    if record is not None and record.status == RUNNING:  # nobody was left to write it
        record.end_segment(how, error)
    if record is not None:
        tell_failure(read(TrackingSettings, submission.config.get("tracking") or {}, "tracking"), record)
    file = sweep / submission.logs / manifest.ATTEMPTS
    attempts = [Attempt(**json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []
    restart = int(facts.get("restart", len(attempts)))
    attempts.append(Attempt(restart, how, _iterations_done(path), str(error.get("message", ""))))
    write_text(file, "".join(json.dumps(asdict(attempt)) + "\n" for attempt in attempts))
    return goes_on(attempts, Site.from_dict(submission.site).retries, str(error.get("type", "")))


def record_path(submission: Submission) -> Path:
    """The folder of a submission's run record."""
    config = submission.config
    return Path(str(config["runs"])) / str(config["sweep"]) / submission.run_id


def _read(path: Path) -> dict[str, Any] | None:
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None


def _iterations_done(path: Path) -> int:
    """How far the newest checkpoint of a run reaches."""
    found = [int(commit.parent.name.removeprefix("iter")) for commit in path.glob("checkpoint/iter*/commit.json")]
    return max(found, default=0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0: the job is to be queued again, 3: its run has finished, 75: neither."""
    sweep, job, code = arguments or sys.argv[1:]
    folder, end_s = Path(sweep), time.monotonic() + MANIFEST_WAIT_S
    while (submission := manifest.of_job(folder, job)) is None and time.monotonic() < end_s:
        time.sleep(0.5)  # a quick job is over before the one who submitted it has written down its number
    if submission is None:
        print(f"{folder} knows no job {job}", file=sys.stderr)  # noqa: T201
        return STOPPED_SHORT
    try:
        again = patiently(lambda: settle(folder, submission, int(code), job_facts()), "noting how the job ended")
    except OSError as error:
        print(f"how job {job} ended cannot be noted: {error}", file=sys.stderr)  # noqa: T201
        return STOPPED_SHORT
    if again:
        print(f"job {job} ended with {code}: queued again", flush=True)  # noqa: T201
        return 0
    with suppress(ValueError):
        if RunRecord.load(record_path(submission)).status == FINISHED:
            return DONE
    print(f"job {job} ended with {code}: not queued again", flush=True)  # noqa: T201
    return STOPPED_SHORT


if __name__ == "__main__":
    sys.exit(main())
