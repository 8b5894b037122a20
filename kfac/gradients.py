"""Averaging of gradients over the ranks, as messages of the Plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from kfac.layers import GradientAccess
from kfac.streams import on_device, used_here


class GradientsRead(GradientAccess):
    """Gradients that have been read once, as reading may be collective.

    Args:
        access: where they are.
        parameters: whose.

    Attributes:
        gradients: those that there are.
    """

    def __init__(self, access: GradientAccess, parameters: Sequence[nn.Parameter]) -> None:
        self._access = access
        found = [(parameter, access.get(parameter)) for parameter in parameters]
        self.gradients = {parameter: gradient for parameter, gradient in found if gradient is not None}

    def get(self, parameter: Tensor) -> Tensor | None:
        """The gradient as it was read."""
        return self.gradients.get(parameter)  # type: ignore[call-overload,no-any-return]

    def set(self, parameter: Tensor, gradient: Tensor) -> None:
        """Overwrite it where it is."""
        self._access.set(parameter, gradient)


class GradientAverager:
    """Packs and unpacks the gradients of groups of parameters and reports when a group is complete.

    Each message also carries one flag per parameter: whether any rank has a gradient for it. A parameter without one
    anywhere keeps ``grad=None``; one that only some ranks used counts as zero on the others.

    Args:
        groups: parameters of each of the Plan's layers.
        accumulation_steps: backward passes per step.
        world_size: number of ranks.
        on_ready: called with a group's index when all of its gradients of the step are there.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[nn.Parameter]],
        accumulation_steps: int,
        world_size: int,
        on_ready: Callable[[int], None],
    ) -> None:
        self._groups = groups
        self._world_size = world_size
        self._steps = accumulation_steps
        self._on_ready = on_ready
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._accumulated, index))
            for index, group in enumerate(groups)
            for parameter in group
        ]
        self.begin(False)

    def begin(self, watching: bool) -> None:
        """Start a step; ``watching``: it remembers whether this rank's own gradients are finite."""
        self._watching = watching
        self._local_sums: list[Tensor] = []
        self._left = [len(group) * self._steps for group in self._groups]
        self._packed: dict[int, tuple[Tensor | None, int]] = {}

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _accumulated(self, index: int, _: Tensor) -> None:
        self._left[index] -= 1
        if self._left[index] == 0:
            self._on_ready(index)

    @property
    def started(self) -> bool:
        """Whether a gradient of this step has been seen."""
        return self._left != [len(group) * self._steps for group in self._groups]

    def pack(self, items: Sequence[int]) -> Tensor:
        """The flat gradients of the groups ``items`` and their flags, in the widest dtype among them."""
        parameters = self._parameters(items)
        if any(p.grad is not None and p.grad.is_sparse for p in parameters):
            raise ValueError("sparse gradients cannot be averaged: use Embedding(sparse=False)")
        dtype = parameters[0].dtype
        for parameter in parameters:
            dtype = torch.promote_types(dtype, parameter.dtype)
            gradient = parameter.grad
            self._packed[id(parameter)] = (gradient, 0 if gradient is None else gradient._version)
        # Divided before the sum: float16 would overflow.
        flat = [
            (torch.zeros_like(p) if p.grad is None else p.grad).detach().reshape(-1).to(dtype) / self._world_size
            for p in parameters
        ]
        for parameter in parameters:
            if parameter.grad is not None:
                used_here(parameter.grad)
        buffer = torch.cat([*flat, on_device([float(p.grad is not None) for p in parameters], flat[0])])
        if self._watching:
            self._local_sums.append(buffer.sum())
        return buffer

    @property
    def sent_finite(self) -> bool:
        """Whether what this rank has sent was finite, in a step that is watched; waits for the device."""
        return all(bool(torch.isfinite(total)) for total in self._local_sums)

    def unpack(self, items: Sequence[int], buffer: Tensor) -> None:
        """Set the gradients to the average in the summed ``buffer``.

        Raises:
            RuntimeError: if a gradient has been changed since it was sent: the change would be lost.
        """
        parameters = self._parameters(items)
        for parameter in parameters:
            gradient, version = self._packed[id(parameter)]
            same = parameter.grad is gradient and (gradient is None or gradient._version == version)
            if not same:
                raise RuntimeError(
                    "a gradient was changed after its all-reduce had started (several backward passes, zero_grad, "
                    "clipping or unscaling before step()): set KFACConfig.accumulation_steps, change gradients after "
                    "step(), or use a schedule with gradient_pipelining=False"
                )
        sizes = [p.numel() for p in parameters]
        *parts, flags = buffer.split([*sizes, len(parameters)])
        used = (flags > 0).tolist() if any(p.grad is None for p in parameters) else [True] * len(parameters)
        for parameter, part, anywhere in zip(parameters, parts, used, strict=True):
            if not anywhere:
                continue
            average = part.view(parameter.shape)
            if parameter.grad is None:
                parameter.grad = average.to(parameter.dtype)
            else:
                parameter.grad.copy_(average)

    def _parameters(self, items: Sequence[int]) -> list[nn.Parameter]:
        return [parameter for item in items for parameter in self._groups[item]]
