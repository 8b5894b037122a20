"""The parts that execute one Plan on a model: hooks, messages, and what becomes of what they carry."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from kfac.arrivals import Arrivals
from kfac.averages import RunningAverages
from kfac.collection import StatisticsCollector
from kfac.communication import Communicator, Work
from kfac.config import KFACConfig
from kfac.ekfac import EigenvalueCorrection
from kfac.exchange import FactorExchange
from kfac.factors import FactorState
from kfac.fisher_context import FisherContext
from kfac.gradients import GradientAverager, GradientsRead
from kfac.guards import Guards
from kfac.inversion import FactorInversionError, Inversions, dampings
from kfac.layers import GradientAccess, KFACLayer
from kfac.loss_scale import LossScale
from kfac.messages import MessageQueue
from kfac.nonfinite import gradient_fault
from kfac.planning import Message, Plan
from kfac.preconditioning import precondition_gradients
from kfac.recording import Recorder
from kfac.streams import SideStream, SideStreams

INVERSION_STREAMS = 4
"""Inversions that a GPU works on at a time: a decomposition is a chain of small steps, which leaves most of it idle.
Not measured; ``python -m benchmarks gpu`` tells what several streams gain."""


class Execution:
    """One Plan at work, from its construction, which hooks the model, until :meth:`close`.

    Args:
        plan: the Plan.
        layers: the layers to precondition.
        groups: per layer of the Plan the parameters whose gradients travel with it, in the Plan's order; empty:
            gradients are averaged elsewhere.
        factors: the factors' state by layer and side.
        config: hyper-parameters.
        dtype: of the statistics.
        communicator: the ranks.
        recorder: records the work.
        loss_scale: of mixed precision.
        warned: what has been warned of; is added to.

    Attributes:
        layers: in the Plan's order, none if it computes no curvature.
        factors: A and G of each layer in turn.
        averages: the running averages; None without curvature.
        exchange: of the factors' statistics; None without curvature.
        fisher: the context of losses.
    """

    def __init__(
        self,
        plan: Plan,
        layers: Sequence[KFACLayer],
        groups: Sequence[Sequence[nn.Parameter]],
        factors: Mapping[tuple[str, str], FactorState],
        *,
        config: KFACConfig,
        dtype: torch.dtype,
        communicator: Communicator,
        recorder: Recorder,
        loss_scale: LossScale,
        warned: set[str],
    ) -> None:
        self._plan, self._recorder, self._config = plan, recorder, config
        self._communicator, self._loss_scale = communicator, loss_scale
        self._alone = communicator.world_size == 1
        self._local = plan.schedule.factor_collective == "none" and not self._alone
        self._guards = Guards(warned)
        own = next(parameters[0] for parameters in (*(layer.parameters for layer in layers), *groups) if parameters)
        self._side = SideStream(torch.device("cpu") if self._alone else own.device)
        self._inversion_streams = SideStreams(own.device, INVERSION_STREAMS)
        self._queue = MessageQueue(communicator, recorder, self._pack, self._side)
        self._inversions: Inversions | None = None
        self._correction: EigenvalueCorrection | None = None
        self._collector: StatisticsCollector | None = None
        self._averager: GradientAverager | None = None
        self.exchange: FactorExchange | None = None
        self.averages: RunningAverages | None = None
        by_name = {layer.name: layer for layer in layers} if plan.schedule.curvature else {}
        self.layers = [by_name[name] for name in plan.layers if name in by_name]
        self.factors = [factors[f.layer, f.side] for f in plan.factors]
        if plan.schedule.message_dtype != "full" and not self._alone:
            for factor in self.factors:
                factor.noise = torch.finfo(torch.bfloat16).eps
        if self.layers:
            if config.inverse_method == "ekfac":
                self._correction = EigenvalueCorrection(self.layers, self.factors, communicator, recorder)
            self._collector = StatisticsCollector(
                self.layers,
                scaling=config.scaling,
                dtype=dtype,
                accumulation_steps=config.accumulation_steps,
                recorder=recorder,
                on_ready=lambda side, index: self._queue.ready(side, 2 * index + (side == "G")),
                has_left=lambda index: self._queue.has_left("A", 2 * index),
                loss_scale=loss_scale,
                guards=self._guards,
                correction=self._correction,
                wanted=plan.statistics_of(communicator.rank),
            )
            like = torch.empty(0, dtype=dtype, device=self.layers[0].parameters[0].device)
            self.exchange = FactorExchange(plan, self._collector, communicator, like)
            self.averages = RunningAverages(
                plan, self.layers, self.factors, communicator, recorder, warned, self._correction
            )
        self.fisher = FisherContext(config, self.layers, self._collector, recorder, loss_scale, self._guards)
        if groups:
            self._averager = GradientAverager(
                groups,
                config.accumulation_steps,
                communicator.world_size,
                lambda index: self._queue.ready("gradient", index),
            )

    def begin(self, collecting: bool, inverting: bool) -> None:
        """Start a step, in which statistics are collected or not, and factors inverted or not."""
        collecting = collecting and self._collector is not None
        self._guards.begin()
        self._inversions = None
        if self._collector:
            self._collector.begin(collecting)
        if self._correction:
            self._correction.begin(collecting and not inverting)
        self.fisher.begin()
        if self.exchange:
            self.exchange.begin()
        if self._averager:
            self._averager.begin(watching=self._local or not collecting)
        wanted = {"gradient"} if self._averager else set()
        wanted |= {"A", "G"} if collecting else set()
        self._queue.begin([m for m in self._plan.messages if m.kind in wanted])

    @property
    def started(self) -> bool:
        """Whether something of the step has happened."""
        parts = (self._collector, self._averager)
        return self._queue.started or any(part is not None and part.started for part in parts)

    def close_with(self, owner: object) -> None:
        """Remove every hook when ``owner`` is dropped; what hooks hold must not hold it."""
        weakref.finalize(owner, _close, weakref.ref(self))

    def close(self) -> None:
        """Remove every hook."""
        for part in (self._collector, self._averager):
            if part:
                part.close()

    def receive(self, step: int, inverting: bool, strength: float) -> None:
        """End the passes, send what has not left and wait for all: gradients and running averages are then up to date.

        Where the Plan says so, inversions begin meanwhile.

        Args:
            step: at which numbers that vary in training hold.
            inverting: whether factors are inverted.
            strength: multiplies every layer's damping.

        Raises:
            RuntimeError: if passes do not match, or gradients were changed after they were sent; averages are then as
                before.
        """
        self._guards.check_order()
        self.fisher.require()
        if self._collector and self._collector.collecting:
            self._collector.finish()
        self._queue.flush()
        summary = self._summarise()
        exchange = None if self._alone else self.exchange  # sums stay where they are
        arrivals = Arrivals(self._queue, exchange, self.averages, self._unpack_gradients, step)
        try:
            if inverting and self._starts_early:
                self._invert(step, strength, arrivals)
            arrivals.rest(summary)
        except Exception:
            self.undo()
            raise
        if self._alone and self.exchange and self.averages and self._collecting:
            self.averages.add(self.exchange.local(), step)

    @property
    def _collecting(self) -> bool:
        return self._collector is not None and self._collector.collecting

    @property
    def _starts_early(self) -> bool:
        """Whether inversions begin before all messages have arrived: not before every factor was known once, as a layer
        that has statistics for the first time is inverted with the others.
        """
        wanted = self._plan.schedule.inverse_start == "as_ready" and not self._alone
        return wanted and self._collecting and all(factor.known for factor in self.factors)

    def _unpack_gradients(self, items: tuple[int, ...], buffer: Tensor) -> None:
        assert self._averager is not None
        self._averager.unpack(items, buffer)

    def _invert(self, step: int, strength: float, arrivals: Arrivals | None = None) -> None:
        """Begin to invert the factors, each when its layer's have arrived."""
        interval = self._config.at("inverse_interval", step)
        damping = self._damping(step, strength, arrivals)
        ranks = self._plan, self._communicator, self._recorder
        # Several at a time would hold back the first inverse until the sums of the others are there.
        streams = self._inversion_streams if arrivals is None else None
        self._inversions = Inversions(self.layers, self.factors, damping, interval, *ranks, streams=streams)
        self._inversions.start()

    def _damping(self, step: int, strength: float, arrivals: Arrivals | None) -> Callable[[int], float]:
        known: list[float | None] = [None] * len(self.factors)
        if arrivals is None:
            known = dampings(self.layers, self.factors, step, strength)

        def damping(i: int) -> float:
            pair = slice(i & ~1, (i & ~1) + 2)
            if arrivals is not None and known[i] is None:
                arrivals.until(range(pair.start, pair.stop))
                known[pair] = dampings([self.layers[i // 2]], self.factors[pair], step, strength)
            value = known[i]
            assert value is not None
            return value

        return damping

    def settle(self, step: int) -> None:
        """The step counts: its statistics stay in the running averages; collective with corrected eigenvalues.

        Raises:
            RuntimeError: if no layer has been used.
        """
        assert self.averages is not None
        try:
            counts = self.averages.settle(step)
        except Exception:
            self.undo()
            raise
        if not counts:
            self._abandon_inversions()

    def undo(self) -> None:
        """The step does not count: running averages and inverses are as before; collective where inversions began."""
        self._abandon_inversions()
        if self.averages:
            self.averages.undo()

    def _abandon_inversions(self) -> None:
        inversions, self._inversions = self._inversions, None
        if inversions:
            inversions.abandon()

    def precondition(self, access: GradientAccess, step: int, inverting: bool, strength: float) -> None:
        """Invert the factors, if that is due, and replace the gradients by preconditioned ones; collective.

        Args:
            access: where gradients are.
            step, inverting, strength: as in :meth:`receive`.

        Raises:
            FactorInversionError: on every rank; inverses are then as before.
        """
        if inverting and self._inversions is None:
            self._invert(step, strength)
        inversions = self._inversions
        kl_clip = self._config.at("kl_clip", step)
        parts = self.layers, self.factors, access, self._plan, self._communicator, self._recorder
        try:
            precondition_gradients(*parts, step=step, kl_clip=kl_clip, strength=strength, inversions=inversions)
        except FactorInversionError:
            if inversions:
                inversions.undo()
            raise

    def _summarise(self) -> tuple[Tensor, Work] | None:
        """Send what every rank must know of the factors, where their messages do not say it."""
        if not (self._plan.summarised and self.exchange and self._collecting):
            return None
        with self._side.work():  # where the parts of it were made
            with self._recorder.span("FactorComp", "summary"):
                buffer = self.exchange.summary()
            issue = partial(self._communicator.all_reduce, buffer, "kfac_FactorComm")
            work = self._recorder.flight("FactorComm", "summary", issue)
        return buffer, work

    def discard(self) -> None:
        """Forget the step under way; collective where messages travel: what has left on one rank leaves on all."""
        self._queue.flush()
        for _ in self._queue.receive():
            pass
        if self._collector:
            self._collector.discard()

    def fault(
        self, model: nn.Module, parameters: Sequence[nn.Parameter], access: GradientAccess
    ) -> tuple[str | None, GradientAccess]:
        """What is not finite among a step's statistics, or among its gradients where it has none, or None.

        Args:
            model: knows the parameters' names.
            parameters: with gradients, averaged ones.
            access: where they are.

        Returns:
            it, and how gradients are read from now on.
        """
        assert self.exchange is not None
        # A scaler asks for finite gradients itself; a rank that computes no statistics may have gradients that are not.
        fault = self.exchange.fault()
        if self._loss_scale.enabled or fault is not None or (self._collecting and not self._local):
            return fault, access
        read = GradientsRead(access, parameters)
        known = self._averager is not None or self._alone
        return gradient_fault(model, read.gradients, self._guilty_ranks if known else None), read

    def _guilty_ranks(self) -> str:
        finite = self._averager is not None and self._averager.sent_finite
        everyone = self._communicator.all_gather_object(finite)
        ranks = [str(rank) for rank, fine in enumerate(everyone) if not fine]
        return f"rank(s) {', '.join(ranks)}" if ranks else "the sum over the ranks (overflow)"

    def _pack(self, message: Message) -> Tensor:
        if message.kind == "gradient":
            assert self._averager is not None
            return self._averager.pack(message.items)
        assert self.exchange is not None
        if self._alone:
            return self.exchange.nothing  # sums stay where they are; what has left has left
        with self._recorder.span("FactorComp", f"pack {message.kind}"):
            return self.exchange.pack(message.items)


def _close(execution: weakref.ref[Execution]) -> None:
    there = execution()
    if there is not None:
        there.close()
