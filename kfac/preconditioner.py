"""The K-FAC preconditioner: state and hooks that execute a :class:`~kfac.planning.Plan` on real ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from kfac.communication import Communicator, get_communicator
from kfac.config import KFACConfig
from kfac.damping_adaptation import LevenbergMarquardt, mean_over_ranks
from kfac.execution import Execution
from kfac.holdings import make_factors, settle, share
from kfac.hooks import renew_compiled
from kfac.inversion import FactorInversionError
from kfac.layers import GradientAccess, PlainGradients, describe_coverage, unwrap
from kfac.loss_scale import LossScale, ScaledGradients
from kfac.nonfinite import NonFiniteError, overflowed, refuse
from kfac.planning import ClusterProfile, LayerProfile, ModelProfile, Plan
from kfac.recording import Recorder
from kfac.schedules import fixed_switches
from kfac.setup import (
    Schedule,
    check_arguments,
    check_plan,
    common_plan,
    layer_sizes,
    register_everywhere,
    require_same_parameters,
    trainable,
)
from kfac.state import BoundToModel, dense_factor, load_factors, make_state, read_state

__all__ = ["KFAC", "FactorInversionError", "NonFiniteError"]


class KFAC(BoundToModel):
    """Preconditions gradients with Kronecker-factored curvature: ``loss.backward(); kfac.step(); optimizer.step()``.

    Construction, :meth:`step`, :meth:`replan` and :meth:`state_dict` are collective. The ranks are those of
    torch.distributed or deepspeed.comm where either is initialised, else this process is alone.

    Args:
        model: the model, may be wrapped in DistributedDataParallel and compiled, as a whole or in parts.
        config: hyper-parameters.
        schedule: a schedule's name, its switches, or a ready Plan. It changes when things happen, never the
            result beyond rounding.
        average_gradients: also average all gradients over the ranks, as messages of the Plan. Without it :meth:`step`
            expects gradients that are averaged already (DistributedDataParallel, DeepSpeed).
        model_profile, cluster_profile: what to plan from; without them a shipped profile and the layers' dimensions.
        communicator: the ranks, if not the default ones.
        recorder: records timelines.
        grad_scaler: the ``torch.amp.GradScaler`` that scales the loss (fp16). Statistics are unscaled; a step whose
            gradients overflow changes nothing here and is skipped by the scaler. :meth:`step` takes gradients before
            or after ``scaler.unscale_(optimizer)``; with ``average_gradients`` before it.
        gradients: where gradients are; :func:`kfac.engine.attach` gives DeepSpeed's.

    Raises:
        ValueError: if the model has no layer to precondition, or the ranks disagree on model, config or schedule, or
            for a ``grad_scaler`` that is none.
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
        grad_scaler: torch.amp.GradScaler | None = None,
        gradients: GradientAccess | None = None,
    ) -> None:
        check_arguments(model, config)
        self.config = KFACConfig() if config is None else config
        self._gradients = gradients or PlainGradients()
        self._loss_scale = LossScale(grad_scaler)
        self._communicator = communicator or get_communicator()
        renew_compiled(model)
        self._model = unwrap(model)
        self.schedule = schedule
        self._average_gradients = average_gradients and self._communicator.world_size > 1
        self.layers, self.first_order, self._groups = register_everywhere(
            self._model, self.config, schedule, self._average_gradients, self._communicator
        )
        self._device = next(iter(self._groups.values()))[0].device
        self._recorder = recorder or Recorder(self._device, self._communicator.rank)
        self._dtype = max((torch.float32, *(x.parameters[0].dtype for x in self.layers)), key=lambda d: d.itemsize)
        self.plan = self._make_plan(schedule, model_profile, cluster_profile)
        self.steps = self.skipped_steps = 0
        self._warned: set[str] = set()
        self._adaptation: LevenbergMarquardt | None = None
        if self.config.damping_adaptation == "levenberg_marquardt" and self.plan.schedule.curvature:
            self._adaptation = LevenbergMarquardt(self.config.damping_interval)
        self._factors = make_factors(self.layers, self._dtype, self._device, self._communicator.world_size > 1)
        self._attach()

    # ------------------------------------------------------------------ set-up

    def _make_plan(self, schedule: Schedule, model: ModelProfile | None, cluster: ClusterProfile | None) -> Plan:
        plan = common_plan(schedule, self.layer_sizes, self._communicator, model, cluster, self.config)
        if plan.schedule.curvature and not self.layers:
            raise ValueError("K-FAC finds no layer to precondition:\n" + describe_coverage([], self.first_order))
        return plan

    @property
    def layer_sizes(self) -> tuple[LayerProfile, ...]:
        """The layers' names and sizes, without seconds: what a plan is for."""
        return layer_sizes(self.layers, self._groups)

    def _attach(self) -> None:
        """Hook the model for the present plan, keeping the factors' state."""
        settle(self._factors, self.plan, self._communicator.rank)
        self._trainable = trainable(self._model)
        self._execution = Execution(
            self.plan,
            self.layers,
            [self._groups[name] for name in self.plan.layers] if self._average_gradients else [],
            self._factors,
            config=self.config,
            dtype=self._dtype,
            communicator=self._communicator,
            recorder=self._recorder,
            loss_scale=self._loss_scale,
            warned=self._warned,
        )
        self._execution.close_with(self)
        self._closed = False
        try:
            self._begin()
        except Exception:
            self.close()
            raise

    def _begin(self) -> None:
        collecting = self.steps % self.config.at("factor_interval", self.steps) == 0
        self._execution.begin(collecting, inverting=self._inverses_due())

    def close(self) -> None:
        """Remove every hook; the model is as it was."""
        self._execution.close()
        self._closed = True

    def replan(
        self,
        model_profile: ModelProfile | None,
        cluster_profile: ClusterProfile | None,
        schedule: Schedule | None = None,
    ) -> Plan:
        """Plan anew, from rank 0's profiles (those of other ranks are ignored); collective, between two steps.

        ``schedule`` is kept for the next time, unless it is a ready Plan. See also :class:`kfac.replanning.Replanner`.

        Returns:
            the new plan. Factors, inverses and the step count stay.

        Raises:
            RuntimeError: within a step.
            ValueError: if the profile is of another model.
        """
        self._require_boundary("replan")
        require_same_parameters(self._model, self._trainable)
        if schedule is None:
            schedule = self.schedule.schedule if isinstance(self.schedule, Plan) else self.schedule
        plan = self._make_plan(schedule, model_profile, cluster_profile)
        share(self._factors, self.plan, self._communicator)
        self.plan, self.schedule = plan, self.schedule if isinstance(schedule, Plan) else schedule
        self.close()
        self._attach()
        return self.plan

    def _require_boundary(self, what: str) -> None:
        if self._execution.started and not self._closed:
            raise RuntimeError(f"{what}() within a step: call it after step() and before the next forward pass")

    # ------------------------------------------------------------------ one step

    def curvature(
        self,
        outputs: Tensor,
        loss_kind: str,
        weight: float = 1.0,
        *,
        targets: Tensor | None = None,
        ignore_index: int = -100,
        class_weights: Tensor | None = None,
    ) -> AbstractContextManager[None]:
        """Say what the loss is a function of; its backward pass goes inside.

        ``with kfac.curvature(outputs, "classification", targets=y): loss.backward()``. G is scaled by the number of
        loss terms (tokens, where a mean is over tokens), which without this is taken for the number of samples; with
        ``fisher`` mc or exact G is computed from the outputs. Use it for all backward passes of a step, or for none. In
        steps that collect no statistics it does nothing.

        Args:
            outputs: the model's outputs, with their graph: logits ``[N, classes, *positions]`` of a classification, of
                which every position is a term; else ``[N, *positions, d]``, where every row of d is one.
            loss_kind: ``classification`` (``nn.CrossEntropyLoss``), ``regression`` (``nn.MSELoss``) or ``binary``
                (``nn.BCEWithLogitsLoss``), reduced as ``KFACConfig.loss_reduction`` says.
            weight: what the loss of these outputs is weighted with in that of the whole batch: 1/k with k equal
                micro-batches, (terms here) * ranks / (all terms) with unequal shards of a mean.
            targets: labels as the loss takes them, to know which are ``ignore_index``; without, all terms count.
            ignore_index: the label of terms that do not count in a classification.
            class_weights: ``[classes]``, the ``weight`` of ``nn.CrossEntropyLoss`` (without label smoothing), by which
                ``fisher`` mc and exact weight the terms; shares in ``weight`` are then of sums of these weights.

        Raises:
            ValueError: on entry, for an unknown loss kind, or shapes that do not fit it.
        """
        return self._execution.fisher.around(outputs, loss_kind, weight, targets, ignore_index, class_weights)

    def abandon_step(self) -> None:
        """Forget the passes since the last :meth:`step` (an exception ended one); collective. Gradients are yours."""
        self._execution.discard()
        self._begin()

    @torch.no_grad()
    def step(self) -> None:
        """Finish the iteration's communication and precondition the gradients in place; collective.

        Raises:
            NonFiniteError: on every rank, for a NaN or infinite statistic or gradient, if ``nonfinite`` is ``raise``.
            FactorInversionError: on every rank, if a damped factor cannot be inverted.
        """
        if self._closed:
            raise RuntimeError("step() after close(): the model is not preconditioned any more")
        require_same_parameters(self._model, self._trainable)
        if self.adapts_damping:
            raise RuntimeError(
                "damping_adaptation: the last step's loss afterwards is missing. Call "
                "kfac.adapt_damping(loss, loss_again) after optimizer.step() where kfac.adapts_damping is true"
            )
        try:
            with torch.autocast(self._device.type, enabled=False):
                self.steps += self._step()
        except Exception:
            if self._adaptation:
                self._adaptation.forget()
            raise
        finally:
            self._begin()

    def _step(self) -> bool:
        """Whether there was a step: not where gradients overflowed under a loss scale."""
        scaled = self._loss_scale.gradients_are_scaled(self._average_gradients)
        self._execution.receive(self.steps, self._inverses_due(), self.damping_strength)
        if self._execution.averages is None:
            return True
        fault, access = self._execution.fault(self._model, self._trainable, self._gradients)
        if overflowed(fault, self._trainable, self._loss_scale, scaled):
            self.skipped_steps += 1
            self._execution.undo()
            return False
        if fault is not None:
            self._execution.undo()
            refuse(f"step {self.steps}: {fault}", self.config.nonfinite, self._trainable)
            self.skipped_steps += 1
            return True
        self._execution.settle(self.steps)
        if scaled:
            access = ScaledGradients(access, self._loss_scale.inverse(self._device))
        if self._adaptation:
            self._adaptation.note(self.steps, self._trainable, access)
        self._execution.precondition(access, self.steps, self._inverses_due(), self.damping_strength)
        return True

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
        mean = mean_over_ranks((before, after), self._communicator)
        return self._adaptation.adapt(*mean, self._execution.layers, self._execution.factors)

    def _inverses_due(self) -> bool:
        """Also where a factor has statistics and was never inverted: the step that should have done it was skipped."""
        due = self.steps % self.config.at("inverse_interval", self.steps) == 0
        return bool(due) or any(state.known and not state.solved for state in self._factors.values())

    # ------------------------------------------------------------------ state

    def factor(self, layer: str, side: str) -> Tensor:
        """The factor ``[d, d]`` of a layer's side ``A`` or ``G``, without damping, with zeros between blocks; a copy.

        A is in the order of ``weight.view(out, -1)``, with the bias last (per group).

        Raises:
            KeyError: if there is no such layer, no statistic yet, or only another rank has it, naming that rank.
        """
        return dense_factor(self.layers, self._factors, self.plan, self._communicator.rank, layer, side)

    def state_dict(self) -> dict[str, Any]:
        """Everything that a bitwise continuation needs, also inside an inverse interval; the same on every rank.

        Raises:
            RuntimeError: within a step.
        """
        self._require_boundary("state_dict")
        state = make_state(self._factors, self.plan, self.config, self.steps, self.skipped_steps, self._communicator)
        return {**state, "damping_strength": self.damping_strength}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state, plan included; for another schedule or number of ranks the own plan is kept.

        Raises:
            ValueError: if the state does not fit, or is of an unknown version; nothing has changed then.
        """
        self._require_boundary("load_state_dict")
        state, plan = read_state(state, self._factors, self.config)
        strength = state.get("damping_strength", 1.0)
        if not (isinstance(strength, (int, float)) and 0.0 < strength < math.inf):
            raise ValueError(f"the state is damaged: damping_strength should be a positive number, but is {strength!r}")
        same = plan.schedule == self.plan.schedule or fixed_switches(self.schedule) is not None
        taken_over = same and plan.world_size == self._communicator.world_size and plan != self.plan
        if taken_over:
            check_plan(plan, self.layer_sizes, plan.world_size, self.config)
        load_factors(state, self._factors)
        self.steps, self.skipped_steps = state["steps"], state["skipped_steps"]
        if self._adaptation:
            self._adaptation.strength = strength
            self._adaptation.forget()
        if taken_over:
            self.close()
            self.plan = plan
            self._attach()
        settle(self._factors, self.plan, self._communicator.rank)
        self._begin()

    def summary(self) -> str:
        """The layers that are preconditioned, and the parameters that keep their plain gradient with the reasons."""
        return describe_coverage(self.layers, self.first_order, self._factors)
