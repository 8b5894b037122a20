"""What a sweep's command will do, before it does it: which runs are needed, as which jobs, at what cost."""

from __future__ import annotations

import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.provenance import code_identity, patch_digest
from experiments.records import FINISHED
from slurm.site import SLURM, Site
from slurm.status import RunStatus

if TYPE_CHECKING:
    from experiments.config import TrainConfig

LARGEST_ARRAY = 1000  # SLURM's default MaxArraySize is 1001


@dataclass(frozen=True)
class Request:
    """One run of a sweep: its checked configuration, where it goes, and the overrides that made it, for people."""

    config: TrainConfig
    site: Site
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """The runs to hand over, grouped by what they ask for, and why the others are left out."""

    new: tuple[tuple[Request, ...], ...]
    notes: Mapping[str, str]
    """Of each run, what to say about it: why it is skipped, continued or started over."""

    @property
    def runs(self) -> list[Request]:
        """All runs that are handed over."""
        return [request for group in self.new for request in group]

    def describe(self) -> str:
        """The plan as text: a line per run, the jobs, what they may cost at most."""
        lines = []
        names = {request.config.run_id for request in self.runs}
        for run_id, note in self.notes.items():
            lines.append(f"{'submit' if run_id in names else 'skip':<7}{run_id}" + (f": {note}" if note else ""))
        hours: defaultdict[str, float] = defaultdict(float)
        for group in self.new:
            site, size = group[0].site, group[0].config.world_size
            nodes, per_node = site.layout(size)
            limit_h = site.time_min / 60
            gpus = site.gpus(size)
            what = f"{counted(size, 'rank')} on {counted(nodes, 'node')} ({per_node} each), {counted(gpus, 'GPU')}"
            if site.scheduler == SLURM:
                jobs = f"array of {len(group)}" if len(group) > 1 else "1 job"
                lines.append(f"{jobs}: {what}, {site.time_min} min at most")
                hours["GPU-hours"] += len(group) * gpus * limit_h
                hours["core-hours"] += len(group) * size * site.cpus_per_task * limit_h
            else:
                lines.append(f"{len(group)} on this machine, {site.parallel} at a time: {counted(size, 'rank')} each")
        cost = ", ".join(f"{value:.4g} {name}" for name, value in hours.items() if value)
        lines.append(counted(len(self.runs), "run") + (f", at most {cost}" if cost else ""))
        return "\n".join(lines)


def counted(number: int, what: str) -> str:
    """A number of things, in words."""
    return f"{number} {what}{'s' * (number != 1)}"


def make_plan(requests: Sequence[Request], known: Mapping[str, RunStatus], *, same: Mapping[str, Any]) -> Plan:
    """Decide what becomes of each run.

    Left out are runs that finished (unless their configuration says ``rerun``), those that wait or run already (two
    jobs must not write one record), and repetitions within the sweep.

    Args:
        requests: in the order of the grid.
        known: the sweep's runs so far.
        same: the code that would run now (:func:`present_code`).

    Raises:
        ConfigError: if ranks do not fit on nodes as the site says.
    """
    notes: dict[str, str] = {}
    groups: defaultdict[str, list[Request]] = defaultdict(list)
    for request in requests:
        run_id = request.config.run_id
        request.site.layout(request.config.world_size)
        if run_id in notes:
            continue
        skipped, notes[run_id] = _judge(request, known.get(run_id), same)
        if not skipped:
            groups[json.dumps([request.site.to_dict(), request.config.world_size], sort_keys=True)].append(request)
    new = [
        tuple(members[first : first + LARGEST_ARRAY])
        for members in groups.values()
        for first in range(0, len(members), LARGEST_ARRAY)
    ]
    return Plan(tuple(new), notes)


def _judge(request: Request, row: RunStatus | None, same: Mapping[str, Any]) -> tuple[bool, str]:
    """Whether a run is left out, and what to say."""
    if row is None:
        return False, ""
    other = " by other code than this" if row.code and row.code != dict(same) else ""
    if row.job_id and not row.over:
        return True, f"{row.state} as job {row.job_id}"
    if row.state == FINISHED:
        if request.config.rerun:
            return False, f"finished{other}, starts over"
        return True, f"finished{other} (rerun=true starts it over)"
    if request.config.rerun or row.iteration is None:
        return False, f"{row.state}, starts over"
    return False, f"{row.state} after {row.iteration} iterations, continues" + (f"; begun{other}" if other else "")


def freeze(request: Request, inputs: Path) -> Request:
    """The request with absolute paths and copies of the small files it reads: what it needs stays while it waits.

    Its identity stays too: paths do not count, profiles and texts count by their content.
    """
    from experiments.config import TrainConfig

    data = request.config.to_dict()
    data["runs"] = str(Path(data["runs"]).resolve())
    if path := data["data"]["path"]:
        data["data"]["path"] = str(_keep_copy(Path(path), inputs) if Path(path).is_file() else Path(path).resolve())
    for key in ("cluster", "model_profile"):
        if data[key] and Path(data[key]).is_file():
            data[key] = str(_keep_copy(Path(data[key]), inputs))
    frozen = TrainConfig.from_dict(data)
    if frozen.run_id != request.config.run_id:
        raise RuntimeError(f"{request.config.run_id} would become {frozen.run_id}: its files have just been changed")
    return replace(request, config=frozen)


def _keep_copy(path: Path, folder: Path) -> Path:
    content = path.read_bytes()
    copy = folder / f"{hashlib.sha256(content).hexdigest()[:16]}{path.suffix}"
    if not copy.exists():
        folder.mkdir(parents=True, exist_ok=True)
        temporary = copy.with_suffix(f".{os.getpid()}")
        temporary.write_bytes(content)
        temporary.replace(copy)
    return copy.resolve()


def present_code() -> dict[str, Any]:
    """Which code would run now, as a record's last segment names it."""
    identity, patch = code_identity()
    return {**identity, "patch": patch_digest(patch)}
