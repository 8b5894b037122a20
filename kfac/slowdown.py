"""How much messages slow computing down in a run, from a plan in which they overlap and one in which they do not."""

from __future__ import annotations

from dataclasses import replace

from kfac.planning import ClusterProfile, ModelProfile, Plan
from kfac.planning.profiles import DisturbedCluster, Interference
from kfac.run_profile import RunProfile
from kfac.simulation import simulated_iteration_s

MOST_SLOWDOWN = 0.75
"""Of the speed of computing; more is no interference but a machine that does something else."""


def slowed(profile: RunProfile, plan: Plan, measured_s: float) -> RunProfile:
    """The profile with the slowdown of computing by messages that explains what iterations of a plan have taken.

    Args:
        profile: of iterations in which nothing overlapped.
        plan: under which it does.
        measured_s: seconds of its iterations.

    Returns:
        the profile, whose ``iteration_s`` is ``measured_s``.
    """
    profile = replace(profile, iteration_s=measured_s)
    if not in_order(plan, profile.model):
        return profile

    def with_slowdown(slowdown: float) -> ClusterProfile:
        return DisturbedCluster.disturbed(profile.cluster, Interference(slowdown=slowdown))

    low, high = 0.0, MOST_SLOWDOWN
    while high - low > 1e-3:
        middle = (low + high) / 2
        if simulated_iteration_s(plan, profile.model, with_slowdown(middle)) < measured_s:
            low = middle
        else:
            high = middle
    return profile if low == 0.0 else replace(profile, cluster=with_slowdown(low))


def in_order(plan: Plan, model: ModelProfile) -> bool:
    """Whether a plan has the layers in the order in which they ran."""
    return plan.layers == tuple(layer.name for layer in model.layers)


def simulated_by(profile: RunProfile, plan: Plan) -> float | None:
    """A plan's simulated seconds by a profile; None where its layers are in another order."""
    return simulated_iteration_s(plan, profile.model, profile.cluster) if in_order(plan, profile.model) else None
