"""Where the time went between two timelines: pure arithmetic, nothing is read and nothing drawn.

An iteration lasts the sum of what its kinds of work expose, waiting for nothing (``Other``) included
(:meth:`~kfac.timeline.Timeline.breakdown_s`). So the differences of the exposed seconds, over kinds or parts, sum to
the difference of the two iterations: no second is lost, and none is counted twice.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kfac.timeline import COMMUNICATION_KINDS, KINDS, OTHER, Span, Timeline

ALL = "all together"
"""The name of a part that stands for all spans of its kind, where the two sides name them differently."""

_MESSAGE = re.compile(r"(A|G|gradient) message (\d+) (\(\d+ items\))")
Key = TypeVar("Key", bound=Hashable)
Part = tuple[str, str]
"""A kind, and the name of its spans."""


@dataclass(frozen=True)
class Share:
    """What some spans take of an iteration, averaged over the ranks (and over several iterations).

    Args:
        exposed_s: seconds that the iteration is longer for them.
        total_s: seconds that they run, within the iteration.
        spans: how many there are, per rank and iteration.
    """

    exposed_s: float = 0.0
    total_s: float = 0.0
    spans: float = 0.0

    @property
    def hidden_s(self) -> float:
        """Seconds that run while something else owns the time."""
        return max(0.0, self.total_s - self.exposed_s)

    def __add__(self, other: Share) -> Share:
        return Share(self.exposed_s + other.exposed_s, self.total_s + other.total_s, self.spans + other.spans)

    def scaled(self, factor: float) -> Share:
        """All of it times a factor."""
        return Share(factor * self.exposed_s, factor * self.total_s, factor * self.spans)


NOTHING = Share()


@dataclass(frozen=True)
class Difference:
    """One kind, or one part of it, on both sides.

    Args:
        kind: of :data:`~kfac.timeline.KINDS`, or ``Other``.
        name: of the layer or message; empty for a whole kind.
        first, second: its shares of the two timelines; :data:`NOTHING` where it does not occur.
    """

    kind: str
    name: str
    first: Share
    second: Share

    @property
    def exposed_s(self) -> float:
        """By how many seconds it makes the second iteration longer."""
        return self.second.exposed_s - self.first.exposed_s

    @property
    def hidden_s(self) -> float:
        """How many more seconds of it the second hides."""
        return self.second.hidden_s - self.first.hidden_s

    @property
    def total_s(self) -> float:
        """How many more seconds of it the second has in all."""
        return self.second.total_s - self.first.total_s


@dataclass(frozen=True)
class TimelineDiff:
    """Two timelines, or two sets of iterations, compared.

    Args:
        first_s, second_s: seconds of the iterations.
        kinds: every kind that occurs, in the usual order, ``Other`` last.
        parts: every layer and message, the greatest difference of exposed time first.
    """

    first_s: float
    second_s: float
    kinds: tuple[Difference, ...]
    parts: tuple[Difference, ...]

    @property
    def longer_s(self) -> float:
        """By how many seconds the second iteration is longer."""
        return self.second_s - self.first_s


def shares(timelines: Sequence[Timeline], key: Callable[[Span | None], Key]) -> dict[Key, Share]:
    """The shares of spans that have the same key, averaged over ranks and timelines.

    Args:
        timelines: iterations of the same thing.
        key: of a span; of None, the time that no span owns.
    """
    found: dict[Key, Share] = defaultdict(Share)
    for timeline in timelines:
        counts = {rank: timeline.rank_counts.get(rank, 1) for rank in timeline.ranks}
        ranks = sum(counts.values()) or 1
        limit_s = timeline.iteration_s
        for span, seconds in timeline.exposed_s().items():
            found[key(span)] += Share(seconds, seconds if span is None else 0.0)
        for span in timeline.spans:
            within_s = min(span.end_s, limit_s) - min(span.start_s, limit_s)
            found[key(span)] += Share(0.0, within_s, 1.0).scaled(counts[span.rank] / ranks)
    return {of: share.scaled(1.0 / len(timelines)) for of, share in found.items()}


def kind_of(span: Span | None) -> str:
    """The key that gathers spans by kind."""
    return span.kind if span else OTHER


def part_of(span: Span | None) -> Part:
    """The key that gathers spans by kind and name."""
    return (span.kind, span.name) if span else (OTHER, ALL)


def _parts(timelines: Sequence[Timeline]) -> dict[Part, Share]:
    """Shares by part. Messages are numbered anew within what they carry: the plan's own numbers go over all of them,
    so that the one message of gradients would have another name wherever there are more of factors.
    """
    sent = {match[0]: match for t in timelines for s in t.spans if (match := _MESSAGE.fullmatch(s.name))}
    numbers: dict[str, list[int]] = defaultdict(list)
    for match in sorted(sent.values(), key=lambda match: int(match[2])):
        if int(match[2]) not in numbers[match[1]]:
            numbers[match[1]].append(int(match[2]))
    names = {name: f"{m[1]} message #{numbers[m[1]].index(int(m[2])) + 1} {m[3]}" for name, m in sent.items()}
    found: dict[Part, Share] = defaultdict(Share)
    for (kind, name), share in shares(timelines, part_of).items():
        found[kind, names.get(name, name)] += share
    return dict(found)


def difference(first: Iterable[Timeline], second: Iterable[Timeline]) -> TimelineDiff:
    """What makes the second iteration longer or shorter than the first.

    Parts are matched by kind and name; messages by what they carry, their number among those, and how many items. Where
    a kind of computing has no name on both sides (a measured timeline has one forward pass, a simulated one its
    layers), all of it is one part, :data:`ALL`; messages stay what they are.

    Args:
        first, second: one or more iterations each; several are averaged.

    Raises:
        ValueError: if a side has none.
    """
    sides = (tuple(first), tuple(second))
    if not all(sides):
        raise ValueError("a difference needs at least one timeline on each side")
    means_s = [sum(timeline.iteration_s for timeline in side) / len(side) for side in sides]
    kinds = [shares(side, kind_of) for side in sides]
    parts = _matched(*(_parts(side) for side in sides))
    order = [kind for kind in (*KINDS, OTHER) if any(kind in side for side in kinds)]
    return TimelineDiff(
        means_s[0],
        means_s[1],
        tuple(Difference(kind, "", *(side.get(kind, NOTHING) for side in kinds)) for kind in order),
        tuple(sorted(parts, key=lambda part: (-abs(part.exposed_s), -abs(part.total_s), part.kind, part.name))),
    )


def _matched(first: Mapping[Part, Share], second: Mapping[Part, Share]) -> list[Difference]:
    found = []
    for kind in (*KINDS, OTHER):
        mine = {name: share for (of, name), share in first.items() if of == kind}
        yours = {name: share for (of, name), share in second.items() if of == kind}
        if kind not in COMMUNICATION_KINDS and mine and yours and not mine.keys() & yours.keys():
            mine, yours = ({ALL: sum(side.values(), NOTHING)} for side in (mine, yours))
        for name in dict.fromkeys((*mine, *yours)):
            found.append(Difference(kind, name, mine.get(name, NOTHING), yours.get(name, NOTHING)))
    return found
