"""Communicators for tests of one process, and one that writes down what leaves."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from kfac.communication import LocalCommunicator


class TwoRanks(LocalCommunicator):
    """Rank 0 of two, as far as the plan goes: the other one is given the same and sends nothing."""

    world_size = 2

    def broadcast(self, tensor: Tensor, src: int, name: str) -> Any:
        if src != self.rank:
            tensor.zero_()  # what the memory held before must not pass for an inverse
        return super().broadcast(tensor, src, name)

    def all_gather_object(self, obj: Any) -> list[Any]:
        return [obj, obj]


class Sent(NamedTuple):
    """A collective: what it carries (``FactorComm`` ...), how much, and from or to which rank."""

    operation: str
    kind: str
    elements: int
    root: int | None


class Recording:
    """A communicator that writes down the collectives of tensors that go through it."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.sent: list[Sent] = []

    def __getattr__(self, operation: str) -> Any:
        method = getattr(self._inner, operation)
        if operation not in ("all_reduce", "reduce", "broadcast"):
            return method

        def recorded(tensor: Tensor, *args: Any) -> Any:
            *root, name = args
            self.sent.append(Sent(operation, name.removeprefix("kfac_"), tensor.numel(), *(root or [None])))
            return method(tensor, *args)

        return recorded
