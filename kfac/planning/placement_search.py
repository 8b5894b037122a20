"""Our inverse placement: a deterministic search over which factors are broadcast.

A factor that every rank inverts is never worth inverting before one that has to be sent, so every rank inverts its own
factors first and the common ones while broadcasts are under way. What is left to choose is which factors are
broadcast, by whom, and in which order a rank inverts its own. Factors of equal cost are interchangeable: the search
moves in counts per distinct cost. Nothing in it depends on the clock, so every rank finds the same placement.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kfac.planning.placement_model import InverseCosts, Placement, channel_finish_s, compute_finish_s

_BUDGET = 150_000
"""Broadcasts that the search may evaluate in all: a fraction of a second."""

Counts = tuple[int, ...]
Jobs = list[tuple[float, float, int]]
"""(seconds to invert, seconds to broadcast, factor)"""

_ORDERS: tuple[Callable[[tuple[float, float, int]], tuple[float, ...]], ...] = (
    lambda job: (job[0], job[2]),  # cheapest first: the channel starts early
    lambda job: (-job[1], job[2]),  # dearest broadcast first: the last one is short
)


@dataclass(frozen=True)
class _Candidate:
    finish_s: float
    slack_s: float
    counts: Counts
    order: int


def optimized_placement(costs: InverseCosts, world_size: int, baselines: Sequence[Placement]) -> Placement:
    """The best placement found; never later than any of ``baselines``."""
    search = _Search(costs, world_size)
    found = search.best()
    return min([*baselines, search.placement(found)], key=lambda placement: _finish(placement, costs))


def _finish(placement: Placement, costs: InverseCosts) -> float:
    return max(channel_finish_s(placement, costs), compute_finish_s(placement, costs))


class _Search:
    def __init__(self, costs: InverseCosts, world_size: int) -> None:
        kinds: dict[tuple[float, float], list[int]] = defaultdict(list)
        for i, cost in enumerate(zip(costs.invert_s, costs.broadcast_s, strict=True)):
            kinds[cost].append(i)
        # Dearest inverse first: the order in which the longest-processing-time rule assigns.
        self.kinds = sorted(kinds.items(), key=lambda kind: (-kind[0][0], kind[1]))
        self.total_s = sum(costs.invert_s)
        self.count = len(costs.invert_s)
        self.world_size = world_size
        self.budget = _BUDGET

    def best(self) -> _Candidate:
        best = min(self._starts(), key=_rank)
        improved = True
        while improved and self.budget > 0:
            improved = False
            for counts in self._neighbours(best.counts):
                candidate = self._evaluate(counts)
                if _rank(candidate) < _rank(best):
                    best, improved = candidate, True
                if self.budget <= 0:
                    break
        return best

    def placement(self, candidate: _Candidate) -> Placement:
        owner: list[int | None] = [None] * self.count
        sent = []
        for rank, jobs in enumerate(self._assign(candidate.counts)):
            now = 0.0
            for place, (invert_s, _, i) in enumerate(sorted(jobs, key=_ORDERS[candidate.order])):
                owner[i] = rank
                now += invert_s
                sent.append((now, place, i))
        sequence = [i for _, _, i in sorted(sent)] + [i for i in range(self.count) if owner[i] is None]
        return Placement.from_sequence(owner, sequence, self.world_size)

    def _starts(self) -> Iterator[_Candidate]:
        """Broadcast the factors with the most saved computing per second of channel: every prefix of that order."""
        by_gain = sorted(
            range(len(self.kinds)), key=lambda v: (self.kinds[v][0][1] / (self.kinds[v][0][0] or 1e-30), v)
        )
        counts = [0] * len(self.kinds)
        yield self._evaluate(tuple(counts))
        for v in by_gain:
            counts[v] = len(self.kinds[v][1])
            yield self._evaluate(tuple(counts))

    def _neighbours(self, counts: Counts) -> Iterator[Counts]:
        for v, (_, factors) in enumerate(self.kinds):
            for step in (1, -1, 4, -4):
                if 0 <= counts[v] + step <= len(factors):
                    yield (*counts[:v], counts[v] + step, *counts[v + 1 :])

    def _assign(self, counts: Counts) -> list[Jobs]:
        jobs: list[Jobs] = [[] for _ in range(min(self.world_size, max(1, sum(counts))))]
        loads = [(0.0, rank) for rank in range(len(jobs))]
        for ((invert_s, broadcast_s), factors), count in zip(self.kinds, counts, strict=True):
            for i in factors[:count]:
                load, rank = loads[0]
                heapq.heapreplace(loads, (load + invert_s, rank))
                jobs[rank].append((invert_s, broadcast_s, i))
        return jobs

    def _evaluate(self, counts: Counts) -> _Candidate:
        jobs = self._assign(counts)
        self.budget -= len(_ORDERS) * (sum(counts) + 20)
        local = self.total_s - sum(c * n for ((c, _), _), n in zip(self.kinds, counts, strict=True))
        compute = local + max(sum(job[0] for job in own) for own in jobs)
        candidates = []
        for number, order in enumerate(_ORDERS):
            finishes = []
            for own in jobs:
                now = 0.0
                for invert_s, broadcast_s, _ in sorted(own, key=order):
                    now += invert_s
                    finishes.append((now, broadcast_s))
            channel = 0.0
            for finish, broadcast_s in sorted(finishes):
                channel = max(channel, finish) + broadcast_s
            candidates.append(_Candidate(max(channel, compute), channel + compute, counts, number))
        return min(candidates, key=_rank)


def _rank(candidate: _Candidate) -> tuple[float, float, Counts, int]:
    return candidate.finish_s, candidate.slack_s, candidate.counts, candidate.order
