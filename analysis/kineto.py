"""Traces of ``torch.profiler`` (Kineto's Chrome JSON, also gzipped) as Timelines; torch is not needed to read them.

What a moment of a thread is for is said by the innermost event that tells a kind:

* a ``record_function`` range whose name starts with one of our kinds: ``InverseComp: invert A of conv1``;
* ``autograd::engine::evaluate_function``: ``BP``;
* a factorisation or inverse of ``torch.linalg`` outside of such ranges: ``InverseComp``;
* any other operator up to the end of the last backward pass: ``FF``; after it, and in the optimizer: no kind.

Collectives are the ``gloo:`` ranges of the communication threads, or the ``nccl`` kernels. Their kind is that of the
range in which they were issued, else ``InverseComm`` for a broadcast and ``GradComm`` for the others. Where there are
kernels, they are the compute lane, each of the kind of the moment that launched it (Kineto's correlation ids); else the
operators of the thread that trains are.
"""

from __future__ import annotations

import gzip
import json
import math
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from kfac.timeline import COMMUNICATION_KINDS, COMMUNICATION_LANE, COMPUTE_LANE, KINDS, Span, Timeline

Rule = tuple[re.Pattern[str], str]
"""Events whose names a pattern finds are of this kind."""

_RANGE = re.compile(rf"({'|'.join(KINDS)})\b\W*(.*)")
_STEP = re.compile(r"ProfilerStep#(\d+)")
_COLLECTIVE = re.compile(r"(?:gloo:|nccl)", re.IGNORECASE)
_COLLECTIVE_NAME = re.compile(
    r"(?:gloo:|ncclDevKernel_|ncclKernel_|nccl:)([A-Za-z]+(?:_(?!Sum|Ring|RING|Tree|TREE|LL)[a-z]+)*)"
)
_INVERSE = re.compile(r"aten::_?(?:linalg_(?:cholesky|eigh|inv|solve|svd|lu|ldl|qr)|cholesky)")
_BACKWARD = "autograd::engine::evaluate_function"
_HOST = ("cpu_op", "user_annotation")
_LAUNCH = ("cuda_runtime", "cuda_driver", "hip_runtime")
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True)
class _Event:
    name: str
    category: str
    thread: tuple[Any, Any]
    start: float
    end: float
    correlation: Any = None


@dataclass(frozen=True)
class _Label:
    """What a moment is for; no kind: nothing of ours."""

    kind: str | None
    name: str = ""
    explicit: bool = False  # said by the user, so that operators inside do not know better


@dataclass(frozen=True)
class _Segment:
    label: _Label
    start: float
    end: float


_NOTHING = _Label(None, explicit=True)
_start = attrgetter("start")


def parse_rules(texts: Iterable[str]) -> list[Rule]:
    """Rules from ``PATTERN=KIND``.

    Raises:
        ValueError: for another form, a kind that there is not, or a pattern that is no regular expression.
    """
    rules = []
    for text in texts:
        pattern, _, kind = text.rpartition("=")
        if not pattern or kind not in KINDS:
            raise ValueError(f"--rule {text}: give PATTERN=KIND with a kind of: {', '.join(KINDS)}")
        try:
            rules.append((re.compile(pattern), kind))
        except re.error as error:
            raise ValueError(f"--rule {text}: {pattern!r} is no regular expression: {error}") from error
    return rules


def load_trace(path: Path) -> Any:
    """The JSON of a trace file, which may be gzipped.

    Raises:
        ValueError: if it cannot be read.
    """
    try:
        data = path.read_bytes()
        return json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    except (OSError, EOFError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as a trace: {error}") from error


def is_kineto(data: Any) -> bool:
    """Whether this is what ``torch.profiler`` exports."""
    return isinstance(data, dict) and "traceEvents" in data and ("schemaVersion" in data or "deviceProperties" in data)


def from_kineto(data: Any, rules: Sequence[Rule] = (), name: str = "the trace") -> dict[int, Timeline]:
    """The profiled iterations of a trace, by the profiler's step numbers; the whole trace as 0 without steps.

    Args:
        data: the trace's JSON.
        rules: what tells kinds before everything else.
        name: of the trace, for errors.

    Raises:
        ValueError: if it is no such trace, or holds no work of a kind that is known.
    """
    if not is_kineto(data):
        raise ValueError(f"{name} is no trace of torch.profiler: it has no schemaVersion and traceEvents")
    try:
        events = [event for raw in data["traceEvents"] if (event := _event(raw)) is not None]
        rank = int((data.get("distributedInfo") or {}).get("rank", 0))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{name} is a damaged trace of torch.profiler: {error!r}") from error
    trace = _Trace(events, rules, rank)
    found = trace.timelines()
    if not any(timeline.spans for timeline in found.values()):
        raise ValueError(f"{name} holds no work of a known kind: profile with ProfilerActivity.CPU, or give rules")
    return found


def _event(raw: Any) -> _Event | None:
    if raw.get("ph") != "X" or raw.get("cat") not in (*_HOST, *_LAUNCH, *_DEVICE):
        return None
    start, length = float(raw["ts"]), float(raw.get("dur", 0.0))
    if not (math.isfinite(start) and 0 <= length < math.inf):
        raise ValueError(f"event {raw.get('name')!r} has ts={start} and dur={length}")
    correlation = (raw.get("args") or {}).get("correlation")
    return _Event(str(raw["name"]), raw["cat"], (raw["pid"], raw["tid"]), start, start + length, correlation)


class _Trace:
    def __init__(self, events: Sequence[_Event], rules: Sequence[Rule], rank: int) -> None:
        self.rank = rank
        self.rules = rules
        self.host: dict[Any, list[_Event]] = defaultdict(list)
        for event in sorted(events, key=lambda e: (e.start, -e.end)):
            if event.category in _HOST:
                self.host[event.thread].append(event)
        self.device = sorted((e for e in events if e.category in _DEVICE), key=_start)
        self.launches = {e.correlation: e for e in events if e.category in _LAUNCH and e.correlation is not None}
        self.segments = {thread: self._segments(of) for thread, of in self.host.items()}
        self.starts = {thread: [s.start for s in of] for thread, of in self.segments.items()}

    def timelines(self) -> dict[int, Timeline]:
        steps = sorted((e.start, e.end, int(m[1]), t) for t, of in self.host.items() for e in of if (m := _step(e)))
        everything = [*self.device, *(e for of in self.host.values() for e in of)]
        if not everything:
            return {}
        if not steps:
            busiest = max(self.host, key=lambda t: sum(s.end - s.start for s in self.segments[t]), default=None)
            steps = [(min(e.start for e in everything), max(e.end for e in everything), 0, busiest)]
        if self.device:
            return self._of_device([step[:3] for step in steps])
        messages = self._host_collectives()
        return {n: self._timeline(a, b, self._compute_of_host(thread, a, b), messages) for a, b, n, thread in steps}

    def _timeline(
        self, start: float, end: float, compute: Iterable[_Segment], messages: Iterable[_Segment]
    ) -> Timeline:
        """The spans that begin within the iteration, each lane one after the other."""
        spans = []
        for lane, segments in ((COMPUTE_LANE, compute), (COMMUNICATION_LANE, messages)):
            free = start
            for s in sorted(segments, key=lambda s: (s.end, s.start)):
                if s.label.kind and start <= s.start < end and s.end > free:
                    begin, until = (round((t - start) / 1e6, 12) for t in (max(s.start, free), s.end))
                    spans.append(Span(self.rank, lane, s.label.kind, s.label.name, begin, until))
                    free = s.end
        return Timeline(tuple(spans), total_s=(end - start) / 1e6)

    def _of_device(self, steps: Sequence[tuple[float, float, int]]) -> dict[int, Timeline]:
        """Iterations of kernels: each from where the one before has left the device free to where it has itself."""
        launched = [(self._launch(event), event) for event in self.device]
        found: dict[int, Timeline] = {}
        free = -math.inf
        for start, end, number in steps:
            mine = [(s, e) for s, e in launched if start <= (e.start if s is None else s.start) < end]
            before = max((e.end for s, e in launched if (e.start if s is None else s.start) < start), default=free)
            begin = max(start, before)
            free = max([end, *(e.end for _, e in mine)])
            compute, messages = [], []
            for launch, event in mine:
                label = self._at(launch) if launch else _NOTHING
                if _COLLECTIVE.match(event.name):
                    messages.append(_Segment(_collective(event.name, label), event.start, event.end))
                elif label.kind not in (None, *COMMUNICATION_KINDS):
                    compute.append(_Segment(label, event.start, event.end))
            found[number] = self._timeline(begin, free, _joined(compute, 0.0), messages)
        return found

    def _launch(self, event: _Event) -> _Event | None:
        return self.launches.get(event.correlation)

    def _at(self, launch: _Event) -> _Label:
        """What the launching thread was doing."""
        place = bisect_right(self.starts.get(launch.thread, []), launch.start) - 1
        segment = self.segments[launch.thread][place] if place >= 0 else None
        return segment.label if segment and launch.start < segment.end else _NOTHING

    def _compute_of_host(self, thread: Any, start: float, end: float) -> list[_Segment]:
        """The thread's work in an iteration; between operators of one kind Python works for the same."""
        within = (s for s in self.segments.get(thread, ()) if start <= s.start < end)
        parts = _joined((s for s in within if s.label.kind or s.label.explicit), math.inf)
        return [s for s in parts if s.label.kind not in (None, *COMMUNICATION_KINDS)]

    def _host_collectives(self) -> list[_Segment]:
        """The ``gloo:`` ranges; those of one name were issued in the order in which they began."""
        done, issued = defaultdict(list), defaultdict(list)
        for event in sorted((e for of in self.host.values() for e in of), key=_start):
            if event.name.startswith("gloo:"):
                done[_plain(event.name)].append(event)
            elif event.name.startswith("c10d::"):
                issued[_plain(event.name)].append(event)
        found = []
        for name, events in done.items():
            calls = issued[name] if len(issued[name]) == len(events) else [None] * len(events)
            for event, call in zip(events, calls, strict=True):
                label = self._at(call) if call else _NOTHING
                found.append(_Segment(_collective(event.name, label), event.start, event.end))
        return found

    def _segments(self, events: Sequence[_Event]) -> list[_Segment]:
        """A thread's time by what it is for: an event inside another one cuts it."""
        last_backward = self._last_backward(events)
        found: list[_Segment] = []
        stack: list[tuple[_Event, _Label]] = []
        cursor = -math.inf

        def emit(until: float) -> None:
            nonlocal cursor
            if stack and until > cursor:
                found.append(_Segment(stack[-1][1], cursor, until))
            cursor = max(cursor, until)

        def close(until: float) -> None:
            while stack and stack[-1][0].end <= until:
                emit(stack[-1][0].end)
                stack.pop()

        for event in events:
            close(event.start)
            emit(event.start)
            stack.append((event, self._label(event, stack[-1][1] if stack else _Label(None), last_backward)))
        close(math.inf)
        return _joined(found, 0.0)

    def _last_backward(self, events: Sequence[_Event]) -> Callable[[float], float]:
        """Of a moment: when the last backward pass of its iteration ends; never in a trace without one."""
        ends = [(e.start, e.end) for e in events if e.name.startswith(_BACKWARD)]
        if not ends:
            return lambda _: math.inf
        begins = sorted(e.start for e in events if _STEP.fullmatch(e.name))
        last: dict[int, float] = {}
        for start, end in ends:
            number = bisect_right(begins, start)
            last[number] = max(end, last.get(number, end))
        return lambda moment: last.get(bisect_right(begins, moment), -math.inf)

    def _label(self, event: _Event, around: _Label, last_backward: Callable[[float], float]) -> _Label:
        for pattern, kind in self.rules:
            if pattern.search(event.name):
                return _Label(kind, event.name, explicit=True)
        if event.category == "user_annotation":
            return _of_range(event.name) or around
        return around if around.explicit and around.kind else _of_operator(event, around, last_backward)


def _of_range(name: str) -> _Label | None:
    """What a user's or the optimizer's range says; None: nothing."""
    if match := _RANGE.match(name):
        return _Label(match[1], match[2] or match[1], explicit=True)
    return _NOTHING if name.startswith("Optimizer.") else None


def _of_operator(event: _Event, around: _Label, last_backward: Callable[[float], float]) -> _Label:
    """What an operator is for that no range tells."""
    if event.name.startswith(_BACKWARD):
        return _Label("BP", "backward")
    if event.name.startswith("c10d::"):
        return _NOTHING
    if around.kind not in ("BP", "InverseComp") and _INVERSE.match(event.name):
        return _Label("InverseComp", event.name)
    if around.kind or around is _NOTHING or event.start >= last_backward(event.start):
        return around
    return _Label("FF", "forward")


def _step(event: _Event) -> re.Match[str] | None:
    return _STEP.fullmatch(event.name)


def _plain(name: str) -> str:
    return re.sub(r"[^a-z]", "", name.rsplit(":", maxsplit=1)[-1].lower())


def _collective(name: str, label: _Label) -> _Label:
    """What a collective is for: as the range says in which it was issued."""
    if label.kind in COMMUNICATION_KINDS:
        return label
    match = _COLLECTIVE_NAME.search(name)
    short = match[1] if match else name
    return _Label("InverseComm" if "broadcast" in short.lower() else "GradComm", short)


def _joined(segments: Iterable[_Segment], gap: float) -> list[_Segment]:
    """Neighbours of one label that at most ``gap`` microseconds part as one."""
    found: list[_Segment] = []
    for s in sorted(segments, key=_start):
        if found and found[-1].label == s.label and s.start - found[-1].end <= gap:
            found[-1] = _Segment(s.label, found[-1].start, max(found[-1].end, s.end))
        else:
            found.append(s)
    return found
