"""A checker of streams without a GPU: what runs before what, by vector clocks, while the engine works on the CPU.

Every operation belongs to the stream that is current; a stream knows how far it is behind each other one: by waiting
for it, by what the host has waited for, by a collective (which waits for the stream that issues it, and is waited for).
Reported are operations that read what another stream has written and is not known to have finished, and memory that is
dropped while a stream that the allocator knows nothing of may still use it.
"""

from __future__ import annotations

import threading
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

MAIN, HOST, CHANNEL = "main", "host", "channel"
WAITS_FOR_THE_DEVICE = ("aten::_local_scalar_dense", "aten::_linalg_eigh", "aten::is_nonzero", "aten::item")

_of_thread = threading.local()


class Streams:
    """What is known on each stream of one rank.

    Attributes:
        problems: what was read too early, or dropped too early, and how often.
        operations: how many were seen.
    """

    def __init__(self) -> None:
        self.clocks: defaultdict[str, defaultdict[str, int]] = defaultdict(lambda: defaultdict(int))
        self.current = MAIN
        self.writer: dict[int, tuple[str, int]] = {}
        self.uses: dict[int, dict[str, int]] = {}
        self.made_on: dict[int, str] = {}
        self.recorded: dict[int, set[str]] = {}
        self.alive: dict[int, StorageWeakRef] = {}
        self.problems: Counter[str] = Counter()
        self.operations = 0

    def wait(self, stream: str, for_what: dict[str, int]) -> None:
        clock = self.clocks[stream]
        for other, moment in for_what.items():
            clock[other] = max(clock[other], moment)

    def host_waits(self) -> None:
        self.wait(HOST, self.clocks[self.current])

    def tick(self, stream: str) -> int:
        self.clocks[stream][stream] += 1
        return self.clocks[stream][stream]

    def seen(self, tensor: Tensor) -> int:
        key = _key(tensor)
        if key not in self.alive:
            self.alive[key] = StorageWeakRef(tensor.untyped_storage())
            self.made_on[key], self.uses[key], self.recorded[key] = self.current, {}, set()
        return key

    def reads(self, tensor: Tensor, stream: str, what: str) -> None:
        written = self.writer.get(_key(tensor))
        if written and written[0] != stream and self.clocks[stream][written[0]] < written[1]:
            self.problems[f"{what} on {stream} of what {written[0]} writes: {_where()}"] += 1

    def drop_what_is_gone(self) -> None:
        for key in [key for key, reference in self.alive.items() if reference.expired()]:
            home = self.made_on.pop(key)
            for stream, moment in self.uses.pop(key).items():
                known = max(self.clocks[home][stream], self.clocks[HOST][stream])
                if stream not in (home, CHANNEL) and stream not in self.recorded[key] and known < moment:
                    self.problems[f"dropped while {stream} uses it, made on {home}"] += 1
            del self.alive[key], self.recorded[key]
            self.writer.pop(key, None)


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _where() -> str:
    frames = [f for f in traceback.extract_stack() if "/kfac/" in f.filename and "/tests/" not in f.filename]
    return " < ".join(f"{f.filename.rpartition('/kfac/')[2]}:{f.lineno}" for f in frames[-3:][::-1])


class _Watch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        streams, kwargs = _of_thread.streams, kwargs or {}
        streams.drop_what_is_gone()
        name = func._overloadpacket._qualified_op_name
        here = streams.current
        streams.wait(here, streams.clocks[HOST])
        out = func(*args, **kwargs)
        if func.is_view or name == "aten::detach":
            return out
        moment = streams.tick(here)
        streams.operations += 1
        for tensor in (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)):
            streams.uses[streams.seen(tensor)][here] = moment
            streams.reads(tensor, here, name)
        written = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        if func._schema.is_mutable:
            arguments = zip(args, func._schema.arguments, strict=False)
            written += [a for a, s in arguments if isinstance(a, Tensor) and s.alias_info and s.alias_info.is_write]
        for tensor in written:
            key = streams.seen(tensor)
            streams.uses[key][here], streams.writer[key] = moment, (here, moment)
        if name in WAITS_FOR_THE_DEVICE:
            streams.host_waits()
        return out


class Side:
    """In place of :class:`kfac.streams.SideStream`.

    Args:
        joins: whether the current stream waits for it after :meth:`resumed`; False is the mistake to be found.
    """

    joins = True

    def __init__(self, device: torch.device, number: int = 0) -> None:
        self.name = f"side {number}"

    @contextmanager
    def _entered(self) -> Iterator[Streams]:
        streams: Streams = _of_thread.streams
        before, streams.current = streams.current, self.name
        try:
            yield streams
        finally:
            streams.current = before

    @contextmanager
    def work(self) -> Iterator[None]:
        streams: Streams = _of_thread.streams
        streams.wait(self.name, streams.clocks[streams.current])
        with self._entered():
            yield

    @contextmanager
    def resumed(self) -> Iterator[None]:
        with self._entered() as streams:
            yield
        if self.joins:
            streams.wait(streams.current, streams.clocks[self.name])


class Sides:
    """In place of :class:`kfac.streams.SideStreams`: as many as on a GPU."""

    def __init__(self, device: torch.device, count: int) -> None:
        self._sides = [Side(device, 1 + k) for k in range(count)]

    def __len__(self) -> int:
        return len(self._sides)

    def __getitem__(self, number: int) -> Side:
        return self._sides[number % len(self._sides)]


def used_here(tensor: Tensor) -> None:
    """In place of :func:`kfac.streams.used_here`."""
    streams: Streams = _of_thread.streams
    streams.recorded.setdefault(_key(tensor), set()).add(streams.current)


class _Work:
    def __init__(self, inner: Any, clock: dict[str, int]) -> None:
        self._inner, self._clock = inner, clock

    def wait(self) -> None:
        streams: Streams = _of_thread.streams
        streams.wait(streams.current, self._clock)
        with _disable_current_modes():
            self._inner.wait()

    def on_done(self, callback: Callable[[], None]) -> None:
        self._inner.on_done(callback)


class Channel:
    """A communicator whose collectives run on a stream of their own, in order, as NCCL's do."""

    def __init__(self, inner: Any) -> None:
        self._inner, self.rank, self.world_size = inner, inner.rank, inner.world_size

    def _issue(self, method: Any, tensor: Tensor, *rest: Any) -> _Work:
        streams: Streams = _of_thread.streams
        streams.wait(CHANNEL, streams.clocks[streams.current])
        streams.wait(CHANNEL, streams.clocks[HOST])
        streams.reads(tensor, CHANNEL, "a collective")
        key, moment = streams.seen(tensor), streams.tick(CHANNEL)
        streams.writer[key] = CHANNEL, moment
        streams.uses[key][CHANNEL] = moment
        clock = dict(streams.clocks[CHANNEL])
        with _disable_current_modes():
            return _Work(method(tensor, *rest), clock)

    def all_reduce(self, tensor: Tensor, name: str) -> _Work:
        return self._issue(self._inner.all_reduce, tensor, name)

    def reduce(self, tensor: Tensor, dst: int, name: str) -> _Work:
        return self._issue(self._inner.reduce, tensor, dst, name)

    def broadcast(self, tensor: Tensor, src: int, name: str) -> _Work:
        return self._issue(self._inner.broadcast, tensor, src, name)

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        with _disable_current_modes():
            return self._inner.broadcast_object(obj, src)

    def all_gather_object(self, obj: Any) -> list[Any]:
        with _disable_current_modes():
            return self._inner.all_gather_object(obj)

    def barrier(self) -> None:
        with _disable_current_modes():
            self._inner.barrier()


def watched(function: Callable[[Any], None], communicator: Any) -> Streams:
    """What happens on the streams of this rank (a thread) in ``function(communicator)``."""
    streams = _of_thread.streams = Streams()
    with _Watch():
        function(Channel(communicator))
    streams.drop_what_is_gone()
    return streams


def install(monkeypatch: Any) -> None:
    """Give the engine these streams, and let its quick inverses go on without asking, as on a GPU."""
    monkeypatch.setattr("kfac.execution.SideStream", Side)
    monkeypatch.setattr("kfac.execution.SideStreams", Sides)
    for module in ("inversion", "messages", "exchange", "arrivals", "gradients"):
        monkeypatch.setattr(f"kfac.{module}.used_here", used_here)

    def inverse_of(upper: Tensor, good: Tensor) -> Tensor:
        return upper.square_().reciprocal_() if upper.shape[-1] == 1 else torch.cholesky_inverse(upper.mT).mT

    monkeypatch.setattr("kfac.curvature.inverses._inverse_of", inverse_of)
    to_list = Tensor.tolist

    def tolist(tensor: Tensor) -> Any:
        streams = getattr(_of_thread, "streams", None)
        if streams is not None:
            streams.reads(tensor, streams.current, "tolist")
            streams.host_waits()
        return to_list(tensor)

    monkeypatch.setattr(Tensor, "tolist", tolist)
