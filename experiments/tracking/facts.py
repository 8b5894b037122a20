"""What a sink is told about a run when it starts: who it is, and what it went through."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.records import RunRecord
from experiments.redaction import redacted

KILLED = "killed"
"""How a segment ended that did not live to say so."""


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """A run as sinks name and file it.

    Args:
        path: the record's directory.
        id: the same after every restart, another one when the run starts over or lies in another sweep.
        name, group, job_type: for people; the group is the sweep, the job type the schedule.
        config: the resolved nested configuration, with the run's id and without secrets.
        restarts: how often the run was continued.
        segments: start, end, host and end of each start of the run.
        rank, world_size: of this process.
    """

    path: Path
    id: str
    name: str
    group: str
    job_type: str
    config: Mapping[str, Any]
    restarts: int
    segments: tuple[Mapping[str, Any], ...]
    rank: int = 0
    world_size: int = 1

    @classmethod
    def of(cls, record: RunRecord, rank: int = 0) -> RunFacts:
        """Those of a record; a segment without an end that is not the last one was killed."""
        head = record.head
        config = record.read("config.json") or {}
        schedule, world_size = str(head["schedule"]), int(head["world_size"])
        return cls(
            path=record.path,
            id=tracking_id(record),
            name=f"{schedule}-{head['model']}-w{world_size}-s{head['seed']}",
            group=record.path.resolve().parent.name,
            job_type=schedule,
            config=redacted({**config, "run_id": head["run_id"], "schedule_label": schedule}),
            restarts=record.restarts,
            segments=segments(record),
            rank=rank,
            world_size=world_size,
        )


def tracking_id(record: RunRecord) -> str:
    """``RUN_ID-`` and 6 hex digits of sweep and creation: no state file, and no second run after a requeue."""
    origin = f"{record.path.resolve().parent.name}/{record.head['created']}"
    return f"{record.head['run_id']}-{hashlib.sha256(origin.encode()).hexdigest()[:6]}"


def segments(record: RunRecord) -> tuple[Mapping[str, Any], ...]:
    """Each start of a run: when, where, and how it ended; None for one that goes on."""
    found = record.head["segments"]
    last = len(found) - 1
    keys = ("start", "end", "host")
    return tuple(
        {**{key: s.get(key) for key in keys}, "end_reason": s.get("end_reason") or (KILLED if i < last else None)}
        for i, s in enumerate(found)
    )
