"""Which rank preconditions which layer alone, and in which order the results leave."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kfac.planning.costs import Cost, checked_cost


class LayerOwners(NamedTuple):
    """Per layer its owner (None: every rank preconditions it), and the layers of each owner, in the order in which the
    owners are done.
    """

    owner: tuple[int | None, ...]
    messages: tuple[tuple[int, ...], ...]


def place_layers(
    layers: Sequence[int],
    takes_s: Sequence[float],
    elements: Sequence[int],
    busy_s: Sequence[float],
    broadcast: Cost,
    rule: str,
) -> LayerOwners:
    """Give each of these layers to a rank.

    Args:
        layers: indices of the layers that one rank preconditions.
        takes_s: per layer the seconds of inverting and preconditioning it.
        elements: per layer the elements of its gradient.
        busy_s: per rank the seconds of what it does before.
        broadcast: seconds of a broadcast as a function of its elements.
        rule: ``seq_dist``: round robin. Else the layer that takes longest goes to the rank with the least work so far;
            under ``optimized`` to as many ranks as let the last broadcast end first: where one layer takes longer than
            many others together, these share a rank, and its broadcast.
    """
    if rule == "seq_dist":
        return _owners({k: turn % len(busy_s) for turn, k in enumerate(layers)}, takes_s, busy_s)
    broadcast = checked_cost("broadcast", broadcast)
    longest_first = sorted(layers, key=lambda k: (-takes_s[k], k))
    idle_first = sorted(range(len(busy_s)), key=lambda rank: (busy_s[rank], rank))[: max(1, len(layers))]
    found = [
        _owners(_balanced(longest_first, takes_s, busy_s, sorted(idle_first[:count])), takes_s, busy_s)
        for count in _counts(len(idle_first) if rule == "optimized" else 0, len(idle_first))
    ]
    return min(found, key=lambda it: (_finish_s(it, takes_s, elements, busy_s, broadcast), len(it.messages)))


def _counts(least: int, most: int) -> Iterator[int]:
    """``most`` and, where ``least`` is not 0, its halves down to 1."""
    yield most
    while least and most > 1:
        most = (most + 1) // 2
        yield most


def _balanced(
    layers: Sequence[int], takes_s: Sequence[float], busy_s: Sequence[float], ranks: Sequence[int]
) -> dict[int, int]:
    load = {rank: (busy_s[rank], 0) for rank in ranks}  # seconds, and layers where these are none
    owner = {}
    for k in layers:
        rank = min(load, key=lambda r: (load[r], r))
        owner[k] = rank
        load[rank] = (load[rank][0] + takes_s[k], load[rank][1] + 1)
    return owner


def _owners(owner: dict[int, int], takes_s: Sequence[float], busy_s: Sequence[float]) -> LayerOwners:
    of_rank: dict[int, list[int]] = {}
    for k in sorted(owner):
        of_rank.setdefault(owner[k], []).append(k)
    done = sorted((busy_s[rank] + sum(takes_s[k] for k in own), rank) for rank, own in of_rank.items())
    return LayerOwners(
        tuple(owner.get(k) for k in range(len(takes_s))), tuple(tuple(of_rank[rank]) for _, rank in done)
    )


def _finish_s(
    owners: LayerOwners,
    takes_s: Sequence[float],
    elements: Sequence[int],
    busy_s: Sequence[float],
    broadcast: Cost,
) -> float:
    """When the last of the broadcasts has arrived, on a channel that nothing else uses."""
    end = 0.0
    for group in owners.messages:
        rank = owners.owner[group[0]]
        assert rank is not None
        done = busy_s[rank] + sum(takes_s[k] for k in group)
        end = max(end, done) + broadcast(sum(elements[k] for k in group))
    return end
