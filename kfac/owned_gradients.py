"""Layers that one rank preconditions: it alone has their inverses, and broadcasts the preconditioned gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from kfac.communication import Communicator, Work
from kfac.inversion import Inversions, refuse_failed
from kfac.planning import Plan
from kfac.recording import Recorder
from kfac.streams import on_device


class OwnedGradients:
    """The Plan's broadcasts of preconditioned gradients in one step.

    Where factors have been inverted, two flags per layer travel behind the gradients: whether its owner could not
    invert A, or G. So every rank learns of it without a collective of its own.

    Args:
        plan: the Plan.
        communicator: the ranks.
        recorder: records the work.
        like: a tensor of the factors' dtype, on their device.
        inversions: in a step in which factors are inverted: those of these layers wait for :meth:`send`.
    """

    def __init__(
        self,
        plan: Plan,
        communicator: Communicator,
        recorder: Recorder,
        like: Tensor,
        inversions: Inversions | None,
    ) -> None:
        self._plan, self._communicator, self._recorder = plan, communicator, recorder
        self._like, self._inversions = like, inversions
        self._groups = plan.gradient_messages if communicator.world_size > 1 else ()
        self._gradients: dict[int, Tensor] = {}
        self._sent: list[tuple[Sequence[int], Sequence[int], Tensor, Work]] = []

    def send(self, gradient_of: Callable[[int], Tensor | None], solve: Callable[[int, Tensor], Tensor]) -> None:
        """Invert and precondition what this rank owns, and issue all broadcasts.

        Every rank has issued the broadcasts before its own when it begins: those of ranks with less to do do not wait
        for the others.

        Args:
            gradient_of: a layer's gradient, the same on every rank; None: it has none, or no inverses.
            solve: the preconditioned gradient of a layer.
        """
        for group in self._groups:
            owner = self._plan.gradient_owner[group[0]]
            assert owner is not None
            mine = owner == self._communicator.rank
            if mine and self._inversions:
                self._inversions.private(group)
            found = {k: gradient for k in group if (gradient := gradient_of(k)) is not None}
            self._gradients |= found
            flags = 2 * len(group) if self._inversions else 0
            buffer = self._like.new_empty(sum(gradient.numel() for gradient in found.values()) + flags)
            if not buffer.numel():
                continue
            if mine:
                with self._recorder.span("Precondition", f"own layers ({len(group)})"):
                    self._fill(buffer, group, found, solve)
            issue = partial(self._communicator.broadcast, buffer, owner, "kfac_GradComm")
            work = self._recorder.flight("GradComm", self._plan.gradient_name(group), issue)
            self._sent.append((group, list(found), buffer, work))

    def _fill(
        self,
        buffer: Tensor,
        group: Sequence[int],
        found: dict[int, Tensor],
        solve: Callable[[int, Tensor], Tensor],
    ) -> None:
        for k, piece in self._pieces(list(found), buffer):
            piece.copy_(solve(k, found[k]))
        if self._inversions:
            bad = [float(i in self._inversions.failed) for k in group for i in (2 * k, 2 * k + 1)]
            buffer[-len(bad) :] = on_device(bad, buffer)

    def receive(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Of every layer its number, its gradient and the preconditioned one, the same bits on every rank.

        Raises:
            FactorInversionError: on every rank, if an owner could not invert a factor.
        """
        for *_, work in self._sent:
            work.wait()
        if self._inversions and self._sent:
            self._refuse()
        for _, layers, buffer, _ in self._sent:
            for k, result in self._pieces(layers, buffer):
                yield k, self._gradients.pop(k), result

    def _refuse(self) -> None:
        flags = torch.cat([buffer[-2 * len(group) :] for group, _, buffer, _ in self._sent]).tolist()
        factors = [i for group, *_ in self._sent for k in group for i in (2 * k, 2 * k + 1)]
        refuse_failed(sorted(i for i, bad in zip(factors, flags, strict=True) if bad), self._plan)

    def _pieces(self, layers: Sequence[int], buffer: Tensor) -> Iterator[tuple[int, Tensor]]:
        start = 0
        for k in layers:
            gradient = self._gradients[k]
            yield k, buffer[start : start + gradient.numel()].view(gradient.shape)
            start += gradient.numel()
