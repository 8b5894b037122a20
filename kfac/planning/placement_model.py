"""What an inverse placement is, and when it finishes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from kfac.planning.checks import whole
from kfac.planning.costs import Size, checked_cost, inverse_dim, packed_elements
from kfac.planning.profiles import ClusterProfile


@dataclass(frozen=True)
class Placement:
    """Which rank inverts which factor, and in which order.

    Args:
        owner: per factor the rank that inverts it and broadcasts the inverse, or None: every rank inverts it.
        order: per rank the factors it inverts (its own and those of every rank), in its order.

    Raises:
        ValueError: if an order is not a permutation of what its rank has to invert, or an owner is no rank.
    """

    owner: tuple[int | None, ...]
    order: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if not self.order:
            raise ValueError("a placement needs at least one rank")
        if any(rank is not None and not 0 <= rank < self.world_size for rank in self.owner):
            raise ValueError(f"an inverse owner is not a rank below {self.world_size}")
        checked: set[int] = set()  # ranks without factors of their own share one tuple: large worlds stay cheap
        for rank, order in enumerate(self.order):
            own = self.owned.get(rank, ())
            if not own and id(order) in checked:
                continue
            if sorted(order) != sorted([*self.everywhere, *own]):
                raise ValueError(f"rank {rank} must invert its own factors and those of every rank, each once")
            if not own:
                checked.add(id(order))

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.order)

    @cached_property
    def everywhere(self) -> tuple[int, ...]:
        """Factors that every rank inverts."""
        return tuple(i for i, rank in enumerate(self.owner) if rank is None)

    @cached_property
    def owned(self) -> Mapping[int, tuple[int, ...]]:
        """Factors of each rank that owns any."""
        result: dict[int, list[int]] = {}
        for i, rank in enumerate(self.owner):
            if rank is not None:
                result.setdefault(rank, []).append(i)
        return {rank: tuple(factors) for rank, factors in result.items()}

    @classmethod
    def from_sequence(cls, owner: Sequence[int | None], sequence: Sequence[int], world_size: int) -> Placement:
        """The placement in which every rank follows one sequence of all factors and skips what is not its own."""
        everywhere = tuple(i for i in sequence if owner[i] is None)
        ranks = {rank for rank in owner if rank is not None}
        return cls(
            tuple(owner),
            tuple(
                tuple(i for i in sequence if owner[i] in (None, rank)) if rank in ranks else everywhere
                for rank in range(world_size)
            ),
        )


def checked_size(what: str, size: Any) -> Size:
    """``size`` as whole numbers of at least 1.

    Raises:
        ValueError: if it is neither a dimension nor (blocks, dimension).
    """
    if isinstance(size, tuple) and len(size) == 2:
        return whole(f"blocks of {what}", size[0], 1), whole(what, size[1], 1)
    return whole(what, size, 1)


@dataclass(frozen=True)
class InverseCosts:
    """Seconds to invert and to broadcast each factor: ``d (d + 1) / 2`` elements of the packed triangle travel; and
    seconds until the channel is free for broadcasts.
    """

    invert_s: tuple[float, ...]
    broadcast_s: tuple[float, ...]
    channel_free_s: float = 0.0

    @classmethod
    def of(cls, dims: Sequence[Size], cluster: ClusterProfile, channel_free_s: float = 0.0) -> InverseCosts:
        """The costs of factors of these dimensions.

        Raises:
            ValueError: for a dimension that is no whole number or below 1, or a cost that is no number of seconds.
        """
        dims = [checked_size(f"dims[{i}]", d) for i, d in enumerate(dims)]
        inverse, send = checked_cost("inverse", cluster.inverse), checked_cost("broadcast", cluster.broadcast)
        invert = {d: inverse(inverse_dim(d)) for d in set(dims)}
        broadcast = {d: send(packed_elements(d)) for d in set(dims)}
        return cls(tuple(invert[d] for d in dims), tuple(broadcast[d] for d in dims), channel_free_s)


def placement_finish_s(placement: Placement, dims: Sequence[Size], cluster: ClusterProfile) -> float:
    """Seconds until every rank has every inverse.

    All factors are there at 0. One channel carries one broadcast at a time; the inverse that is finished first is sent
    first (which is the best order for one channel).

    Raises:
        ValueError: if the placement is for another number of factors.
    """
    costs = _costs(placement, dims, cluster)
    return max(channel_finish_s(placement, costs), compute_finish_s(placement, costs))


def inverse_sequence(placement: Placement, dims: Sequence[Size], cluster: ClusterProfile) -> tuple[int, ...]:
    """One sequence of all factors that keeps every rank's order and broadcasts, as far as that allows, in the order in
    which inverses finish.

    All ranks must take part in all broadcasts in the same order, so they walk one sequence. The factors that every
    rank inverts cut it into slots; within a slot the first finished comes first.

    Raises:
        ValueError: if two ranks order the factors that every rank inverts differently.
    """
    costs = _costs(placement, dims, cluster)
    everywhere = set(placement.everywhere)
    common = tuple(i for i in placement.order[0] if i in everywhere)
    slots: list[list[tuple[float, int]]] = [[] for _ in range(len(common) + 1)]
    for rank in placement.owned:
        order = placement.order[rank]
        if tuple(i for i in order if i in everywhere) != common:
            raise ValueError("the ranks order the factors that all of them invert differently")
        now, slot = 0.0, 0
        for i in order:
            now += costs.invert_s[i]
            if i in everywhere:
                slot += 1
            else:
                slots[slot].append((now, i))
    position = {i: k for rank in placement.owned for k, i in enumerate(placement.order[rank])}
    sequence: list[int] = []
    for slot, factors in enumerate(slots):
        # Inverses that cost nothing finish together: their rank's order decides.
        sequence += [i for _, i in sorted(factors, key=lambda f: (f[0], position[f[1]], f[1]))]
        sequence += common[slot : slot + 1]
    return tuple(sequence)


def sequence_finish_s(
    owner: Sequence[int | None],
    sequence: Sequence[int],
    world_size: int,
    dims: Sequence[Size],
    cluster: ClusterProfile,
    inverse_broadcast: str,
) -> float:
    """Seconds until every rank has every inverse when all ranks walk one sequence.

    That is what a Plan does. It is never earlier than :func:`placement_finish_s` of the same owners and orders, since a
    broadcast here waits until every rank has inverted what comes before it in the sequence; with ``after_all`` every
    broadcast waits for every inversion.
    """
    costs = InverseCosts.of(dims, cluster)
    ranks = {rank: 0.0 for rank in owner if rank is not None}
    if len(ranks) < world_size:
        ranks[-1] = 0.0  # stands for those that own nothing
    channel = held = 0.0
    for i in sequence:
        rank = owner[i]
        for r in ranks if rank is None else (rank,):
            ranks[r] += costs.invert_s[i]
        if rank is None or world_size == 1:
            continue
        if inverse_broadcast == "as_ready":
            channel = max(channel, *ranks.values()) + costs.broadcast_s[i]
        else:
            held += costs.broadcast_s[i]
    computed = max(ranks.values(), default=0.0)
    return max(computed, channel, computed + held)


def channel_finish_s(placement: Placement, costs: InverseCosts) -> float:
    """When the last broadcast has arrived (0 without any)."""
    finished = []
    for rank in placement.owned:
        now = 0.0
        for i in placement.order[rank]:
            now += costs.invert_s[i]
            if placement.owner[i] is not None:
                finished.append((now, i))
    end = costs.channel_free_s if finished else 0.0
    for finish, i in sorted(finished):
        end = max(end, finish) + costs.broadcast_s[i]
    return end


def compute_finish_s(placement: Placement, costs: InverseCosts) -> float:
    """When the last rank has inverted everything it inverts."""
    # A rank without factors of its own inverts the common ones only, as every other rank does besides its own.
    orders = [placement.order[rank] for rank in placement.owned] or [placement.everywhere]
    return max(sum_in_order(costs.invert_s, order) for order in orders)


def sum_in_order(seconds: Sequence[float], order: Sequence[int]) -> float:
    """The sum in this order, rounded as a clock that advances step by step rounds it."""
    total = 0.0
    for i in order:
        total += seconds[i]
    return total


def _costs(placement: Placement, dims: Sequence[Size], cluster: ClusterProfile) -> InverseCosts:
    if len(dims) != len(placement.owner):
        raise ValueError(f"the placement is for {len(placement.owner)} factors, dims has {len(dims)}")
    return InverseCosts.of(dims, cluster)
