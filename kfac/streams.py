"""Work beside the current stream of a GPU; on a CPU the same calls do nothing.

Memory of a tensor belongs to the stream on which it was made: the allocator may hand it out again as soon as the tensor
is dropped, although another stream still reads it. :func:`used_here` keeps it from that.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class SideStream:
    """A stream beside the current one, for what need not hold it up.

    Args:
        device: whose work this is.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

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
        """What is issued or waited for within comes behind what this stream was given before, and nothing else."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield


class SideStreams:
    """Streams that are taken in turns, for pieces of work that do not fill the device alone; on a CPU there is one.

    Args:
        device: whose work this is.
        count: how many a GPU has.
    """

    def __init__(self, device: torch.device, count: int) -> None:
        self._streams = [SideStream(device) for _ in range(count if device.type == "cuda" else 1)]

    def __len__(self) -> int:
        return len(self._streams)

    def __getitem__(self, number: int) -> SideStream:
        """The stream of a piece of work, by the number of those before it."""
        return self._streams[number % len(self._streams)]


def used_here(tensor: Tensor) -> None:
    """The current stream uses a tensor that another one has made: its memory stays until that is done."""
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
