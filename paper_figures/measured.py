"""What the measured table and figure share: which runs they show, and their medians over seeds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from analysis.runs import Problem, Run, load_runs, paper_order, sweep_names
from analysis.statistics import Spread
from paper_figures.item import Provenance

NO_RUNS = "No finished run records in {}: python -m experiments.train makes some."


@dataclass(frozen=True)
class Measured:
    """Comparable runs of one schedule.

    Args:
        runs: one per seed, or repeats.
        root: the folder that they were found in.
    """

    runs: tuple[Run, ...]
    root: Path

    @property
    def run(self) -> Run:
        """One of them, for what they share."""
        return self.runs[0]

    @property
    def label(self) -> str:
        """Its name in provenance files."""
        return self.path_of(self.run)

    def path_of(self, run: Run) -> str:
        """Where a run lies below the root: its name in provenance files, where a run's id may appear in two sweeps."""
        return run.path.relative_to(self.root).as_posix()

    @property
    def spread(self) -> Spread:
        """Medians of the runs' medians and quartiles, and the number of iterations in all."""
        spreads = [r.iteration_s for r in self.runs if r.iteration_s]
        q25, middle, q75 = (median(getattr(s, name) for s in spreads) for name in ("q25", "median", "q75"))
        return Spread(middle, q25, q75, sum(s.n for s in spreads))

    def breakdown_s(self) -> dict[str, float]:
        """Mean of the runs' exposed seconds per kind; empty where none was recorded."""
        recorded = [r.breakdown_s for r in self.runs if r.breakdown_s]
        kinds = {kind: None for breakdown in recorded for kind in breakdown}
        return {kind: sum(b.get(kind, 0.0) for b in recorded) / len(recorded) for kind in kinds}

    def recorded(self) -> int:
        """How many iterations :meth:`breakdown_s` is the mean of."""
        return sum(run.recorded() for run in self.runs)

    def communication_share(self) -> float | None:
        """Factors' and gradients' channel seconds over FF, BP and FactorComp; None where no timeline was recorded."""
        shares = []
        for run in self.runs:
            computing = sum(run.breakdown_s.get(kind, 0.0) for kind in ("FF", "BP", "FactorComp"))
            sent = (run.breakdown_s.get(k, 0.0) + run.hidden_s.get(k, 0.0) for k in ("FactorComm", "GradComm"))
            if computing > 0:
                shares.append(sum(sent) / computing)
        return median(shares) if shares else None

    def origin(self) -> dict[str, object]:
        """What leads to the numbers."""
        return {"runs": [self.path_of(run) for run in self.runs]}


def measured(runs_folder: Path) -> tuple[list[Measured], list[str]]:
    """All finished runs with iteration times, grouped, in the paper's order, and a warning per record left out.

    A folder that does not exist has no runs.
    """
    if not runs_folder.is_dir():
        return [], []
    runs, problems = load_runs([runs_folder])
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in sorted(runs, key=paper_order):
        if run.status == "finished" and run.iteration_s:
            try:
                run.machine()
            except ValueError as error:
                problems.append(Problem(run.path, str(error)))
            else:
                groups.setdefault((run.comparable, run.schedule), []).append(run)
    return [Measured(tuple(group), runs_folder) for group in groups.values()], [str(problem) for problem in problems]


@dataclass(frozen=True)
class Setting:
    """What tells a group from those of other sweeps and settings; groups of equal ones can stand on one axis.

    Args:
        sweep: name of its folder; empty where all groups come from one.
        model, data, batch_size: as the run's.
        others: further settings (``kfac.damping=0.01``) in which groups differ that otherwise have the same setting.
    """

    sweep: str
    model: str
    data: str
    batch_size: int | None
    others: tuple[str, ...] = ()


def settings(groups: Sequence[Measured]) -> list[Setting]:
    """The setting of each group; the number of ranks is none."""
    names = sweep_names(group.run for group in groups)
    coarse = [
        Setting(names[g.run.sweep] if len(names) > 1 else "", g.run.model, g.run.data, g.run.batch_size) for g in groups
    ]
    flat = [dict(_flat(group.run.settings)) for group in groups]
    like: dict[Setting, list[dict[str, Any]]] = {}
    for setting, own in zip(coarse, flat, strict=True):
        like.setdefault(setting, []).append(own)
    differing = {setting: _differing(of_setting) for setting, of_setting in like.items()}
    return [
        replace(setting, others=tuple(f"{key}={value}" for key, value in own.items() if key in differing[setting]))
        for setting, own in zip(coarse, flat, strict=True)
    ]


def _differing(mappings: Sequence[Mapping[str, Any]]) -> set[str]:
    """Keys that some lack or that have several values."""
    first = mappings[0]
    return {
        key
        for other in mappings[1:]
        for key in first.keys() | other.keys()
        if key not in first or key not in other or first[key] != other[key]
    }


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(inner, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, value


def by_comparable(groups: Iterable[Measured]) -> dict[tuple[str, str], Measured]:
    """The groups by what they may be compared with (:attr:`~analysis.runs.Run.comparable`) and schedule."""
    return {(group.run.comparable, group.run.schedule): group for group in groups}


def add_runs(provenance: Provenance, groups: Sequence[Measured]) -> None:
    """Record path, code and machine of every run."""
    described: dict[str, Mapping[str, object]] = {}
    for group in groups:
        for run in group.runs:
            path = group.path_of(run)
            described[path] = {"path": path, "created": run.created, "code": run.code, "machine": run.machine()}
    provenance.inputs["runs"] = described
