"""The parts that execute one Plan on a model: hooks, messages, and what becomes of what they carry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from kfac.averages import RunningAverages
from kfac.collection import StatisticsCollector
from kfac.communication import Communicator
from kfac.config import KFACConfig
from kfac.ekfac import EigenvalueCorrection
from kfac.exchange import FactorExchange, Received
from kfac.factors import FactorState
from kfac.fisher_context import FisherContext
from kfac.gradients import GradientAverager
from kfac.layers import KFACLayer
from kfac.loss_scale import LossScale
from kfac.messages import MessageQueue
from kfac.planning import Message, Plan
from kfac.recording import Recorder


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
        warned: the names of layers that were warned of; is added to.

    Attributes:
        layers: in the Plan's order, none if it computes no curvature.
        factors: A and G of each layer in turn.
        averages: the running averages; None without curvature, like what follows.
        exchange: of the factors' statistics.
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
        self._plan, self._recorder = plan, recorder
        self._alone = communicator.world_size == 1
        self._queue = MessageQueue(communicator, recorder, self._pack)
        self._correction: EigenvalueCorrection | None = None
        self._collector: StatisticsCollector | None = None
        self._averager: GradientAverager | None = None
        self.exchange: FactorExchange | None = None
        self.averages: RunningAverages | None = None
        by_name = {layer.name: layer for layer in layers} if plan.schedule.curvature else {}
        self.layers = [by_name[name] for name in plan.layers if name in by_name]
        self.factors = [factors[f.layer, f.side] for f in plan.factors]
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
                correction=self._correction,
            )
            like = torch.empty(0, dtype=dtype, device=self.layers[0].parameters[0].device)
            self.exchange = FactorExchange(plan, self._collector, communicator, like)
            self.averages = RunningAverages(
                plan, self.layers, self.factors, communicator, recorder, warned, self._correction
            )
        self.fisher = FisherContext(config, self.layers, self._collector, recorder, loss_scale)
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
        if self._collector:
            self._collector.begin(collecting)
        if self._correction:
            self._correction.begin(collecting and not inverting)
        self.fisher.begin()
        if self.exchange:
            self.exchange.begin()
        if self._averager:
            self._averager.begin()
        wanted = {"gradient"} if self._averager else set()
        wanted |= {"A", "G"} if collecting else set()
        self._queue.begin([m for m in self._plan.messages if m.kind in wanted])

    @property
    def started(self) -> bool:
        """Whether something of the step has happened."""
        parts = (self._collector, self._averager)
        return self._queue.started or any(part is not None and part.started for part in parts)

    def close(self) -> None:
        """Remove every hook."""
        for part in (self._collector, self._averager):
            if part:
                part.close()

    def receive(self) -> Received:
        """End the passes, send what has not left and wait for all: gradients are averaged in place, sums returned.

        Raises:
            RuntimeError: if passes do not match, or gradients were changed after they were sent.
        """
        self.fisher.require()
        if self._collector and self._collector.collecting:
            self._collector.finish()
        self._queue.flush()
        factors: list[tuple[Message, Tensor]] = []
        for message, buffer in self._queue.receive():
            if message.kind == "gradient":
                assert self._averager is not None
                self._averager.unpack(message.items, buffer)
            else:
                factors.append((message, buffer))
        if self._alone and self.exchange and self._collector and self._collector.collecting:
            return self.exchange.local()
        return self.exchange.unpack(factors) if self.exchange else {}

    def _pack(self, message: Message) -> Tensor:
        if message.kind == "gradient":
            assert self._averager is not None
            return self._averager.pack(message.items)
        assert self.exchange is not None
        if self._alone:
            return self.exchange.nothing  # sums stay where they are; what has left has left
        with self._recorder.span("FactorComp", f"pack {message.kind}"):
            return self.exchange.pack(message.items)
