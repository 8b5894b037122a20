"""A lower bound on an iteration that also respects when its messages become ready."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kfac.planning.costs import packed_elements
from kfac.planning.fusion import fusion_finish_s, plan_fusion
from kfac.planning.joint_fusion import Family
from kfac.planning.placement_bound import placement_lower_bound_s
from kfac.planning.plan import factors_of
from kfac.planning.profiles import ClusterProfile, ModelProfile
from kfac.planning.ready_times import ready_times


def message_families(model: ModelProfile) -> Mapping[str, Family]:
    """A factors, G factors and gradients, each in the order in which they become ready."""
    times, layers = ready_times(model), model.layers
    covered = [k for k, layer in enumerate(layers) if layer.has_factors]

    def family(order: Sequence[int], ready: Sequence[float], elements: Callable[[int], int]) -> Family:
        return Family([ready[k] for k in order], [elements(k) for k in order])

    return {
        "A": family(covered, times.a_s, lambda k: packed_elements((layers[k].a_blocks, layers[k].a_dim))),
        "G": family(covered[::-1], times.g_s, lambda k: packed_elements((layers[k].g_blocks, layers[k].g_dim))),
        "gradient": family(range(len(layers))[::-1], times.gradient_s, lambda k: layers[k].gradient_elements),
    }


def merged_family(families: Sequence[Family]) -> Family:
    """One family of several, in the order in which tensors become ready."""
    pairs = sorted(pair for family in families for pair in zip(*family, strict=True))
    return Family([ready for ready, _ in pairs], [elements for _, elements in pairs])


def iteration_lower_bound_s(
    model: ModelProfile,
    cluster: ClusterProfile,
    *,
    inverse_start: str = "as_ready",
    time_limit_s: float = 30.0,
) -> float:
    """Seconds that no plan can beat that sends factors (in full) and gradients by all-reduce, broadcasts inverses one
    by one and preconditions on every rank. Plans that reduce factors to their owners, or leave layers to one rank, send
    less, and may.

    Preconditioning and the update come after the earliest last arrival of all messages, even if a factor and a gradient
    might share one (exact where an all-reduce takes a start-up time plus seconds per element); and after the bound on
    placements, which begins with the end of the backward pass or, where inversions wait for all messages, with that
    arrival.

    Args:
        model: seconds of the layers' work.
        cluster: cost models and world size.
        inverse_start: of the plans: ``after_all`` bounds those only that wait for all messages.
        time_limit_s: of the solver, as in :func:`~kfac.planning.placement_bound.placement_lower_bound_s`.
    """
    cluster = cluster.at(cluster.world_size)
    ready, elements = merged_family(list(message_families(model).values()))
    groups = plan_fusion(ready, elements, cluster.all_reduce, "optimal")
    backward_end = ready_times(model).backward_end_s
    arrived = max(fusion_finish_s(groups, ready, elements, cluster.all_reduce), backward_end)
    # Diagonal factors take no placement: every rank inverts them, in no less than no time.
    sizes = [factor.size for factor in factors_of(model.layers) if factor.dim > 1]
    inverted = placement_lower_bound_s(sizes, cluster.world_size, cluster, time_limit_s=time_limit_s) if sizes else 0.0
    precondition = sum(layer.precondition_s for layer in model.layers if layer.has_factors)
    begin = arrived if inverse_start == "after_all" else backward_end
    return max(begin + inverted, arrived) + precondition + model.update_s
