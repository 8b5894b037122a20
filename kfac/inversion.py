"""The inversion phase: every rank inverts or decomposes what the Plan gives it, and the results travel."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kfac.communication import Communicator, Work
from kfac.config import options_at
from kfac.curvature.damping import factor_damping
from kfac.factors import FactorState
from kfac.layers import KFACLayer
from kfac.planning import Plan
from kfac.recording import Recorder
from kfac.solutions import Begun, Method, Parts, method_for
from kfac.streams import SideStream, SideStreams, used_here


class FactorInversionError(RuntimeError):
    """A damped factor is not positive definite; raised on every rank."""


def dampings(
    layers: Sequence[KFACLayer], factors: Sequence[FactorState], step: int, strength: float = 1.0
) -> list[float | None]:
    """Per factor (A and G of each layer in turn) what is added to its diagonal; None where a side has no statistics.

    Waits for the device once, for all traces together. ``strength`` multiplies every layer's damping.
    """
    known = [factor.known for factor in factors]
    means = [factor.mean_eigenvalue() if ok else 0.0 for factor, ok in zip(factors, known, strict=True)]
    waiting = [mean for mean in means if isinstance(mean, Tensor)]
    values = iter(torch.stack(waiting).tolist() if waiting else ())
    mean = [next(values) if isinstance(mean, Tensor) else mean for mean in means]
    result: list[float | None] = []
    configured = options_at([layer.config for layer in layers], "damping", step)
    for k, (layer, damping) in enumerate(zip(layers, configured, strict=True)):
        a, g = 2 * k, 2 * k + 1
        pair = factor_damping(layer.config.damping_method, strength * damping, mean[a], mean[g])
        result += pair if known[a] and known[g] else (None, None)
    return result


class Inversions:
    """One inversion phase, for ``interval`` steps: :meth:`start`, :meth:`private` for layers that this rank alone
    preconditions, :meth:`finish`; collective.

    A rank that cannot invert a factor sends NaN, so that every rank learns of it and none waits for ever.

    Args:
        layers: in the Plan's order.
        factors: A and G of each layer in turn; those of layers without statistics are left alone.
        damping: of a factor that is to be inverted now.
        interval: steps until the next phase.
        plan, communicator, recorder: who inverts what, the ranks, and what records the work.
        streams: as many inversions are under way at a time as there are; by default each is waited for.

    Attributes:
        failed: factors that this rank inverts for itself alone, and could not.
    """

    def __init__(
        self,
        layers: Sequence[KFACLayer],
        factors: Sequence[FactorState],
        damping: Callable[[int], float],
        interval: int,
        plan: Plan,
        communicator: Communicator,
        recorder: Recorder,
        streams: SideStreams | None = None,
    ) -> None:
        self._factors, self._damping, self._plan = factors, damping, plan
        self._streams = streams or SideStreams(torch.device("cpu"), 1)
        self._communicator, self._recorder = communicator, recorder
        due = [i for i in plan.inverse_sequence if factors[i].known and factors[i ^ 1].known]
        self._methods = {i: method_for(layers[i // 2].config, factors[i], interval) for i in due}
        self._shared = [i for i in due if plan.solution_holder(i) is None]
        self._former: dict[int, tuple[Any, ...]] = {}
        if plan.gradient_messages:
            self._former = {i: factors[i].solution for i in due}
        self._parts: dict[int, Parts] = {}
        self._traffic = _Traffic(plan, factors, self._methods, communicator, recorder)
        self.failed: set[int] = set()

    def start(self) -> None:
        """Invert what every rank needs, and send it."""
        own = [i for i in self._shared if self._plan.inverse_owner[i] in (None, self._communicator.rank)]
        solved = self._solve(own)
        for i in self._shared:
            if i in own:
                parts = next(solved)
                self._parts[i] = self._nan(i) if parts is None else parts
            self._traffic.passed(i, self._parts)
        self._traffic.flush()
        for i in self._methods:
            if self._plan.solution_holder(i) not in (None, self._communicator.rank):
                self._factors[i].solution = (*(None,) * 5, True)

    def private(self, layers: Sequence[int]) -> None:
        """Invert A and G of layers that this rank alone preconditions."""
        own = [i for k in layers for i in (2 * k, 2 * k + 1) if i in self._methods]
        for i, parts in zip(own, self._solve(own), strict=True):
            if parts is None or not _finite(parts):
                self.failed.add(i)
            self._methods[i].store(self._factors[i], self._nan(i) if parts is None else parts)

    def finish(self) -> None:
        """Wait for what every rank needs, and keep it.

        Raises:
            FactorInversionError: on every rank, naming the factors without an inverse.
        """
        self._traffic.receive(self._parts)
        _check(self._parts, self._plan)
        for i in self._shared:
            self._methods[i].store(self._factors[i], self._parts.pop(i))

    def abandon(self) -> None:
        """Give up what has been started: wait for what has left, keep nothing."""
        self._traffic.receive({})
        self.undo()

    def undo(self) -> None:
        """Make everything as it was before."""
        for i, solution in self._former.items():
            self._factors[i].solution = solution

    def _solve(self, factors: Sequence[int]) -> Iterator[Parts | None]:
        """The parts of each of these factors in turn; with one stream none is begun before it is asked for."""
        begun: deque[tuple[SideStream, Begun]] = deque()
        for number, i in enumerate(factors):
            if len(begun) == len(self._streams):
                yield self._result(*begun.popleft())
            side, damping = self._streams[number], self._damping(i)
            with side.work(), self._recorder.span("InverseComp", f"invert {_label(self._plan, i)}"):
                begun.append((side, self._methods[i].begin(self._factors[i], damping)))
        while begun:
            yield self._result(*begun.popleft())

    @staticmethod
    def _result(side: SideStream, begun: Begun) -> Parts | None:
        with side.resumed():
            parts = begun()
        for part in parts or ():
            used_here(part)
        return parts

    def _nan(self, i: int) -> Parts:
        factor, method = self._factors[i], self._methods[i]
        return method.parts(factor, factor.like.new_full((method.elements(factor),), float("nan")))


class _Traffic:
    """The broadcasts of an inversion phase, of which ``methods`` says by factor what is due."""

    def __init__(
        self,
        plan: Plan,
        factors: Sequence[FactorState],
        methods: dict[int, Method],
        communicator: Communicator,
        recorder: Recorder,
    ) -> None:
        self._plan, self._factors, self._methods = plan, factors, methods
        self._communicator, self._recorder = communicator, recorder
        self._groups: dict[int, tuple[int, ...]] = {}
        if communicator.world_size > 1:
            place = {i: k for k, i in enumerate(methods)}
            due = [tuple(sorted(place.keys() & set(group), key=place.__getitem__)) for group in plan.inverse_messages]
            self._groups = {group[-1]: group for group in due if group}
        self._waiting: list[tuple[tuple[int, ...], Tensor]] = []
        self._sent: list[tuple[tuple[int, ...], Tensor, Work]] = []

    def passed(self, i: int, parts: dict[int, Parts]) -> None:
        """The sequence has come to factor ``i``: what it completes leaves, or waits for the end of the sequence."""
        group = self._groups.get(i)
        if group is None:
            return
        size = sum(self._methods[j].elements(self._factors[j]) for j in group)
        buffer = self._factors[i].like.new_empty(size)
        if self._plan.inverse_owner[i] == self._communicator.rank:
            with self._recorder.span("InverseComp", f"pack {_label(self._plan, i)}"):
                for j, piece in self._pieces(group, buffer):
                    self._methods[j].flatten(parts[j], piece)
        if self._plan.schedule.inverse_broadcast == "as_ready":
            self._send(group, buffer)
        else:
            self._waiting.append((group, buffer))

    def _send(self, group: tuple[int, ...], buffer: Tensor) -> None:
        owner = self._plan.inverse_owner[group[0]]
        assert owner is not None
        issue = partial(self._communicator.broadcast, buffer, owner, "kfac_InverseComm")
        work = self._recorder.flight("InverseComm", self._plan.broadcast_name(group), issue)
        self._sent.append((group, buffer, work))

    def flush(self) -> None:
        """The sequence has ended: what waits leaves."""
        for group, buffer in self._waiting:
            self._send(group, buffer)

    def receive(self, parts: dict[int, Parts]) -> None:
        """Add what the other ranks have made."""
        for group, buffer, work in self._sent:
            work.wait()
            if self._plan.inverse_owner[group[0]] == self._communicator.rank:
                continue
            with self._recorder.span("InverseComp", f"unpack {_label(self._plan, group[-1])}"):
                for j, piece in self._pieces(group, buffer):
                    # A copy is aligned as its owner's own tensor is, so that products have the same bits.
                    own = piece if len(group) == 1 else piece.clone()
                    parts[j] = self._methods[j].parts(self._factors[j], own)

    def _pieces(self, group: Sequence[int], buffer: Tensor) -> Iterator[tuple[int, Tensor]]:
        sizes = [self._methods[j].elements(self._factors[j]) for j in group]
        return zip(group, buffer.split(sizes), strict=True)


def _label(plan: Plan, i: int) -> str:
    return f"{plan.factors[i].side} of {plan.factors[i].layer}"


def _check(parts: dict[int, Parts], plan: Plan) -> None:
    if not parts:
        return
    indices = sorted(parts)
    sums = torch.stack([torch.stack([part.sum() for part in parts[i]]).sum() for i in indices])
    if not bool(torch.isfinite(sums).all()):
        refuse_failed([i for i in indices if not _finite(parts[i])], plan)


def _finite(parts: Parts) -> bool:
    return all(bool(torch.isfinite(part).all()) for part in parts)


def refuse_failed(bad: Sequence[int], plan: Plan) -> None:
    """End a step in which factors could not be inverted.

    Raises:
        FactorInversionError: if there are any.
    """
    if bad:
        raise FactorInversionError(
            f"not positive definite even in float64: {', '.join(_label(plan, i) for i in bad)}. Raise "
            "KFACConfig.damping, or look for a layer whose inputs or gradients have exploded"
        )
