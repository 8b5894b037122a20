"""How the runs of a sweep are doing, from its manifest, the run records and the queue. Reading never writes."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurm import local, manifest, queue
from slurm.manifest import Submission
from slurm.queue import QueuedJob

OVER = {"finished", "failed", "cancelled", "interrupted", "lost"}
TAIL_BYTES = 8192

SECONDS = "SEC/ITERATION"
LEGEND = (
    f"{SECONDS}: median seconds of a training iteration on rank 0, over the last ones in the record, without "
    "evaluations and\ncheckpoints. ETA: that times the iterations left, hours:minutes:seconds. LOSS: of the last "
    "training iteration, mean of the ranks."
)


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """A run's state: pending, running, cancelling, finished, failed, cancelled, interrupted, or lost.

    Lost is what ended without a word; without the queue, submitted is what has no record yet. ``iteration`` counts the
    iterations done, of ``iterations``; ``code`` is what ran last (:func:`slurm.plan.present_code`).
    """

    run_id: str
    job_id: str | None
    state: str
    iteration: int | None = None
    iterations: int | None = None
    iteration_s: float | None = None
    eta_s: float | None = None
    loss: float | None = None
    restarts: int = 0
    reason: str = ""
    overrides: tuple[str, ...] = ()
    code: Mapping[str, Any] = field(default_factory=dict)

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
    """The state of each run of a sweep: those in the manifest, and records that came about by themselves.

    Args:
        sweep: the sweep's folder.
        queued: what the queue says; asked for if None.
        ask: False leaves the queue alone: the states are then those that the records say.

    Raises:
        slurm.queue.SlurmError: if there are unfinished jobs and the queue cannot be asked.
    """
    submissions = manifest.read(sweep).submissions
    records = {path.parent.name: _json(path) for path in sorted(sweep.glob("*/run.json"))}
    if queued is None and ask:
        queued = queue.jobs(
            s.job_id
            for s in submissions.values()
            if records.get(s.run_id, {}).get("status") != "finished" and not local.is_local(s.job_id)
        )
    return [
        _row(sweep / run_id, run_id, records.get(run_id, {}), submissions.get(run_id), queued)
        for run_id in dict.fromkeys([*submissions, *records])
    ]


def _row(path: Path, run_id: str, record: Mapping[str, Any], submission: Submission | None, queued: Any) -> RunStatus:
    recorded = record.get("status")
    job = None
    if submission and local.is_local(submission.job_id):
        queued = local.jobs([submission], {run_id: recorded})
    if submission and queued is not None:
        job = queued.get(submission.job_id)
        state = decide(recorded, job, submission.cancelled)
    else:
        state = str(recorded or "submitted")
    segments = record.get("segments") or []
    total = record.get("iterations")
    row, iteration_s = _progress(path / "metrics.jsonl") if record else ({}, None)
    done = row["iter"] + 1 if row else None
    left_s = None if not total or iteration_s is None or done is None else (total - done) * iteration_s
    return RunStatus(
        run_id=run_id,
        job_id=submission.job_id if submission else None,
        state=state,
        iteration=done,
        iterations=total,
        iteration_s=iteration_s,
        eta_s=left_s if state == "running" else None,
        loss=row.get("loss"),
        restarts=max(0, len(segments) - 1),
        reason=_reason(state, record, job) or (_last_words(path.parent, submission) if state == "failed" else ""),
        overrides=submission.overrides if submission else (),
        code={**segments[-1].get("code", {}), "patch": segments[-1].get("patch", "")} if segments else {},
    )


def table(rows: Sequence[RunStatus]) -> str:
    """The runs as aligned text, with the number in each state below."""
    cells = [["RUN", "JOB", "STATE", "ITERATION", SECONDS, "ETA", "LOSS", "RESTARTS", "REASON"]]
    for row in rows:
        total = f"/{row.iterations}" if row.iterations else ""
        cells.append(
            [
                row.run_id,
                row.job_id or "",
                row.state,
                "" if row.iteration is None else f"{row.iteration}{total}",
                "" if row.iteration_s is None else f"{row.iteration_s:.3g}",
                "" if row.eta_s is None else clock(row.eta_s),
                "" if row.loss is None else f"{row.loss:.4g}",
                str(row.restarts or ""),
                row.reason,
            ]
        )
    filled = [column for column in range(len(cells[0])) if column < 3 or any(line[column] for line in cells[1:])]
    widths = {column: max(len(line[column]) for line in cells) for column in filled}
    lines = ["  ".join(line[column].ljust(widths[column]) for column in filled).rstrip() for line in cells]
    legend = [LEGEND] if any(row.iteration_s is not None for row in rows) else []
    return "\n".join([*lines, "", *legend, counts(rows)])


def counts(rows: Sequence[RunStatus]) -> str:
    """How many runs are in each state."""
    return ", ".join(f"{count} {state}" for state, count in sorted(Counter(row.state for row in rows).items()))


def clock(seconds: float) -> str:
    """Hours, minutes and seconds."""
    minutes, second = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{second:02d}"


def log_files(sweep: Path, submission: Submission) -> list[Path]:
    """What a run's ranks have written, rank 0's output first."""
    folder = sweep / submission.logs
    order = {".out": 0, ".err": 1}
    found = [*folder.glob("*_log.*"), *(sweep / submission.run_id / "logs").glob("*.log")]
    return sorted(found, key=lambda path: (order.get(path.suffix, 2), len(path.name), path.name))


def error_output(sweep: Path, submission: Submission, lines: int = 15) -> str:
    """The last lines of the error output of the rank that failed first, as far as files tell."""
    files = [path for path in log_files(sweep, submission) if path.suffix != ".out"]
    files.sort(key=lambda path: path.stat().st_mtime)
    for path in files:
        text = path.read_text(errors="replace").strip().splitlines()
        if any("Traceback" in line for line in text):
            return "\n".join(text[-lines:])
    return "\n".join(line for path in files for line in path.read_text(errors="replace").splitlines()[-lines:])


def _reason(state: str, record: Mapping[str, Any], job: QueuedJob | None) -> str:
    error = record.get("error") or {}
    if state == "failed" and error:
        text = error.get("message") if isinstance(error, Mapping) else error
        return str(text).strip().splitlines()[0] if text else ""
    if state == "lost":
        return "its job ended and left no word: see its logs"
    if job is None or state not in ("pending", "failed", "cancelled"):
        return ""
    return job.reason if state == "pending" else _end(state, job)


def _last_words(sweep: Path, submission: Submission | None) -> str:
    """Why the last start of a job ended whose ranks had no record yet, as where they did not meet."""
    try:
        lines = (sweep / submission.logs / manifest.ATTEMPTS).read_text().splitlines() if submission else []
        return str(json.loads(lines[-1]).get("reason", "")) if lines else ""
    except (OSError, ValueError):
        return ""


def _end(state: str, job: QueuedJob) -> str:
    """How SLURM says that a job ended, where that is more than the state."""
    if job.reason == "DependencyNeverSatisfied":
        return "the sweep of site.after did not finish"
    if job.state == "COMPLETED":
        return "its job ended without an error, but before the run did: see its logs"
    return "" if job.state.lower() == state else job.state.lower().replace("_", " ")


def _json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError):  # being replaced at this moment
        return {}
    return data if isinstance(data, dict) else {}


def _progress(path: Path) -> tuple[dict[str, Any], float | None]:
    """The last training row, and the median seconds per iteration of the last few."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return {}, None
    rows = []
    for line in lines:
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(row, dict) and row.get("kind") == "train":
            rows.append(row)
    times = [row["iteration_s"] for row in rows if isinstance(row.get("iteration_s"), (int, float))]
    return (rows[-1] if rows else {}), (statistics.median(times) if times else None)
