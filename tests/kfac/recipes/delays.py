"""A race finder: ranks as threads of one process that take turns, with collectives that arrive late and out of order.

A seed decides everything: which rank runs next (at every call of a communicator), when each collective reads its
buffers and when its result appears on each rank. Until then a buffer holds NaN, or still what the rank put there; so
what is read too early, or written too late, changes the result.
"""

from __future__ import annotations

import pickle
import random
import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor


class Deadlock(AssertionError):
    """Every rank waits for another one."""


class _Collective:
    """The k-th collective of every rank: from ``root`` where that is given, to ``sink`` alone where that is."""

    def __init__(self, what: tuple[Any, ...], root: int | None, sink: int | None, early: bool) -> None:
        self.what, self.root, self.sink = what, root, sink
        self.early = early
        self.posted: dict[int, Any] = {}
        self.read: dict[int, Any] = {}
        self.result: Any = None
        self.delivered: set[int] = set()
        self.callbacks: dict[int, list[Callable[[], None]]] = {}

    def poison(self, rank: int) -> None:
        if rank != self.root:
            self.posted[rank].fill_(float("nan"))

    def post(self, rank: int, value: Any) -> None:
        self.posted[rank] = value
        if self.early and isinstance(value, Tensor):
            self.read[rank] = value.clone()
            self.poison(rank)

    def deliver(self, rank: int) -> None:
        if self.result is None:
            self._execute()
        if isinstance(self.posted[rank], Tensor):
            if self.sink in (None, rank):
                self.posted[rank].copy_(self.result)
            else:
                self.poison(rank)  # undefined: in time for who looks at it all the same
        self.delivered.add(rank)
        for callback in self.callbacks.pop(rank, []):
            callback()

    def _execute(self) -> None:
        values = [self.read.get(rank, self.posted[rank]) for rank in sorted(self.posted)]
        if not isinstance(values[0], Tensor):
            self.result = values
            return
        if self.root is not None:
            self.result = values[self.root].clone()
        else:
            self.result = values[0].clone()
            for value in values[1:]:
                self.result += value
        for rank in self.posted:
            self.poison(rank)


class _Work:
    def __init__(self, world: World, rank: int, collective: _Collective) -> None:
        self._world, self._rank, self._collective = world, rank, collective

    def wait(self) -> None:
        if not self._world.skips(self._collective):
            self._world.wait(self._rank, self._collective)

    def on_done(self, callback: Callable[[], None]) -> None:
        if self._rank in self._collective.delivered:
            callback()
        else:
            self._collective.callbacks.setdefault(self._rank, []).append(callback)


class World:
    """Ranks that take turns.

    Args:
        size: number of ranks.
        seed: of all that is random.
        skipped: ``wait()`` is broken, as by a race, for what has this in its name; "" breaks all.
    """

    def __init__(self, size: int, seed: int, *, skipped: str | None = None) -> None:
        self.size, self._skipped = size, skipped
        self._random = random.Random(seed)
        self._turn = [threading.Semaphore(0) for _ in range(size)]
        self._collectives: list[_Collective] = []
        self._posted = [0] * size
        self._blocked: dict[int, _Collective] = {}
        self._finished: set[int] = set()
        self._failure: BaseException | None = None

    def run(self, function: Callable[[int, Communicator], Any]) -> list[Any]:
        """``function(rank, communicator)`` on every rank; the results in rank order.

        Raises:
            Exception: the first one of any rank.
        """
        results: list[Any] = [None] * self.size

        def rank_main(rank: int) -> None:
            self._turn[rank].acquire()
            try:
                if self._failure is None:
                    results[rank] = function(rank, Communicator(self, rank))
            except BaseException as error:
                self._failure = self._failure or error
            self._finished.add(rank)
            self._next(rank)

        threads = [threading.Thread(target=rank_main, args=(rank,), daemon=True) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        self._turn[self._random.randrange(self.size)].release()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "a rank does not come to an end"
        if self._failure is not None:
            raise self._failure
        return results

    def skips(self, collective: _Collective) -> bool:
        """Whether waiting for it is broken."""
        return self._skipped is not None and self._skipped in str(collective.what)

    def _complete(self, collective: _Collective) -> bool:
        return len(collective.posted) == self.size

    def _next(self, me: int) -> None:
        """Let some rank run that can; after a failure all of them, to their ends."""
        ranks = [r for r in range(self.size) if r not in self._finished]
        able = [r for r in ranks if r not in self._blocked or self._complete(self._blocked[r])]
        if self._failure is None and ranks and not able:
            waiting = {r: self._blocked[r].what for r in ranks}
            self._failure = Deadlock(f"rank(s) {sorted(self._finished)} have ended, the others wait: {waiting}")
        able = ranks if self._failure is not None else able
        if able:
            following = self._random.choice(able)
            if following != me:
                self._turn[following].release()
                if me not in self._finished:
                    self._turn[me].acquire()

    def _switch(self, me: int) -> None:
        """Something arrives, perhaps, and another rank runs, perhaps."""
        for collective in self._collectives:
            if self._complete(collective):
                for rank in collective.posted.keys() - collective.delivered:
                    if self._random.random() < 0.2:
                        collective.deliver(rank)
        self._collectives = [c for c in self._collectives if len(c.delivered) < self.size]
        self._next(me)
        if self._failure is not None:
            raise self._failure

    def post(self, rank: int, what: tuple[Any, ...], root: int | None, value: Any, sink: int | None = None) -> _Work:
        """Issue a rank's next collective.

        Raises:
            AssertionError: if another rank's collective at the same place is another one.
        """
        index = self._posted[rank]
        self._posted[rank] += 1
        collective = next((c for c in self._collectives if rank not in c.posted), None)
        if collective is None:
            collective = _Collective((index, *what), root, sink, self._random.random() < 0.5)
            self._collectives.append(collective)
        assert collective.what == (index, *what), f"rank {rank} issues {what}, another rank {collective.what}"
        collective.post(rank, value)
        self._switch(rank)
        return _Work(self, rank, collective)

    def wait(self, rank: int, collective: _Collective) -> None:
        """Come back when the collective's result is there."""
        while rank not in collective.delivered:
            if self._complete(collective):
                collective.deliver(rank)
            else:
                self._blocked[rank] = collective
                self._switch(rank)
                self._blocked.pop(rank, None)


class Communicator:
    """One rank's view of a :class:`World`."""

    def __init__(self, world: World, rank: int) -> None:
        self._world, self.rank, self.world_size = world, rank, world.size

    def all_reduce(self, tensor: Tensor, name: str) -> _Work:
        return self._world.post(self.rank, ("all_reduce", name, tensor.numel()), None, tensor)

    def reduce(self, tensor: Tensor, dst: int, name: str) -> _Work:
        return self._world.post(self.rank, ("reduce", name, tensor.numel(), dst), None, tensor, dst)

    def broadcast(self, tensor: Tensor, src: int, name: str) -> _Work:
        return self._world.post(self.rank, ("broadcast", name, tensor.numel(), src), src, tensor)

    def all_gather_object(self, obj: Any) -> list[Any]:
        work = self._world.post(self.rank, ("all_gather_object",), None, pickle.dumps(obj))
        self._world.wait(self.rank, work._collective)
        return [pickle.loads(value) for value in work._collective.result]

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        return self.all_gather_object(obj)[src]

    def barrier(self) -> None:
        self.all_gather_object(None)
