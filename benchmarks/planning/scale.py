"""Iteration time against world size, simulated from the paper's cluster, for every schedule."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

from kfac.planning.scaling import LATENCY, scaled_cluster
from kfac.planning.shipped_profiles import load_shipped_cluster, load_shipped_model
from kfac.schedules import AUTO, NAMED_SCHEDULES, Schedule, make_plan
from kfac.simulation import simulated_iteration_s
from paper_figures import published

WORLD_SIZES = tuple(2**k for k in range(2, 15))
"""4 to 16,384."""
AS_RUN = f"spdkfac, d < {published.lbp_threshold_dim()}"
SCHEDULES: Mapping[str, Schedule] = {
    **{name: NAMED_SCHEDULES[name] for name in ("sgd", "dkfac", "mpdkfac", "spdkfac")},
    AS_RUN: replace(NAMED_SCHEDULES["spdkfac"], lbp_rule=published.lbp_threshold_dim()),
    AUTO: AUTO,
}


def iteration_s(key: str, latency: str, schedule: str, world_size: int) -> float:
    """Seconds of one iteration with all curvature work due."""
    model = load_shipped_model(key)
    cluster = scaled_cluster(load_shipped_cluster("paper64"), world_size, latency)
    return simulated_iteration_s(make_plan(SCHEDULES[schedule], model, cluster), model, cluster)


def curves() -> Iterator[dict[str, Any]]:
    """Per model and latency law the iteration seconds of every schedule at :data:`WORLD_SIZES`."""
    for latency in LATENCY:
        for key in published.model_keys():
            yield {
                "model": key,
                "latency": latency,
                "world_sizes": list(WORLD_SIZES),
                "iteration_s": {
                    name: [iteration_s(key, latency, name, world_size) for world_size in WORLD_SIZES]
                    for name in SCHEDULES
                },
            }


def crossings(world_sizes: Sequence[int], iteration_s: Mapping[str, Sequence[float]]) -> list[dict[str, Any]]:
    """Where one schedule becomes faster than another: the world size is interpolated on its logarithm."""
    found = []
    for first, second in combinations(iteration_s, 2):
        difference = [a - b for a, b in zip(iteration_s[first], iteration_s[second], strict=True)]
        for (p, d), (q, e) in pairwise(zip(world_sizes, difference, strict=True)):
            if d * e < 0:
                at = 2 ** (math.log2(p) + d / (d - e) * math.log2(q / p))
                faster, slower = (first, second) if e < 0 else (second, first)
                found.append({"world_size": round(at), "faster_beyond": faster, "slower_beyond": slower})
    return sorted(found, key=lambda crossing: int(crossing["world_size"]))
