"""A debug mode: ranks compare every collective before they issue it, and name the first difference instead of hanging.

What a rank is about to issue, and what all of them make of it, goes through the store at which the ranks have met: the
checked process group carries nothing for it, and nothing here waits without an end. Every collective waits for all
ranks, so that nothing overlaps and seconds mean nothing. ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` turns it on, as it does
torch's own checks (which know neither names nor roots), or ``check_collectives=True`` of
:func:`kfac.communication.get_communicator`.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from kfac.communication import Communicator, Work

TIMEOUT_S = 300.0
REMEMBERED = 5
"""So many collectives before a difference are named."""
_POLL_S, _SLOWEST_POLL_S = 2e-4, 2e-2


class CollectiveError(RuntimeError):
    """The ranks do not issue the same collectives in the same order."""


class Store(Protocol):
    """What is needed of a ``torch.distributed.Store``; none of it blocks for a key that is not there."""

    def set(self, key: str, value: str) -> None:
        """Write a value."""

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""

    def get(self, key: str) -> bytes:
        """The value of a key that is there."""

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Write ``desired`` if there is no value yet (``expected`` empty); the value that is there afterwards."""

    def delete_key(self, key: str) -> bool:
        """Remove a key."""


class CheckedCommunicator:
    """A communicator whose ranks agree on every collective before it is issued.

    Args:
        inner: what issues them.
        store: the ranks' common store; its keys must be this communicator's alone.
        timeout_s: how long a rank waits for the others at every collective.
    """

    def __init__(self, inner: Communicator, store: Store, timeout_s: float = TIMEOUT_S) -> None:
        self.rank, self.world_size = inner.rank, inner.world_size
        self._inner, self._store, self._timeout_s = inner, store, timeout_s
        self._number = 0
        self._before: deque[str] = deque(maxlen=REMEMBERED)
        self._failure = ""

    def all_reduce(self, tensor: Tensor, name: str) -> Work:  # noqa: D102
        self._agree("all_reduce", name, tensor)
        return self._inner.all_reduce(tensor, name)

    def reduce(self, tensor: Tensor, dst: int, name: str) -> Work:  # noqa: D102
        self._agree("reduce", name, tensor, dst)
        return self._inner.reduce(tensor, dst, name)

    def broadcast(self, tensor: Tensor, src: int, name: str) -> Work:  # noqa: D102
        self._agree("broadcast", name, tensor, src)
        return self._inner.broadcast(tensor, src, name)

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:  # noqa: D102
        self._agree("broadcast_object", root=src)
        return self._inner.broadcast_object(obj, src)

    def all_gather_object(self, obj: Any) -> list[Any]:  # noqa: D102
        self._agree("all_gather_object")
        return self._inner.all_gather_object(obj)

    def barrier(self) -> None:  # noqa: D102
        self._agree("barrier")
        self._inner.barrier()

    # ------------------------------------------------------------------ agreement

    def _agree(self, operation: str, name: str = "", tensor: Tensor | None = None, root: int | None = None) -> None:
        """Return when every rank is about to issue the same collective.

        Raises:
            CollectiveError: on every rank that comes here, if one issues another collective or none in time; and from
                then on at every collective.
        """
        if self._failure:
            raise CollectiveError(self._failure)
        mine: dict[str, Any] = {"operation": operation, "name": name, "root": root}
        if tensor is not None:
            mine |= {
                "shape": list(tensor.shape),
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "device": tensor.device.type,
            }
        try:
            self._failure = self._verdict(mine)
        except RuntimeError as error:
            self._failure = f"{self._where()}: the ranks' store does not answer; its host may have ended: {error}"
            raise CollectiveError(self._failure) from error
        if self._failure:
            raise CollectiveError(self._failure)
        self._before.append(f"{self._number}: {_describe(mine)}")
        self._number += 1

    def _verdict(self, mine: dict[str, Any]) -> str:
        """What is wrong with this collective, the same text on every rank; empty if nothing is."""
        ranks = [self._key(rank) for rank in range(self.world_size)]
        verdict = self._key("verdict")
        self._store.set(ranks[self.rank], json.dumps(mine))
        give_up_s, pause_s = time.monotonic() + self._timeout_s, _POLL_S
        while not self._store.check(ranks):
            if self._store.check([verdict]):  # others have given up
                return self._store.get(verdict).decode().strip()
            if time.monotonic() > give_up_s:
                break
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _SLOWEST_POLL_S)
        there = {r: json.loads(self._store.get(key)) for r, key in enumerate(ranks) if self._store.check([key])}
        # The first verdict counts: a rank that comes as others give up goes the same way as they do. A blank stands for
        # "nothing wrong", because an empty value would be none.
        agreed = self._store.compare_set(verdict, "", self._difference(there) or " ").decode().strip()
        if not agreed and self._number:
            # All are here, so nobody reads what was before.
            self._store.delete_key(self._key(self.rank, back=1))
            if self.rank == 0:
                self._store.delete_key(self._key("verdict", back=1))
        return agreed

    def _key(self, what: int | str, back: int = 0) -> str:
        return f"{self._number - back}/{what}"

    def _where(self) -> str:
        return f"collective {self._number} of this communicator"

    def _difference(self, there: dict[int, dict[str, Any]]) -> str:
        missing = [rank for rank in range(self.world_size) if rank not in there]
        first = next(iter(there.values()))
        others = [one for one in there.values() if one != first]
        if not missing and not others:
            return ""
        groups: dict[str, list[int]] = {}
        for rank, one in there.items():
            groups.setdefault(_describe(one), []).append(rank)
        problems = []
        if others:
            keys = [key for key in {**first, **others[0]} if first.get(key) != others[0].get(key)]
            problems.append(f"the ranks differ in {', '.join(keys)}")
        if missing:
            problems.append(f"{_ranks(missing)} issued none within {self._timeout_s:g} s")
        lines = [f"{self._where()}: {' and '.join(problems)}"]
        lines += [f"  {_ranks(ranks)}: {what}" for what, ranks in groups.items()]
        lines += [f"  {_ranks(missing)}: nothing"] if missing else []
        lines += ["the last ones before, the same on every rank:"] if self._before else []
        return "\n".join([*lines, *(f"  {one}" for one in self._before)])


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _describe(one: dict[str, Any]) -> str:
    words = [one["operation"], one["name"]]
    if "shape" in one:
        words.append(f"{one['dtype']}{one['shape']} on {one['device']}")
    if one["root"] is not None:
        words.append(f"{'to' if one['operation'] == 'reduce' else 'from'} rank {one['root']}")
    return " ".join(word for word in words if word)
