"""Who inverts what, who preconditions what, and what travels of it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from kfac.planning.arrivals import Arrivals, in_order_of_arrival
from kfac.planning.costs import Size, packed_elements
from kfac.planning.family_fusion import OwnFamily, fuse_families
from kfac.planning.layer_owners import place_layers
from kfac.planning.placement import Placement, inverse_sequence, plan_placement
from kfac.planning.placement_model import InverseCosts
from kfac.planning.plan import FactorSpec
from kfac.planning.profiles import ClusterProfile, ModelProfile
from kfac.planning.schedule_config import ScheduleConfig

Groups = tuple[tuple[int, ...], ...]


class Ownership(NamedTuple):
    """The fields of a :class:`~kfac.planning.plan.Plan` of the same names."""

    inverse_owner: tuple[int | None, ...]
    inverse_sequence: tuple[int, ...]
    inverse_messages: Groups
    gradient_owner: tuple[int | None, ...]
    gradient_messages: Groups


def plan_ownership(
    schedule: ScheduleConfig,
    model: ModelProfile,
    factors: Sequence[FactorSpec],
    cluster: ClusterProfile,
    arrivals: Arrivals | None = None,
) -> Ownership:
    """Owners and order of everything after the factors' messages.

    Factors whose inverses are broadcast come first in the sequence, so that their broadcasts overlap with inversions
    whose results stay where they are. Diagonal factors have no owner, unless their layer has: no rank needs another's
    reciprocals. Where inversions begin before all factors have arrived, the order of ``arrivals`` goes before.
    """
    costs = InverseCosts.of([factor.size for factor in factors], cluster)
    private = _private_layers(schedule, factors, cluster.world_size)
    owner: list[int | None] = [None] * len(factors)
    shared = [i for i in range(len(factors)) if i // 2 not in private]
    diagonal = [i for i in shared if factors[i].dim == 1]
    placed = [i for i in shared if factors[i].dim > 1]
    sizes = [factors[i].size for i in placed]
    channel_free_s = 0.0
    if arrivals:  # seen from the moment at which a rank that inverts everything would have to begin to end as early
        waiting_s = arrivals.waiting_s(costs.invert_s)
        channel_free_s = max(0.0, arrivals.channel_free_s - waiting_s)
    placement = _placement(tuple(sizes), cluster, schedule.placement, schedule.lbp_rule, channel_free_s)
    for i, rank in zip(placed, placement.owner, strict=True):
        owner[i] = rank
    if schedule.inverse_broadcast == "as_ready":
        order = [*diagonal, *(placed[k] for k in inverse_sequence(placement, sizes, cluster))]
    else:
        order = shared  # all inversions come first: only the owners matter
    if arrivals:
        share = {i: 1.0 if owner[i] is None else 1.0 / cluster.world_size for i in order}
        order = list(in_order_of_arrival(order, arrivals.there_s, dict(enumerate(costs.invert_s)), share))
    load = _loads(owner, costs, cluster.world_size)
    covered = {layer.name: layer for layer in model.layers}
    layers = [covered[factors[i].layer] for i in range(0, len(factors), 2)]
    takes_s = [
        costs.invert_s[2 * k] + costs.invert_s[2 * k + 1] + layer.precondition_s for k, layer in enumerate(layers)
    ]
    rule = schedule.placement
    if schedule.factor_collective == "none":  # statistics are the owner's work, too: on as many ranks as there are
        takes_s = [s + x.a_statistics_s + x.g_statistics_s for s, x in zip(takes_s, layers, strict=True)]
        rule = "lbp" if rule == "optimized" else rule
    elements = [layer.matrix_elements for layer in layers]
    owned = place_layers(sorted(private), takes_s, elements, load, cluster.broadcast, rule)
    for k, rank in enumerate(owned.owner):
        if rank is not None:
            owner[2 * k] = owner[2 * k + 1] = rank
    sequence = (*order, *(i for i in range(len(factors)) if i // 2 in private))
    inverses = _inverse_messages(schedule, owner, order, costs, factors, cluster, arrivals)
    return Ownership(tuple(owner), sequence, inverses, owned.owner, owned.messages)


@lru_cache(maxsize=16)
def _placement(
    sizes: tuple[Size, ...], cluster: ClusterProfile, rule: str, lbp_rule: str | int, channel_free_s: float
) -> Placement:
    """Remembered, as schedules that differ in something else place the same factors."""
    return plan_placement(sizes, cluster.world_size, cluster, rule, lbp_rule=lbp_rule, channel_free_s=channel_free_s)


def _private_layers(schedule: ScheduleConfig, factors: Sequence[FactorSpec], world_size: int) -> frozenset[int]:
    """The layers that one rank preconditions: as few as leave each rank ``gradient_worker_fraction`` of the inverses'
    elements on average.
    """
    elements = [factors[i].elements + factors[i + 1].elements for i in range(0, len(factors), 2)]
    total = sum(elements)
    held = float(total)
    found: set[int] = set()
    if world_size == 1:
        return frozenset()
    for k in sorted(range(len(elements)), key=lambda k: -elements[k]):
        if held <= schedule.gradient_worker_fraction * total:
            break
        found.add(k)
        held -= elements[k] * (1 - 1 / world_size)
    return frozenset(found)


def _loads(owner: Sequence[int | None], costs: InverseCosts, world_size: int) -> list[float]:
    """Seconds that each rank inverts."""
    everywhere = sum(seconds for seconds, rank in zip(costs.invert_s, owner, strict=True) if rank is None)
    load = [everywhere] * world_size
    for seconds, rank in zip(costs.invert_s, owner, strict=True):
        if rank is not None:
            load[rank] += seconds
    return load


def _inverse_messages(
    schedule: ScheduleConfig,
    owner: Sequence[int | None],
    order: Sequence[int],
    costs: InverseCosts,
    factors: Sequence[FactorSpec],
    cluster: ClusterProfile,
    arrivals: Arrivals | None,
) -> Groups:
    """Groups of what is broadcast, in the order in which they leave."""
    sent = [i for i in order if owner[i] is not None]
    if schedule.inverse_fusion == "none" or cluster.world_size == 1:
        return tuple((i,) for i in sent)
    of_owner: dict[int | None, list[int]] = {}
    for i in sent:
        of_owner.setdefault(owner[i], []).append(i)
    groups = [tuple(items) for items in of_owner.values()]
    if schedule.inverse_fusion == "planned":
        reached = _reached_s(owner, order, costs, arrivals, late=schedule.inverse_broadcast == "after_all")
        families = [
            OwnFamily([reached[i] for i in items], [packed_elements(factors[i].size) for i in items], cluster.broadcast)
            for items in of_owner.values()
        ]
        divided = zip(of_owner.values(), fuse_families(families), strict=True)
        groups = [tuple(items[k] for k in group) for items, found in divided for group in found]
    place = {i: k for k, i in enumerate(order)}
    return tuple(sorted(groups, key=lambda group: place[group[-1]]))


def _reached_s(
    owner: Sequence[int | None],
    order: Sequence[int],
    costs: InverseCosts,
    arrivals: Arrivals | None,
    *,
    late: bool,
) -> dict[int, float]:
    """When all ranks have reached each factor's broadcast, walking the sequence."""
    there: Sequence[float] = arrivals.there_s if arrivals else [0.0] * len(owner)
    ranks = {rank: 0.0 for i in order if (rank := owner[i]) is not None}
    reached = {}
    for i in order:
        rank = owner[i]
        if rank is None:
            ranks = {r: max(now, there[i]) + costs.invert_s[i] for r, now in ranks.items()}
            continue
        ranks[rank] = max(ranks[rank], there[i]) + costs.invert_s[i]
        reached[i] = max(ranks.values())
    end = max(ranks.values(), default=0.0)
    return dict.fromkeys(reached, end) if late else reached
