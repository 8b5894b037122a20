"""What of a task graph a timeline shows as flows: how messages hang together with computing."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from kfac.simulation.events import Task


@dataclass(frozen=True)
class Place:
    """Where a task is seen.

    Args:
        ranks: whose lane has a span of it.
        message: whether it is on their communication lane.
    """

    ranks: Collection[int]
    message: bool


def flows(
    tasks: Sequence[Task], places: Sequence[Place | None], times: Sequence[tuple[float, float]]
) -> Iterator[tuple[int, int, int]]:
    """Pairs of tasks of which the second has waited for the first, and the rank on whose lanes both are.

    To a message leads what its rank has computed last of what it waits for; from it, what first waits for it there.
    More would be no news: lanes keep their order. What is not seen passes on what it waits for.

    Args:
        tasks: in an order in which each comes after those that it waits for, and in their lanes' order.
        places: of the tasks; None: not seen.
        times: start and end of the tasks.
    """
    behind = _seen_behind(tasks, places)
    awaited: set[tuple[int, int]] = set()
    for j, place in enumerate(places):
        if place is None:
            continue
        before = (i for a in tasks[j].after for i in behind[a])
        if place.message:
            yield from ((i, j, rank) for rank, i in _latest(before, places, times, place.ranks).items())
            continue
        # What has been passed on to an earlier task of the lane has been awaited there.
        for rank in place.ranks:
            for a in tasks[j].after:
                if (a, rank) in awaited:
                    continue
                awaited.add((a, rank))
                for i in behind[a]:
                    if _is_message(places[i]) and (i == a or (i, rank) not in awaited):
                        awaited.add((i, rank))
                        yield i, j, rank


def _is_message(place: Place | None) -> bool:
    return place is not None and place.message


def _seen_behind(tasks: Sequence[Task], places: Sequence[Place | None]) -> list[tuple[int, ...]]:
    """Of each task itself; of one that is not seen, what it waits for instead."""
    behind: list[tuple[int, ...]] = []
    for i, task in enumerate(tasks):
        there = dict.fromkeys(j for a in task.after for j in behind[a]) if places[i] is None else (i,)
        behind.append(tuple(there))
    return behind


def _latest(
    before: Iterator[int],
    places: Sequence[Place | None],
    times: Sequence[tuple[float, float]],
    ranks: Collection[int],
) -> dict[int, int]:
    """By rank what ends last of the computing among these tasks."""
    common: dict[int, tuple[Collection[int], int]] = {}  # what the same ranks do is looked at once
    for i in before:
        place = places[i]
        if place is not None and not place.message:
            there, last = common.get(id(place.ranks), (place.ranks, i))
            common[id(place.ranks)] = there, max(last, i, key=lambda k: (times[k][1], k))
    latest: dict[int, int] = {}
    for there, i in common.values():
        for rank in there:
            if rank in ranks:
                latest[rank] = max(latest.get(rank, i), i, key=lambda k: (times[k][1], k))
    return latest
