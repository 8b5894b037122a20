"""The K-FAC preconditioner: state and hooks that execute a :class:`~kfac.planning.Plan` on real ranks."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from kfac.collection import StatisticsCollector
from kfac.communication import Communicator, get_communicator
from kfac.config import KFACConfig, options_at
from kfac.curvature.scaling import factor_scale
from kfac.damping_adaptation import LevenbergMarquardt
from kfac.ekfac import EigenvalueCorrection
from kfac.exchange import FactorExchange, Received
from kfac.factors import FactorState
from kfac.fisher_context import FisherContext
from kfac.gradients import GradientAverager
from kfac.inversion import FactorInversionError, dampings, invert
from kfac.layers import GradientAccess, KFACLayer, PlainGradients, describe_coverage, unwrap
from kfac.messages import MessageQueue
from kfac.planning import ClusterProfile, LayerProfile, Message, ModelProfile, Plan
from kfac.preconditioning import precondition_gradients
from kfac.recording import Recorder
from kfac.setup import Schedule, check_plan, common_plan, layer_sizes, register_everywhere
from kfac.state import check_state, load_factors, make_state

__all__ = ["KFAC", "FactorInversionError", "NonFiniteError"]

logger = logging.getLogger(__name__)


class NonFiniteError(RuntimeError):
    """A factor's statistic is NaN or infinite; raised on every rank, the state is as before the step."""


class KFAC:
    """Preconditions gradients with Kronecker-factored curvature: ``loss.backward(); kfac.step(); optimizer.step()``.

    Construction, :meth:`step`, :meth:`replan` and :meth:`state_dict` are collective. The ranks are those of
    torch.distributed or deepspeed.comm where either is initialised, else this process is alone.

    Args:
        model: the model, may be wrapped in DistributedDataParallel.
        config: hyper-parameters.
        schedule: a schedule's name, its switches, or a ready Plan. It changes when things happen, never the result.
        average_gradients: also average all gradients over the ranks, as messages of the Plan. Without it :meth:`step`
            expects gradients that are averaged already (DistributedDataParallel, DeepSpeed).
        model_profile, cluster_profile: what to plan from; without them a shipped profile and the layers' dimensions.
        communicator: the ranks, if not the default ones.
        recorder: records timelines.
        gradients: where gradients are; :func:`kfac.engine.attach` gives DeepSpeed's.

    Raises:
        ValueError: if the model has no layer to precondition, or the ranks disagree on model, config or schedule.
    """

    def __init__(
        self,
        model: nn.Module,
        config: KFACConfig | None = None,
        schedule: Schedule = "spdkfac",
        *,
        average_gradients: bool = False,
        model_profile: ModelProfile | None = None,
        cluster_profile: ClusterProfile | None = None,
        communicator: Communicator | None = None,
        recorder: Recorder | None = None,
        gradients: GradientAccess | None = None,
    ) -> None:
        self.config = config or KFACConfig()
        self._gradients = gradients or PlainGradients()
        self._communicator = communicator or get_communicator()
        self._model = unwrap(model)
        self._schedule = schedule
        self._average_gradients = average_gradients and self._communicator.world_size > 1
        self.layers, self.first_order, self._groups = register_everywhere(
            self._model, self.config, schedule, self._average_gradients, self._communicator
        )
        weight = next(iter(self._groups.values()))[0]
        self._recorder = recorder or Recorder(weight.device, self._communicator.rank)
        dtypes = [layer.parameters[0].dtype for layer in self.layers]
        self._dtype = max((torch.float32, *dtypes), key=lambda d: d.itemsize)
        self.plan = self._make_plan(model_profile, cluster_profile)
        self.steps = 0
        self.skipped_steps = 0
        self._warned: set[str] = set()
        self._collector: StatisticsCollector | None = None
        self._exchange: FactorExchange | None = None
        self._averager: GradientAverager | None = None
        self._correction: EigenvalueCorrection | None = None
        self._adaptation: LevenbergMarquardt | None = None
        if self.config.damping_adaptation == "levenberg_marquardt" and self.plan.schedule.curvature:
            self._adaptation = LevenbergMarquardt(self.config.damping_interval)
        self._factors: dict[tuple[str, str], FactorState] = {}
        self._states: list[FactorState] = []
        self._queue = MessageQueue(self._communicator, self._recorder, self._pack)
        self._attach()

    # ------------------------------------------------------------------ set-up

    def _make_plan(self, model: ModelProfile | None, cluster: ClusterProfile | None) -> Plan:
        plan = common_plan(self._schedule, self.layer_sizes, self._communicator, model, cluster)
        if plan.schedule.curvature and not self.layers:
            raise ValueError("K-FAC finds no layer to precondition:\n" + self.summary())
        return plan

    @property
    def layer_sizes(self) -> tuple[LayerProfile, ...]:
        """The layers' names and sizes, without seconds: what a plan is for."""
        return layer_sizes(self.layers, self._groups)

    def _attach(self) -> None:
        """Hook the model for the present plan, keeping the factors' state."""
        self._closed = False
        self._trainable = self._trainable_now()
        by_name = {layer.name: layer for layer in self.layers}
        self._ordered: list[KFACLayer] = [by_name[name] for name in self.plan.layers if name in by_name]
        if self.plan.schedule.curvature:
            factors = {
                (f.layer, f.side): FactorState(by_name[f.layer].a if f.side == "A" else by_name[f.layer].g)
                for f in self.plan.factors
            }
            self._factors = {key: self._factors.get(key, fresh) for key, fresh in factors.items()}
            self._states = [self._factors[f.layer, f.side] for f in self.plan.factors]
            if self.config.inverse_method == "ekfac":
                self._correction = EigenvalueCorrection(self._ordered, self._states, self._communicator, self._recorder)
            self._collector = StatisticsCollector(
                self._ordered,
                scaling=self.config.scaling,
                dtype=self._dtype,
                accumulation_steps=self.config.accumulation_steps,
                recorder=self._recorder,
                on_ready=lambda side, index: self._queue.ready(side, 2 * index + (side == "G")),
                has_left=lambda index: self._queue.has_left("A", 2 * index),
                correction=self._correction,
            )
            like = torch.empty(0, dtype=self._dtype, device=self._ordered[0].parameters[0].device)
            self._exchange = FactorExchange(self.plan, self._collector, self._communicator, like)
        self._fisher = FisherContext(self.config, self._ordered, self._collector, self._recorder)
        if self._average_gradients:
            self._averager = GradientAverager(
                [self._groups[name] for name in self.plan.layers],
                self.config.accumulation_steps,
                self._communicator.world_size,
                lambda index: self._queue.ready("gradient", index),
            )
        self._begin()

    def _begin(self) -> None:
        collecting = self.steps % self.config.at("factor_interval", self.steps) == 0
        if self._collector:
            self._collector.begin(collecting)
        if self._correction:
            self._correction.begin(collecting and not self._inverses_due())
        self._fisher.begin()
        if self._exchange:
            self._exchange.begin()
        if self._averager:
            self._averager.begin()
        wanted = {"gradient"} if self._averager else set()
        wanted |= {"A", "G"} if self._collector and collecting else set()
        self._queue.begin([m for m in self.plan.messages if m.kind in wanted])

    def close(self) -> None:
        """Remove every hook; the model is as it was."""
        for part in (self._collector, self._averager):
            if part:
                part.close()
        self._collector = self._exchange = self._averager = None
        self._closed = True
        self._queue.begin(())

    def replan(
        self,
        model_profile: ModelProfile | None,
        cluster_profile: ClusterProfile | None,
        schedule: Schedule | None = None,
    ) -> Plan:
        """Plan anew, from rank 0's profiles (those of other ranks are ignored); collective, between two steps.

        Returns:
            the new plan. Factors, inverses and the step count stay.

        Raises:
            RuntimeError: within a step.
            ValueError: if the profile is of another model.
        """
        self._require_boundary("replan")
        self._require_same_parameters()
        before = self._schedule
        if schedule is not None:
            self._schedule = schedule
        elif isinstance(before, Plan):
            self._schedule = before.schedule
        try:
            self.plan = self._make_plan(model_profile, cluster_profile)
        except Exception:
            self._schedule = before
            raise
        self.close()
        self._attach()
        return self.plan

    def _require_boundary(self, what: str) -> None:
        parts = (self._collector, self._averager)
        if self._queue.started or any(part is not None and part.started for part in parts):
            raise RuntimeError(f"{what}() within a step: call it after step() and before the next forward pass")

    def _trainable_now(self) -> list[nn.Parameter]:
        return [parameter for parameter in self._model.parameters() if parameter.requires_grad]

    def _require_same_parameters(self) -> None:
        now = self._trainable_now()
        if len(now) != len(self._trainable) or any(a is not b for a, b in zip(now, self._trainable, strict=True)):
            raise RuntimeError(
                "parameters were frozen, unfrozen, added or replaced since KFAC was made: close() it and make a new one"
            )

    # ------------------------------------------------------------------ one step

    def curvature(self, outputs: Tensor, loss_kind: str, weight: float = 1.0) -> AbstractContextManager[None]:
        """Compute G from the model's outputs (``fisher`` mc or exact); the loss's backward pass goes inside.

        ``with kfac.curvature(outputs, "classification"): loss.backward()``. With ``fisher="empirical"``, and in steps
        that collect no statistics, it does nothing.

        Args:
            outputs: the model's outputs, with their graph (logits for classification).
            loss_kind: ``classification`` (mean cross-entropy) or ``regression`` (``nn.MSELoss``).
            weight: what the mean loss is multiplied by (with unequal shards, or 1/k for k micro-batches).

        Raises:
            ValueError: on entry, for an unknown loss kind.
        """
        return self._fisher.around(outputs, loss_kind, weight)

    @torch.no_grad()
    def step(self) -> None:
        """Finish the iteration's communication and precondition the gradients in place; collective.

        Raises:
            NonFiniteError: on every rank, if a statistic is NaN or infinite and ``nonfinite`` is ``raise``.
            FactorInversionError: on every rank, if a damped factor cannot be inverted.
        """
        if self._closed:
            raise RuntimeError("step() after close(): the model is not preconditioned any more")
        self._require_same_parameters()
        if self.adapts_damping:
            raise RuntimeError(
                "damping_adaptation: the last step's loss afterwards is missing. Call "
                "kfac.adapt_damping(loss, loss_again) after optimizer.step() where kfac.adapts_damping is true"
            )
        device_type = next(iter(self._groups.values()))[0].device.type
        try:
            with torch.autocast(device_type, enabled=False):
                self._step()
            self.steps += 1
        except Exception:
            if self._adaptation:
                self._adaptation.forget()
            raise
        finally:
            self._begin()

    def _step(self) -> None:
        self._fisher.require()
        if self._collector and self._collector.collecting:
            self._collector.finish()
        self._queue.flush()
        received = self._receive()
        if self._collector and self._update(received):
            if self._adaptation:
                self._adaptation.note(self.steps, self._trainable)
            if self._inverses_due():
                invert(self._ordered, self._states, self._dampings(), self.plan, self._communicator, self._recorder)
            with self._recorder.span("Precondition", "precondition"):
                self._precondition()

    @property
    def damping_strength(self) -> float:
        """What every layer's damping is multiplied by; 1 unless ``damping_adaptation`` changes it."""
        return self._adaptation.strength if self._adaptation else 1.0

    @property
    def adapts_damping(self) -> bool:
        """Whether :meth:`adapt_damping` must be called before the next step."""
        return self._adaptation is not None and self._adaptation.waiting

    def adapt_damping(self, before: float | Tensor, after: float | Tensor) -> float:
        """Adapt the damping to how well the last step was predicted; collective.

        After ``optimizer.step()``, where :attr:`adapts_damping` says so: ``kfac.adapt_damping(loss, loss_again)``.

        Args:
            before, after: the same batch's mean loss before and after the step, on this rank's shard.

        Returns:
            the reduction ratio: 1 where the loss fell as the quadratic model predicted.

        Raises:
            RuntimeError: if no step is waiting for it.
        """
        if self._adaptation is None or not self._adaptation.waiting:
            raise RuntimeError("adapt_damping() where none is due: call it where kfac.adapts_damping is true")
        losses = self._communicator.all_gather_object((float(before), float(after)))
        mean = [sum(values) / len(losses) for values in zip(*losses, strict=True)]
        return self._adaptation.adapt(mean[0], mean[1], self._ordered, self._states)

    def _inverses_due(self) -> bool:
        """Also where a factor has statistics and was never inverted: the step that should have done it was skipped."""
        due = self.steps % self.config.at("inverse_interval", self.steps) == 0
        return bool(due) or any(state.average is not None and not state.solved for state in self._states)

    def _pack(self, message: Message) -> Tensor:
        if message.kind == "gradient":
            assert self._averager is not None
            return self._averager.pack(message.items)
        assert self._exchange is not None
        with self._recorder.span("FactorComp", f"pack {message.kind}"):
            return self._exchange.pack(message.items)

    def _receive(self) -> Received:
        """Wait for all messages: gradients are averaged in place, factors' sums returned."""
        factors: list[tuple[Message, Tensor]] = []
        for message, buffer in self._queue.receive():
            if message.kind == "gradient":
                assert self._averager is not None
                self._averager.unpack(message.items, buffer)
            else:
                factors.append((message, buffer))
        return self._exchange.unpack(factors) if self._exchange else {}

    def _update(self, received: Received) -> bool:
        """Update the running averages; False if the step is skipped because a statistic is not finite."""
        assert self._exchange is not None
        fault = self._exchange.fault(received)
        if fault is not None:
            self._refuse(f"step {self.steps}: {fault}")
            return False
        if not received:
            return True
        if all(samples == 0 for _, samples in received.values()):
            raise RuntimeError(
                "step() without any statistics: no layer has seen a forward and a backward pass since the last step(). "
                "Under torch.compile, make KFAC before the first compiled call"
            )
        decays = options_at([layer.config for layer in self._ordered], "factor_decay", self.steps)
        world_size, from_identity = self._communicator.world_size, self.config.average_from == "identity"
        scales: list[float | None] = [None] * len(self._ordered)
        with self._recorder.span("FactorComp", "running averages"):
            for i, (total, samples) in sorted(received.items()):
                if samples == 0:
                    self._warn_unused(self.plan.factors[i].layer)
                    continue
                side, options = self.plan.factors[i].side, self._ordered[i // 2].config
                scale = factor_scale(options.scaling, side, samples, world_size, options.loss_reduction)
                self._states[i].update(total, scale, decays[i // 2], from_identity)
                scales[i // 2] = scale if side == "G" else None  # G comes last
        if self._correction:
            self._correction.update(scales, decays)
        return True

    def _refuse(self, fault: str) -> None:
        """End or skip the step, on all ranks together."""
        if self.config.nonfinite == "raise":
            raise NonFiniteError(fault)
        self.skipped_steps += 1
        logger.warning("%s; the step is skipped", fault)
        for group in self._groups.values():
            for parameter in group:
                parameter.grad = None

    def _warn_unused(self, name: str) -> None:
        if name not in self._warned:
            self._warned.add(name)
            logger.warning(
                "layer %r was not used in a step (its forward is bypassed or it is conditional): without statistics "
                "its gradient stays as it is",
                name,
            )

    def _dampings(self) -> list[float | None]:
        return dampings(self._ordered, self._states, self.steps, self.damping_strength)

    def _precondition(self) -> None:
        kl_clip = self.config.at("kl_clip", self.steps)
        precondition_gradients(
            self._ordered,
            self._states,
            self._gradients,
            step=self.steps,
            kl_clip=kl_clip,
            strength=self.damping_strength,
        )

    # ------------------------------------------------------------------ state

    def factor(self, layer: str, side: str) -> Tensor:
        """The factor ``[d, d]`` of a layer's side ``A`` or ``G``, without damping, with zeros between blocks; a copy.

        A is in the order of ``weight.view(out, -1)``, with the bias last (per group).

        Raises:
            KeyError: if there is no such layer, or no statistic yet.
        """
        state = self._factors[layer, side]
        if state.average is None:
            raise KeyError(f"{side} of {layer!r} has no statistics yet")
        owner = next(item for item in self.layers if item.name == layer)
        order = owner.a_order() if side == "A" else None
        groups = []
        for blocks in state.matrix().chunk(state.shape.groups):
            matrix = torch.block_diag(*blocks)[: state.shape.width, : state.shape.width]
            groups.append(matrix if order is None else matrix[order][:, order])
        whole: Tensor = torch.block_diag(*groups)
        return whole

    def state_dict(self) -> dict[str, Any]:
        """Everything that a bitwise continuation needs, also inside an inverse interval; the same on every rank.

        Raises:
            RuntimeError: within a step.
        """
        self._require_boundary("state_dict")
        state = make_state(self._factors, self.plan, self.config, self.steps, self.skipped_steps)
        return {**state, "damping_strength": self.damping_strength}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state, plan included; for another schedule or number of ranks the own plan is kept.

        Raises:
            ValueError: if the state is of another model.
        """
        self._require_boundary("load_state_dict")
        plan = check_state(state, self._factors)
        like = next(iter(self._groups.values()))[0].detach().to(self._dtype)
        load_factors(state, self._factors, like)
        self.steps, self.skipped_steps = state["steps"], state["skipped_steps"]
        if self._adaptation:
            self._adaptation.strength = state.get("damping_strength", 1.0)
            self._adaptation.forget()
        same = plan.schedule == self.plan.schedule or self._schedule == "auto"
        if same and plan.world_size == self._communicator.world_size and plan != self.plan:
            check_plan(plan, self.layer_sizes, plan.world_size)
            self.close()
            self.plan = plan
            self._attach()
        self._begin()

    def summary(self) -> str:
        """The layers that are preconditioned, and the parameters that keep their plain gradient with the reasons."""
        return describe_coverage(self.layers, self.first_order)
