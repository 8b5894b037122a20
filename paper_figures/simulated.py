"""The paper's comparison on the paper's cluster by simulation: an ideal one, and one with interference fitted to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

from kfac.planning import ClusterProfile, LinearCost, ModelProfile, Plan, PolynomialCost, ScheduleConfig
from kfac.planning.shipped_profiles import load_shipped_cluster, load_shipped_model
from kfac.schedules import NAMED_SCHEDULES, make_plan
from kfac.simulation import simulated_iteration_s
from paper_figures import interference, published
from paper_figures.item import Provenance
from paper_figures.paper_cluster import CLUSTER_NAME

SCHEDULES: Mapping[str, ScheduleConfig] = {
    "D-KFAC": NAMED_SCHEDULES["dkfac"],
    "MPD-KFAC": NAMED_SCHEDULES["mpdkfac"],
    "SPD-KFAC": NAMED_SCHEDULES["spdkfac"],
}
"""The schedule of each algorithm of the paper."""
PRECONDITIONING = (
    "Preconditioning is inside FactorComp, as in the paper's bars: they are differences between runs with parts left "
    "out, and every run with K-FAC preconditions."
)
"""Belongs below what shows simulated seconds: the derived profiles have no preconditioning of their own."""


@dataclass(frozen=True)
class Simulated:
    """One simulated iteration.

    Args:
        iteration_s: its seconds.
        exposed_s: seconds per kind (:data:`~paper_figures.published.KINDS`), which add up to the iteration.
        plan: what was simulated.
    """

    iteration_s: float
    exposed_s: Mapping[str, float]
    plan: Plan


@cache
def cluster() -> ClusterProfile:
    """The paper's cluster as shipped."""
    return load_shipped_cluster(CLUSTER_NAME)


@cache
def model(key: str) -> ModelProfile:
    """One of the paper's models as shipped."""
    return load_shipped_model(key)


@cache
def _plan(key: str, schedule: ScheduleConfig) -> Plan:
    return make_plan(schedule, model(key), cluster())


@cache
def simulated(key: str, schedule: ScheduleConfig, fitted: bool = False) -> Simulated:
    """One of the paper's models under a schedule on the paper's cluster.

    Args:
        key: the model.
        schedule: planned with the shipped profile, whose all-reduce has the constants of the authors' planner.
        fitted: whether it is executed with the interference of :mod:`paper_figures.interference`, or ideally.
    """
    plan = _plan(key, schedule)
    levels_s = exclusion_levels_s(plan, model(key), interference.load().cluster(key) if fitted else cluster())
    # Rounded to a picosecond, so that a difference of two equal sums is zero.
    steps_s = [round(b - a, 12) + 0.0 for a, b in zip((0.0, *levels_s), levels_s, strict=False)]
    return Simulated(levels_s[-1], dict(zip(published.KINDS, steps_s, strict=True)), plan)


def exclusion_levels_s(plan: Plan, model: ModelProfile, cluster: ClusterProfile) -> tuple[float, ...]:
    """Seconds of an iteration as its parts are added one after the other, in the order of the paper's bars.

    The paper's bars are differences between runs that leave parts out; simulating the same runs makes bars that can be
    compared with them, which a breakdown of one timeline is not (there, waiting for another rank's inversion belongs to
    no kind). The levels: the forward and backward pass; with the gradients' all-reduces (S-SGD); with computing factors
    and preconditioning; with the factors' all-reduces; with inversions; with broadcasts, which is the whole iteration.
    """
    free, instant = LinearCost(0.0, 0.0), PolynomialCost((0.0,))
    no_curvature = replace(plan.schedule, curvature=False)
    no_owners = replace(plan, inverse_owner=(None,) * len(plan.factors), inverse_messages=())
    pass_s = sum(layer.forward_s + layer.backward_s for layer in model.layers) + model.loss_s + model.update_s

    def s_sgd_s(of: ModelProfile) -> float:
        return simulated_iteration_s(make_plan(no_curvature, of, cluster, plan.world_size), of, cluster)

    return (
        pass_s,
        s_sgd_s(model),
        s_sgd_s(_statistics_in_passes(model)),
        simulated_iteration_s(no_owners, model, replace(cluster, inverse=instant)),
        simulated_iteration_s(plan, model, replace(cluster, broadcast=free)),
        simulated_iteration_s(plan, model, cluster),
    )


def _statistics_in_passes(model: ModelProfile) -> ModelProfile:
    """The model with its K-FAC computing, inverses apart, as if it belonged to the passes and the update."""
    layers = tuple(
        replace(
            layer,
            forward_s=layer.forward_s + layer.a_statistics_s,
            backward_s=layer.backward_s + layer.g_statistics_s,
            a_statistics_s=0.0,
            g_statistics_s=0.0,
        )
        for layer in model.layers
    )
    precondition_s = sum(layer.precondition_s for layer in model.layers)
    return replace(model, layers=layers, update_s=model.update_s + precondition_s)


def add_input(provenance: Provenance, key: str, algorithm: str, schedule: ScheduleConfig, fitted: bool = False) -> str:
    """Record what leads from simulated numbers to their inputs: profiles, switches, plan; returns its name."""
    name = f"simulation of {key} under {algorithm}" + (" with interference" if fitted else "")
    provenance.inputs["cluster_profile"] = dict(cluster().provenance)
    if fitted:
        provenance.inputs["interference"] = f"paper_figures/{interference.PATH.name}, by {interference.COMMAND}"
    provenance.inputs[name] = {
        "model_profile": f"kfac/planning/shipped/models/{key}.json",
        "cluster_profile": f"kfac/planning/shipped/{CLUSTER_NAME}.json",
        "schedule": schedule.to_dict(),
        "plan": simulated(key, schedule).plan.fingerprint,
    }
    return name
