"""The queue of an iteration's sums over the ranks: each leaves when the Plan lets it, in its order, on every rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from kfac.communication import Communicator, Work
from kfac.planning.plan import Message, MessageKind
from kfac.recording import Recorder
from kfac.streams import SideStream, used_here

KIND = {"A": "FactorComm", "G": "FactorComm", "gradient": "GradComm"}
"""The timeline's kind of each kind of message."""


class MessageQueue:
    """Sends messages as their items become ready.

    A message that is ready waits for those before it: the order of the collectives is then the Plan's on every rank,
    whatever order the backward pass takes its branches in.

    Args:
        communicator: what carries them.
        recorder: records each one's flight.
        pack: makes a message's buffer from its items (called when it leaves).
        side: where messages are packed and sent from, beside the passes; by default in line.
    """

    def __init__(
        self,
        communicator: Communicator,
        recorder: Recorder,
        pack: Callable[[Message], Tensor],
        side: SideStream | None = None,
    ) -> None:
        self._side = side or SideStream(torch.device("cpu"))
        self._communicator = communicator
        self._recorder = recorder
        self._pack = pack
        self._messages: Sequence[Message] = ()
        self.begin(())

    def begin(self, messages: Sequence[Message]) -> None:
        """Start an iteration that sends these messages."""
        self._messages = messages
        self._missing = [set(m.items) for m in messages]
        self._where = {(m.kind, item): k for k, m in enumerate(messages) for item in m.items}
        self._sent = 0
        self._flights: deque[tuple[Message, Tensor, Work]] = deque()

    @property
    def started(self) -> bool:
        """Whether a message has left."""
        return self._sent > 0

    def has_left(self, kind: MessageKind, item: int) -> bool:
        """Whether the message that carries the item has left."""
        return self._where.get((kind, item), len(self._messages)) < self._sent

    def ready(self, kind: MessageKind, item: int) -> None:
        """The item is there: send what can leave now."""
        index = self._where.get((kind, item))
        if index is None:
            return
        self._missing[index].discard(item)
        while self._sent < len(self._messages):
            following = self._sent
            if self._missing[following] or self._messages[following].release != "ready":
                return
            self._send()

    def _send(self) -> None:
        number = self._sent
        message = self._messages[number]
        kind, name = KIND[message.kind], f"{message.kind} message {number} ({len(message.items)} items)"
        with self._side.work():
            buffer = self._pack(message)
            issue = partial(self._issue, message, buffer)
            # What goes nowhere is no message to be seen.
            work = issue() if self._communicator.world_size == 1 else self._recorder.flight(kind, name, issue)
        self._flights.append((message, buffer, work))
        self._sent += 1

    def _issue(self, message: Message, buffer: Tensor) -> Work:
        label = f"kfac_{KIND[message.kind]}"
        if message.root is None:
            return self._communicator.all_reduce(buffer, label)
        return self._communicator.reduce(buffer, message.root, label)

    def flush(self) -> None:
        """Send everything that has not left; items that never came are packed as they are."""
        while self._sent < len(self._messages):
            self._send()

    def receive(self) -> Iterator[tuple[Message, Tensor]]:
        """The summed buffers of all messages in order, each as soon as it has arrived; they are given away.

        One whose sum goes to another rank alone is undefined here.
        """
        while self._flights:
            message, buffer, work = self._flights.popleft()
            work.wait()
            used_here(buffer)
            yield message, buffer
