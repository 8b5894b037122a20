"""Inverse placement: which rank inverts which factor.

Inverting a factor on every rank costs every rank its time; inverting it on one rank costs a broadcast, and all
broadcasts share one channel.
"""

from __future__ import annotations

from collections.abc import Sequence

from kfac.planning.costs import Size, inverse_dim
from kfac.planning.placement_bound import placement_lower_bound_s
from kfac.planning.placement_model import (
    InverseCosts,
    Placement,
    inverse_sequence,
    placement_finish_s,
    sequence_finish_s,
)
from kfac.planning.placement_search import optimized_placement
from kfac.planning.profiles import ClusterProfile
from kfac.planning.schedule_config import CHOICES, check_lbp_rule

__all__ = [
    "Placement",
    "inverse_sequence",
    "placement_finish_s",
    "placement_lower_bound_s",
    "plan_placement",
    "sequence_finish_s",
]


def plan_placement(
    dims: Sequence[Size],
    world_size: int,
    cluster: ClusterProfile,
    rule: str,
    *,
    lbp_rule: str | int = "cost",
    channel_free_s: float = 0.0,
) -> Placement:
    """Place the inversions of factors of dimensions ``dims``.

    Args:
        dims: dimension of every factor, or (blocks, dimension) of a block-diagonal one, in the order of the layers (A0
            G0 A1 G1 ...).
        world_size: number of ranks; it overrides the profile's. One rank inverts everything, whatever the rule.
        cluster: the cost models.
        rule: ``non_dist``: every rank inverts everything. ``seq_dist``: round robin over the given order. ``lbp``: the
            paper's load-balancing placement as its code states it: by falling dimension, small factors go to every
            rank and each other one to the rank with the least sum of dimensions (the lowest such rank); inversions run
            in the given order. ``optimized``: ours (:mod:`kfac.planning.placement_search`).
        lbp_rule: which factors are small for ``lbp``: ``cost``, inverting takes less time than broadcasting; or a
            dimension, the smaller ones (the paper's runs hard-wired 1400).
        channel_free_s: seconds until the first broadcast can travel; ``optimized`` makes use of it.

    Raises:
        ValueError: for an unknown rule, impossible numbers or costs that are no numbers of seconds.
    """
    if rule not in CHOICES["placement"]:
        raise ValueError(f"unknown placement rule {rule!r}; choices: {', '.join(CHOICES['placement'])}")
    check_lbp_rule("lbp_rule", lbp_rule)
    cluster = cluster.at(world_size)
    costs = InverseCosts.of(dims, cluster, channel_free_s)
    count = len(dims)
    owner: list[int | None] = [None] * count
    if world_size == 1 or rule == "non_dist":
        pass
    elif rule == "seq_dist":
        owner = [i % world_size for i in range(count)]
    elif rule == "lbp":
        owner = _load_balanced(dims, world_size, costs, lbp_rule)
    else:
        baselines = [plan_placement(dims, world_size, cluster, other) for other in ("non_dist", "seq_dist", "lbp")]
        return optimized_placement(costs, world_size, baselines)
    return Placement.from_sequence(owner, range(count), world_size)


def _load_balanced(dims: Sequence[Size], world_size: int, costs: InverseCosts, lbp_rule: str | int) -> list[int | None]:
    owner: list[int | None] = [None] * len(dims)
    load = [0] * min(world_size, len(dims))  # further ranks would never be the lowest with the least load
    single = [inverse_dim(size) for size in dims]
    for i in sorted(range(len(dims)), key=lambda i: -single[i]):
        small = costs.invert_s[i] < costs.broadcast_s[i] if isinstance(lbp_rule, str) else single[i] < lbp_rule
        if not small:
            rank = load.index(min(load))
            owner[i] = rank
            load[rank] += single[i]
    return owner
