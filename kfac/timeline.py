"""Timelines: what ran when on which rank, measured or simulated, in one type."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any

KINDS = ("FF", "BP", "GradComm", "FactorComp", "FactorComm", "InverseComp", "InverseComm", "Precondition")
"""Kinds of work, named as in the paper's breakdown figures."""

COMMUNICATION_KINDS = ("GradComm", "FactorComm", "InverseComm")
OTHER = "Other"
"""The breakdown's name for time in which a rank neither computes a recorded kind nor waits for a recorded message."""

KIND_COLORS: Mapping[str, str] = {
    "FF": "#5a5a5a",
    "BP": "#9b9b9b",
    "GradComm": "#faf069",
    "FactorComp": "#00569b",
    "FactorComm": "#6cbdee",
    "InverseComp": "#cf5208",
    "InverseComm": "#f5b945",
    "Precondition": "#b06aa8",
    OTHER: "#f4f4f4",
}
"""One colour per kind in every picture: the hues of Okabe and Ito's colours for the colour-blind, each as light as no
other, so that all can be told apart in grey print; of each pair computing is the darker one."""

COMPUTE_LANE = "compute"
COMMUNICATION_LANE = "communication"


@dataclass(frozen=True)
class Span:
    """One piece of work.

    Args:
        rank: the rank it ran on.
        lane: ``compute`` or ``communication``; spans of one lane of one rank do not overlap.
        kind: one of :data:`KINDS`.
        name: what exactly, for people.
        start_s, end_s: seconds from the iteration's start.
        critical: whether it is on the critical path, as far as that is known (simulated timelines).

    Raises:
        ValueError: for an unknown kind, times that are negative or not finite, or an end before the start.
    """

    rank: int
    lane: str
    kind: str
    name: str
    start_s: float
    end_s: float
    critical: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"unknown span kind {self.kind!r}; kinds: {', '.join(KINDS)}")
        if not 0 <= self.start_s <= self.end_s < math.inf:
            if 0 <= self.end_s < self.start_s < math.inf:
                raise ValueError(f"span {self.name!r} ends before it starts")
            raise ValueError(f"span {self.name!r}: {self.start_s} to {self.end_s} s must be finite and not negative")

    @property
    def duration_s(self) -> float:
        """Seconds from start to end."""
        return self.end_s - self.start_s


_PLACE = attrgetter("rank", "lane", "start_s", "end_s")
Flow = tuple[int, int]
"""The numbers of two spans of a timeline of which the second has waited for the first."""


@dataclass(frozen=True)
class Timeline:
    """The spans of one iteration.

    Args:
        spans: in any order.
        rank_counts: how many ranks each rank that appears stands for (1 where absent): ranks that do the same share
            one set of lanes, so that large worlds stay small.
        total_s: the iteration's seconds where known (measured); else the latest end.
        source: ``measured`` or ``simulated``.
        flows: what is known of who has waited for whom across lanes, as pairs of numbers in ``spans`` as given; they
            become those of the spans in their order.

    Raises:
        ValueError: for a total that is negative or not finite, a rank that stands for less than one, or a flow from or
            to no span, or back in time.
    """

    spans: tuple[Span, ...]
    rank_counts: Mapping[int, int] = field(default_factory=dict, hash=False)
    total_s: float | None = None
    source: str = "measured"
    flows: tuple[Flow, ...] = ()

    def __post_init__(self) -> None:
        if self.total_s is not None and not 0 <= self.total_s < math.inf:
            raise ValueError(f"total_s must be finite and not negative, got {self.total_s}")
        if not all(count >= 1 for count in self.rank_counts.values()):
            raise ValueError(f"every rank stands for at least one, got {dict(self.rank_counts)}")
        self._check_flows()
        order = sorted(range(len(self.spans)), key=[_PLACE(span) for span in self.spans].__getitem__)
        object.__setattr__(self, "spans", tuple(self.spans[i] for i in order))
        if self.flows:
            place = sorted(range(len(order)), key=order.__getitem__)
            object.__setattr__(self, "flows", tuple(sorted((place[a], place[b]) for a, b in self.flows)))

    def _check_flows(self) -> None:
        for a, b in self.flows:
            if not (0 <= a < len(self.spans) and 0 <= b < len(self.spans)):
                raise ValueError(f"a flow from span {a} to {b}, of {len(self.spans)} spans")
            if self.spans[a].end_s > self.spans[b].start_s + 1e-9:  # what traces round to
                raise ValueError(f"a flow from {self.spans[a].name!r} back in time to {self.spans[b].name!r}")

    @property
    def iteration_s(self) -> float:
        """Seconds of the whole iteration."""
        if self.total_s is not None:
            return self.total_s
        return max((s.end_s for s in self.spans), default=0.0)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that appear."""
        return tuple(sorted({s.rank for s in self.spans}))

    def breakdown_s(self) -> dict[str, float]:
        """Exposed seconds per kind, averaged over the ranks; with ``Other`` they sum to :attr:`iteration_s`.

        At every moment a rank's time belongs to the kind its compute lane runs; where that lane is idle, to the message
        that has been in flight longest; else to ``Other``. So communication counts only where it is not hidden, as in
        the paper's breakdowns.
        """
        total = dict.fromkeys((*KINDS, OTHER), 0.0)
        for span, seconds in self.exposed_s().items():
            total[span.kind if span else OTHER] += seconds
        return total

    def exposed_s(self) -> dict[Span | None, float]:
        """:meth:`breakdown_s` by span: its exposed seconds times the share of the ranks that its rank stands for.

        What belongs to no span, ``Other``, is under None. Spans that are never exposed may be left out.
        """
        by_rank: dict[int, list[Span]] = defaultdict(list)
        for span in self.spans:
            by_rank[span.rank].append(span)
        weights = {rank: self.rank_counts.get(rank, 1) for rank in by_rank}
        count = sum(weights.values())
        if count == 0:
            return {None: self.iteration_s}
        total: dict[Span | None, float] = defaultdict(float)
        for rank, weight in weights.items():
            for owner, seconds in self._owners(by_rank[rank]).items():
                total[owner] += weight / count * seconds
        return dict(total)

    def busy_s(self) -> dict[str, float]:
        """Seconds per kind within the iteration, whether hidden or not, averaged over the ranks."""
        weights = {rank: self.rank_counts.get(rank, 1) for rank in self.ranks}
        total = dict.fromkeys(KINDS, 0.0)
        limit_s = self.iteration_s
        for span in self.spans:
            total[span.kind] += weights[span.rank] * (min(span.end_s, limit_s) - min(span.start_s, limit_s))
        return {kind: seconds / max(1, sum(weights.values())) for kind, seconds in total.items()}

    def hidden_s(self) -> dict[str, float]:
        """Seconds of each communication kind that computing hides, averaged over the ranks."""
        busy, exposed = self.busy_s(), self.breakdown_s()
        return {kind: max(0.0, busy[kind] - exposed[kind]) for kind in COMMUNICATION_KINDS}

    def _owners(self, spans: list[Span]) -> dict[Span | None, float]:
        """Seconds of the iteration that each of one rank's spans owns; None: those that none does."""
        result: dict[Span | None, float] = defaultdict(float)
        marks = sorted({0.0, self.iteration_s, *(t for s in spans for t in (s.start_s, s.end_s))})
        marks = [t for t in marks if 0.0 <= t <= self.iteration_s]
        pending = sorted(spans, key=lambda s: s.start_s)
        active: list[Span] = []
        cursor = 0
        for begin, end in pairwise(marks):
            while cursor < len(pending) and pending[cursor].start_s <= begin:
                active.append(pending[cursor])
                cursor += 1
            active = [s for s in active if s.end_s > begin]
            compute = next((s for s in active if s.lane == COMPUTE_LANE), None)
            result[compute or next(iter(active), None)] += end - begin
        return result

    def later(self, seconds: float) -> Timeline:
        """The same some seconds later, after idling for as long."""
        spans = tuple(replace(s, start_s=s.start_s + seconds, end_s=s.end_s + seconds) for s in self.spans)
        return replace(self, spans=spans, total_s=self.iteration_s + seconds)

    def to_chrome_trace(self, path: Path | str) -> None:
        """Write Chrome trace JSON (Perfetto opens it): one process per rank, one thread per lane, whole nanoseconds.

        Flows are arrows between spans of at least a nanosecond; shorter ones do not exist for Perfetto.
        """
        trace = {"traceEvents": list(self._events()), "metadata": self._metadata()}
        Path(path).write_text(json.dumps(trace, separators=(",", ":")) + "\n")

    def _metadata(self) -> dict[str, Any]:
        counts = {str(rank): count for rank, count in self.rank_counts.items()}
        return {"rank_counts": counts, "total_s": self.total_s, "source": self.source, "flows": self.flows}

    def _events(
        self, name: str = "", first_pid: int = 1, first_tid: int = 1, first_flow: int = 1
    ) -> Iterable[dict[str, Any]]:
        lanes = sorted({(s.rank, s.lane) for s in self.spans})
        # Process and thread ids start at 1 and threads are unique over all processes: 0 is special in Perfetto.
        tids = {key: number for number, key in enumerate(lanes, start=first_tid)}
        for (rank, lane), tid in tids.items():
            count = self.rank_counts.get(rank, 1)
            label = f"rank {rank}" + ("" if count == 1 else f" (stands for {count})") + (f", {name}" if name else "")
            yield {"ph": "M", "name": "process_name", "pid": first_pid + rank, "tid": tid, "args": {"name": label}}
            yield {"ph": "M", "name": "thread_name", "pid": first_pid + rank, "tid": tid, "args": {"name": lane}}
        for s in self.spans:
            # Both ends are rounded and the duration derived, so that neighbours do not overlap by a nanosecond.
            start_ns, end_ns = round(s.start_s * 1e9), round(s.end_s * 1e9)
            times = {"ts": start_ns / 1e3, "dur": (end_ns - start_ns) / 1e3}
            identity = {"pid": first_pid + s.rank, "tid": tids[s.rank, s.lane], "cat": s.kind}
            args = {"kind": s.kind, "lane": s.lane, "start_s": s.start_s, "end_s": s.end_s}
            if s.critical:
                args["critical"] = True
            yield {"ph": "X", "name": s.name, **identity, **times, "args": args}
        for number, (a, b) in enumerate(self.flows, start=first_flow):
            begin, end = self.spans[a], self.spans[b]
            last_ns, first_ns = round(begin.end_s * 1e9) - 1, round(end.start_s * 1e9)
            if last_ns < round(begin.start_s * 1e9) or first_ns >= round(end.end_s * 1e9):
                continue
            # Each end belongs to the slice that is open at its moment: a slice is not open any more when it ends. They
            # come behind all slices, as of what has the same moment Perfetto takes in first what stands first.
            for ph, s, ns in (("s", begin, last_ns), ("f", end, first_ns)):
                where = {"pid": first_pid + s.rank, "tid": tids[s.rank, s.lane], "ts": ns / 1e3}
                binding = {"bp": "e"} if ph == "f" else {}
                yield {"ph": ph, "name": "awaited", "cat": "flow", "id": number, **where, **binding}

    @classmethod
    def from_chrome_trace(cls, path: Path | str) -> Timeline:
        """Read what :meth:`to_chrome_trace` wrote.

        Raises:
            ValueError: if the file is no such trace.
        """
        try:
            data = json.loads(Path(path).read_text())
            spans = tuple(
                Span(
                    rank=e["pid"] - 1,
                    lane=(args := e["args"])["lane"],
                    kind=e["cat"],
                    name=e["name"],
                    start_s=args["start_s"],
                    end_s=args["end_s"],
                    critical=bool(args.get("critical")),
                )
                for e in data["traceEvents"]
                if e["ph"] == "X"
            )
            meta = data.get("metadata", {})
            counts = {int(rank): count for rank, count in meta.get("rank_counts", {}).items()}
            flows = tuple((int(a), int(b)) for a, b in meta.get("flows", ()))
            return cls(spans, counts, meta.get("total_s"), meta.get("source", "measured"), flows)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is not a timeline written by this project: {error!r}") from error

    @classmethod
    def merge(cls, timelines: Iterable[Timeline]) -> Timeline:
        """One timeline of several ranks' timelines of the same iteration; the longest total counts."""
        parts = list(timelines)
        totals = [t.total_s for t in parts if t.total_s is not None]
        counts = {rank: count for t in parts for rank, count in t.rank_counts.items()}
        spans = tuple(s for t in parts for s in t.spans)
        firsts = accumulate((len(t.spans) for t in parts), initial=0)
        flows = tuple((first + a, first + b) for first, t in zip(firsts, parts, strict=False) for a, b in t.flows)
        return cls(spans, counts, max(totals, default=None), parts[0].source if parts else "measured", flows)


def chrome_trace(timelines: Mapping[str, Timeline]) -> dict[str, Any]:
    """Several timelines of one iteration, such as measured and simulated, as one Chrome trace to look at in Perfetto.

    Args:
        timelines: by the names that their processes get; each one's ranks are processes of their own.
    """
    events: list[dict[str, Any]] = []
    pid = tid = flow = 1
    for name, timeline in timelines.items():
        events += timeline._events(name if len(timelines) > 1 else "", pid, tid, flow)
        pid += max(timeline.ranks, default=0) + 1
        tid += len({(s.rank, s.lane) for s in timeline.spans})
        flow += len(timeline.flows)
    return {"traceEvents": events}
