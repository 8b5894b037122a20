"""What all ranks must share before the first step: the same model and options, and one Plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from kfac.communication import Communicator
from kfac.config import KFACConfig
from kfac.layers import FirstOrder, KFACLayer, register_layers
from kfac.planning import ClusterProfile, LayerProfile, ModelProfile, Plan, ScheduleConfig
from kfac.planning.plan import factors_of
from kfac.planning.shipped_profiles import estimate_model_profile, load_shipped_cluster
from kfac.schedules import AUTO, fixed_switches, make_plan

Schedule = str | Mapping[str, Any] | ScheduleConfig | Plan
LayerSizes = Sequence[LayerProfile]
"""The layers' names and sizes, without seconds."""


def check_arguments(model: object, config: object) -> None:
    """Whether the first arguments of :class:`kfac.KFAC` are what they should be.

    Raises:
        ValueError: if not, with what to pass.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is a {type(model).__name__}: KFAC takes a torch.nn.Module first")
    if isinstance(config, torch.optim.Optimizer):
        raise ValueError(
            f"config is a {type(config).__name__}: KFAC wraps no optimizer. Make KFAC(model, KFACConfig(...)) and "
            "call kfac.step() before optimizer.step()"
        )


def describe_schedule(schedule: Schedule) -> Any:
    """A schedule as plain values that can be compared between ranks."""
    if isinstance(schedule, Plan):
        return schedule.fingerprint
    if isinstance(schedule, ScheduleConfig):
        return schedule.to_dict()
    return dict(schedule) if isinstance(schedule, Mapping) else schedule


def register_everywhere(
    model: nn.Module, config: KFACConfig, schedule: Schedule, average_gradients: bool, communicator: Communicator
) -> tuple[list[KFACLayer], list[FirstOrder], dict[str, list[nn.Parameter]]]:
    """Find the layers; every rank must find the same, or collectives would not match; collective.

    Returns:
        the layers, the parameters without one, and per name of a layer of the Plan the parameters whose gradients
        travel with it (see :func:`kfac.layers.register_layers`).

    Raises:
        ValueError: if the model has nothing to train or a layer is impossible, or if the ranks disagree.
    """
    if not isinstance(config, KFACConfig):
        raise ValueError(f"config is a {type(config).__name__}: KFAC takes a KFACConfig, see KFACConfig.from_dict")
    problem = ""
    try:
        layers, first_order, groups = register_layers(model, config)
        if not groups:
            raise ValueError(
                "the model has no trainable parameters: unfreeze some with requires_grad_(True) before making KFAC"
            )
    except ValueError as error:
        problem, layers, first_order, groups = str(error), [], [], []
    names = [layer.name for layer in layers] or (["parameters"] if groups else [])
    named = dict(zip(names, groups, strict=True))
    require_agreement(
        communicator,
        {
            "problem": problem,
            "layers": [(x.name, x.kind, x.a, x.g, str(x.parameters[0].dtype)) for x in layers],
            "parameters": [size.gradient_elements for size in layer_sizes(layers, named)],
            "config": config.to_dict(),
            "schedule": describe_schedule(schedule),
            "average_gradients": average_gradients,
        },
    )
    if problem:
        raise ValueError(problem)
    return layers, first_order, named


def layer_sizes(layers: Sequence[KFACLayer], groups: Mapping[str, Sequence[nn.Parameter]]) -> tuple[LayerProfile, ...]:
    """The layers' names and sizes, without seconds: what a plan is for."""
    by_name = {layer.name: layer for layer in layers}
    sizes = []
    for name, group in groups.items():
        layer, elements = by_name.get(name), sum(p.numel() for p in group)
        dims = {} if layer is None else {"a_blocks": layer.a.count, "g_blocks": layer.g.count}
        a, g = (0, 0) if layer is None else (layer.a.dim, layer.g.dim)
        sizes.append(LayerProfile(name=name, a_dim=a, g_dim=g, gradient_elements=elements, **dims))
    return tuple(sizes)


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
    config: KFACConfig,
) -> Plan:
    """Rank 0's plan, on every rank; collective.

    Raises:
        ValueError: on every rank, if the schedule is impossible or a profile or plan is of another model.
    """
    plan: Plan | Exception | None = None
    if communicator.rank == 0:
        try:
            plan = _plan(suitable(schedule, config), sizes, communicator.world_size, model, cluster, config)
            check_plan(plan, sizes, communicator.world_size, config)
        except Exception as error:  # every rank raises it, so that none waits for rank 0
            plan = error
    plan = communicator.broadcast_object(plan)
    if isinstance(plan, Exception):
        raise plan
    assert plan is not None
    return plan


def _plan(
    schedule: Schedule,
    sizes: LayerSizes,
    world_size: int,
    model: ModelProfile | None,
    cluster: ClusterProfile | None,
    config: KFACConfig,
) -> Plan:
    if isinstance(schedule, Plan):
        return schedule
    model = model or estimate_model_profile("model", sizes)
    return make_plan(schedule, model, cluster or load_shipped_cluster(), world_size, intervals=config.intervals(0))


def suitable(schedule: Schedule, config: KFACConfig) -> Schedule:
    """``schedule``, where ``auto`` chooses only among what the options go together with."""
    if isinstance(schedule, Plan) or (fixed := fixed_switches(schedule)) is None:
        return schedule
    needed: dict[str, Any] = {}
    if config.inverse_method == "ekfac":
        needed["gradient_worker_fraction"] = 1.0
    if config.damping_adaptation == "levenberg_marquardt":
        needed["factor_collective"] = "all_reduce"
    return {**needed, **fixed, "name": AUTO}


def check_plan(plan: Plan, sizes: LayerSizes, world_size: int, config: KFACConfig) -> None:
    """Whether a plan fits a model, a number of ranks and options.

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
    _check_options(plan, config)


def _check_options(plan: Plan, config: KFACConfig) -> None:
    """Refuse a Plan under which ranks lack what an option needs.

    Raises:
        ValueError: naming the option, the switch and the remedy.
    """
    if config.inverse_method == "ekfac" and any(owner is not None for owner in plan.gradient_owner):
        raise ValueError(
            "inverse_method='ekfac' needs every layer's eigenvectors on every rank: "
            "set schedule.gradient_worker_fraction=1 (and a factor_collective other than none)"
        )
    if config.damping_adaptation == "levenberg_marquardt" and any(rank is not None for rank in plan.factor_holder):
        raise ValueError(
            "damping_adaptation='levenberg_marquardt' needs every factor on every rank: "
            "set schedule.factor_collective=all_reduce"
        )


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """The model's parameters that are not frozen."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def require_same_parameters(model: nn.Module, before: Sequence[nn.Parameter]) -> None:
    """Whether the trainable parameters are those of ``before``.

    Raises:
        RuntimeError: if they are not.
    """
    now = trainable(model)
    if len(now) != len(before) or any(a is not b for a, b in zip(now, before, strict=True)):
        raise RuntimeError(
            "parameters were frozen, unfrozen, added or replaced since KFAC was made: close() it and make a new one"
        )
