"""Collecting statistics: hooks on the layers, sums over the calls and micro-batches of one step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from kfac.curvature.scaling import position_weights
from kfac.layers import KFACLayer
from kfac.recording import Recorder


@dataclass
class _Side:
    """One factor's sum over this rank's samples of the step."""

    total: Tensor | None = None
    samples: float = 0.0

    def sum(self, dim: int, like: Tensor) -> Tensor:
        """The sum so far ``[dim, dim]``, to be added to."""
        if self.total is None:
            self.total = like.new_zeros(dim, dim)
        return self.total


@dataclass
class _Progress:
    """Where a layer stands in the step: passes are forward-backward pairs, calls are uses within one pass."""

    forward_passes: int = 0
    backward_passes: int = 0
    open_calls: int = 0
    calls: int = 0


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


class StatisticsCollector:
    """Hooks that sum A's statistics in the forward pass and G's in the backward pass.

    G is hooked on the layer's output tensor, which also works where an in-place activation follows. Passes whose output
    needs no gradient are ignored.

    Args:
        layers: the layers, in the order of the indices passed to ``on_ready``.
        scaling: see :mod:`kfac.curvature.scaling`.
        dtype: of the statistics.
        accumulation_steps: micro-batches per step.
        recorder: records the work as FactorComp.
        on_ready: called with ("A" or "G", layer index) when a statistic of the step is complete on this rank.
    """

    def __init__(
        self,
        layers: Sequence[KFACLayer],
        *,
        scaling: str,
        dtype: torch.dtype,
        accumulation_steps: int,
        recorder: Recorder,
        on_ready: Callable[[Literal["A", "G"], int], None],
    ) -> None:
        self._layers = layers
        self._scaling = scaling
        self._dtype = dtype
        self._passes = accumulation_steps
        self._recorder = recorder
        self._on_ready = on_ready
        self._calls_seen = [0] * len(layers)
        self._learned = False
        self.collecting = False
        self._output_gradients: Literal["collect", "add", "ignore"] = "collect"
        self._reset()
        self._hooks = [
            layer.module.register_forward_hook(partial(self._after_forward, index), with_kwargs=True)
            for index, layer in enumerate(layers)
        ]

    def _reset(self) -> None:
        self._sides = {side: [_Side() for _ in self._layers] for side in "AG"}
        self._progress = [_Progress() for _ in self._layers]

    def begin(self, collecting: bool) -> None:
        """Start a step, which collects statistics or does not.

        How often each layer is called per pass is learned in the first collecting step, during which nothing is
        reported ready: a layer that is used twice must not be sent after its first use.
        """
        if any(progress.calls for progress in self._progress):
            self._learned = True
        self._reset()
        self.collecting = collecting

    @contextmanager
    def output_gradients(self, what: Literal["collect", "add", "ignore"]) -> Iterator[None]:
        """What a backward pass within does to G: ``collect`` (the last one), ``add`` (more will follow), ``ignore``."""
        before, self._output_gradients = self._output_gradients, what
        try:
            yield
        finally:
            self._output_gradients = before

    def take(self, side: str, index: int) -> tuple[Tensor | None, float]:
        """The sum ``[d, d]`` (None if the layer was not used) and its number of samples; the sum is given away."""
        slot = self._sides[side][index]
        total, slot.total = slot.total, None
        return total, slot.samples

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _after_forward(self, index: int, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not self.collecting or not isinstance(output, Tensor) or not output.requires_grad:
            return
        progress, layer = self._progress[index], self._layers[index]
        if progress.open_calls and _in_backward():
            return  # activation checkpointing runs the forward pass again: the first time was counted
        first = progress.open_calls == 0
        if first:
            self._open_pass(index)
        progress.open_calls += 1
        progress.calls = max(progress.calls, progress.open_calls)
        x = args[0] if args else kwargs["input"]
        with torch.no_grad(), self._recorder.span("FactorComp", f"A {layer.name}"):
            x = layer.batched(x.detach().to(self._dtype))
            positions = layer.positions(layer.batched(output))
            weight, _ = position_weights(self._scaling, positions, layer.convolution)
            side = self._sides["A"][index]
            layer.add_a_statistic(x, side.sum(layer.a_dim, x), weight)
            side.samples += x.shape[0] if first else 0
            output.register_hook(partial(self._output_gradient, index, positions))
            seen = self._calls_seen[index]
            complete = progress.forward_passes == self._passes and progress.open_calls == seen
            if self._learned and complete and seen == 1:
                self._on_ready("A", index)
        self._calls_seen[index] = max(seen, progress.open_calls)

    def _open_pass(self, index: int) -> None:
        progress = self._progress[index]
        progress.forward_passes += 1
        if progress.forward_passes > self._passes:
            raise RuntimeError(
                f"layer {self._layers[index].name!r} has seen more forward passes with gradients than "
                f"accumulation_steps={self._passes} since the last step(): set KFACConfig.accumulation_steps to the "
                "number of micro-batches, or run passes that are not trained on under torch.no_grad()"
            )

    def _output_gradient(self, index: int, positions: int, gradient: Tensor) -> None:
        progress, layer = self._progress[index], self._layers[index]
        if not self.collecting or progress.open_calls == 0 or self._output_gradients == "ignore":
            return
        last = self._output_gradients == "collect"
        first = progress.open_calls == progress.calls
        with torch.no_grad(), self._recorder.span("FactorComp", f"G {layer.name}"):
            g = layer.batched(gradient.detach().to(self._dtype))
            _, weight = position_weights(self._scaling, positions * progress.calls, layer.convolution)
            side = self._sides["G"][index]
            layer.add_g_statistic(g, side.sum(layer.g_dim, g), weight)
            if not last:
                return
            side.samples += g.shape[0] if first else 0
            progress.open_calls -= 1
            if progress.open_calls == 0:
                self._close_pass(index)

    def _close_pass(self, index: int) -> None:
        progress = self._progress[index]
        progress.backward_passes += 1
        progress.calls = 0 if progress.backward_passes < self._passes else progress.calls
        if self._learned and progress.backward_passes == self._passes:
            self._on_ready("A", index)  # for a layer that is called several times per pass, only now
            self._on_ready("G", index)
