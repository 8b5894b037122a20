"""Where timelines come from: a run's record, the simulation of its plan, a trace of ours or of ``torch.profiler``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from analysis.chakra import Carried, carried
from analysis.kineto import from_kineto, is_kineto, load_trace
from analysis.kineto_labels import Rule
from analysis.runs import load_timelines
from experiments.records import RunRecord
from experiments.simulated import simulated_timeline
from kfac.planning import Plan
from kfac.timeline import Timeline

SIMULATED = ":simulated"
"""What follows a record's directory to name the simulation of its plan on its own profiles."""


@dataclass(frozen=True)
class Source:
    """Iterations of one thing.

    Args:
        name: for people.
        timelines: by the iteration's number.
        messages: what its messages are, where its plan is known.
        starts_ns: when the iterations begin by the clock of a machine, where that is known.
        machine: which.
        numbered: whether the numbers are those of a run; a simulation, or a lone timeline, is every iteration.
    """

    name: str
    timelines: Mapping[int, Timeline] = field(hash=False)
    messages: Mapping[str, Carried] = field(default_factory=dict, hash=False)
    starts_ns: Mapping[int, int] = field(default_factory=dict, hash=False)
    machine: str = ""
    numbered: bool = True

    def only(self, iterations: Sequence[int] | None) -> Source:
        """With some of the iterations; all of them for None.

        Raises:
            ValueError: if one is not there, naming those that are.
        """
        if iterations is None or not self.numbered:
            return self
        if missing := [i for i in iterations if i not in self.timelines]:
            there = ", ".join(map(str, self.timelines))
            raise ValueError(f"{self.name} has no timeline of iteration {missing[0]}; it has: {there}")
        return replace(self, timelines={i: self.timelines[i] for i in iterations})

    @property
    def typical(self) -> Timeline:
        """The iteration of median length, to be looked at."""
        ordered = sorted(self.timelines.values(), key=lambda timeline: timeline.iteration_s)
        return ordered[(len(ordered) - 1) // 2]


def read_source(text: str, rules: Sequence[Rule] = ()) -> Source:
    """The timelines that a name on the command line means.

    Args:
        text: a record's directory, one with :data:`SIMULATED` behind it, or a trace file.
        rules: for traces of ``torch.profiler``.

    Raises:
        ValueError: if there are none, saying what else could be given.
    """
    simulated = text.endswith(SIMULATED)
    path = Path(text.removesuffix(SIMULATED))
    if simulated:
        return _simulated(path)
    if path.is_dir():
        found = load_timelines(path)
        if not found:
            raise ValueError(
                f"{path} has no timelines: none were recorded (timeline.count); {path}{SIMULATED} is its simulation"
            )
        return Source(path.name, found, _messages(path))
    if not path.exists():
        raise ValueError(f"no {path}: give a run's directory, RUN{SIMULATED}, or a trace file")
    data = load_trace(path)
    if is_kineto(data):
        profiled = from_kineto(data, rules, str(path))
        return Source(path.name, profiled.timelines, starts_ns=profiled.starts_ns, machine=profiled.machine)
    try:
        return Source(path.name, {0: Timeline.from_chrome_trace(path)}, numbered=False)
    except ValueError as error:
        raise ValueError(f"{error}; nor is it a trace of torch.profiler") from error


def merged(sources: Sequence[Source]) -> Source:
    """Several ranks' traces of the same iterations as one.

    Iterations that one machine's clock has timed keep their places on it: the first that begins is the start of all.
    Others begin together.

    Raises:
        ValueError: if they have no iteration in common, or a rank twice.
    """
    if len(sources) == 1:
        return sources[0]
    common = [i for i in sources[0].timelines if all(i in source.timelines for source in sources)]
    if not common:
        raise ValueError(f"{', '.join(s.name for s in sources)} have no iteration in common")
    ranks = [rank for source in sources for rank in source.timelines[common[0]].ranks]
    if twice := {rank for rank in ranks if ranks.count(rank) > 1}:
        raise ValueError(f"rank {min(twice)} is in several of the traces: give each rank's once")
    timelines = {i: Timeline.merge(_in_place(i, sources)) for i in common}
    name = f"{sources[0].name} and {len(sources) - 1} more"
    return Source(name, timelines, sources[0].messages, numbered=sources[0].numbered)


def _in_place(iteration: int, sources: Sequence[Source]) -> list[Timeline]:
    """Everyone's timeline of an iteration, from the common start on where the clock is the same."""
    timelines = [source.timelines[iteration] for source in sources]
    if not sources[0].machine or len({source.machine for source in sources}) > 1:
        return timelines
    first_ns = min(source.starts_ns[iteration] for source in sources)
    late_s = [(source.starts_ns[iteration] - first_ns) / 1e9 for source in sources]
    if max(late_s) > min(late + t.iteration_s for late, t in zip(late_s, timelines, strict=True)):
        return timelines  # not the same clock after all
    return [t.later(late) for late, t in zip(late_s, timelines, strict=True)]


def _simulated(path: Path) -> Source:
    record = RunRecord.load(path)
    timeline = simulated_timeline(record)
    if timeline is None:
        names = ("plan.json", "model_profile.json", "cluster_profile.json")
        missing = ", ".join(name for name in names if not (path / name).is_file())
        raise ValueError(
            f"{path} cannot be simulated: it has no {missing or 'readable plan and profiles'}. Runs whose schedule "
            "measures the machine have all; others get them with cluster=FILE model_profile=FILE, the files that "
            "experiments.profile writes"
        )
    return Source(f"{path.name}, simulated", {0: timeline}, _messages(path), numbered=False)


def _messages(path: Path) -> dict[str, Carried]:
    """What a record's messages are; none where its plan is of another version."""
    try:
        plan: Any = RunRecord.load(path).read("plan.json")
        return carried(Plan.from_dict(plan)) if plan else {}
    except Exception:  # a file may hold anything; without it only sizes are missing
        return {}
