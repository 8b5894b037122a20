"""Our inverse placement: a deterministic search over what is broadcast, by whom and when.

A factor that every rank inverts is never worth inverting before one that has to be sent, so every rank inverts its own
factors first and the common ones while broadcasts are under way. What is left to choose is which factors are broadcast,
by whom, and in which order a rank inverts its own. The search has two stages: how many factors of each cost are
broadcast, with the longest-processing-time rule as the assignment; then single moves of factors. Nothing in it depends
on the clock, so it finds the same placement everywhere.
"""

from __future__ import annotations

import heapq
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from kfac.planning.placement_model import InverseCosts, Placement, channel_finish_s, compute_finish_s

_STAGE_BUDGET = 150_000
"""Broadcasts that each stage may evaluate: about a tenth of a second."""

_FEW = range(9, 13)
_FEW_BUDGET = 1_500_000
"""So many factors have few enough placements for the second stage to find the best one, in half a second (with fewer
factors a tenth of that does; with more it finds no better ones)."""

_PATIENCE = 20
"""Moves per factor without a better placement after which the second stage kicks."""

_KICKS = 3
"""Moves of one kick, which are kept whatever they do."""

_STEPS = 4
"""Steps in which the first stage's starting points take up the factors of one cost."""

Counts = tuple[int, ...]


class _Job(NamedTuple):
    """A factor that one rank inverts and broadcasts."""

    invert_s: float
    broadcast_s: float
    factor: int


class _Value(NamedTuple):
    """How good an assignment is, compared in this order."""

    finish_s: float
    slack_s: float
    """Channel's plus ranks' finish: of two equal finishes the one that leaves more room is better."""


_ORDERS: tuple[Callable[[_Job], tuple[float, int]], ...] = (
    lambda job: (job.invert_s, job.factor),  # cheapest first: the channel starts early
    lambda job: (-job.broadcast_s, job.factor),  # dearest broadcast first: the last one is short
)


def optimized_placement(costs: InverseCosts, world_size: int, baselines: Sequence[Placement]) -> Placement:
    """The best placement found; never later than any of ``baselines``."""

    def finish_s(placement: Placement) -> float:
        return max(channel_finish_s(placement, costs), compute_finish_s(placement, costs))

    return min([_searched(costs, world_size), *baselines], key=finish_s)


@lru_cache(maxsize=64)  # choosing a schedule asks for the same one several times
def _searched(costs: InverseCosts, world_size: int) -> Placement:
    search = _Search(costs, world_size)
    return search.placement(search.moved(search.counted()))


class _Search:
    def __init__(self, costs: InverseCosts, world_size: int) -> None:
        kinds: dict[tuple[float, float], list[int]] = defaultdict(list)
        for i, cost in enumerate(zip(costs.invert_s, costs.broadcast_s, strict=True)):
            kinds[cost].append(i)
        # Factors of equal cost are interchangeable; dearest first, as the longest-processing-time rule assigns.
        self.kinds = sorted(kinds.items(), key=lambda kind: (-kind[0][0], kind[1]))
        self.total_s = sum(costs.invert_s)
        self.costs = costs
        self.count = len(costs.invert_s)
        self.world_size = world_size

    def value(self, ranks: Sequence[Sequence[_Job]]) -> _Value:
        """Of an assignment: per rank its own factors in order; all others are inverted by every rank."""
        finishes: list[tuple[float, float]] = []
        owned = longest = 0.0
        for own in ranks:
            now = 0.0
            for invert_s, broadcast_s, _ in own:
                now += invert_s
                finishes.append((now, broadcast_s))
            owned += now
            longest = max(longest, now)
        finishes.sort()
        channel = self.costs.channel_free_s if finishes else 0.0
        for finish, broadcast_s in finishes:
            channel = (channel if channel > finish else finish) + broadcast_s
        compute = self.total_s - owned + longest
        return _Value(max(channel, compute), channel + compute)

    def placement(self, ranks: Sequence[Sequence[_Job]]) -> Placement:
        """The assignment as a placement."""
        owner: list[int | None] = [None] * self.count
        sent = []
        for rank, own in enumerate(ranks):
            now = 0.0
            for place, job in enumerate(own):
                owner[job.factor] = rank
                now += job.invert_s
                sent.append((now, place, job.factor))
        sequence = [i for _, _, i in sorted(sent)] + [i for i in range(self.count) if owner[i] is None]
        return Placement.from_sequence(owner, sequence, self.world_size)

    def counted(self) -> list[list[_Job]]:
        """First stage: descend over how many factors of each cost are broadcast."""
        best, counts, ranks = min(map(self._built, self._prefixes()), key=lambda built: built[:2])
        spent, improved = 0, True
        while improved and spent < _STAGE_BUDGET:
            improved = False
            for neighbour in self._neighbours(counts):
                built = self._built(neighbour)
                spent += len(_ORDERS) * (sum(neighbour) + 20)
                if built[0] < best:
                    best, counts, ranks = built
                    improved = True
                if spent >= _STAGE_BUDGET:
                    break
        return ranks

    def moved(self, ranks: list[list[_Job]]) -> list[list[_Job]]:
        """Second stage: move single factors between ranks, places and "every rank", and keep what is not worse; when
        that has not helped for a while, kick the best so far and go on from there.
        """
        owned = {job.factor for own in ranks for job in own}
        # The last list holds what every rank inverts; its order means nothing.
        lists = [*ranks, *([] for _ in range(min(self.world_size, self.count) - len(ranks)))]
        lists.append([self._job(i) for i in range(self.count) if i not in owned])
        dice = random.Random(0)
        present = best = self.value(lists[:-1])
        best_lists = [list(own) for own in lists]
        spent = stale = kicks = 0
        budget = _FEW_BUDGET if self.count in _FEW else _STAGE_BUDGET
        while self.count and spent < budget:
            undo = _move(lists, dice)
            spent += self.count + len(lists)
            value = self.value(lists[:-1])
            if kicks or value <= present:
                kicks = max(0, kicks - 1)
                present = value
            else:
                undo()
            stale += 1
            if value < best and value == present:
                best, best_lists, stale = value, [list(own) for own in lists], 0
            elif stale > _PATIENCE * self.count:
                lists, present, stale, kicks = [list(own) for own in best_lists], best, 0, _KICKS
        return best_lists[:-1]

    def _job(self, i: int) -> _Job:
        return _Job(self.costs.invert_s[i], self.costs.broadcast_s[i], i)

    def _prefixes(self) -> Iterator[Counts]:
        """Broadcast the kinds with the most computing saved per second of the channel, or the dearest to invert: every
        prefix of either order, and steps within a kind.
        """

        def price(v: int) -> float:
            (invert_s, broadcast_s), _ = self.kinds[v]
            return broadcast_s / invert_s if invert_s else float("inf")

        yield (0,) * len(self.kinds)
        for order in (sorted(range(len(self.kinds)), key=price), range(len(self.kinds))):
            counts = [0] * len(self.kinds)
            for v in order:
                every = len(self.kinds[v][1])
                for step in range(1, _STEPS + 1):
                    if counts[v] < every * step // _STEPS:
                        counts[v] = every * step // _STEPS
                        yield tuple(counts)

    def _neighbours(self, counts: Counts) -> Iterator[Counts]:
        for v, (_, factors) in enumerate(self.kinds):
            for step in (1, -1, 4, -4):
                if 0 <= counts[v] + step <= len(factors):
                    yield (*counts[:v], counts[v] + step, *counts[v + 1 :])

    def _built(self, counts: Counts) -> tuple[_Value, Counts, list[list[_Job]]]:
        """The better order of the longest-processing-time assignment of these counts."""
        ranks: list[list[_Job]] = [[] for _ in range(min(self.world_size, max(1, sum(counts))))]
        loads = [(0.0, rank) for rank in range(len(ranks))]
        for (_, factors), count in zip(self.kinds, counts, strict=True):
            for i in factors[:count]:
                load, rank = loads[0]
                heapq.heapreplace(loads, (load + self.costs.invert_s[i], rank))
                ranks[rank].append(self._job(i))
        ordered = [[sorted(own, key=order) for own in ranks] for order in _ORDERS]
        value, number = min((self.value(candidate), number) for number, candidate in enumerate(ordered))
        return value, counts, ordered[number]


def _move(lists: list[list[_Job]], dice: random.Random) -> Callable[[], None]:
    """Move one factor to another place, or exchange two; what is returned takes the move back."""
    source = dice.choice([own for own in lists if own])
    target = dice.choice(lists)
    place, goal = dice.randrange(len(source)), dice.randrange(len(target) + 1)
    if goal < len(target) and dice.random() < 0.5:

        def exchange() -> None:
            source[place], target[goal] = target[goal], source[place]

        exchange()
        return exchange
    job = source.pop(place)
    goal = min(goal, len(target))
    target.insert(goal, job)

    def back() -> None:
        source.insert(place, target.pop(goal))

    return back
