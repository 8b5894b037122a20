"""Inverse placement: every rule against a proven lower bound, on six models, three inverse costs, nine world sizes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from kfac.planning import (
    ClusterProfile,
    Cost,
    ExponentialCost,
    LinearCost,
    Placement,
    PolynomialCost,
    placement_lower_bound_s,
    plan_placement,
)
from kfac.planning.placement import inverse_sequence, sequence_finish_s
from kfac.planning.shipped_profiles import load_shipped_cluster, load_shipped_model, shipped_names
from paper_figures import published

WORLD_SIZES = (4, 8, 16, 32, 64, 128, 256, 512, 1024)
RULES = (
    "all local",
    "round robin",
    "longest first",
    "lbp by cost",
    f"lbp below {published.lbp_threshold_dim()}",
    "optimized",
)
"""``all local``: every rank inverts everything (``non_dist``). ``round robin``: ``seq_dist``. ``longest first``: every
factor is broadcast, the dearest goes to the least loaded rank next (LPT). Both variants of the paper's ``lbp``."""


def _transformer(width: int, hidden: int, layers: int) -> list[int]:
    """Factor dimensions of a transformer's linear layers with biases, head and embeddings left out: query, key, value
    and output, then the two of the feed-forward network."""
    attention = [width + 1, width] * 4
    return [d for _ in range(layers) for d in (*attention, width + 1, hidden, hidden + 1, width)]


@cache
def models() -> Mapping[str, Sequence[int]]:
    """Factor dimensions by model."""
    shipped = {published.model(key).name: load_shipped_model(key) for key in published.model_keys()}
    paper = {
        name: [d for layer in model.layers if layer.has_factors for d in (layer.a_dim, layer.g_dim)]
        for name, model in shipped.items()
    }
    # GPT-2 has one product for query, key and value.
    gpt2 = [d for _ in range(48) for d in (1601, 4800, 1601, 1600, 1601, 6400, 6401, 1600)]
    return {**paper, "BERT-large": _transformer(1024, 4096, 24), "GPT-2 XL without head": gpt2}


def inverse_costs() -> Mapping[str, Cost]:
    """Seconds of an inverse by dimension: published, assumed, and those of shipped profiles that were measured."""
    figure = published.load()["cost_models"]["inverse_figure"]
    shipped = [load_shipped_cluster(name) for name in shipped_names()]
    measured = [profile for profile in shipped if profile.provenance["kind"] == "measured"]
    return {
        "published exponential": ExponentialCost(figure["alpha_s"], figure["beta_per_dim"]),
        "fit to published totals": load_shipped_cluster("paper64").inverse,
        "cubic": PolynomialCost((2.5e-4, 0.0, 0.0, 5.4e-4)),  # start-up and 1.9 Tflop/s: inverses on a GPU like theirs
        **{f"measured on {profile.provenance['hardware']}": profile.inverse for profile in measured},
    }


def cluster(inverse: Cost, world_size: int) -> ClusterProfile:
    """The broadcast of the authors' code at 64 ranks, with an inverse cost."""
    send = published.linear_cost("broadcast_code_2020_12")
    broadcast = LinearCost(send.alpha_s, send.beta_s_per_element)
    unused = LinearCost(0.0, 0.0)
    return ClusterProfile(world_size=world_size, all_reduce=unused, reduce=unused, broadcast=broadcast, inverse=inverse)


def longest_first(dims: Sequence[int], world_size: int, costs: ClusterProfile) -> Placement:
    """Every factor on one rank: the dearest first, to the rank with the least work."""
    load = [0.0] * min(world_size, len(dims))
    owner: list[int | None] = [None] * len(dims)
    order = sorted(range(len(dims)), key=lambda i: (-costs.inverse(dims[i]), i))
    for i in order:
        rank = load.index(min(load))
        owner[i] = rank
        load[rank] += costs.inverse(dims[i])
    return Placement.from_sequence(owner, order[::-1], world_size)


def placed(rule: str, dims: Sequence[int], world_size: int, costs: ClusterProfile) -> Placement:
    """The placement of one of :data:`RULES`."""
    if rule == "longest first":
        return longest_first(dims, world_size, costs)
    if rule.startswith("lbp"):
        by: str | int = "cost" if rule == "lbp by cost" else published.lbp_threshold_dim()
        return plan_placement(dims, world_size, costs, "lbp", lbp_rule=by)
    names = {"all local": "non_dist", "round robin": "seq_dist"}
    return plan_placement(dims, world_size, costs, names.get(rule, rule))


def plan_finish_s(placement: Placement, dims: Sequence[int], world_size: int, costs: ClusterProfile) -> float:
    """When every rank has every inverse as a Plan has it done: all walk one sequence of inversions and broadcasts.

    That is what the simulator says of the Plan. The placement by itself may promise less (LBP: up to 15 % on these
    instances), since a broadcast waits there for nothing but the channel and its own inversion.
    """
    sequence = inverse_sequence(placement, dims, costs)
    return sequence_finish_s(placement.owner, sequence, world_size, dims, costs, "as_ready")


def row(model: str, fit: str, world_size: int) -> dict[str, Any]:
    """One instance: the bound, the finish of every rule, and the processor time of the search."""
    dims, costs = models()[model], cluster(inverse_costs()[fit], world_size)
    finish_s, planning_s = {}, 0.0
    for rule in RULES:
        start = time.process_time()
        placement = placed(rule, dims, world_size, costs)
        planning_s = time.process_time() - start  # of the last one, which is ours
        finish_s[rule] = plan_finish_s(placement, dims, world_size, costs)
    bound_s = placement_lower_bound_s(dims, world_size, costs)
    return {
        "model": model,
        "inverse": fit,
        "world_size": world_size,
        "bound_s": bound_s,
        "finish_s": finish_s,
        "planning_s": round(planning_s, 3),
    }


def rows() -> Iterator[dict[str, Any]]:
    """Every instance."""
    for model in models():
        for fit in inverse_costs():
            for world_size in WORLD_SIZES:
                yield row(model, fit, world_size)


def gap(of: Mapping[str, Any], rule: str) -> float:
    """How far above the bound a rule finishes, as a share of the bound."""
    return float(of["finish_s"][rule] / of["bound_s"] - 1)
