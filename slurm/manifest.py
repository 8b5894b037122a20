"""Which job computes which run: a file in the sweep's folder that is only ever appended to.

One JSON line per submission, and one per cancellation: SLURM forgets a job that was cancelled before it started.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

FILE = "manifest.jsonl"
SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class Submission:
    """One run handed to SLURM; ``logs`` is relative to the sweep's folder, so that this can be moved."""

    run_id: str
    job_id: str
    submitted: str
    overrides: tuple[str, ...]
    world_size: int
    resources: dict[str, Any]
    logs: str
    cancelled: bool = False


def append(sweep: Path, submissions: Sequence[Submission]) -> None:
    """Add submissions to a sweep's manifest."""
    _append(sweep, [{"submission": asdict(submission)} for submission in submissions])


def note_cancelled(sweep: Path, job_ids: Sequence[str]) -> None:
    """Add to a sweep's manifest that jobs were cancelled."""
    _append(sweep, [{"cancelled": list(job_ids)}])


def read(sweep: Path) -> dict[str, Submission]:
    """The last submission of each run, by run id; empty without a manifest.

    A line that a crash cut off is passed over. Raises ValueError for a manifest of another schema.
    """
    last: dict[str, Submission] = {}
    path = sweep / FILE
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            data = json.loads(line)
        except json.JSONDecodeError:
            continue
        if data.pop("schema", None) != SCHEMA:
            raise ValueError(f"{path} was written by another version of this project")
        if "cancelled" in data:
            last = {k: replace(s, cancelled=s.cancelled or s.job_id in data["cancelled"]) for k, s in last.items()}
        else:
            fields = data["submission"]
            submission = Submission(**{**fields, "overrides": tuple(fields["overrides"])})
            last[submission.run_id] = submission
    return last


def _append(sweep: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    with (sweep / FILE).open("a") as file:
        file.write("".join(json.dumps({"schema": SCHEMA, **line}) + "\n" for line in lines))
