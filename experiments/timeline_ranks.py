"""Which ranks of a timeline a picture shows, where there are more than it has room for."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kfac.timeline import COMPUTE_LANE, Span, Timeline

ALIKE = 0.02
"""Ranks are similar if the seconds of their kinds, all together, differ by less than this share of the iteration."""
BUSIEST, LEAST, LAST = "busiest", "least busy", "last to end"


@dataclass(frozen=True)
class Shown:
    """A rank that is drawn.

    Args:
        rank: which one.
        count: how many ranks it stands for, itself included.
        same: whether all of them do exactly the same; else they are those that are most like it.
        role: what it is chosen for, if anything.
    """

    rank: int
    count: int = 1
    same: bool = True
    role: str = ""

    @property
    def remark(self) -> str:
        """What is to say besides its number, if anything."""
        many = f"{'of' if self.same else 'for'} {self.count} {'alike' if self.same else 'similar'}"
        return ", ".join(filter(None, (self.role, many if self.count > 1 else "")))

    @property
    def name(self) -> str:
        """For people, in one line."""
        return f"rank {self.rank}" + (f" ({self.remark})" if self.remark else "")


def without_repeats(timeline: Timeline) -> Timeline:
    """The timeline with ranks that do exactly the same in one set of lanes, with their number."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for rank, spans in _by_rank(timeline).items():
        does = tuple((s.lane, s.kind, s.name, s.start_s, s.end_s, s.critical) for s in spans)
        groups.setdefault(does, []).append(rank)
    counts = {ranks[0]: sum(timeline.rank_counts.get(rank, 1) for rank in ranks) for ranks in groups.values()}
    if len(counts) == len(timeline.ranks):
        return timeline
    return replace(timeline, spans=tuple(s for s in timeline.spans if s.rank in counts), rank_counts=counts)


def shown_ranks(timeline: Timeline, most: int) -> tuple[Shown, ...]:
    """The ranks to draw, in order: all that differ, if these are not more than ``most``.

    Else the one that computes longest, the one that computes least, the one that ends last, and then whichever differs
    most from those chosen, until the rest is similar to one of them (:data:`ALIKE`) or there is no more room. Each
    stands for the ranks that are most like it.

    Raises:
        ValueError: if ``most`` is less than 1.
    """
    if most < 1:
        raise ValueError(f"most={most}: a picture shows at least one rank")
    timeline = without_repeats(timeline)
    counts = {rank: timeline.rank_counts.get(rank, 1) for rank in timeline.ranks}
    if len(counts) <= most:
        return tuple(Shown(rank, count) for rank, count in counts.items())
    spans = _by_rank(timeline)
    busy = {rank: _busy_s(of_rank) for rank, of_rank in spans.items()}
    similar_s = ALIKE * timeline.iteration_s
    roles = dict(list(_extremes(spans, similar_s).items())[:most])
    nearest = {rank: min((_apart_s(busy[rank], busy[c]), c) for c in roles) for rank in counts}
    chosen = list(dict.fromkeys(roles))
    while len(chosen) < most:
        distance_s, other = max((distance_s, -rank) for rank, (distance_s, _) in nearest.items())
        if distance_s < similar_s:
            break
        chosen.append(-other)
        nearest = {rank: min(near, (_apart_s(busy[rank], busy[-other]), -other)) for rank, near in nearest.items()}
    stands_for: Counter[int] = Counter()
    for rank, (_, of) in nearest.items():
        stands_for[rank if rank in chosen else of] += counts[rank]
    return tuple(Shown(r, stands_for[r], stands_for[r] == counts[r], roles.get(r, "")) for r in sorted(chosen))


def said_of(shown: Sequence[Shown], timeline: Timeline) -> str:
    """What a title must say of a choice of ranks; nothing where all that differ are shown."""
    if all(one.same for one in shown) and not any(one.role for one in shown):
        return ""
    total = sum(timeline.rank_counts.get(rank, 1) for rank in timeline.ranks)
    return f"{len(shown)} of {total} ranks, those that differ most; each stands for those most like it"


def _extremes(spans: Mapping[int, Sequence[Span]], similar_s: float) -> dict[int, str]:
    """The ranks with a role: always the busiest, others where they differ from it."""
    computing = {rank: sum(s.duration_s for s in of if s.lane == COMPUTE_LANE) for rank, of in spans.items()}
    end = {rank: max(s.end_s for s in of) for rank, of in spans.items()}
    busiest = max(spans, key=lambda rank: (computing[rank], -rank))
    roles = {busiest: BUSIEST}
    least = min(spans, key=lambda rank: (computing[rank], rank))
    if computing[least] <= computing[busiest] - similar_s and least != busiest:
        roles[least] = LEAST
    last = max(spans, key=lambda rank: (end[rank], -rank))
    if end[last] >= max(end[rank] for rank in roles) + similar_s and last not in roles:
        roles[last] = LAST
    return roles


def _by_rank(timeline: Timeline) -> dict[int, list[Span]]:
    found: dict[int, list[Span]] = defaultdict(list)
    for span in timeline.spans:
        found[span.rank].append(span)
    return found


def _busy_s(spans: Sequence[Span]) -> Mapping[tuple[str, str], float]:
    busy: dict[tuple[str, str], float] = defaultdict(float)
    for span in spans:
        busy[span.lane, span.kind] += span.duration_s
    return busy


def _apart_s(one: Mapping[tuple[str, str], float], other: Mapping[tuple[str, str], float]) -> float:
    return sum(abs(one.get(key, 0.0) - other.get(key, 0.0)) for key in one.keys() | other.keys())
