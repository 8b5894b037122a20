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
from functools import cached_property
from pathlib import Path
from typing import Any

from analysis.fields import (
    check_file,
    damage_in,
    duration_s,
    number_or_none,
    positive,
    read_json,
    seconds_by_kind,
    spread_of,
)
from analysis.metrics import plain_training_rows, rows_by_kind
from analysis.statistics import Spread, spread
from analysis.tables import printable, shortened
from experiments.records import RunRecord
from kfac.timeline import Timeline

LONGEST_REASON = 500
"""Characters of what is wrong with a record."""
SCHEDULE_ORDER = ("sgd", "kfac", "dkfac", "mpdkfac", "spdkfac")
"""Schedules as the paper lists them."""
COMPARABLE_KEYS = ("model", "data", "kfac", "batch_size", "threads", "device")
"""Keys of the configuration that change an iteration's time and are not what is compared (that is the schedule)."""


@dataclass(frozen=True)
class Problem:
    """A record, or one of its files, that was left out.

    Args:
        path: the record's directory, or the file.
        reason: what is wrong with it.
    """

    path: Path
    reason: str

    def __str__(self) -> str:
        return printable(f"skipped {self.path}: {shortened(self.reason, LONGEST_REASON)}")


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

    @cached_property
    def comparable(self) -> str:
        """What two runs must share for their times to be compared: the sweep, the ranks and the settings, as JSON."""
        return json.dumps([self.sweep.as_posix(), self.world_size, self.settings], sort_keys=True)

    def samples_s(self) -> list[float]:
        """Seconds of each iteration in order, without the warm-up unless there is nothing else.

        Raises:
            ValueError: if ``metrics.jsonl`` is damaged.
        """
        rows = plain_training_rows(self.path / "metrics.jsonl")
        return _samples_s(self.config, rows_by_kind(self.path)["train"] if rows is None else rows)

    def recorded(self) -> int:
        """How many iterations have a timeline."""
        return len(RunRecord.load(self.path).timeline_paths())

    def machine(self) -> dict[str, Any]:
        """What the run ran on: host, processors, GPUs, versions; empty where it was not recorded.

        Raises:
            ValueError: if ``environment.json`` is damaged.
        """
        facts = read_json(self.path / "environment.json") if (self.path / "environment.json").exists() else {}
        gpus = facts.get("gpus", [])
        if not isinstance(gpus, list) or not all(isinstance(gpu, str) for gpu in gpus):
            raise ValueError(f"environment.json is damaged: gpus={gpus!r} is no list of names")
        if not isinstance(packages := facts.get("packages", {}), dict):
            raise ValueError(f"environment.json is damaged: packages={packages!r} is no object")
        return {key: facts[key] for key in ("host", "cpu", "cpus", "gpus", "python", "packages") if key in facts}


def find_records(root: Path, problems: list[Problem] | None = None) -> Iterator[Path]:
    """Directories with a ``run.json`` at or below a folder, sorted; inside of records nothing is searched for.

    Args:
        root: the folder; links below it are not followed.
        problems: gets the folders that cannot be listed.
    """
    folders = [os.fspath(root)]
    while folders:
        folder = folders.pop()
        if os.path.lexists(os.path.join(folder, "run.json")):  # asked first: listing thousands of records takes long
            yield Path(folder)
            continue
        try:
            with os.scandir(folder) as entries:
                below = sorted(entry.path for entry in entries if entry.is_dir(follow_symlinks=False))
        except OSError as error:
            if problems is not None:
                problems.append(Problem(Path(folder), f"it cannot be listed: {error.strerror}"))
            continue
        folders += reversed(below)


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

    A run that is below several of them counts once.

    Raises:
        ValueError: if a folder does not exist.
    """
    runs: list[Run] = []
    problems: list[Problem] = []
    seen: set[tuple[int, int]] = set()
    for root in roots:
        if not root.is_dir():
            raise ValueError(f"no folder {root} to read run records from")
        for path in find_records(root, problems):
            found = path.stat()
            if (found.st_dev, found.st_ino) in seen:
                continue
            seen.add((found.st_dev, found.st_ino))
            try:
                runs.append(load_run(path))
            except (ValueError, RecursionError) as error:  # the latter as of a million brackets
                problems.append(Problem(path, str(error)))
    return runs, problems


def load_samples(runs: Iterable[Run]) -> tuple[dict[Path, list[float]], list[Problem]]:
    """:meth:`Run.samples_s` of runs, by their directories, and the metrics that had to be left out."""
    samples_s, problems = {}, []
    for run in runs:
        try:
            samples_s[run.path] = run.samples_s()
        except ValueError as error:
            problems.append(Problem(run.path / "metrics.jsonl", str(error)))
    return samples_s, problems


def load_run(path: Path) -> Run:
    """One run.

    Raises:
        ValueError: if its record is damaged or incomplete, saying where.
    """
    for name in ("run.json", "config.json", "summary.json"):
        check_file(path / name)
    with damage_in("run.json", known=ValueError):
        head = RunRecord.load(path).head
    config = read_json(path / "config.json")
    with damage_in("run.json"):
        identity: dict[str, Any] = {
            **{key: printable(str(head[key])) for key in ("run_id", "status", "schedule", "model", "data")},
            "name": printable(str(head.get("name") or head["run_id"])),
            "world_size": positive("world_size", head["world_size"]),
            "seed": int(head["seed"]),
            "created": printable(str(head.get("created", ""))),
            "host": printable(str((head.get("segments") or [{}])[-1].get("host", ""))),
            "code": code if isinstance(code := head.get("code"), dict) else {},
        }
    if identity["status"] == "finished" or (path / "summary.json").exists():
        summary = read_json(path / "summary.json")
    else:
        summary = _summarise(path, config)
    with damage_in("summary.json"):
        times = summary.get("iteration_s")
        return Run(
            path=path,
            **identity,
            config=config,
            iterations=int(summary["iterations"]),
            iteration_s=spread_of(times) if times else None,
            breakdown_s=seconds_by_kind(summary.get("breakdown_s")),
            hidden_s=seconds_by_kind(summary.get("hidden_s")),
            loss=number_or_none(summary.get("eval_loss")),
            accuracy=number_or_none(summary.get("eval_accuracy")),
        )


def load_timelines(path: Path) -> dict[int, Timeline]:
    """The recorded iterations of a run: all ranks' timelines of each, merged.

    Raises:
        ValueError: if it is no record, or a file is damaged.
    """
    paths = RunRecord.load(path).timeline_paths()
    return {i: Timeline.merge(map(_timeline, of_ranks)) for i, of_ranks in paths.items()}


def _timeline(file: Path) -> Timeline:
    timeline = Timeline.from_chrome_trace(file)
    if not timeline.spans:  # every iteration has a forward pass
        raise ValueError(f"{file} is damaged: a timeline without spans")
    return timeline


def _samples_s(config: Mapping[str, Any], rows: list[dict[str, Any]]) -> list[float]:
    warmup = config.get("warmup") or 0
    if not isinstance(warmup, int) or warmup < 0:
        raise ValueError(f"config.json is damaged: warmup={warmup!r}")
    with damage_in("metrics.jsonl"):
        seconds = [duration_s(row["iteration_s"]) for row in rows]
    return seconds[warmup:] or seconds


def _summarise(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """The summary of a run that has not written one."""
    rows = rows_by_kind(path)
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
