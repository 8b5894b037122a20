"""What a comparison of runs consists of, gathered once from the records: groups, curves, timelines, provenance."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

from analysis.report import BASELINE, Baselines
from analysis.runs import Problem, Run, load_runs, load_samples, load_timelines, paper_order, sweep_names
from analysis.tables import LONGEST, shortened
from experiments.records import RunRecord
from experiments.simulated import PROFILES, simulated_timeline
from experiments.tracking.facts import segments
from kfac.timeline import Timeline

NOT_COMPARED = (
    "seed",
    "name",
    "runs",
    "sweep",
    "rerun",
    "progress",
    "tracking",
    "checkpoint",
    "site",
    "schedule_label",
)
"""Keys of the configuration in which runs may differ without being different experiments."""


@dataclass(frozen=True)
class Curve:
    """What one run learned.

    Args:
        label: of its group, with the seed where that has several runs.
        group: the group's number, for the colour.
        steps, seconds, loss: of the training iterations; the seconds are those spent in iterations.
        eval_steps, eval_seconds, eval_loss: of the evaluations.
    """

    label: str
    group: int
    steps: Sequence[float]
    seconds: Sequence[float]
    loss: Sequence[float]
    eval_steps: Sequence[float]
    eval_seconds: Sequence[float]
    eval_loss: Sequence[float]


@dataclass(frozen=True)
class Pictured:
    """A recorded iteration to look at.

    Args:
        label: of its group.
        run, iteration: which.
        measured: all ranks.
        simulated: the same plan on the run's cost profile, or on that of a run like it.
        costs_of: that run, where it is another one.
    """

    label: str
    run: str
    iteration: int
    measured: Timeline
    simulated: Timeline | None
    costs_of: str = ""

    @property
    def views(self) -> dict[str, Timeline]:
        """Measured and, if there is one, simulated."""
        return {"measured": self.measured, **({"simulated": self.simulated} if self.simulated else {})}


@dataclass(frozen=True)
class Group:
    """Runs that differ only by their seed.

    Args:
        label: what tells them from the other groups.
        runs: in the order of their seeds.
    """

    label: str
    runs: tuple[Run, ...]

    @property
    def first(self) -> Run:
        """A run of them, for what all share."""
        return self.runs[0]

    @property
    def medians_s(self) -> list[float]:
        """Each finished run's median seconds of an iteration; of all runs, if none has finished."""
        finished = [run for run in self.runs if run.status == "finished"] or self.runs
        return [run.iteration_s.median for run in finished if run.iteration_s]

    @property
    def median_s(self) -> float | None:
        """The median of the runs' medians."""
        return median(self.medians_s) if self.medians_s else None

    def breakdown_s(self) -> dict[str, float]:
        """Exposed seconds of each kind, averaged over the runs that recorded timelines."""
        found = [run.breakdown_s for run in self.runs if run.breakdown_s]
        return {kind: sum(of[kind] for of in found) / len(found) for kind in found[0]} if found else {}


@dataclass(frozen=True)
class Comparison:
    """Runs to be compared.

    Args:
        title: where they come from.
        runs: as the paper orders them.
        groups: the same, by what they are.
        problems: what could not be read.
        baseline: the schedule that others are compared with.
        samples_s: seconds of each iteration by the runs' directories.
    """

    title: str
    runs: tuple[Run, ...]
    groups: tuple[Group, ...]
    problems: tuple[Problem, ...]
    baseline: str
    samples_s: Mapping[Path, Sequence[float]] = field(hash=False)

    @classmethod
    def of(cls, folders: Sequence[Path], baseline: str = BASELINE) -> Comparison:
        """All runs below some folders.

        Raises:
            ValueError: if a folder does not exist, or none holds a run.
        """
        found, problems = load_runs(folders)
        if not found:
            reasons = "".join(f"; {problem}" for problem in problems[:1])
            raise ValueError(f"no run records below {', '.join(map(str, folders))}{reasons}")
        samples_s, damaged = load_samples(found)
        runs = tuple(sorted(found, key=paper_order))
        title = ", ".join(dict.fromkeys(folder.resolve().name for folder in folders))
        return cls(title, runs, tuple(group(runs)), (*problems, *damaged), baseline, samples_s)

    @cached_property
    def baselines(self) -> Baselines:
        """The runs that speed-ups are over."""
        return Baselines.among(self.runs, self.baseline)

    def curves(self) -> list[Curve]:
        """One per run that trained."""
        found = []
        for number, of in enumerate(self.groups):
            for run in of.runs:
                label = of.label if len(of.runs) == 1 else f"{of.label}, seed {run.seed}"
                if (curve := _curve(label, number, run)) is not None:
                    found.append(curve)
        return found

    def pictured(self) -> list[Pictured]:
        """For each group the last recorded iteration of its first run that has one."""
        found = []
        for of in self.groups:
            for run in of.runs:
                try:
                    timelines = load_timelines(run.path)
                except ValueError:
                    continue
                if timelines:
                    last = max(timelines)
                    costs = self._costs_for(run)
                    from_record = RunRecord.load(costs.path) if costs else None
                    simulated = simulated_timeline(RunRecord.load(run.path), from_record)
                    whose = costs.run_id if costs and costs is not run else ""
                    found.append(Pictured(of.label, run.run_id, last, timelines[last], simulated, whose))
                    break
        return found

    def _costs_for(self, run: Run) -> Run | None:
        """The run itself if it holds cost profiles, or one of the same model, data, batch, ranks and machine."""
        like = [other for other in self.runs if _costs(other) == _costs(run)]
        return next((r for r in (run, *like) if all((r.path / name).is_file() for name in PROFILES)), None)

    @property
    def latest(self) -> str:
        """When the last of the runs started: a report of the same records is the same file."""
        return max(run.created for run in self.runs)


def _costs(run: Run) -> tuple[Any, ...]:
    """What the seconds of a run's tasks and messages depend on, as far as its record says."""
    config = {key: run.config.get(key) for key in ("model", "kfac", "threads", "device")}
    return (run.sweep, run.data, run.batch_size, run.world_size, run.host, json.dumps(config, sort_keys=True))


def group(runs: Sequence[Run]) -> list[Group]:
    """Runs by what they are, in the order of the first of each."""
    names = sweep_names(runs)
    found: dict[str, list[Run]] = {}
    for run in runs:
        key = json.dumps([str(run.sweep), run.schedule, run.world_size, comparable_config(run)], sort_keys=True)
        found.setdefault(key, []).append(run)
    groups = list(found.values())
    facts = [_facts(of[0], names) for of in groups]
    varying = [key for key in facts[0] if len({fact[key] for fact in facts}) > 1 or key == "schedule"]
    labels = [shortened(" ".join(fact[key] for key in varying), LONGEST) for fact in facts]
    counts = {label: labels.count(label) for label in labels}
    seen: dict[str, int] = {}
    result = []
    for label, of in zip(labels, groups, strict=True):
        seen[label] = seen.get(label, 0) + 1
        number = f" ({seen[label]})" if counts[label] > 1 else ""
        result.append(Group(label + number, tuple(sorted(of, key=lambda run: (run.seed, run.run_id)))))
    return result


def _facts(run: Run, sweeps: Mapping[Path, str]) -> dict[str, str]:
    return {
        "schedule": run.schedule,
        "model": run.model,
        "data": run.data,
        "world_size": f"w{run.world_size}",
        "batch_size": f"b{run.batch_size}",
        "sweep": f"[{sweeps[run.sweep]}]",
    }


def comparable_config(run: Run) -> dict[str, Any]:
    """The configuration without what does not make runs different experiments."""
    return {key: value for key, value in run.config.items() if key not in NOT_COMPARED}


def differences(groups: Iterable[Group]) -> dict[str, list[Any]]:
    """The dotted keys of the configuration in which groups differ: the value of each."""
    flat = [_flat(comparable_config(of.first)) for of in groups]
    keys = dict.fromkeys(key for config in flat for key in config)
    values = {key: [config.get(key) for config in flat] for key in keys}
    return {key: of for key, of in values.items() if len({json.dumps(v, sort_keys=True) for v in of}) > 1}


def history(run: Run) -> list[str]:
    """Each start of a run in words; none where its record does not say."""
    try:
        found = segments(RunRecord.load(run.path))
    except (ValueError, KeyError, TypeError, AttributeError):
        return []
    return [f"{of['start']} on {of['host']}: {of['end_reason'] or 'running'}" for of in found]


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found


def _curve(label: str, number: int, run: Run) -> Curve | None:
    try:
        rows = RunRecord.load(run.path).rows()
        train = [row for row in rows if row["kind"] == "train" and isinstance(row.get("loss"), (int, float))]
        tests = [row for row in rows if row["kind"] == "eval" and isinstance(row.get("loss"), (int, float))]
        seconds = list(accumulate(float(row.get("iteration_s") or 0.0) for row in train))
        losses, tested = ([float(row["loss"]) for row in of] for of in (train, tests))
    except (OSError, ValueError, TypeError, OverflowError, RecursionError):
        return None
    if not train:
        return None
    numbers = [row["iter"] for row in train]
    passed = [bisect_right(numbers, row["iter"]) for row in tests]  # iterations before each evaluation
    return Curve(
        label,
        number,
        [row["iter"] + 1 for row in train],
        seconds,
        losses,
        [row["iter"] + 1 for row in tests],
        [seconds[count - 1] if count else 0.0 for count in passed],
        tested,
    )
