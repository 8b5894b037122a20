"""What the model's outputs tell of the loss: how many terms it has, and G from backward passes of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from kfac.collection import StatisticsCollector
from kfac.config import KFACConfig
from kfac.curvature.fisher import check_loss, class_weighted_terms, counted_terms, fisher_vectors, loss_terms
from kfac.guards import Guards
from kfac.layers import KFACLayer
from kfac.loss_scale import LossScale
from kfac.recording import Recorder


class FisherContext:
    """What surrounds a loss's backward pass, see :meth:`kfac.KFAC.curvature`.

    Args:
        config: ``fisher``, ``fisher_samples`` and ``loss_reduction`` say what is computed.
        layers: the preconditioned layers.
        collector: of their statistics; None where no curvature is computed.
        recorder: records the passes.
        loss_scale: of mixed precision; the passes have it too.
        guards: warn of outputs that can be read in two ways.
    """

    def __init__(
        self,
        config: KFACConfig,
        layers: Sequence[KFACLayer],
        collector: StatisticsCollector | None,
        recorder: Recorder,
        loss_scale: LossScale,
        guards: Guards,
    ) -> None:
        self._config, self._collector, self._recorder = config, collector, recorder
        self._loss_scale, self._guards = loss_scale, guards
        self._inputs = [parameter for layer in layers for parameter in layer.parameters]
        self.begin()

    def begin(self) -> None:
        """Start a step."""
        self._entered = 0

    def require(self) -> None:
        """Whether the step had the outputs that it needs.

        Raises:
            RuntimeError: if it had not.
        """
        needed = self._collector is not None and self._collector.collecting and self._config.fisher != "empirical"
        if needed and self._entered == 0:
            raise RuntimeError(
                f"fisher={self._config.fisher!r} needs the model's outputs: "
                "with kfac.curvature(outputs, loss_kind): loss.backward()"
            )

    @contextmanager
    def around(
        self,
        outputs: Tensor,
        loss_kind: str,
        weight: float,
        targets: Tensor | None,
        ignore_index: int,
        class_weights: Tensor | None,
    ) -> Iterator[None]:
        """The context; on entry G is computed, unless it comes from the loss's own backward pass."""
        check_loss(outputs, loss_kind, targets)
        sampled = self._config.fisher != "empirical"
        if class_weights is not None:
            weighted = class_weighted_terms(outputs, loss_kind, targets, ignore_index, class_weights)
        collector = self._collector
        if collector is None or not collector.collecting:
            yield
            return
        counted = counted_terms(outputs, loss_kind, targets, ignore_index)
        if sampled and class_weights is not None:
            counted = weighted  # the gradients of the empirical Fisher have the weights already
        if sampled and loss_kind == "classification":
            self._guards.check_classes(outputs)
        collector.contexts += 1
        collector.loss_terms = loss_terms(outputs, loss_kind, counted)
        try:
            if not sampled:
                yield
                return
            self._passes(collector, outputs, loss_kind, weight, counted)
            self._entered += 1
            with collector.output_gradients("ignore"):
                yield
        finally:
            collector.loss_terms = None

    def _passes(
        self, collector: StatisticsCollector, outputs: Tensor, loss_kind: str, weight: float, counted: Tensor | None
    ) -> None:
        samples = self._config.fisher_samples if self._config.fisher == "mc" else None
        scale = 1.0 / self._loss_scale.inverse(outputs.device) if self._loss_scale.enabled else 1.0
        vectors = fisher_vectors(
            outputs,
            loss_kind,
            samples,
            reduction=self._config.loss_reduction,
            counted=counted,
            factor=weight * scale,
        )
        vector = next(vectors, None)
        while vector is not None:
            following = next(vectors, None)
            with (
                collector.output_gradients("add" if following is not None else "collect"),
                self._recorder.span("BP", "backward pass for the Fisher"),
            ):
                # The hooks on the layers' outputs see the gradients; those of the weights are thrown away.
                torch.autograd.grad(outputs, self._inputs, vector, retain_graph=True, allow_unused=True)
            vector = following
