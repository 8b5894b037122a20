"""Which call issued which of gloo's collectives: the profiler's traces do not say.

A process group of gloo takes what it is given in order, with threads of its own (two of them). The trace has the calls
(``c10d::allreduce_`` on the thread that trains) and, on those threads, the work (``gloo:all_reduce``), but neither the
group of a call nor the call of a piece of work.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

THREADS_OF_A_GROUP = 2
"""Threads that torch gives a group of gloo."""
_MOST_THREADS = 8
"""More are not told apart: that would be all subsets of them."""


@dataclass(frozen=True)
class Call:
    """A collective that is issued.

    Args:
        name: of the operation, the same as its work's.
        start: moment.
        ours: whether it is in a range that says what for; such calls are taken to be one group's.
    """

    name: str
    start: float
    ours: bool


@dataclass(frozen=True)
class Work:
    """A collective that is carried out, on a thread of its group."""

    name: str
    start: float
    thread: Hashable


def issued_by(calls: Sequence[Call], work: Sequence[Work]) -> list[int | None]:
    """For each piece of work the number of the call that issued it; None where that cannot be told.

    Collectives of one name and group begin in the order in which they were issued, and none before it was. Where there
    are more threads than a group has, those of the calls in ranges are told from the others by how that fits best. Two
    that begin at the same moment on a group's two threads may be taken for one another; names that say more than the
    operation (the shapes of what is sent) keep them apart.
    """
    threads = sorted({w.thread for w in work}, key=str)
    best: dict[int, int] = {}
    for mine in _choices(threads):
        found = _by_group(calls, work, mine)
        if len(found) > len(best):
            best = found
        if len(best) == min(len(calls), len(work)):
            break
    return [best.get(k) for k in range(len(work))]


def _choices(threads: Sequence[Hashable]) -> Iterator[frozenset[Hashable] | None]:
    """Which threads may be those of the calls in ranges; None: all threads are of one group."""
    if len(threads) <= THREADS_OF_A_GROUP:
        yield None
    if len(threads) <= _MOST_THREADS:
        for count in range(len(threads) + 1):
            yield from map(frozenset, combinations(threads, count))
    if len(threads) > THREADS_OF_A_GROUP:
        yield None


def _by_group(calls: Sequence[Call], work: Sequence[Work], mine: frozenset[Hashable] | None) -> dict[int, int]:
    waiting: Mapping[Hashable, list[int]] = defaultdict(list)
    begun: Mapping[Hashable, list[int]] = defaultdict(list)
    for k in sorted(range(len(calls)), key=lambda k: calls[k].start):
        waiting[calls[k].name, mine is not None and calls[k].ours].append(k)
    for k in sorted(range(len(work)), key=lambda k: work[k].start):
        begun[work[k].name, mine is not None and work[k].thread in mine].append(k)
    return {k: call for key in begun for k, call in _in_order(begun[key], waiting[key], calls, work)}


def _in_order(
    begun: Sequence[int], waiting: Sequence[int], calls: Sequence[Call], work: Sequence[Work]
) -> Iterable[tuple[int, int]]:
    """Pairs of work and call in their order; the first pieces of work may have been issued before the trace begins."""
    for earlier in range(max(0, len(begun) - len(waiting)), len(begun)):
        pairs = list(zip(begun[earlier:], waiting, strict=False))
        if all(calls[call].start <= work[k].start for k, call in pairs):
            return pairs
    return []
