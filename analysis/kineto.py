"""Traces of ``torch.profiler`` (Kineto's Chrome JSON, also gzipped) as Timelines; torch is not needed to read them.

What a moment of a thread is for is said by the innermost event that tells a kind:

* a ``record_function`` range whose name starts with one of our kinds, ``InverseComp: invert A of conv1``: K-FAC makes
  them itself while a profiler runs (:func:`kfac.recording.profiler_range`); one of communication is around the call
  that issues it, which is work of what is around that;
* ``autograd::engine::evaluate_function``: ``BP``;
* a factorisation or inverse of ``torch.linalg`` outside of such ranges: ``InverseComp``;
* any other operator up to the end of the last backward pass: ``FF``; after it, in the optimizer and where batches are
  fetched: no kind.

Collectives are the ``gloo:`` ranges of the communication threads, or the ``nccl`` kernels. Their kind is that of the
range in which they were issued; in none it is ``GradComm``, but for barriers, which have no kind, and broadcasts, which
are ``InverseComm`` unless the trace has ranges of communication and they are not in any. Where there are kernels, they
are the compute lane, each of the kind of the moment that launched it (Kineto's correlation ids); else the operators of
the thread that trains are.
"""

from __future__ import annotations

import gzip
import json
import math
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from analysis import gloo
from analysis.kineto_labels import BACKWARD, NOTHING, Label, Rule, collective_label, is_message, label_of
from kfac.named_flows import named_flows
from kfac.timeline import COMMUNICATION_KINDS, COMMUNICATION_LANE, COMPUTE_LANE, Span, Timeline

_STEP = re.compile(r"ProfilerStep#(\d+)")
_COLLECTIVE = re.compile(r"(?:gloo:|nccl)", re.IGNORECASE)
_RANGE = "user_annotation"
_HOST = ("cpu_op", _RANGE)
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
    shapes: str = ""  # of what it is given, where the profiler was asked for them


@dataclass(frozen=True)
class _Segment:
    label: Label
    start: float
    end: float


_start = attrgetter("start")


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


@dataclass(frozen=True)
class Profiled:
    """What a trace holds.

    Args:
        timelines: the iterations by the profiler's step numbers; the whole trace as 0 without steps.
        starts_ns: the moment of the machine's clock at which each begins, in nanoseconds since 1970.
        machine: its name; empty where the trace does not say it.
    """

    timelines: Mapping[int, Timeline]
    starts_ns: Mapping[int, int]
    machine: str = ""


def from_kineto(data: Any, rules: Sequence[Rule] = (), name: str = "the trace") -> Profiled:
    """The profiled iterations of a trace.

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
        base_ns, machine = int(data.get("baseTimeNanoseconds", 0)), str(data.get("host_name", ""))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{name} is a damaged trace of torch.profiler: {error!r}") from error
    trace = _Trace(events, rules, rank)
    found = trace.timelines()
    if not any(timeline.spans for timeline in found.values()):
        raise ValueError(f"{name} holds no work of a known kind: profile with ProfilerActivity.CPU, or give rules")
    starts_ns = {number: base_ns + round(1e3 * start) for number, start in trace.begins.items()}
    return Profiled(found, starts_ns, machine)


def _event(raw: Any) -> _Event | None:
    if raw.get("ph") != "X" or raw.get("cat") not in (*_HOST, *_LAUNCH, *_DEVICE):
        return None
    start, length = float(raw["ts"]), float(raw.get("dur", 0.0))
    if not (math.isfinite(start) and 0 <= length < math.inf):
        raise ValueError(f"event {raw.get('name')!r} has ts={start} and dur={length}")
    arguments = raw.get("args") or {}
    shapes = ", ".join(re.findall(r"\d+", str(arguments.get("Input Dims", ""))))
    where = raw["pid"], raw["tid"]
    return _Event(str(raw["name"]), raw["cat"], where, start, start + length, arguments.get("correlation"), shapes)


class _Trace:
    def __init__(self, events: Sequence[_Event], rules: Sequence[Rule], rank: int) -> None:
        self.rank = rank
        self.rules = rules
        self.begins: dict[int, float] = {}
        """When the iterations that have been taken begin."""
        self.host: dict[Any, list[_Event]] = defaultdict(list)
        for event in sorted(events, key=lambda e: (e.start, -e.end)):
            if event.category in _HOST:
                self.host[event.thread].append(event)
        self.device = sorted((e for e in events if e.category in _DEVICE), key=_start)
        self.launches = {e.correlation: e for e in events if e.category in _LAUNCH and e.correlation is not None}
        self.told = any(is_message(e.name) for of in self.host.values() for e in of if e.category == _RANGE)
        self._last_backward = _last_backward([event for of in self.host.values() for event in of])
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
        self.begins = {number: start for start, _, number, _ in steps}
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
        return Timeline(tuple(spans), total_s=(end - start) / 1e6, flows=named_flows(spans))

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
            labelled = [(self._at(launch) if launch else NOTHING, event) for launch, event in mine]
            compute = [_Segment(a.computing, e.start, e.end) for a, e in labelled if not _COLLECTIVE.match(e.name)]
            messages = self._messages((a, e) for a, e in labelled if _COLLECTIVE.match(e.name))
            self.begins[number] = begin
            found[number] = self._timeline(begin, free, _joined(compute, 0.0), messages)
        return found

    def _launch(self, event: _Event) -> _Event | None:
        return self.launches.get(event.correlation)

    def _at(self, launch: _Event) -> Label:
        """What the launching thread was doing."""
        place = bisect_right(self.starts.get(launch.thread, []), launch.start) - 1
        segment = self.segments[launch.thread][place] if place >= 0 else None
        return segment.label if segment and launch.start < segment.end else NOTHING

    def _compute_of_host(self, thread: Any, start: float, end: float) -> list[_Segment]:
        """The thread's work in an iteration; between operators of one kind Python works for the same."""
        within = (s for s in self.segments.get(thread, ()) if start <= s.start < end)
        parts = (_Segment(s.label.computing, s.start, s.end) for s in within)
        return _joined((s for s in parts if s.label.kind or s.label.explicit), math.inf)

    def _host_collectives(self) -> list[_Segment]:
        """The ``gloo:`` ranges."""
        everything = [event for of in self.host.values() for event in of]
        work = [e for e in everything if e.name.startswith("gloo:")]
        calls = [e for e in everything if e.name.startswith("c10d::")]
        labels = [self._at(call) for call in calls]
        ours = [label.kind in COMMUNICATION_KINDS for label in labels]
        issued = min((_issued(calls, ours, work, sized) for sized in (True, False)), key=lambda of: of.count(None))
        return self._messages((NOTHING if k is None else labels[k], e) for k, e in zip(issued, work, strict=True))

    def _messages(self, found: Iterable[tuple[Label, _Event]]) -> list[_Segment]:
        """Collectives by the moments that issued them."""
        return [_Segment(collective_label(e.name, issued, self.told), e.start, e.end) for issued, e in found]

    def _segments(self, events: Sequence[_Event]) -> list[_Segment]:
        """A thread's time by what it is for: an event inside another one cuts it."""
        found: list[_Segment] = []
        stack: list[tuple[_Event, Label]] = []
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
            around = stack[-1][1] if stack else Label(None)
            over = event.start >= self._last_backward(event.start)
            stack.append((event, label_of(event.name, event.category == _RANGE, around, self.rules, over)))
        close(math.inf)
        return _joined(found, 0.0)


def _last_backward(events: Sequence[_Event]) -> Callable[[float], float]:
    """Of a moment: when the last backward pass of its iteration ends; never in a trace without one.

    On a GPU backward passes run in a thread of their own.
    """
    ends = [(e.start, e.end) for e in events if e.name.startswith(BACKWARD)]
    if not ends:
        return lambda _: math.inf
    begins = sorted(e.start for e in events if _STEP.fullmatch(e.name))
    last: dict[int, float] = {}
    for start, end in ends:
        number = bisect_right(begins, start)
        last[number] = max(end, last.get(number, end))
    return lambda moment: last.get(bisect_right(begins, moment), -math.inf)


def _step(event: _Event) -> re.Match[str] | None:
    return _STEP.fullmatch(event.name)


def _issued(calls: Sequence[_Event], ours: Sequence[bool], work: Sequence[_Event], sized: bool) -> list[int | None]:
    """Which call issued which work; ``sized``: what they are given has to be of the same shapes."""

    def named(event: _Event) -> str:
        return _plain(event.name) + (event.shapes if sized else "")

    return gloo.issued_by(
        [gloo.Call(named(call), call.start, mine) for call, mine in zip(calls, ours, strict=True)],
        [gloo.Work(named(one), one.start, one.thread) for one in work],
    )


def _plain(name: str) -> str:
    return re.sub(r"[^a-z]", "", name.rsplit(":", maxsplit=1)[-1].lower())


def _joined(segments: Iterable[_Segment], gap: float) -> list[_Segment]:
    """Neighbours of one label that at most ``gap`` microseconds part as one, and the pieces of one range."""
    found: list[_Segment] = []
    for s in sorted(segments, key=_start):
        if found and found[-1].label == s.label and s.start - found[-1].end <= (0.0 if s.label.whole else gap):
            found[-1] = _Segment(s.label, found[-1].start, max(found[-1].end, s.end))
        else:
            found.append(s)
    return found
