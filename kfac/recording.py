"""Recording one iteration's timeline without changing it: clocks are read, nothing is waited for before its end.

While ``torch.profiler`` runs, the same work is in ranges of its trace, whether a timeline is recorded or not.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd import profiler

from kfac.communication import Work
from kfac.named_flows import named_flows
from kfac.timeline import COMMUNICATION_LANE, COMPUTE_LANE, Span, Timeline

_NO_RANGE = nullcontext()


def profiler_range(kind: str, name: str) -> AbstractContextManager[Any]:
    """A range ``KIND: name`` of the traces of ``torch.profiler``, as :mod:`analysis.kineto` reads them.

    Without a profiler it is nothing, for two tenths of a microsecond: a range costs microseconds also where nobody
    looks. So it is in code that is being compiled, where torch would warn of it, and compile anew for each profiler.
    """
    if torch.compiler.is_compiling() or not profiler._is_profiler_enabled:
        return _NO_RANGE
    return profiler.record_function(f"{kind}: {name}")


class _HostClock:
    """Moments of work on the CPU: the wall clock."""

    def here(self) -> None:
        return None

    def now(self, _: None = None) -> float:
        return time.perf_counter()

    def when_done(self, work: Work, moment: list[float]) -> None:
        work.on_done(lambda: moment.append(time.perf_counter()))

    def synchronize(self) -> None:
        pass

    def elapsed_s(self, start: float, moment: float) -> float:
        return moment - start


class _CudaClock:
    """Moments of work on a GPU: events on the stream that does it; the host is never blocked before the end."""

    def __init__(self) -> None:
        self._probe = torch.cuda.Stream()

    def here(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream()

    def now(self, stream: torch.cuda.Stream | None = None) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream or torch.cuda.current_stream())
        return event

    def when_done(self, work: Work, moment: list[Any]) -> None:
        # wait() makes the current stream wait for the collective: on a stream of its own that delays nothing.
        with torch.cuda.stream(self._probe):
            work.wait()
            event = torch.cuda.Event(enable_timing=True)
            event.record(self._probe)
        moment.append(event)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def elapsed_s(self, start: torch.cuda.Event, moment: torch.cuda.Event) -> float:
        return float(start.elapsed_time(moment)) / 1e3


@dataclass
class _Open:
    kind: str
    name: str
    since: Any
    where: Any
    """The stream that does the work."""


@dataclass
class _Flight:
    kind: str
    name: str
    issued: Any
    done: list[Any] = field(default_factory=list)


class Recorder:
    """Records spans between :meth:`start` and :meth:`stop`; outside of that everything is a no-op.

    Args:
        device: the device whose work is recorded.
        rank: this process.
    """

    def __init__(self, device: torch.device | str = "cpu", rank: int = 0) -> None:
        self.rank = rank
        self._clock: Any = _CudaClock() if torch.device(device).type == "cuda" else _HostClock()
        self._lock = threading.Lock()
        self.active = False
        self._reset()

    def _reset(self) -> None:
        self._stack: list[_Open] = []
        self._spans: list[tuple[str, str, Any, Any]] = []
        self._flights: list[_Flight] = []

    def start(self) -> None:
        """Begin an iteration."""
        self._reset()
        self.active = True
        self._origin = self._clock.now()

    @contextmanager
    def span(self, kind: str, name: str) -> Iterator[None]:
        """Record the enclosed work on the compute lane; a span inside another one cuts it in two.

        Work on several streams of a GPU at once takes turns on the lane, in the order in which it ends.
        """
        with profiler_range(kind, name):
            if not self.active:
                yield
                return
            self._cut()
            self._stack.append(_Open(kind, name, self._clock.now(), self._clock.here()))
            try:
                yield
            finally:
                if self.active:
                    self._cut()
                    self._stack.pop()
                    if self._stack:
                        self._stack[-1].since = self._clock.now(self._stack[-1].where)

    def _cut(self) -> None:
        if self._stack:
            top = self._stack[-1]
            self._spans.append((top.kind, top.name, top.since, self._clock.now(top.where)))

    def flight(self, kind: str, name: str, issue: Callable[[], Work]) -> Work:
        """Issue a collective and record it until it is done, on the communication lane.

        Args:
            kind, name: of the span.
            issue: starts the collective; in a profiler's trace it is what the range encloses.

        Returns:
            the collective.
        """
        # From before it is issued: other threads may carry it out before the call returns.
        flight = _Flight(kind, name, self._clock.now()) if self.active else None
        with profiler_range(kind, name):
            work = issue()
        if flight is not None:
            self._flights.append(flight)
            self._clock.when_done(work, flight.done)
        return work

    def stop(self) -> Timeline:
        """End the iteration and return its timeline (seconds from :meth:`start`)."""
        end = self._clock.now()
        self.active = False
        self._clock.synchronize()
        elapsed = self._clock.elapsed_s
        total_s = elapsed(self._origin, end)
        computing = [
            (kind, name, elapsed(self._origin, since), elapsed(self._origin, until))
            for kind, name, since, until in self._spans
        ]
        messages = [
            (f.kind, f.name, elapsed(self._origin, f.issued), elapsed(self._origin, f.done[0]) if f.done else total_s)
            for f in self._flights
        ]
        spans = self._in_turn(COMPUTE_LANE, computing, total_s) + self._in_turn(COMMUNICATION_LANE, messages, total_s)
        return Timeline(tuple(spans), total_s=total_s, flows=named_flows(spans))

    def _in_turn(self, lane: str, work: list[tuple[str, str, float, float]], limit_s: float) -> list[Span]:
        """What may have been under way at once, in the order of its end: each has the lane from when it could start."""
        spans, free_s = [], 0.0
        for kind, name, start_s, end_s in sorted(work, key=lambda one: (min(one[3], limit_s), one[2])):
            until_s = min(end_s, limit_s)
            spans.append(Span(self.rank, lane, kind, name, min(max(start_s, free_s), until_s), until_s))
            free_s = max(free_s, until_s)
        return spans
