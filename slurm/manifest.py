"""Which job computes which run: one JSON line per submission in the sweep's folder, only ever appended to."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
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


def append(sweep: Path, submissions: Sequence[Submission]) -> None:
    """Add submissions to a sweep's manifest."""
    lines = [json.dumps({"schema": SCHEMA, **asdict(submission)}) + "\n" for submission in submissions]
    with (sweep / FILE).open("a") as file:
        file.write("".join(lines))


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
        submission = Submission(**{**data, "overrides": tuple(data["overrides"])})
        last[submission.run_id] = submission
    return last
