"""The seconds of each iteration, without waiting for the device inside one."""

from __future__ import annotations

import time
from typing import Any

import torch


class IterationClock:
    """Marks the beginning and end of iterations: by the wall clock, or on a GPU by events in its stream.

    Args:
        device: the device that computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[tuple[Any, Any]] = []
        self._begun: Any = None

    def begin(self) -> None:
        """An iteration begins."""
        self._begun = self._now()

    def end(self) -> None:
        """The iteration ends."""
        self._marks.append((self._begun, self._now()))

    def drain(self) -> list[float]:
        """Seconds of the iterations since the last call; waits for the device, so call it between iterations."""
        marks, self._marks = self._marks, []
        if not self._cuda:
            return [end - begin for begin, end in marks]
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) / 1e3 for begin, end in marks]

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
