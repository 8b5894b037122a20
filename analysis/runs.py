"""Run records as values: what tables and figures need of each, read from its directory alone.

A record is a directory with ``run.json`` (see :mod:`experiments.records`). What is damaged or incomplete is left out
and named, never guessed; a run that has not finished is shown with what it recorded so far.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from analysis.statistics import Spread, spread
from experiments.records import RunRecord
from kfac.timeline import Timeline

SCHEDULE_ORDER = ("sgd", "kfac", "dkfac", "mpdkfac", "spdkfac")
"""Schedules as the paper lists them."""
COMPARABLE_KEYS = ("model", "data", "kfac", "batch_size", "threads", "device")
"""Keys of the configuration that change an iteration's time and are not what is compared (that is the schedule)."""


@dataclass(frozen=True)
class Problem:
    """A record that was left out.

    Args:
        path: its directory.
        reason: what is wrong with it.
    """

    path: Path
    reason: str

    def __str__(self) -> str:
        return f"skipped {self.path}: {self.reason}"


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run.

    Args:
        path: its directory.
        run_id, name, status, schedule, model, data, world_size, seed: as recorded.
        created: when, as recorded.
        host: where its last segment ran.
        code: the commit, or the version, that it started with.
        config: the resolved configuration.
        iterations: how many it trained, a repeated one counted once.
        iteration_s: median and quartiles of an iteration's seconds, the first (warm-up) ones left out; None if it has
            none.
        breakdown_s: exposed seconds per kind, averaged over ranks and recorded iterations; empty if none was recorded.
        hidden_s: seconds of each communication kind that computing hides.
        loss, accuracy: of the last evaluation; None before it.
    """

    path: Path
    run_id: str
    name: str
    status: str
    schedule: str
    model: str
    data: str
    world_size: int
    seed: int
    created: str
    host: str
    code: Mapping[str, Any] = field(hash=False)
    config: Mapping[str, Any] = field(hash=False)
    iterations: int
    iteration_s: Spread | None
    breakdown_s: Mapping[str, float] = field(hash=False)
    hidden_s: Mapping[str, float] = field(hash=False)
    loss: float | None
    accuracy: float | None

    @property
    def batch_size(self) -> int | None:
        """Samples per rank and iteration, where the configuration says so."""
        value = self.config.get("batch_size")
        return value if isinstance(value, int) else None

    @property
    def sweep(self) -> Path:
        """The folder that holds the run beside the others of its sweep."""
        return self.path.parent

    @property
    def settings(self) -> dict[str, Any]:
        """The part of the configuration that changes an iteration's time: :data:`COMPARABLE_KEYS`."""
        return {key: self.config.get(key) for key in COMPARABLE_KEYS}

    @property
    def comparable(self) -> str:
        """What two runs must share for their times to be compared: the sweep, the ranks and the settings, as JSON."""
        return json.dumps([self.sweep.as_posix(), self.world_size, self.settings], sort_keys=True)

    def samples_s(self) -> list[float]:
        """Seconds of each iteration in order, without the warm-up unless there is nothing else."""
        return _samples_s(self.config, _rows(self.path)["train"])

    def recorded(self) -> int:
        """How many iterations have a timeline."""
        return len(RunRecord.load(self.path).timeline_paths())

    def machine(self) -> dict[str, Any]:
        """What the run ran on: host, processors, GPUs, versions; empty where it was not recorded."""
        facts = _read_json(self.path / "environment.json") if (self.path / "environment.json").exists() else {}
        return {key: facts[key] for key in ("host", "cpu", "cpus", "gpus", "python", "packages") if key in facts}


def find_records(root: Path) -> Iterator[Path]:
    """Directories with a ``run.json`` at or below a folder, sorted; inside of records nothing is searched for."""
    for folder, folders, files in os.walk(root):
        if "run.json" in files:
            folders.clear()
            yield Path(folder)
        folders.sort()


def paper_order(run: Run) -> tuple[Any, ...]:
    """Sorts runs by sweep, model and data, then schedules as the paper lists them, other ones after."""
    name = run.schedule.split("+")[0]  # what follows are the switches that differ from the named schedule
    place = SCHEDULE_ORDER.index(name) if name in SCHEDULE_ORDER else len(SCHEDULE_ORDER)
    return (run.sweep, run.model, run.data, place, run.schedule, run.world_size, run.seed, run.run_id)


def sweep_names(runs: Iterable[Run]) -> dict[Path, str]:
    """The runs' sweeps, each by its folder's name, or by its path where two folders have one name."""
    sweeps = dict.fromkeys(run.sweep for run in runs)
    count = Counter(sweep.name for sweep in sweeps)
    return {sweep: sweep.name if count[sweep.name] == 1 else sweep.as_posix() for sweep in sweeps}


def load_runs(roots: Iterable[Path]) -> tuple[list[Run], list[Problem]]:
    """All runs below some folders, in the order of their paths, and the records that had to be left out.

    Raises:
        ValueError: if a folder does not exist.
    """
    runs, problems = [], []
    for root in roots:
        if not root.is_dir():
            raise ValueError(f"no folder {root} to read run records from")
        for path in find_records(root):
            try:
                runs.append(load_run(path))
            except ValueError as error:
                problems.append(Problem(path, str(error)))
    return runs, problems


def load_run(path: Path) -> Run:
    """One run.

    Raises:
        ValueError: if its record is damaged or incomplete, saying where.
    """
    try:
        return _load_run(path)
    except KeyError as error:
        raise ValueError(f"no {error} in its run.json or summary.json") from error
    except (TypeError, AttributeError) as error:
        raise ValueError(f"run.json or summary.json is damaged: {error}") from error


def _load_run(path: Path) -> Run:
    head = RunRecord.load(path).head
    config = _read_json(path / "config.json")
    finished = head["status"] == "finished"
    if finished or (path / "summary.json").exists():
        summary = _read_json(path / "summary.json")
    else:
        summary = _summarise(path, config)
    times = summary.get("iteration_s")
    return Run(
        path=path,
        run_id=str(head["run_id"]),
        name=str(head.get("name") or head["run_id"]),
        status=str(head["status"]),
        schedule=str(head["schedule"]),
        model=str(head["model"]),
        data=str(head["data"]),
        world_size=int(head["world_size"]),
        seed=int(head["seed"]),
        created=str(head.get("created", "")),
        host=str((head.get("segments") or [{}])[-1].get("host", "")),
        code=head.get("code") or {},
        config=config,
        iterations=int(summary["iterations"]),
        iteration_s=Spread(times["median"], times["q25"], times["q75"], times["n"]) if times else None,
        breakdown_s=_seconds(summary.get("breakdown_s")),
        hidden_s=_seconds(summary.get("hidden_s")),
        loss=_number(summary.get("eval_loss")),
        accuracy=_number(summary.get("eval_accuracy")),
    )


def load_timelines(path: Path) -> dict[int, Timeline]:
    """The recorded iterations of a run: all ranks' timelines of each, merged.

    Raises:
        ValueError: if it is no record, or a file is damaged.
    """
    paths = RunRecord.load(path).timeline_paths()
    return {i: Timeline.merge(map(Timeline.from_chrome_trace, of_ranks)) for i, of_ranks in paths.items()}


def _rows(path: Path) -> dict[str, list[dict[str, Any]]]:
    """The metrics rows of each kind by iteration, repeated iterations once."""
    by_kind: dict[str, list[dict[str, Any]]] = {"train": [], "eval": []}
    try:
        for row in RunRecord.load(path).rows():
            by_kind.setdefault(row["kind"], []).append(row)
    except (KeyError, TypeError) as error:
        raise ValueError(f"metrics.jsonl has a row without kind or iter: {error}") from error
    return by_kind


def _samples_s(config: Mapping[str, Any], rows: list[dict[str, Any]]) -> list[float]:
    warmup = config.get("warmup", 0)
    seconds = [row["iteration_s"] for row in rows]
    return seconds[warmup:] or seconds


def _summarise(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """The summary of a run that has not written one."""
    rows = _rows(path)
    train, evaluations = rows["train"], rows["eval"]
    samples_s = _samples_s(config, train)
    timelines = load_timelines(path).values()
    last: Mapping[str, Any] = evaluations[-1] if evaluations else {}
    return {
        "iterations": len(train),
        "iteration_s": vars(spread(samples_s)) if samples_s else None,
        "breakdown_s": _mean(t.breakdown_s() for t in timelines),
        "hidden_s": _mean(t.hidden_s() for t in timelines),
        "eval_loss": last.get("loss"),
        "eval_accuracy": last.get("accuracy"),
    }


def _mean(breakdowns: Iterable[Mapping[str, float]]) -> dict[str, float]:
    found = list(breakdowns)
    return {kind: sum(b[kind] for b in found) / len(found) for kind in found[0]} if found else {}


def _seconds(value: Mapping[str, Any] | None) -> dict[str, float]:
    return {str(kind): float(seconds) for kind, seconds in (value or {}).items()}


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        data = json.loads(file.read_text())
    except FileNotFoundError as error:
        raise ValueError(f"no {file.name} in it") from error
    except (OSError, ValueError) as error:
        raise ValueError(f"{file.name} is damaged: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{file.name} is damaged: no JSON object")
    return data
