"""What the planner chose, and why: a value that is logged, recorded and compared."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from kfac.planning.costs import inverse_dim
from kfac.planning.intervals import EVERY_STEP, Intervals
from kfac.planning.plan import Plan
from kfac.planning.profiles import ClusterProfile, ModelProfile
from kfac.planning.schedule_config import ScheduleConfig
from kfac.schedules import (
    NAMED_SCHEDULES,
    ONE_PROCESS,
    OTHER_MATHEMATICS,
    Schedule,
    Simulated,
    fixed_switches,
    make_plan,
    search,
)
from kfac.simulation import simulate, simulated_iteration_s
from kfac.timeline import COMMUNICATION_LANE, COMPUTE_LANE, Timeline

SHOWN = 4
"""Switches that the text names, those that matter most first."""


@dataclass(frozen=True, kw_only=True)
class SwitchEffect:
    """What one switch of a plan is worth.

    Args:
        switch: its name.
        chosen, instead_of: its value, and that of the named schedule that is compared with.
        saves_s: simulated seconds per iteration that the plan would take longer if this switch alone had the other
            value; None where the other switches exclude that.
    """

    switch: str
    chosen: Any
    instead_of: Any
    saves_s: float | None


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Simulated seconds of an iteration in which all curvature work is due, and where they go.

    Args:
        passes_s: forward and backward passes of a rank.
        statistics_s: its factor statistics.
        messages_s: all sums over the ranks on the channel, hidden or not.
        tail_s: from the end of the passes until the last sum has arrived.
        inversions_s: all inversions, one after the other.
        busiest_s: the inversions of the rank that inverts most.
        broadcasts_s: inverses and preconditioned gradients on the channel.
        precondition_s: preconditioning of the rank that does most.
        start_up_s: of an all-reduce (one element).
        mebi_s: of an all-reduce of 2^20 elements.
    """

    passes_s: float
    statistics_s: float
    messages_s: float
    tail_s: float
    inversions_s: float
    busiest_s: float
    broadcasts_s: float
    precondition_s: float
    start_up_s: float
    mebi_s: float


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A Plan, and how it compares.

    Args:
        plan: the Plan.
        model: the name of the model's profile.
        sources: where the seconds of the ``model`` and the ``cluster`` come from (measured, derived, estimated).
        iteration_s: its simulated seconds.
        named_s: those of the named schedules; ``sgd`` and ``dp_kfac`` compute something else.
        baseline: the fastest of the named schedules that compute the same.
        effects: what each switch saves that differs from the baseline's, the most first.
        considered: the switches and seconds of every plan that was simulated as a whole, the fastest first.
        in_parts: choices of messages, and of what follows them, that were simulated by themselves.
        figures: where the seconds of an iteration go in which all curvature work is due.
        intervals: steps between updates; all other seconds are the mean over the steps.
    """

    plan: Plan
    model: str
    sources: Mapping[str, str]
    iteration_s: float
    named_s: Mapping[str, float]
    baseline: str
    effects: tuple[SwitchEffect, ...]
    considered: tuple[tuple[ScheduleConfig, float], ...]
    in_parts: int
    figures: Figures
    intervals: Intervals = EVERY_STEP

    def to_dict(self) -> dict[str, Any]:
        """The JSON form; of the Plan its fingerprint and switches."""
        return {
            "plan": self.plan.fingerprint,
            "schedule": self.plan.schedule.to_dict(),
            "world_size": self.plan.world_size,
            "model": self.model,
            "sources": dict(self.sources),
            "iteration_s": self.iteration_s,
            "named_s": dict(self.named_s),
            "baseline": self.baseline,
            "effects": [asdict(effect) for effect in self.effects],
            "considered": [{"schedule": s.to_dict(), "iteration_s": seconds} for s, seconds in self.considered],
            "in_parts": self.in_parts,
            "figures": asdict(self.figures),
            "intervals": asdict(self.intervals),
        }

    def switches_of(self, plan: Plan) -> str:
        """The switches in which a plan differs from the baseline, for people."""
        pairs = _differences(plan.schedule, NAMED_SCHEDULES[self.baseline])
        return ", ".join(f"{key}={value}" for key, value in pairs) or "nothing else"

    def __str__(self) -> str:
        f, ms = self.figures, _ms
        switches = self.switches_of(self.plan)
        tried = f" of {len(self.considered)} plans simulated ({self.in_parts} more in parts)" if self.considered else ""
        every = self.intervals
        mean = f" in the mean (statistics every {every.factor}, inverses every {every.inverse} steps)"
        how = "" if every == EVERY_STEP else mean
        said = [f"{ms(self.iteration_s)} per iteration{how}, the fastest{tried}: {self.baseline} with {switches}"]
        if not self.considered:
            said = [f"{ms(self.iteration_s)} per iteration{how}: {self.baseline} with {switches}"]
        same = {n: s for n, s in self.named_s.items() if n not in OTHER_MATHEMATICS}
        listed = ", ".join(f"{name} {ms(s)} ({_percent(s, self.iteration_s)})" for name, s in _by_value(same))
        others = ", ".join(f"{name} {ms(s)}" for name, s in _by_value(self.named_s) if name in OTHER_MATHEMATICS)
        said.append(f"named schedules: {listed}" + (f"; computing something else: {others}" if others else ""))
        known = [effect for effect in self.effects if effect.saves_s is not None]
        worth = [f"{e.switch}={e.chosen} instead of {e.instead_of} saves {ms(e.saves_s or 0.0)}" for e in known[:SHOWN]]
        if worth:
            said.append(f"by itself {', '.join(worth)}")
        origins = " and ".join(f"{kind} {name} profile" for name, kind in self.sources.items())
        said.append(
            f"{origins}, {self.plan.world_size} rank(s): passes {ms(f.passes_s)}, statistics {ms(f.statistics_s)}; "
            f"sums {ms(f.messages_s)} on the channel, the last {ms(f.tail_s)} after the passes; inversions "
            f"{ms(f.inversions_s)} in all, {ms(f.busiest_s)} on the busiest rank, broadcasts {ms(f.broadcasts_s)}; "
            f"preconditioning {ms(f.precondition_s)}; an all-reduce {ms(f.start_up_s)} and {ms(f.mebi_s)} per 4 MiB"
        )
        return f"{self.model}, plan {self.plan.fingerprint}: " + "\n  ".join(said)


def choose(
    schedule: Schedule,
    model: ModelProfile,
    cluster: ClusterProfile,
    world_size: int | None = None,
    *,
    others: Sequence[Plan] = (),
    intervals: Intervals = EVERY_STEP,
) -> Choice:
    """What :func:`~kfac.schedules.make_plan` gives, and why; of a schedule other than ``auto``, how it compares.

    Args:
        schedule, model, cluster, world_size: as there.
        others: ready plans that ``auto`` considers as well, as that under which a run has been so far.
        intervals: steps between updates of statistics and inverses; seconds are the mean over all steps.

    Raises:
        ValueError: as there.
    """
    cluster = cluster.at(cluster.world_size if world_size is None else world_size)
    fixed = fixed_switches(schedule)
    considered: tuple[Simulated, ...] = ()
    in_parts = 0

    def simulated_s(plan: Plan) -> float:
        return simulated_iteration_s(plan, model, cluster, intervals)

    if fixed is None:
        plan = make_plan(schedule, model, cluster)
        iteration_s = simulated_s(plan)
    else:
        considered, in_parts = search(fixed, model, cluster, others, intervals)
        plan, iteration_s = considered[0]
    named_s = {
        name: simulated_s(make_plan(name, model, cluster))
        for name in NAMED_SCHEDULES
        if name != ONE_PROCESS or cluster.world_size == 1
    }
    baseline = min((name for name in named_s if name not in OTHER_MATHEMATICS), key=named_s.__getitem__)
    return Choice(
        plan=plan,
        model=model.name,
        sources={"model": _source(model), "cluster": _source(cluster)},
        iteration_s=iteration_s,
        named_s=named_s,
        baseline=baseline,
        effects=_effects(
            plan, iteration_s, NAMED_SCHEDULES[baseline], lambda s: simulated_s(make_plan(s, model, cluster))
        ),
        considered=tuple((item.plan.schedule, item.iteration_s) for item in considered),
        in_parts=in_parts,
        figures=_figures(plan, simulate(plan, model, cluster), cluster),
        intervals=intervals,
    )


def _effects(
    plan: Plan, iteration_s: float, base: ScheduleConfig, simulated_s: Callable[[ScheduleConfig], float]
) -> tuple[SwitchEffect, ...]:
    found = []
    for key, value in _differences(plan.schedule, base):
        other = getattr(base, key)
        saves_s: float | None = None
        try:
            back = replace(plan.schedule, **{key: other})
        except ValueError:  # switches exclude each other
            pass
        else:
            saves_s = simulated_s(back) - iteration_s
        found.append(SwitchEffect(switch=key, chosen=value, instead_of=other, saves_s=saves_s))
    return tuple(sorted(found, key=lambda effect: -(effect.saves_s or 0.0)))


def _differences(own: ScheduleConfig, base: ScheduleConfig) -> list[tuple[str, Any]]:
    names = [field.name for field in fields(own)]
    return [(name, getattr(own, name)) for name in names if getattr(own, name) != getattr(base, name)]


def _figures(plan: Plan, timeline: Timeline, cluster: ClusterProfile) -> Figures:
    seconds: dict[tuple[int, str], float] = defaultdict(float)
    passes_end_s = arrived_s = messages_s = broadcasts_s = 0.0
    first = min(timeline.ranks)
    for span in timeline.spans:
        if span.lane == COMPUTE_LANE:
            seconds[span.rank, span.kind] += span.duration_s
            if span.kind in ("FF", "BP"):
                passes_end_s = max(passes_end_s, span.end_s)
        elif span.lane == COMMUNICATION_LANE and span.rank == first:  # every rank takes part in each
            if span.kind == "InverseComm" or "preconditioned" in span.name:
                broadcasts_s += span.duration_s
            else:
                messages_s += span.duration_s
                arrived_s = max(arrived_s, span.end_s)

    def most(*kinds: str) -> float:
        return max(sum(seconds[rank, kind] for kind in kinds) for rank in timeline.ranks)

    return Figures(
        passes_s=most("FF", "BP"),
        statistics_s=most("FactorComp"),
        messages_s=messages_s,
        tail_s=max(0.0, arrived_s - passes_end_s),
        inversions_s=sum(cluster.inverse(inverse_dim(factor.size)) for factor in plan.factors),
        busiest_s=most("InverseComp"),
        broadcasts_s=broadcasts_s,
        precondition_s=most("Precondition"),
        start_up_s=cluster.all_reduce(1),
        mebi_s=cluster.all_reduce(2**20),
    )


def _source(profile: ModelProfile | ClusterProfile) -> str:
    return str(profile.provenance.get("kind", "given"))


def _by_value(values: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(values.items(), key=lambda item: item[1])


def _ms(seconds: float) -> str:
    digits = 1 if seconds >= 0.01 else 2
    return f"{1e3 * seconds:.{digits}f} ms"


def _percent(seconds: float, of: float) -> str:
    return f"{100 * (seconds / of - 1):+.1f} %" if of else "+0.0 %"
