"""The named schedules, and how a schedule becomes a Plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any, NamedTuple

from kfac.planning.arrivals import plan_arrivals
from kfac.planning.intervals import EVERY_STEP, Intervals
from kfac.planning.messages import plan_messages
from kfac.planning.ownership import Ownership, plan_ownership
from kfac.planning.plan import FactorSpec, Plan, factors_of
from kfac.planning.profiles import ClusterProfile, ModelProfile
from kfac.planning.schedule_config import ScheduleConfig
from kfac.simulation import simulated_iteration_s, simulated_second_order_s

AUTO = "auto"
"""The schedule that the planner chooses for the profiles at hand, by simulation."""

ONE_PROCESS = "kfac"
"""The schedule that refuses to run on more than one process."""

NAMED_SCHEDULES: dict[str, ScheduleConfig] = {
    "sgd": ScheduleConfig(curvature=False, pipelining="none", fusion="threshold", placement="non_dist"),
    "kfac": ScheduleConfig(pipelining="none", fusion="none", placement="non_dist"),
    "dkfac": ScheduleConfig(pipelining="none", fusion="threshold", placement="non_dist"),
    "mpdkfac": ScheduleConfig(
        pipelining="none", fusion="threshold", placement="seq_dist", inverse_broadcast="after_all"
    ),
    "spdkfac": ScheduleConfig(pipelining="layerwise", fusion="greedy", placement="lbp", inverse_broadcast="as_ready"),
    "dp_kfac": ScheduleConfig(placement="optimized", factor_collective="none", gradient_worker_fraction=0.0),
}
"""The algorithms that the paper compares, and one more: names for values of the switches, nothing else.

``sgd`` is (S-)SGD; ``kfac`` one process's K-FAC; ``dkfac`` sends factors after the backward pass and every rank inverts
all of them; ``mpdkfac`` inverts round robin and broadcasts after all inversions; ``spdkfac`` is the paper's. Beyond
the paper, ``dp_kfac`` sends no factors: the rank that owns a layer uses the statistics of its own samples and
broadcasts the preconditioned gradient, which is another, noisier curvature.
"""

OTHER_MATHEMATICS = ("sgd", "dp_kfac")
"""Named schedules whose result is not K-FAC's on the whole batch: ``auto`` neither chooses them nor is compared."""

Schedule = str | Mapping[str, Any] | ScheduleConfig
"""A name, switches (over those of the schedule under the key ``name``, where given), or the value itself."""


def resolve_schedule(schedule: Schedule) -> ScheduleConfig:
    """The switches of a schedule.

    Raises:
        ValueError: for an unknown name, key or value, naming the choices; and for ``auto``, whose switches only
            :func:`make_plan` can choose.
    """
    if isinstance(schedule, ScheduleConfig):
        return schedule
    name, switches = _split(schedule)
    if name == AUTO:
        raise ValueError("schedule 'auto' has no switches of its own: make_plan chooses them from the profiles")
    base = ScheduleConfig() if name is None else NAMED_SCHEDULES[name]
    return ScheduleConfig.from_dict({**base.to_dict(), **switches})


def make_plan(
    schedule: Schedule,
    model: ModelProfile,
    cluster: ClusterProfile,
    world_size: int | None = None,
    *,
    intervals: Intervals = EVERY_STEP,
) -> Plan:
    """The Plan of a schedule for a model on a cluster; the same arguments give the same Plan everywhere.

    Args:
        schedule: a name, switches, or a :class:`ScheduleConfig`; ``auto`` takes the fastest switches by simulation
            (those given beside ``name: auto`` stay fixed).
        model: dimensions and seconds of the layers.
        cluster: cost models.
        world_size: number of ranks; the cluster profile's where None.
        intervals: for ``auto``, steps between updates of statistics and inverses.

    Raises:
        ValueError: for an unknown schedule, or for ``kfac`` on more than one process.
    """
    cluster = cluster.at(cluster.world_size if world_size is None else world_size)
    fixed = fixed_switches(schedule)
    if fixed is not None:
        return search(fixed, model, cluster, intervals=intervals).plan
    name = None if isinstance(schedule, ScheduleConfig) else _split(schedule)[0]
    if name == ONE_PROCESS and cluster.world_size > 1:
        raise ValueError(
            f"schedule 'kfac' runs on one process, not on {cluster.world_size}: "
            "take dkfac, mpdkfac, spdkfac or auto, or world_size=1"
        )
    return _plan(resolve_schedule(schedule), model, cluster)


def fixed_switches(schedule: object) -> dict[str, Any] | None:
    """What is fixed beside ``auto``; None for every other schedule.

    Raises:
        ValueError: for an unknown name.
    """
    if not isinstance(schedule, (str, Mapping)):
        return None
    name, switches = _split(schedule)
    return switches if name == AUTO else None


def has_switches(schedule: ScheduleConfig, fixed: Mapping[str, Any]) -> bool:
    """Whether the switches of a schedule that are named have these values."""
    return all(getattr(schedule, key) == value for key, value in fixed.items())


def _split(schedule: str | Mapping[str, Any]) -> tuple[str | None, dict[str, Any]]:
    if not isinstance(schedule, (str, Mapping)):
        raise ValueError(
            f"a schedule is a name ({', '.join((*NAMED_SCHEDULES, AUTO))}), switches or a ScheduleConfig, "
            f"not {schedule!r:.80}"
        )
    switches = {"name": schedule} if isinstance(schedule, str) else dict(schedule)
    name = switches.pop("name", None)
    if name is not None and name not in (*NAMED_SCHEDULES, AUTO):
        raise ValueError(f"unknown schedule {name!r}; choices: {', '.join((*NAMED_SCHEDULES, AUTO))}")
    return name, switches


def _plan(
    schedule: ScheduleConfig, model: ModelProfile, cluster: ClusterProfile, ownership: Ownership | None = None
) -> Plan:
    factors = _factors(schedule, model)
    if ownership is None:
        arrivals = None
        if schedule.inverse_start == "as_ready" and schedule.curvature:
            messages = plan_messages(schedule, model, factors, cluster)
            arrivals = plan_arrivals(messages, factors, model, cluster.all_reduce)
        ownership = plan_ownership(schedule, model, factors, cluster, arrivals)
    return Plan(
        schedule=schedule,
        world_size=cluster.world_size,
        layers=tuple(layer.name for layer in model.layers),
        factors=factors,
        messages=plan_messages(schedule, model, factors, cluster, ownership.inverse_owner),
        **ownership._asdict(),
    )


def _factors(schedule: ScheduleConfig, model: ModelProfile) -> tuple[FactorSpec, ...]:
    return factors_of(model.layers) if schedule.curvature else ()


class Simulated(NamedTuple):
    """A plan that was simulated as a whole."""

    plan: Plan
    iteration_s: float


class Search(NamedTuple):
    """What a search for the fastest plan has found.

    Attributes:
        simulated: the plans that were simulated as a whole, fastest first; of equally fast ones the first that was.
        in_parts: choices of messages, and of what follows them, that were simulated each by itself.
    """

    simulated: tuple[Simulated, ...]
    in_parts: int

    @property
    def plan(self) -> Plan:
        """The fastest."""
        return self.simulated[0].plan


def search(
    fixed: Mapping[str, Any],
    model: ModelProfile,
    cluster: ClusterProfile,
    others: Sequence[Plan] = (),
    intervals: Intervals = EVERY_STEP,
) -> Search:
    """The fastest plan over the switches that do not change the mathematics.

    Where inversions begin when all messages have arrived, the switches of all-reduced messages and those of what
    follows can be chosen one after the other without losing anything: the former by simulation with inversions that
    every rank does (the smallest task graph), the latter by simulating what follows. Where inversions begin as sums
    arrive, or sums go to one rank, which depends on the owners, messages and inversions are simulated together, for the
    quickest choices of owners. So are the named schedules and ``others``, and whatever differs in one switch from the
    fastest so far, until nothing is faster. Of equally fast ones the first is taken.

    Args:
        fixed: switches that are given; the others are free.
        model, cluster: what to plan from.
        others: further plans for this model that have the fixed switches.
        intervals: steps between updates of statistics and inverses: the plan is the fastest in the mean over all steps.

    Raises:
        ValueError: for an unknown switch or value.
    """
    base = ScheduleConfig.from_dict(dict(fixed))  # also checks the keys and values
    factors = _factors(base, model)
    everywhere: dict[str, Any] = {
        "placement": "non_dist",
        "gradient_worker_fraction": 1.0,
        "factor_collective": "all_reduce",
    }

    def variants(schedule: ScheduleConfig, switches: Mapping[str, Sequence[Any]]) -> Iterator[ScheduleConfig]:
        free = {key: values for key, values in switches.items() if key not in fixed}
        for values in product(*free.values()):
            chosen = {**schedule.to_dict(), **dict(zip(free, values, strict=True))}
            with suppress(ValueError):  # switches that exclude each other
                yield ScheduleConfig.from_dict(chosen)

    def simulated_s(plan: Plan) -> float:
        return simulated_iteration_s(plan, model, cluster, intervals)

    def message_time_s(schedule: ScheduleConfig) -> float:
        return simulated_s(_plan(replace(schedule, **everywhere), model, cluster))

    plain = _plan(replace(base, fusion="none", **everywhere), model, cluster)
    owners = {schedule: plan_ownership(schedule, model, factors, cluster) for schedule in variants(base, _OWNERS)}

    @cache
    def second_order_s(ownership: Ownership, inverse_broadcast: str) -> float:
        switches = replace(plain.schedule, inverse_broadcast=inverse_broadcast)
        plan = replace(plain, schedule=switches, **ownership._asdict())
        return simulated_second_order_s(plan, model, cluster, intervals)

    def switched(schedule: ScheduleConfig, messages: ScheduleConfig, collective: str) -> ScheduleConfig:
        chosen = {key: getattr(messages, key) for key in _MESSAGES}
        return replace(schedule, **chosen, factor_collective=collective)

    quickest = sorted(owners, key=lambda schedule: second_order_s(owners[schedule], schedule.inverse_broadcast))
    best = min(variants(base, _MESSAGES), key=message_time_s)
    candidates: list[tuple[ScheduleConfig, Ownership | None]] = []
    if fixed.get("factor_collective", "all_reduce") == "all_reduce":
        candidates.append((switched(quickest[0], best, "all_reduce"), owners[quickest[0]]))
    further = _with_different_owners(quickest, owners)[:FURTHER]
    all_reduced = {"factor_collective": "all_reduce", "message_dtype": "full", "inverse_start": "as_ready"}
    if all(fixed.get(key, value) == value for key, value in all_reduced.items()) and cluster.world_size > 1:
        early = [*further, replace(best, placement="optimized"), replace(best, placement="non_dist")]
        candidates += [
            (replace(switched(schedule, messages, "all_reduce"), inverse_start="as_ready"), None)
            for schedule in early
            if has_switches(schedule, {**fixed, "inverse_start": schedule.inverse_start})
            for messages in variants(best, {"fusion": _MESSAGES["fusion"]})
        ]
    for collective in ("reduce_to_owner", "none") if base.inverse_start == "after_all" else ():
        if fixed.get("factor_collective", "reduce_to_owner") == collective:
            candidates += [
                (switched(schedule, messages, collective), owners[schedule])
                for schedule in further
                for messages in variants(best, {"fusion": _MESSAGES["fusion"]})
            ]
    plans = [_plan(schedule, model, cluster, ownership) for schedule, ownership in candidates]
    named = [schedule for name, schedule in NAMED_SCHEDULES.items() if name not in (ONE_PROCESS, *OTHER_MATHEMATICS)]
    plans += [_plan(schedule, model, cluster) for schedule in named if has_switches(schedule, fixed)]
    simulated = [Simulated(plan, simulated_s(plan)) for plan in (*plans, *others)]
    _improve(simulated, variants, lambda schedule: _plan(schedule, model, cluster), simulated_s)
    simulated.sort(key=lambda item: item.iteration_s)
    return Search(tuple(simulated), len(owners) + sum(1 for _ in variants(base, _MESSAGES)))


def _improve(
    simulated: list[Simulated],
    variants: Callable[[ScheduleConfig, Mapping[str, Sequence[Any]]], Iterator[ScheduleConfig]],
    plan_of: Callable[[ScheduleConfig], Plan],
    simulated_s: Callable[[Plan], float],
) -> None:
    """Add what differs in one switch from the fastest, until none of it is faster."""
    tried = {item.plan.schedule for item in simulated}
    while True:
        best = min(simulated, key=lambda item: item.iteration_s)
        near = [v for key, values in _SWITCHES.items() for v in variants(best.plan.schedule, {key: values})]
        fresh = [schedule for schedule in dict.fromkeys(near) if schedule not in tried]
        tried.update(fresh)
        found = [Simulated(plan, simulated_s(plan)) for plan in map(plan_of, fresh)]
        simulated += found
        if not any(item.iteration_s < best.iteration_s for item in found):
            return


def _with_different_owners(
    schedules: Sequence[ScheduleConfig], owners: Mapping[ScheduleConfig, Ownership]
) -> list[ScheduleConfig]:
    """The first schedule with each choice of owners."""
    first: dict[tuple[int | None, ...], ScheduleConfig] = {}
    for schedule in schedules:
        first.setdefault(owners[schedule].inverse_owner, schedule)
    return list(first.values())


FURTHER = 4
"""Choices of owners with which reducing to them is tried: the search stays within seconds for hundreds of factors."""

_MESSAGES: dict[str, tuple[Any, ...]] = {
    "pipelining": ("layerwise", "none"),
    "fusion": ("optimal", "greedy", "threshold", "none"),
    "gradient_pipelining": (True, False),
}
_OWNERS: dict[str, tuple[Any, ...]] = {
    "placement": ("optimized", "lbp", "seq_dist", "non_dist"),
    "inverse_broadcast": ("as_ready", "after_all"),
    "inverse_fusion": ("none", "planned", "owner"),
    "gradient_worker_fraction": (1.0, 0.5, 0.0),
}
_SWITCHES: dict[str, tuple[Any, ...]] = {
    **_MESSAGES,
    **_OWNERS,
    "inverse_start": ("after_all", "as_ready"),
    "factor_collective": ("all_reduce", "reduce_to_owner"),
}
