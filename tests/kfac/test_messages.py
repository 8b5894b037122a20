"""The queue of messages."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from kfac.communication import LocalCommunicator
from kfac.messages import MessageQueue
from kfac.planning.plan import Message
from kfac.recording import Recorder


def test_buffers_of_messages_are_freed_as_soon_as_they_have_been_used():
    buffers: list[weakref.ref[Tensor]] = []

    def pack(message: Message) -> Tensor:
        buffer = torch.zeros(3)
        buffers.append(weakref.ref(buffer))
        return buffer

    queue = MessageQueue(LocalCommunicator(), Recorder(), pack)
    queue.begin([Message(kind="gradient", items=(k,), elements=3, release="ready") for k in range(3)])
    queue.flush()
    for number, (_, buffer) in enumerate(queue.receive()):
        assert [there() is not None for there in buffers] == [k >= number for k in range(3)]
        del buffer
    assert not any(there() for there in buffers)
    assert queue.started
    assert queue.has_left("gradient", 2)
