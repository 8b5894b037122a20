"""A cluster's costs at another number of ranks, on paper: from one measured size to sizes that nobody measured.

The usual start-up/bandwidth models of collectives (Thakur, Rabenseifner and Gropp, IJHPCA 19(1), 2005). Bandwidth:
each element of an all-reduce crosses a rank's link ``2 (P - 1) / P`` times, each one of a pipelined broadcast or reduce
once. Start-up: a ring passes ``P - 1`` neighbours, a tree ``log2(P)`` levels. Nodes with several ranks, congestion and
stragglers are not in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from kfac.planning.checks import whole
from kfac.planning.costs import Cost, LinearCost
from kfac.planning.profiles import ClusterProfile

LATENCY: Mapping[str, Callable[[int], float]] = {
    "tree": math.log2,
    "ring": lambda ranks: ranks - 1.0,
}
"""How the start-up time of a collective grows with the ranks, up to a constant factor."""


def scaled_cluster(cluster: ClusterProfile, world_size: int, latency: str = "tree") -> ClusterProfile:
    """The profile at ``world_size`` ranks, from one at two or more.

    Args:
        cluster: what is known, with linear costs of collectives. Inverses cost the same at any size.
        world_size: number of ranks.
        latency: a key of :data:`LATENCY`.

    Raises:
        ValueError: for an unknown latency, a profile of one rank, or a collective whose cost is not linear.
    """
    if latency not in LATENCY:
        raise ValueError(f"unknown latency {latency!r}; choices: {', '.join(LATENCY)}")
    if cluster.world_size < 2:
        raise ValueError("a profile of one rank says nothing of collectives: measure it on two ranks or more")
    if whole("world_size", world_size, 1) == 1:
        return cluster.at(1)
    steps = LATENCY[latency]
    growth = steps(world_size) / steps(cluster.world_size)
    crossings = (1 - 1 / world_size) / (1 - 1 / cluster.world_size)

    def scaled(name: str, cost: Cost, bandwidth: float) -> LinearCost:
        if not isinstance(cost, LinearCost):
            raise ValueError(f"{name} must be a LinearCost to be scaled, got {cost!r}")
        return LinearCost(cost.alpha_s * growth, cost.beta_s_per_element * bandwidth)

    return replace(
        cluster,
        world_size=world_size,
        all_reduce=scaled("all_reduce", cluster.all_reduce, crossings),
        reduce=scaled("reduce", cluster.reduce, 1.0),
        broadcast=scaled("broadcast", cluster.broadcast, 1.0),
        provenance={"kind": "scaled", "latency": latency, "from": dict(cluster.provenance)},
    )
