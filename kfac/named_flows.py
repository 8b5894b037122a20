"""What waited for what in a measured iteration, as far as the names tell that the engine gives to spans and messages.

A recorder sees when work and messages begin and end, not why. But a message of factors is packed by a span of its own,
and what arrives is taken up by one. Where the names leave a doubt (several updates of running averages may have taken
up a sum), nothing is said.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kfac.timeline import COMPUTE_LANE, Flow, Span

_SUMS = re.compile(r"([AG]) message (\d+) ")
_INVERSES = re.compile(r"(?:inverse of|\d+ inverses up to) (.+)")
_GRADIENTS = re.compile(r"(\d+) preconditioned gradients of rank (\d+)")


def named_flows(spans: Sequence[Span]) -> tuple[Flow, ...]:
    """The flows of a measured timeline of one or more ranks.

    Args:
        spans: as the engine names them, in any order.

    Returns:
        pairs of numbers of ``spans``: from what packs a message to it, and from it to what takes it up.
    """
    ranks: dict[int, _Rank] = defaultdict(_Rank)
    for i in sorted(range(len(spans)), key=lambda i: (spans[i].start_s, spans[i].end_s)):
        span, mine = spans[i], ranks[spans[i].rank]
        (mine.work if span.lane == COMPUTE_LANE else mine.messages)[span.name].append(i)
    pairs = (pair for rank, of in ranks.items() for pair in of.pairs(rank))
    return tuple((a, b) for a, b in pairs if spans[a].end_s <= spans[b].start_s)


@dataclass
class _Rank:
    """One rank's spans by name, each in the order of their starts."""

    work: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    messages: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))

    def pairs(self, rank: int) -> Iterator[Flow]:
        """Candidates; whether the first ends before the second begins is for others to see."""
        yield from self._sums()
        for name, message in self.messages.items():
            if inverses := _INVERSES.fullmatch(name):
                yield from self._one_each(self.work.get(f"pack {inverses[1]}"), message)
                yield from self._one_each(message, self.work.get(f"unpack {inverses[1]}"))
            elif gradients := _GRADIENTS.fullmatch(name):
                if int(gradients[2]) == rank:
                    yield from self._one_each(self.work.get(f"own layers ({gradients[1]})"), message)
                yield from self._one_each(message, self.work.get("KL clip"))

    def _sums(self) -> Iterator[Flow]:
        """Sums of factors are packed in the order of their numbers, and so is the summary behind them."""
        sums = [(match, i) for name, of in self.messages.items() if (match := _SUMS.match(name)) for i in of]
        for side in "AG":
            mine = sorted((int(match[2]), i) for match, i in sums if match[1] == side)
            yield from self._one_each(self.work.get(f"pack {side}"), [i for _, i in mine])
        summary = self.messages.get("summary", [])
        yield from self._one_each(self.work.get("summary"), summary)
        averages = self.work.get("running averages", [])
        if len(averages) == 1:
            yield from ((i, averages[0]) for i in (*(i for _, i in sums), *summary))

    @staticmethod
    def _one_each(before: Sequence[int] | None, after: Sequence[int] | None) -> Iterator[Flow]:
        if before and after and len(before) == len(after):
            yield from zip(before, after, strict=True)
