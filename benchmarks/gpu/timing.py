"""Seconds of work on a device: events and streams on a GPU, the wall clock and one thread on a CPU.

Nothing but this module knows of streams and events. The host waits for the device only around what is timed.
"""

from __future__ import annotations

import statistics
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

Action = Callable[[], object]
PATIENCE_S = 0.5
"""No more repeats are begun of what has taken this long, but always one."""


class Timer(ABC):
    """Times work on one device.

    Args:
        device: the device.
        repeats: of everything that is timed, after one for warm-up; fewer of what takes long.
    """

    precisions: tuple[str, ...]
    """In which products of float32 matrices may be computed here."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self.device, self.repeats = device, repeats

    @abstractmethod
    def seconds(self, action: Action) -> float:
        """Median seconds of ``action``, as the device sees it."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the device has done everything."""

    def _warm(self, action: Action) -> int:
        """Do it once; how often it shall be repeated."""
        self.synchronize()
        start = time.perf_counter()
        action()
        self.synchronize()
        return max(1, min(self.repeats, int(PATIENCE_S / max(time.perf_counter() - start, 1e-9))))

    @abstractmethod
    def seconds_beside(self, action: Action, other: Action) -> float:
        """Median seconds of ``action`` while ``other`` is repeated beside it, from before its start beyond its end."""

    @abstractmethod
    def together(self, actions: Sequence[Action], streams: int) -> Action:
        """One action that does all of ``actions``, in turn on so many streams of their own.

        What an action returns, if it can be called, waits for its result: it is called once all have been issued.
        """

    @abstractmethod
    def host_buffer(self, elements: int) -> torch.Tensor:
        """Memory of the host that the device copies to and from without a detour."""

    @property
    @abstractmethod
    def hardware(self) -> dict[str, object]:
        """The device, for records."""


class HostTimer(Timer):
    """The CPU that this process runs on."""

    precisions = ("float32",)

    def seconds(self, action: Action) -> float:  # noqa: D102
        return statistics.median(self._elapsed_s(action) for _ in range(self._warm(action)))

    def synchronize(self) -> None:  # noqa: D102
        pass

    def seconds_beside(self, action: Action, other: Action) -> float:  # noqa: D102
        ended, begun = threading.Event(), threading.Event()

        def repeat() -> None:
            while not ended.is_set():
                other()
                begun.set()

        thread = threading.Thread(target=repeat)
        thread.start()
        begun.wait()
        try:
            return self.seconds(action)
        finally:
            ended.set()
            thread.join()

    def together(self, actions: Sequence[Action], streams: int) -> Action:  # noqa: D102
        def run() -> None:
            for result in [action() for action in actions]:
                _finish(result)

        return run

    def host_buffer(self, elements: int) -> torch.Tensor:  # noqa: D102
        return torch.empty(elements)

    @property
    def hardware(self) -> dict[str, object]:  # noqa: D102
        return {"hardware": "CPU", "threads": torch.get_num_threads()}

    def _elapsed_s(self, action: Action) -> float:
        start = time.perf_counter()
        action()
        return time.perf_counter() - start


class CudaTimer(Timer):
    """One GPU: events on the current stream."""

    precisions = ("float32", "tf32")

    def seconds(self, action: Action) -> float:  # noqa: D102
        pairs = [self._timed(action) for _ in range(self._warm(action))]
        self.synchronize()
        return self._median_s(pairs)

    def synchronize(self) -> None:  # noqa: D102
        torch.cuda.synchronize(self.device)

    def seconds_beside(self, action: Action, other: Action) -> float:  # noqa: D102
        here, beside = torch.cuda.current_stream(self.device), torch.cuda.Stream(self.device)
        with torch.cuda.stream(beside):
            other_s = self.seconds(other)
        # Twice as long as it takes alone at three times its time, and some for the host's own delay.
        count = 4 + int(6 * self.seconds(action) / other_s)
        pairs = []
        for _ in range(self._warm(action)):
            self.synchronize()
            with torch.cuda.stream(beside):
                begun = torch.cuda.Event()
                other()
                begun.record()
                for _ in range(count):
                    other()
            here.wait_event(begun)
            pairs.append(self._timed(action))
        self.synchronize()
        return self._median_s(pairs)

    def together(self, actions: Sequence[Action], streams: int) -> Action:  # noqa: D102
        pool = [torch.cuda.Stream(self.device) for _ in range(streams)]

        def run() -> None:
            here = torch.cuda.current_stream(self.device)
            for stream in pool:
                stream.wait_stream(here)
            results = []
            for number, action in enumerate(actions):
                with torch.cuda.stream(pool[number % streams]):
                    results.append(action())
            for number, result in enumerate(results):
                with torch.cuda.stream(pool[number % streams]):
                    _finish(result)
            for stream in pool:
                here.wait_stream(stream)

        return run

    def host_buffer(self, elements: int) -> torch.Tensor:  # noqa: D102
        return torch.empty(elements, pin_memory=True)

    @property
    def hardware(self) -> dict[str, object]:  # noqa: D102
        properties = torch.cuda.get_device_properties(self.device)
        return {
            "hardware": properties.name,
            "multiprocessors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }

    def _timed(self, action: Action) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        action()
        end.record()
        return start, end

    def _median_s(self, pairs: Sequence[tuple[torch.cuda.Event, torch.cuda.Event]]) -> float:
        return float(statistics.median(start.elapsed_time(end) for start, end in pairs)) / 1e3


def timer_for(device: str, repeats: int) -> Timer:
    """The timer of a device, ``cpu`` or ``cuda``."""
    kind = CudaTimer if device == "cuda" else HostTimer
    return kind(torch.device(device), repeats)


@contextmanager
def precision(name: str) -> Iterator[None]:
    """Products of float32 matrices in ``float32`` or ``tf32``."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _finish(result: object) -> None:
    if callable(result):
        result()
