"""The sums of one step as they arrive."""

from __future__ import annotations

from collections.abc import Callable, Collection

from torch import Tensor

from kfac.averages import RunningAverages
from kfac.communication import Work
from kfac.exchange import FactorExchange
from kfac.messages import MessageQueue
from kfac.planning import Message
from kfac.streams import used_here


class Arrivals:
    """Takes in a step's messages in their order: factors into the running averages, gradients where they belong.

    Args:
        queue: all of whose messages have left.
        exchange: knows what messages of factors hold; None without factors.
        averages: get the sums; None without factors.
        unpack_gradients: is given the items of a message of gradients, and the summed message.
        step: at which numbers that vary in training hold.
    """

    def __init__(
        self,
        queue: MessageQueue,
        exchange: FactorExchange | None,
        averages: RunningAverages | None,
        unpack_gradients: Callable[[tuple[int, ...], Tensor], None],
        step: int,
    ) -> None:
        self._coming = queue.receive()
        self._exchange, self._averages = exchange, averages
        self._unpack_gradients, self._step = unpack_gradients, step
        self._there: set[int] = set()

    def until(self, factors: Collection[int]) -> None:
        """Take in messages until these factors have arrived."""
        missing = set(factors) - self._there
        taken: list[tuple[Message, Tensor]] = []
        while missing:
            message, buffer = next(self._coming)
            self._take(message, buffer, taken)
            missing -= set(message.factors)
        self._add(taken)

    def rest(self, summary: tuple[Tensor, Work] | None = None) -> None:
        """Take in everything else, and the summary where there is one."""
        taken: list[tuple[Message, Tensor]] = []
        for message, buffer in self._coming:
            self._take(message, buffer, taken)
        if summary is not None:
            summary[1].wait()
            used_here(summary[0])
        self._add(taken, summary and summary[0])

    def _take(self, message: Message, buffer: Tensor, factors: list[tuple[Message, Tensor]]) -> None:
        if message.kind == "gradient":
            self._unpack_gradients(message.items, buffer)
        else:
            factors.append((message, buffer))
            self._there.update(message.items)

    def _add(self, messages: list[tuple[Message, Tensor]], summary: Tensor | None = None) -> None:
        if self._exchange and self._averages and (messages or summary is not None):
            self._averages.add(self._exchange.unpack(messages, summary), self._step)
