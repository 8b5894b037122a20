"""What a sweep is: its grids, its runs, which job computes which; a file in its folder that is only appended to.

One JSON line per command that submitted, per run handed over, and per cancellation: SLURM forgets a job that was
cancelled before it started.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

FILE = "manifest.jsonl"
SCHEMA = 2
ATTEMPTS = "attempts.jsonl"
"""In the folder of a job's logs: its starts that did not finish the run (:class:`slurm.aftermath.Attempt`)."""


@dataclass(frozen=True, kw_only=True)
class Submission:
    """One run handed over; paths of its logs are relative to the sweep's folder, so that this can be moved.

    ``config`` is the resolved configuration and ``site`` what was asked for, so that it can be handed over again;
    ``code`` is the folder of the snapshot that runs.
    """

    run_id: str
    job_id: str
    submitted: str
    overrides: tuple[str, ...]
    config: dict[str, Any]
    site: dict[str, Any]
    code: str
    logs: str
    cancelled: bool = False
    ended: bool = False

    @property
    def world_size(self) -> int:
        """The run's number of ranks."""
        return int(self.config["world_size"])


@dataclass
class Sweep:
    """A sweep: the grids that were asked for, and the last submission of each run, by run id."""

    grids: list[dict[str, Any]] = field(default_factory=list)
    submissions: dict[str, Submission] = field(default_factory=dict)


def append(sweep: Path, submissions: Sequence[Submission]) -> None:
    """Add submissions to a sweep's manifest."""
    _append(sweep, [{"submission": asdict(submission)} for submission in submissions])


def note_grid(sweep: Path, **facts: Any) -> None:
    """Add to a sweep's manifest what was asked for: overrides, number of runs, code, time."""
    _append(sweep, [{"grid": facts}])


def note_cancelled(sweep: Path, job_ids: Sequence[str]) -> None:
    """Add to a sweep's manifest that jobs were cancelled."""
    _append(sweep, [{"cancelled": list(job_ids)}])


def note_ended(sweep: Path, run_id: str) -> None:
    """Add to a sweep's manifest that the machine without SLURM is done with a run, for better or worse."""
    _append(sweep, [{"ended": run_id}])


def read(sweep: Path) -> Sweep:
    """The sweep; empty without a manifest.

    A line that a crash cut off is passed over. Raises ValueError for a manifest of another schema.
    """
    found = Sweep()
    last = found.submissions
    path = sweep / FILE
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            data = json.loads(line)
        except json.JSONDecodeError:
            continue
        if data.pop("schema", None) != SCHEMA:
            raise ValueError(f"{path} was written by another version of this project")
        if "grid" in data:
            found.grids.append(data["grid"])
        elif "cancelled" in data:
            jobs = set(data["cancelled"])
            last.update({k: replace(s, cancelled=True) for k, s in last.items() if s.job_id in jobs})
        elif "ended" in data:
            if data["ended"] in last:
                last[data["ended"]] = replace(last[data["ended"]], ended=True)
        else:
            fields = data["submission"]
            last[fields["run_id"]] = Submission(**{**fields, "overrides": tuple(fields["overrides"])})
    return found


def of_job(sweep: Path, job_id: str) -> Submission | None:
    """The run that a job computes; None if the manifest does not know the job."""
    return next((s for s in read(sweep).submissions.values() if s.job_id == job_id), None)


def _append(sweep: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    path = sweep / FILE
    with path.open("a+b") as file:
        file.seek(0, 2)
        if file.tell():
            file.seek(-1, 2)
            # What a crash cut off stays a line of its own.
            start = b"" if file.read(1) == b"\n" else b"\n"
        else:
            start = b""
        file.write(start + "".join(json.dumps({"schema": SCHEMA, **line}) + "\n" for line in lines).encode())
