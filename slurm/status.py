"""How the runs of a sweep are doing, from its manifest, the run records and the queue. Reading never writes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurm import manifest, queue
from slurm.queue import QueuedJob

OVER = {"finished", "failed", "cancelled", "interrupted", "lost"}
TAIL_BYTES = 8192


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """A run's state: pending, running, cancelling, finished, failed, cancelled, interrupted, or lost.

    Lost is what ended without a word; without the queue, submitted is what has no record yet.
    """

    run_id: str
    job_id: str | None
    state: str
    iteration: int | None
    loss: float | None
    reason: str

    @property
    def over(self) -> bool:
        """Whether nothing more will come from it by itself."""
        return self.state in OVER


def decide(recorded: str | None, queued: QueuedJob | None, cancelled: bool = False) -> str:
    """A run's state from what its record, the queue and the manifest (``cancelled``) say of it.

    The record wins where it says finished. A job that waits or runs wins over whatever an earlier job recorded. A job
    that SLURM calls ended, or no longer knows, without a finished record has not reached its end.
    """
    if recorded == "finished":
        return "finished"
    if queued is not None and not queued.ended:
        if cancelled:
            return "cancelling"
        return "pending" if queued.waits else "running"
    if cancelled or (queued is not None and queued.state == "CANCELLED"):
        return "cancelled"
    if recorded in ("failed", "interrupted"):
        return recorded
    return "lost" if queued is None else "failed"


def sweep_status(sweep: Path, queued: Mapping[str, QueuedJob] | None = None, *, ask: bool = True) -> list[RunStatus]:
    """The state of each run of a sweep: those in the manifest, and records that came about without SLURM.

    Args:
        sweep: the sweep's folder.
        queued: what the queue says; asked for if None.
        ask: False leaves the queue alone: the states are then those that the records say.

    Raises:
        slurm.queue.SlurmError: if there are unfinished jobs and the queue cannot be asked.
    """
    submissions = manifest.read(sweep)
    records = {path.parent.name: _json(path) for path in sorted(sweep.glob("*/run.json"))}
    if queued is None and ask:
        open_jobs = [s.job_id for s in submissions.values() if records.get(s.run_id, {}).get("status") != "finished"]
        queued = queue.jobs(open_jobs)
    rows = []
    for run_id in dict.fromkeys([*submissions, *records]):
        record, submission = records.get(run_id, {}), submissions.get(run_id)
        job = queued.get(submission.job_id) if submission and queued else None
        recorded = record.get("status")
        if submission and queued is not None:
            state = decide(recorded, job, submission.cancelled)
        else:
            state = str(recorded or "submitted")
        row = _last_training_row(sweep / run_id / "metrics.jsonl")
        rows.append(
            RunStatus(
                run_id=run_id,
                job_id=submission.job_id if submission else None,
                state=state,
                iteration=row.get("iter"),
                loss=row.get("loss"),
                reason=_reason(state, record, job),
            )
        )
    return rows


def table(rows: Sequence[RunStatus]) -> str:
    """The runs as aligned text, with the number in each state below."""
    cells = [["RUN", "JOB", "STATE", "ITERATION", "LOSS", "REASON"]]
    for row in rows:
        iteration = "" if row.iteration is None else str(row.iteration)
        loss = "" if row.loss is None else f"{row.loss:.4g}"
        cells.append([row.run_id, row.job_id or "", row.state, iteration, loss, row.reason])
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]
    counts = Counter(row.state for row in rows)
    return "\n".join([*lines, "", ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))])


def error_output(sweep: Path, submission: manifest.Submission, lines: int = 15) -> str:
    """The last lines of the error output of the rank that failed first, as far as files tell."""
    files = sorted((sweep / submission.logs).glob("*_log.err"), key=lambda path: path.stat().st_mtime)
    for path in files:
        text = path.read_text(errors="replace").strip().splitlines()
        if any("Traceback" in line for line in text):
            return "\n".join(text[-lines:])
    return "\n".join(line for path in files for line in path.read_text(errors="replace").splitlines()[-lines:])


def _reason(state: str, record: Mapping[str, Any], job: QueuedJob | None) -> str:
    if state == "finished":
        return ""
    if state == "pending":
        return job.reason if job else ""
    error = record.get("error") or {}
    if state == "failed" and error:
        text = error.get("message") if isinstance(error, Mapping) else error
        return str(text).strip().splitlines()[0] if text else ""
    if state in ("failed", "cancelled") and job:
        return job.state.lower().replace("_", " ")
    return "its job ended and left no word: see its logs" if state == "lost" else ""


def _json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError):  # being replaced at this moment
        return {}
    return data if isinstance(data, dict) else {}


def _last_training_row(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return {}
    for line in reversed(lines):
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(row, dict) and row.get("kind") == "train":
            return row
    return {}
