"""What all ranks must share before the first step: the same model and options, and one Plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kfac.communication import Communicator
from kfac.planning import ClusterProfile, LayerProfile, ModelProfile, Plan, ScheduleConfig
from kfac.planning.plan import factors_of
from kfac.planning.shipped_profiles import estimate_model_profile, load_shipped_cluster
from kfac.schedules import make_plan

Schedule = str | Mapping[str, Any] | ScheduleConfig | Plan
LayerSizes = Sequence[LayerProfile]
"""The layers' names and sizes, without seconds."""


def describe_schedule(schedule: Schedule) -> Any:
    """A schedule as plain values that can be compared between ranks."""
    if isinstance(schedule, Plan):
        return schedule.fingerprint
    if isinstance(schedule, ScheduleConfig):
        return schedule.to_dict()
    return dict(schedule) if isinstance(schedule, Mapping) else schedule


def require_agreement(communicator: Communicator, mine: Mapping[str, Any]) -> None:
    """Compare what this rank was given with every other rank's; collective.

    Raises:
        ValueError: on every rank, naming a rank and what differs; collectives would not have matched.
    """
    everyone = communicator.all_gather_object(dict(mine))
    for rank, other in enumerate(everyone):
        for key, value in everyone[0].items():
            if other[key] != value:
                raise ValueError(
                    f"rank {rank} was given another {key} than rank 0 ({other[key]} against {value}): KFAC needs "
                    "the same model and options on every rank"
                )


def common_plan(
    schedule: Schedule,
    sizes: LayerSizes,
    communicator: Communicator,
    model: ModelProfile | None,
    cluster: ClusterProfile | None,
) -> Plan:
    """Rank 0's plan, on every rank; collective.

    Raises:
        ValueError: on every rank, if the schedule is impossible or a profile or plan is of another model.
    """
    plan: Plan | Exception | None = None
    if communicator.rank == 0:
        try:
            plan = _plan(schedule, sizes, communicator.world_size, model, cluster)
            check_plan(plan, sizes, communicator.world_size)
        except Exception as error:  # every rank raises it, so that none waits for rank 0
            plan = error
    plan = communicator.broadcast_object(plan)
    if isinstance(plan, Exception):
        raise plan
    assert plan is not None
    return plan


def _plan(
    schedule: Schedule, sizes: LayerSizes, world_size: int, model: ModelProfile | None, cluster: ClusterProfile | None
) -> Plan:
    if isinstance(schedule, Plan):
        return schedule
    model = model or estimate_model_profile("model", sizes)
    return make_plan(schedule, model, cluster or load_shipped_cluster(), world_size)


def check_plan(plan: Plan, sizes: LayerSizes, world_size: int) -> None:
    """Whether a plan fits a model and a number of ranks.

    Raises:
        ValueError: if it does not, naming what differs.
    """
    if plan.world_size != world_size:
        raise ValueError(f"the plan is for {plan.world_size} rank(s), there are {world_size}")
    expected = set(factors_of(sizes))
    planned = set(plan.factors)
    wrong = planned ^ expected if plan.schedule.curvature else planned
    if wrong or set(plan.layers) != {layer.name for layer in sizes}:
        different = sorted((f.layer, f.side, f.blocks, f.dim) for f in wrong)
        detail = ", ".join(f"{side} of {name} ({blocks} x {dim})" for name, side, blocks, dim in different[:3])
        raise ValueError(f"the plan or profile is of another model: {detail or 'its layers have other names'}")
