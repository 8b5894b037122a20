"""Collecting statistics: hooks on the layers, sums over the calls and micro-batches of one step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from kfac.curvature.scaling import position_weights
from kfac.ekfac import EigenvalueCorrection
from kfac.guards import Guards
from kfac.hooks import ForwardHook, hook_gradient
from kfac.layers import KFACLayer
from kfac.loss_scale import LossScale
from kfac.passes import Call, Progress, Side
from kfac.recording import Recorder


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


class StatisticsCollector:
    """Hooks that sum A's statistics in the forward pass and G's in the backward pass.

    G is hooked on the layer's output tensor (a hook on the module forbids in-place activations). Passes whose output
    needs no gradient are ignored.

    Activation checkpointing runs layers again within the backward pass. With ``use_reentrant=True`` these runs are the
    ones that are differentiated (the first ones record no graph); without, they only fill in what the graph of the
    first runs needs. So a run within a backward pass counts when, and if, its output gets a gradient.

    Args:
        layers: the layers, in the order of the indices passed to ``on_ready``.
        scaling: see :mod:`kfac.curvature.scaling`.
        dtype: of the statistics.
        accumulation_steps: micro-batches per step.
        recorder: records the work as FactorComp.
        on_ready: called with ("A" or "G", layer index) when a statistic of the step is complete on this rank.
        has_left: whether the A statistic of a layer has been sent in this step.
        loss_scale: what output gradients are divided by.
        guards: are told what has run.
        correction: of eigenvalues; is given inputs and output gradients together.
        wanted: the layers (indices) whose statistics this rank computes; None: all of them.

    Attributes:
        loss_terms: of the backward pass under way or to come; None: one per sample.
        contexts: how many times the step has been told of loss terms, and is to be told of all.
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
        has_left: Callable[[int], bool],
        loss_scale: LossScale,
        guards: Guards,
        correction: EigenvalueCorrection | None = None,
        wanted: Collection[int] | None = None,
    ) -> None:
        self._layers = layers
        self._wanted = frozenset(range(len(layers)) if wanted is None else wanted)
        self._scaling = scaling
        self._dtype = dtype
        self._passes = accumulation_steps
        self._recorder = recorder
        self._on_ready = on_ready
        self._has_left = has_left
        self._loss_scale, self._guards = loss_scale, guards
        self._correction = correction
        self._calls_seen = [0] * len(layers)
        self._trained = [False] * len(layers)
        self.collecting = self._closed = False
        self.loss_terms: float | Tensor | None = None
        self._output_gradients: Literal["collect", "add", "ignore"] = "collect"
        self._reset()
        self._hooks = [
            # Before the user's hooks, which may return something else than the layer's output.
            module.register_forward_hook(ForwardHook(self.after_forward, index), with_kwargs=True, prepend=True)
            for index, layer in enumerate(layers)
            for module in layer.modules
        ]

    def _reset(self) -> None:
        self._sides = {side: [Side() for _ in self._layers] for side in "AG"}
        self._progress = [Progress() for _ in self._layers]
        self._untold = False
        self.contexts = 0

    def discard(self) -> None:
        """Forget the step under way, so that :meth:`begin` learns nothing from it."""
        self._reset()

    def begin(self, collecting: bool) -> None:
        """Start a step, which collects statistics or does not.

        How often each layer is called per pass, and whether its outputs are trained on, is learned in its first step,
        during which it is not reported ready: a layer that is used twice must not be sent after its first use.
        """
        for index, progress in enumerate(self._progress):
            if progress.passes:
                self._trained[index] = progress.turned
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

    def take(self, side: str, index: int) -> tuple[Tensor | None, float | Tensor]:
        """The sum ``[blocks, d, d]`` (None if the layer was not used) and its count; the sum is given away."""
        slot, progress = self._sides[side][index], self._progress[index]
        total, slot.total = slot.total, None
        if side == "G" and total is not None and progress.calls != progress.passes:
            total.mul_(progress.passes / progress.calls)  # the calls of a pass are shared positions, as pixels are
        return total, slot.count

    def close(self) -> None:
        """Remove the hooks; compiled code may still call them, for nothing."""
        self.collecting, self._closed = False, True
        for hook in self._hooks:
            hook.remove()

    def after_forward(self, index: int, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """A layer has run."""
        if self._closed or not isinstance(output, Tensor) or not output.numel():
            return
        progress, layer, within = self._progress[index], self._layers[index], _in_backward()
        if not any(parameter is layer.parameters[0] for parameter in module._parameters.values()):
            return  # torch.func.functional_call with other parameters
        if output.requires_grad:
            self._guards.ran(index, layer)
        if not self.collecting:
            return
        if not within and progress.open_calls == 0:
            progress.over = True
        if not output.requires_grad:
            return
        x = layer.batched((args[0] if args else kwargs["input"]).detach())
        call = Call(
            index, module, layer.positions(layer.batched(output)), x, progress, module.training, deferred=within
        )
        hook_gradient(output, partial(self._output_gradient, call))
        if within:
            return
        seen = self._calls_seen[index]
        self._add_input(call)
        complete = progress.passes == self._passes and progress.open_calls == seen == 1
        if self._trained[index] and complete:
            self._on_ready("A", index)

    def _add_input(self, call: Call) -> None:
        """Count a call, and its input."""
        index, progress, layer, x = call.index, call.progress, self._layers[call.index], call.x
        assert x is not None
        self._count_call(index)
        if index not in self._wanted:
            call.x = None
            return
        side = self._sides["A"][index]
        with self._computing(f"A {layer.name}", x):
            weight, _ = position_weights(self._scaling, call.positions, layer.kind == "convolution")
            layer.add_a_statistic(self._wide(x), side.sum(layer.a, self._like(x)), weight, call.module)
        side.count += max(0, x.shape[0] - progress.a_samples)
        progress.a_samples = max(progress.a_samples, x.shape[0])
        if not (layer.needs_input or self._corrects(index)):
            call.x = None

    @contextmanager
    def _computing(self, name: str, like: Tensor) -> Iterator[None]:
        """Work on statistics, in their own precision whatever surrounds it."""
        kind = like.device.type
        full = torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()
        with torch.no_grad(), full, self._recorder.span("FactorComp", name):
            yield

    def _wide(self, tensor: Tensor) -> Tensor:
        """``tensor`` in the statistics' dtype; whole numbers stay what they are."""
        return tensor.to(self._dtype) if tensor.is_floating_point() else tensor

    def _corrects(self, index: int) -> bool:
        return self._correction is not None and self._correction.wants(index)

    def _like(self, tensor: Tensor) -> Tensor:
        return torch.empty(0, dtype=self._dtype, device=tensor.device)

    def _count_call(self, index: int) -> None:
        progress, name = self._progress[index], self._layers[index].name
        if progress.open_calls == 0 and progress.over:
            self._open_pass(index)
        if self._has_left(index):
            raise RuntimeError(
                f"layer {name!r} runs forward again before its backward pass, and its statistic has been sent: run "
                "passes that are not trained on (validation) under torch.no_grad(); where a layer's number of calls in "
                "a pass varies, use a schedule with pipelining='none'"
            )
        progress.calls += 1
        progress.open_calls += 1
        progress.pass_calls += 1
        self._calls_seen[index] = max(self._calls_seen[index], progress.pass_calls)
        if progress.pass_calls > 1 and self._scaling != "standard":
            raise RuntimeError(
                f"layer {name!r} is called several times in a pass, for which scaling={self._scaling!r} says nothing: "
                "use scaling='standard', or exclude the layer"
            )

    def _open_pass(self, index: int) -> None:
        progress = self._progress[index]
        progress.passes += 1
        progress.pass_calls = progress.a_samples = progress.g_samples = 0
        progress.turned = progress.over = False
        if progress.passes > self._passes:
            raise RuntimeError(
                f"layer {self._layers[index].name!r} has seen more forward passes with gradients than "
                f"accumulation_steps={self._passes} since the last step(): set KFACConfig.accumulation_steps to the "
                "number of micro-batches, run passes that are not trained on under torch.no_grad(), or call "
                "kfac.abandon_step() where a step is given up (after an exception)"
            )

    def _output_gradient(self, call: Call, gradient: Tensor) -> None:
        index = call.index
        progress, layer = self._progress[index], self._layers[index]
        if not self.collecting or self._output_gradients == "ignore":
            return
        last = self._output_gradients == "collect"
        self._check_told()
        if call.seen or call.progress is not progress:
            raise RuntimeError(
                f"the output of layer {layer.name!r} has been given a second gradient, or one after the step() that it "
                "belongs to: with several backward passes through one forward pass (retain_graph, gradient penalties) "
                "add the losses and go backward once, or run the extra passes on a copy of the model"
            )
        if call.deferred:
            self._add_input(call)
            call.deferred = False
        call.seen = last
        if index in self._wanted:
            self._add_gradient(call, gradient)
        self._count_gradient(index, layer.batched(gradient).shape[0])
        if last:
            call.x = None
            progress.open_calls -= 1
            self._report(index)

    def _add_gradient(self, call: Call, gradient: Tensor) -> None:
        index, progress, layer = call.index, call.progress, self._layers[call.index]
        with self._computing(f"G {layer.name}", gradient), call.as_it_ran():
            g = self._loss_scale.removed_from(layer.batched(gradient.detach()), self._dtype)
            x = None if call.x is None else self._wide(call.x)
            _, weight = position_weights(self._scaling, call.positions, layer.kind == "convolution")
            side = self._sides["G"][index]
            if self._correction is not None and self._corrects(index) and x is not None:
                self._correction.add(index, x, g, call.module, progress.pass_calls > 1)
            layer.add_g_statistic(g, side.sum(layer.g, g), weight, call.module, x)

    def _count_gradient(self, index: int, samples: int) -> None:
        progress, side = self._progress[index], self._sides["G"][index]
        terms = self.loss_terms if self._scaling == "standard" else None
        if terms is None:
            side.count += max(0, samples - progress.g_samples)
            progress.g_samples = max(progress.g_samples, samples)
        elif not progress.turned:
            side.count += terms
        progress.turned = True

    def _check_told(self) -> None:
        """Whether all of the step's backward passes are within a context, or none."""
        self._untold |= self.loss_terms is None
        if self._untold and self.contexts:
            raise RuntimeError(
                "a backward pass ran outside `with kfac.curvature(...)` in a step that uses it: put loss.backward() "
                "inside the with block, for all of a step's micro-batches or for none"
            )

    def _report(self, index: int) -> None:
        """Say so if the layer's statistics of the step are complete."""
        progress = self._progress[index]
        complete = progress.passes == self._passes and progress.open_calls == 0
        if complete and self._trained[index] and progress.pass_calls >= self._calls_seen[index]:
            self._on_ready("A", index)  # for a layer that is called several times per pass, only now
            self._on_ready("G", index)

    @property
    def started(self) -> bool:
        """Whether a forward pass of this step has been seen."""
        return any(progress.passes for progress in self._progress)

    def finish(self) -> None:
        """End the step's passes.

        A layer whose outputs got no gradient at all has no statistics in this step.

        Raises:
            RuntimeError: if some of a layer's forward passes were followed by a backward pass and some were not: its
                statistics are of inputs that were not trained on.
        """
        for layer, progress, a, g in zip(self._layers, self._progress, self._sides["A"], self._sides["G"], strict=True):
            if progress.open_calls == 0:
                continue
            if g.total is None:
                a.total, a.count = None, 0.0
                continue
            raise RuntimeError(
                f"layer {layer.name!r} has run forward with gradients without a backward pass since the last step(): "
                "run passes that are not trained on (validation) under torch.no_grad(), and call kfac.abandon_step() "
                "where a step is given up (after an exception, before a batch is retried)"
            )
        self._guards.check_micro_batches(max(progress.passes for progress in self._progress), self._passes)
