"""Work beside the current stream of a GPU; on a CPU the same calls do nothing.

Memory of a tensor belongs to the stream on which it was made: the allocator may hand it out again as soon as the tensor
is dropped, although another stream still reads it. :func:`used_here` keeps it from that.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


@functools.cache
def _stream(device: torch.device, number: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class SideStream:
    """A stream beside the current one, for what need not hold it up.

    Args:
        device: whose work this is.
        number: which of the device's side streams; of equal numbers it is the same one, as streams are few.
    """

    def __init__(self, device: torch.device, number: int = 0) -> None:
        self._stream = _stream(device, number) if device.type == "cuda" else None

    @contextmanager
    def work(self) -> Iterator[None]:
        """What is issued within runs beside the current stream, after all that this one has been given so far.

        Collectives issued within wait for it; who waits for a collective waits for it, too.
        """
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield

    @contextmanager
    def resumed(self) -> Iterator[None]:
        """More work behind what this stream was given before; afterwards the current stream waits for all of it."""
        if self._stream is None:
            yield
            return
        here = torch.cuda.current_stream(self._stream.device)
        with torch.cuda.stream(self._stream):
            yield
        here.wait_stream(self._stream)


class SideStreams:
    """Streams that are taken in turns, for pieces of work that do not fill the device alone; on a CPU there is one.

    Args:
        device: whose work this is.
        count: how many a GPU has.
    """

    def __init__(self, device: torch.device, count: int) -> None:
        self._streams = [SideStream(device, 1 + k) for k in range(count if device.type == "cuda" else 1)]

    def __len__(self) -> int:
        return len(self._streams)

    def __getitem__(self, number: int) -> SideStream:
        """The stream of a piece of work, by the number of those before it."""
        return self._streams[number % len(self._streams)]


def used_here(tensor: Tensor) -> None:
    """The current stream uses a tensor that another one has made: its memory stays until that is done."""
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))


def on_device(numbers: Sequence[float], like: Tensor) -> Tensor:
    """Numbers of the host as a tensor of the dtype of ``like``, on its device.

    They pass through pinned memory: a copy from other memory would hold the host up until the stream has come to it.
    """
    row = torch.tensor(numbers, dtype=like.dtype, pin_memory=like.is_cuda)
    return row.to(like.device, non_blocking=True)
