"""The named schedules, and how a schedule becomes a Plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from typing import Any

from kfac.planning.messages import plan_messages
from kfac.planning.placement import inverse_sequence, plan_placement
from kfac.planning.plan import FactorSpec, Plan
from kfac.planning.profiles import ClusterProfile, ModelProfile
from kfac.planning.schedule_config import CHOICES, ScheduleConfig
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
    switches = {"name": schedule} if isinstance(schedule, str) else dict(schedule)
    name = switches.pop("name", None)
    if name is not None and name not in (*NAMED_SCHEDULES, AUTO):
        raise ValueError(f"unknown schedule {name!r}; choices: {', '.join((*NAMED_SCHEDULES, AUTO))}")
    return name, switches


def _plan(schedule: ScheduleConfig, model: ModelProfile, cluster: ClusterProfile) -> Plan:
    factors = tuple(
        factor
        for layer in model.layers
        if layer.has_factors and schedule.curvature
        for factor in (FactorSpec(layer.name, "A", layer.a_dim), FactorSpec(layer.name, "G", layer.g_dim))
    )
    dims = [factor.dim for factor in factors]
    placement = plan_placement(dims, cluster.world_size, cluster, schedule.placement, lbp_rule=schedule.lbp_rule)
    if schedule.inverse_broadcast == "as_ready":
        sequence = inverse_sequence(placement, dims, cluster)
    else:
        sequence = tuple(range(len(factors)))  # all inversions come first: only the owners matter
    return Plan(
        schedule=schedule,
        world_size=cluster.world_size,
        layers=tuple(layer.name for layer in model.layers),
        factors=factors,
        messages=plan_messages(schedule, model, factors, cluster),
        inverse_owner=placement.owner,
        inverse_sequence=sequence,
    )


def _fastest(fixed: Mapping[str, Any], model: ModelProfile, cluster: ClusterProfile) -> Plan:
    """The fastest plan over the switches.

    Inversions begin when all messages have arrived, so the switches of the messages and those of the inversions are
    chosen one after the other without losing anything. Of equally fast plans the first is taken.
    """
    base = ScheduleConfig.from_dict(dict(fixed))  # also checks the keys and values
    stages: tuple[dict[str, tuple[Any, ...]], ...] = (
        {
            "pipelining": ("layerwise", "none"),
            "fusion": ("optimal", "greedy", "threshold", "none"),
            "gradient_pipelining": (True, False),
        },
        {"placement": ("optimized", "lbp", "seq_dist", "non_dist"), "inverse_broadcast": CHOICES["inverse_broadcast"]},
    )
    best = _plan(base, model, cluster)
    for stage in stages:
        free = {key: values for key, values in stage.items() if key not in fixed}
        start = best.schedule
        plans = [
            _plan(replace(start, **dict(zip(free, values, strict=True))), model, cluster)
            for values in product(*free.values())
        ]
        best = min(plans, key=lambda plan: simulate(plan, model, cluster).iteration_s)
    return best
