"""The named schedules, and how a schedule becomes a Plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from kfac.planning.costs import Size
from kfac.planning.messages import plan_messages
from kfac.planning.placement import inverse_sequence, plan_placement, sequence_finish_s
from kfac.planning.plan import FactorSpec, Plan, factors_of
from kfac.planning.profiles import ClusterProfile, ModelProfile
from kfac.planning.schedule_config import ScheduleConfig
from kfac.simulation import simulate

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
}
"""The algorithms that the paper compares: names for values of the switches, nothing else.

``sgd`` is (S-)SGD; ``kfac`` one process's K-FAC; ``dkfac`` sends factors after the backward pass and every rank inverts
all of them; ``mpdkfac`` inverts round robin and broadcasts after all inversions; ``spdkfac`` is the paper's.
"""

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


def make_plan(schedule: Schedule, model: ModelProfile, cluster: ClusterProfile, world_size: int | None = None) -> Plan:
    """The Plan of a schedule for a model on a cluster; the same arguments give the same Plan everywhere.

    Args:
        schedule: a name, switches, or a :class:`ScheduleConfig`; ``auto`` takes the fastest switches by simulation
            (those given beside ``name: auto`` stay fixed).
        model: dimensions and seconds of the layers.
        cluster: cost models.
        world_size: number of ranks; the cluster profile's where None.

    Raises:
        ValueError: for an unknown schedule, or for ``kfac`` on more than one process.
    """
    cluster = cluster.at(cluster.world_size if world_size is None else world_size)
    name, switches = (None, {}) if isinstance(schedule, ScheduleConfig) else _split(schedule)
    if name == ONE_PROCESS and cluster.world_size > 1:
        raise ValueError(
            f"schedule 'kfac' runs on one process, not on {cluster.world_size}: "
            "take dkfac, mpdkfac, spdkfac or auto, or world_size=1"
        )
    if name == AUTO:
        return _fastest(switches, model, cluster)
    return _plan(resolve_schedule(schedule), model, cluster)


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


def _plan(schedule: ScheduleConfig, model: ModelProfile, cluster: ClusterProfile) -> Plan:
    factors = _factors(schedule, model)
    owner, sequence = _inversions(schedule, [factor.size for factor in factors], cluster)
    return Plan(
        schedule=schedule,
        world_size=cluster.world_size,
        layers=tuple(layer.name for layer in model.layers),
        factors=factors,
        messages=plan_messages(schedule, model, factors, cluster),
        inverse_owner=owner,
        inverse_sequence=sequence,
    )


def _factors(schedule: ScheduleConfig, model: ModelProfile) -> tuple[FactorSpec, ...]:
    return factors_of(model.layers) if schedule.curvature else ()


def _inversions(
    schedule: ScheduleConfig, dims: Sequence[Size], cluster: ClusterProfile
) -> tuple[tuple[int | None, ...], tuple[int, ...]]:
    """Every factor's owner, and the sequence that all ranks walk.

    Diagonal factors are not placed: no rank needs another's reciprocals.
    """
    diagonal = [i for i, size in enumerate(dims) if (size if isinstance(size, int) else size[1]) == 1]
    placed = [i for i in range(len(dims)) if i not in set(diagonal)]
    sizes = [dims[i] for i in placed]
    placement = plan_placement(sizes, cluster.world_size, cluster, schedule.placement, lbp_rule=schedule.lbp_rule)
    owner: list[int | None] = [None] * len(dims)
    for i, rank in zip(placed, placement.owner, strict=True):
        owner[i] = rank
    if schedule.inverse_broadcast == "as_ready":
        order = inverse_sequence(placement, sizes, cluster)
        return tuple(owner), (*diagonal, *(placed[k] for k in order))
    return tuple(owner), tuple(range(len(dims)))  # all inversions come first: only the owners matter


def _fastest(fixed: Mapping[str, Any], model: ModelProfile, cluster: ClusterProfile) -> Plan:
    """The fastest plan over the switches.

    Inversions begin when all messages have arrived, so the switches of the messages and those of the inversions can be
    chosen one after the other without losing anything: the former by simulation with inversions that every rank does
    (the smallest task graph), the latter by the time their sequence takes. Of equally fast ones the first is taken.
    """
    base = ScheduleConfig.from_dict(dict(fixed))  # also checks the keys and values
    dims = [factor.size for factor in _factors(base, model)]

    def message_time_s(schedule: ScheduleConfig) -> float:
        return simulate(_plan(replace(schedule, placement="non_dist"), model, cluster), model, cluster).iteration_s

    def inversion_time_s(schedule: ScheduleConfig) -> float:
        owner, sequence = _inversions(schedule, dims, cluster)
        return sequence_finish_s(owner, sequence, cluster.world_size, dims, cluster, schedule.inverse_broadcast)

    def variants(schedule: ScheduleConfig, switches: Mapping[str, Sequence[Any]]) -> Iterator[ScheduleConfig]:
        free = {key: values for key, values in switches.items() if key not in fixed}
        for values in product(*free.values()):
            yield replace(schedule, **dict(zip(free, values, strict=True)))

    best = min(variants(base, _MESSAGE_SWITCHES), key=message_time_s)
    best = min(variants(best, _INVERSION_SWITCHES), key=inversion_time_s)
    return _plan(best, model, cluster)


_MESSAGE_SWITCHES: dict[str, tuple[Any, ...]] = {
    "pipelining": ("layerwise", "none"),
    "fusion": ("optimal", "greedy", "threshold", "none"),
    "gradient_pipelining": (True, False),
}
_INVERSION_SWITCHES: dict[str, tuple[Any, ...]] = {
    "placement": ("optimized", "lbp", "seq_dist", "non_dist"),
    "inverse_broadcast": ("as_ready", "after_all"),
}
