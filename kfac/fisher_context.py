"""G from the model's outputs: backward passes of their own before that of the loss."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from kfac.collection import StatisticsCollector
from kfac.config import KFACConfig
from kfac.curvature.fisher import fisher_vectors
from kfac.layers import KFACLayer
from kfac.recording import Recorder


class FisherContext:
    """What surrounds a loss's backward pass, see :meth:`kfac.KFAC.curvature`.

    Args:
        config: ``fisher`` and ``fisher_samples`` say what is computed.
        layers: the preconditioned layers.
        collector: of their statistics; None where no curvature is computed.
        recorder: records the passes.
    """

    def __init__(
        self, config: KFACConfig, layers: Sequence[KFACLayer], collector: StatisticsCollector | None, recorder: Recorder
    ) -> None:
        self._config, self._collector, self._recorder = config, collector, recorder
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
    def around(self, outputs: Tensor, loss_kind: str, weight: float) -> Iterator[None]:
        """The context; on entry G is computed."""
        collector = self._collector
        if self._config.fisher == "empirical" or collector is None or not collector.collecting:
            yield
            return
        samples = self._config.fisher_samples if self._config.fisher == "mc" else None
        vectors = fisher_vectors(outputs, loss_kind, samples)
        vector = next(vectors, None)
        while vector is not None:
            following = next(vectors, None)
            with (
                collector.output_gradients("add" if following is not None else "collect"),
                self._recorder.span("BP", "backward pass for the Fisher"),
            ):
                # The hooks on the layers' outputs see the gradients; those of the weights are thrown away.
                torch.autograd.grad(outputs, self._inputs, vector * weight, retain_graph=True, allow_unused=True)
            vector = following
        self._entered += 1
        with collector.output_gradients("ignore"):
            yield
