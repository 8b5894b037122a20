"""Run records as values: what tables and figures need of each, read from its directory alone.

A record is a directory with ``run.json`` (see :mod:`experiments.records`). What is damaged or incomplete is left out
and named, never guessed; a run that has not finished is shown with what it recorded so far.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from analysis.statistics import Spread, spread
from kfac.timeline import Timeline


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
        config: the resolved configuration.
        iterations: how many it trained, a repeated one counted once.
        iteration_s: median and quartiles of an iteration's seconds, the first (warm-up) ones left out; None if it has
            none.
        breakdown_s: exposed seconds per kind, averaged over ranks and recorded iterations; empty if none was recorded.
        hidden_s: seconds of each communication kind that computing hides.
        loss, accuracy: of the last evaluation, else the last training loss.
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
    def comparable(self) -> tuple[Any, ...]:
        """What two runs must share for their iteration times to be compared."""
        return (
            self.model,
            self.data,
            self.world_size,
            *(self.config.get(k) for k in ("batch_size", "threads", "device")),
        )

    def samples_s(self) -> list[float]:
        """Seconds of each iteration in order, without the warm-up."""
        return _samples_s(self.config, _last_rows(self.path, "train"))


def find_records(root: Path) -> Iterator[Path]:
    """Directories with a ``run.json`` at or below a folder, sorted; inside of records nothing is searched for."""
    for folder, folders, files in os.walk(root):
        if "run.json" in files:
            folders.clear()
            yield Path(folder)
        folders.sort()


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
    head = _read_json(path / "run.json")
    config = _read_json(path / "config.json")
    finished = head.get("status") == "finished"
    summary = _read_json(path / "summary.json") if finished or (path / "summary.json").exists() else None
    if summary is None:
        summary = _summarise(path, config)
    segments = head.get("segments") or [{}]
    try:
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
            host=str(segments[-1].get("host", "")),
            config=config,
            iterations=int(summary["iterations"]),
            iteration_s=Spread(times["median"], times["q25"], times["q75"], times["n"]) if times else None,
            breakdown_s=_seconds(summary.get("breakdown_s")),
            hidden_s=_seconds(summary.get("hidden_s")),
            loss=_number(summary.get("eval_loss", summary.get("loss"))),
            accuracy=_number(summary.get("eval_accuracy")),
        )
    except KeyError as error:
        raise ValueError(f"no {error} in its run.json or summary.json") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"run.json or summary.json is damaged: {error}") from error


def load_timelines(path: Path) -> dict[int, Timeline]:
    """The recorded iterations of a run: all ranks' timelines of each, merged.

    Raises:
        ValueError: if a file is damaged or has another name than ``iterNNNNNN.rankR.json``.
    """
    parts: dict[int, list[Timeline]] = {}
    for file in sorted((path / "timelines").glob("*.json")):
        try:
            iteration = int(file.name.split(".")[0].removeprefix("iter"))
        except ValueError as error:
            raise ValueError(f"{file.name} is not named like iter000012.rank0.json") from error
        parts.setdefault(iteration, []).append(Timeline.from_chrome_trace(file))
    return {iteration: Timeline.merge(of_ranks) for iteration, of_ranks in sorted(parts.items())}


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a run's ``metrics.jsonl``; a torn last line, which a killed run leaves, is dropped.

    Raises:
        ValueError: if another line is damaged, with its number.
    """
    file = path / "metrics.jsonl"
    try:
        lines = file.read_text().split("\n") if file.exists() else []
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read metrics.jsonl: {error}") from error
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            row = json.loads(line)
            if not isinstance(row, dict) or not {"kind", "iter"} <= row.keys():
                raise ValueError("no row of metrics")
        except ValueError as error:
            if number == len(lines):  # a complete line ends with a newline, so this one was cut short
                break
            raise ValueError(f"metrics.jsonl line {number} is damaged: {error}") from error
        rows.append(row)
    return rows


def _last_rows(path: Path, kind: str) -> list[dict[str, Any]]:
    """Rows of a kind by iteration: after a resume the last row of an iteration counts."""
    by_iteration = {row["iter"]: row for row in read_metrics(path) if row["kind"] == kind}
    return [by_iteration[i] for i in sorted(by_iteration)]


def _samples_s(config: Mapping[str, Any], rows: list[dict[str, Any]]) -> list[float]:
    warmup = config.get("warmup", 0)
    return [row["iteration_s"] for row in rows[warmup:] if row.get("iteration_s") is not None]


def _summarise(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """The summary of a run that has not written one."""
    train, evaluations = _last_rows(path, "train"), _last_rows(path, "eval")
    samples_s = _samples_s(config, train)
    timelines = load_timelines(path).values()
    last: Mapping[str, Any] = evaluations[-1] if evaluations else {}
    return {
        "iterations": len(train),
        "iteration_s": vars(spread(samples_s)) if samples_s else None,
        "breakdown_s": _mean(t.breakdown_s() for t in timelines),
        "hidden_s": _mean(t.hidden_s() for t in timelines),
        "eval_loss": last.get("loss", train[-1].get("loss") if train else None),
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
