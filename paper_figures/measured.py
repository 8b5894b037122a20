"""What the measured table and figure share: which runs they show, and their medians over seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from analysis.runs import Run, load_runs, paper_order
from analysis.statistics import Spread
from paper_figures.item import Provenance

NO_RUNS = "No finished run records in {}: python -m experiments.train makes some."


@dataclass(frozen=True)
class Measured:
    """Comparable runs of one schedule.

    Args:
        runs: one per seed, or repeats.
    """

    runs: tuple[Run, ...]

    @property
    def run(self) -> Run:
        """One of them, for what they share."""
        return self.runs[0]

    @property
    def label(self) -> str:
        """Its name in provenance files."""
        return self.run.run_id

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
        return {"runs": [run.run_id for run in self.runs]}


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
            groups.setdefault((run.comparable, run.schedule), []).append(run)
    return [Measured(tuple(group)) for group in groups.values()], [str(problem) for problem in problems]


def baseline(of: Measured, groups: Sequence[Measured], schedule: str) -> Measured | None:
    """The group of another schedule that may be compared with this one, if there is one."""
    for group in groups:
        if group.run.schedule == schedule and group.run.comparable == of.run.comparable:
            return group
    return None


def add_runs(provenance: Provenance, groups: Sequence[Measured], root: Path) -> None:
    """Record path, code and machine of every run."""
    described: dict[str, Mapping[str, object]] = {}
    for run in (run for group in groups for run in group.runs):
        path = run.path.relative_to(root).as_posix()
        described[run.run_id] = {"path": path, "created": run.created, "code": run.code, "machine": run.machine()}
    provenance.inputs["runs"] = described
