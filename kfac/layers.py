"""Layers with Kronecker factors: how each module type's inputs, output gradients and weights become matrices."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from kfac.config import KFACConfig
from kfac.curvature import statistics
from kfac.hooks import ForwardHook

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d


class GradientAccess(Protocol):
    """Where gradients are read from and written to, after they have been averaged over the ranks."""

    def get(self, parameter: Tensor) -> Tensor | None:
        """The whole gradient of a parameter; collective where gradients are partitioned."""

    def set(self, parameter: Tensor, gradient: Tensor) -> None:
        """Overwrite the whole gradient of a parameter; collective where gradients are partitioned."""


class PlainGradients:
    """Gradients in ``.grad``."""

    def get(self, parameter: Tensor) -> Tensor | None:
        """``parameter.grad``."""
        return parameter.grad

    def set(self, parameter: Tensor, gradient: Tensor) -> None:
        """Copy into ``parameter.grad``, where there is one."""
        if parameter.grad is not None:
            parameter.grad.copy_(gradient)


class KFACLayer(ABC):
    """One preconditioned module. Subclasses say how its tensors become matrices.

    Args:
        name: the module's name in the model.
        module: the module.
    """

    convolution = False
    sample_dims = 2
    """Dimensions of an input with a sample dimension and no shared positions beyond what the layer needs."""

    def __init__(self, name: str, module: nn.Linear | Convolution) -> None:
        self.name = name
        self.module = module
        self.weight: Tensor = module.weight
        self.bias: Tensor | None = module.bias if module.bias is not None and module.bias.requires_grad else None
        self.g_dim = self.weight.shape[0]
        self.a_dim = math.prod(self.weight.shape[1:]) + (self.bias is not None)

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """The parameters whose gradients are preconditioned."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    def batched(self, tensor: Tensor) -> Tensor:
        """``tensor`` with a leading sample dimension (an unbatched one is one sample)."""
        return tensor if tensor.dim() >= self.sample_dims else tensor.unsqueeze(0)

    @abstractmethod
    def positions(self, output: Tensor) -> int:
        """Shared positions per sample of an output ``[samples, ...]``."""

    @abstractmethod
    def add_a_statistic(self, x: Tensor, total: Tensor, weight: float) -> None:
        """Add ``weight sum x x^T`` of an input to the upper triangle of ``total [a_dim, a_dim]``."""

    @abstractmethod
    def add_g_statistic(self, g: Tensor, total: Tensor, weight: float) -> None:
        """Add ``weight sum g g^T`` of an output gradient to the upper triangle of ``total [g_dim, g_dim]``."""

    def matrix_from_weight(self, weight: Tensor) -> Tensor:
        """A tensor of the weight's shape as ``[g_dim, inputs]`` in A's order."""
        return weight.reshape(self.g_dim, -1)

    def weight_from_matrix(self, matrix: Tensor) -> Tensor:
        """The inverse of :meth:`matrix_from_weight`."""
        return matrix.reshape(self.weight.shape)

    def a_in_weight_order(self, a: Tensor) -> Tensor:
        """A with its rows and columns in the order of ``weight.view(out, -1)`` (and the bias last)."""
        columns = self.a_dim - (self.bias is not None)
        ours = torch.arange(columns).expand(self.g_dim, columns)
        order = self.weight_from_matrix(ours).reshape(self.g_dim, -1)[0]
        order = torch.cat([order, torch.arange(columns, self.a_dim)]).to(a.device)
        return a[order][:, order]

    def gradient_matrix(self, access: GradientAccess) -> Tensor | None:
        """The gradient as ``[g_dim, a_dim]``, or None if there is none."""
        weight = access.get(self.weight)
        bias = None if self.bias is None else access.get(self.bias)
        if weight is None:
            return None
        matrix = self.matrix_from_weight(weight)
        if self.bias is None:
            return matrix
        column = matrix.new_zeros(self.g_dim) if bias is None else bias
        return torch.cat([matrix, column[:, None]], 1)

    def set_gradient(self, matrix: Tensor, access: GradientAccess) -> None:
        """Overwrite the gradient with ``[g_dim, a_dim]``."""
        columns = self.a_dim - (self.bias is not None)
        access.set(self.weight, self.weight_from_matrix(matrix[:, :columns]))
        if self.bias is not None:
            access.set(self.bias, matrix[:, -1].contiguous())


class LinearLayer(KFACLayer):
    """``nn.Linear`` on ``[samples, ..., in]``; inner dimensions are shared positions (K-FAC-expand)."""

    def positions(self, output: Tensor) -> int:  # noqa: D102
        return math.prod(output.shape[1:-1])

    def add_a_statistic(self, x: Tensor, total: Tensor, weight: float) -> None:  # noqa: D102
        statistics.add_moment(x.reshape(-1, x.shape[-1]), total, weight, self.bias is not None)

    def add_g_statistic(self, g: Tensor, total: Tensor, weight: float) -> None:  # noqa: D102
        statistics.add_moment(g.reshape(-1, self.g_dim), total, weight)


class ConvolutionLayer(KFACLayer):
    """``nn.Conv1d``, ``Conv2d`` or ``Conv3d`` without groups on ``[samples, channels, *sizes]``.

    Output pixels are shared positions. The inputs of A are in (kernel position, channel) order.
    """

    convolution = True
    module: Convolution

    @property
    def sample_dims(self) -> int:  # type: ignore[override]
        """Dimensions of an input with a sample dimension."""
        return self.weight.dim()

    def positions(self, output: Tensor) -> int:  # noqa: D102
        return math.prod(output.shape[2:])

    def _padding(self) -> list[int]:
        """(before, after) of the last size first."""
        m = self.module
        totals = [d * (k - 1) for d, k in zip(m.dilation, m.kernel_size, strict=True)]
        if m.padding == "valid":
            pairs = [(0, 0) for _ in totals]
        elif m.padding == "same":
            pairs = [(total // 2, total - total // 2) for total in totals]
        else:
            pairs = [(int(p), int(p)) for p in m.padding]
        return [side for pair in reversed(pairs) for side in pair]

    def add_a_statistic(self, x: Tensor, total: Tensor, weight: float) -> None:  # noqa: D102
        m = self.module
        for patches in statistics.convolution_patches(
            x, m.kernel_size, m.stride, self._padding(), m.dilation, m.padding_mode
        ):
            statistics.add_moment(patches, total, weight, self.bias is not None)

    def add_g_statistic(self, g: Tensor, total: Tensor, weight: float) -> None:  # noqa: D102
        statistics.add_moment(statistics.position_rows(g), total, weight)

    def matrix_from_weight(self, weight: Tensor) -> Tensor:  # noqa: D102
        return weight.movedim(1, -1).reshape(self.g_dim, -1)

    def weight_from_matrix(self, matrix: Tensor) -> Tensor:  # noqa: D102
        out, channels, *kernel = self.weight.shape
        return matrix.reshape(out, *kernel, channels).movedim(-1, 1)


@dataclass(frozen=True)
class FirstOrder:
    """Parameters that keep their plain gradient, and why."""

    name: str
    parameters: int
    reason: str


_COVERED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def _reason_against(name: str, module: nn.Module, config: KFACConfig) -> str | None:
    """Why ``module``, which has parameters of its own, is not preconditioned; None if it is."""
    if not isinstance(module, _COVERED):
        return f"{type(module).__name__} has no Kronecker factors here"
    weight, groups = module.weight, getattr(module, "groups", 1)
    if not isinstance(weight, nn.Parameter):
        return "its weight is computed from other parameters (a parametrization)"
    if isinstance(weight, nn.UninitializedParameter):
        raise ValueError(f"layer {name!r} has no shape yet: run the model once before making KFAC")
    forwards = {cls.forward for cls in _COVERED}
    layer = _make(name, module)
    widest = max(layer.a_dim, layer.g_dim)
    reasons = {
        "its weight is frozen": not weight.requires_grad,
        "include/exclude patterns": not config.covers(name),
        f"{type(module).__name__} has a forward pass of its own": type(module).forward not in forwards,
        f"a convolution with {groups} groups": groups != 1,
        f"{weight.dtype} is no real floating-point type": not weight.is_floating_point(),
        "it has no inputs or no outputs": min(layer.a_dim - (layer.bias is not None), layer.g_dim) == 0,
        f"a factor of dimension {widest} is wider than max_dim={config.max_dim}": widest > config.max_dim,
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def _make(name: str, module: nn.Module) -> KFACLayer:
    if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        return ConvolutionLayer(name, module)
    assert isinstance(module, nn.Linear)
    return LinearLayer(name, module)


def _owners(model: nn.Module) -> Iterator[tuple[str, nn.Module, list[nn.Parameter]]]:
    """Modules with trainable or frozen parameters of their own, each parameter once."""
    seen: set[int] = set()
    for name, module in model.named_modules():
        own = [p for p in module.parameters(recurse=False) if id(p) not in seen]
        seen.update(id(p) for p in own)
        if own:
            yield name, module, own


def unwrap(model: nn.Module) -> nn.Module:
    """The user's model inside DistributedDataParallel or torch.compile, so that names have no prefix."""
    while True:
        if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


def register_layers(
    model: nn.Module, config: KFACConfig
) -> tuple[list[KFACLayer], list[FirstOrder], list[list[nn.Parameter]]]:
    """Find the layers to precondition, in registration order.

    Returns:
        the layers; the trainable parameters that keep their plain gradient, with the reasons; and per layer all
        trainable parameters whose gradients become ready about when its own do: its own and those of uncovered modules
        registered next to it (one list of all of them if there is no layer).

    Raises:
        ValueError: for a layer without a shape, or one that another KFAC has hooked.
    """
    layers: list[KFACLayer] = []
    first_order: list[FirstOrder] = []
    groups: list[list[nn.Parameter]] = []
    early: list[nn.Parameter] = []
    shared = _shared_parameters(model)
    for name, module, own in _owners(model):
        trainable = [p for p in own if p.requires_grad]
        reason = _reason_against(name, module, config)
        if reason is None and any(id(p) in shared for p in own):
            reason = "its weight is tied to another module's"
        if reason is None and any(isinstance(hook, ForwardHook) for hook in module._forward_hooks.values()):
            raise ValueError(f"layer {name!r} is preconditioned by another KFAC already: close() that one first")
        if reason is None:
            layers.append(_make(name, module))
            groups.append(trainable)
            continue
        if trainable:
            first_order.append(FirstOrder(name, sum(p.numel() for p in trainable), reason))
        (groups[-1] if groups else early).extend(trainable)
    if groups:
        groups[0].extend(early)
    elif early:
        groups.append(early)
    return layers, first_order, groups


def _shared_parameters(model: nn.Module) -> set[int]:
    """Ids of parameters that several modules hold."""
    holders: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            holders[id(parameter)] = holders.get(id(parameter), 0) + 1
    return {key for key, count in holders.items() if count > 1}


def describe_coverage(layers: Sequence[KFACLayer], first_order: Sequence[FirstOrder]) -> str:
    """The layers that are preconditioned, and the parameters that keep their plain gradient with the reasons."""
    covered = sum(p.numel() for layer in layers for p in layer.parameters)
    rest = sum(item.parameters for item in first_order)
    share = covered / max(1, covered + rest)
    lines = [f"{len(layers)} layers preconditioned, {share:.1%} of {covered + rest:,} trainable parameters"]
    reasons: dict[str, list[str]] = {}
    for item in first_order:
        reasons.setdefault(item.reason, []).append(item.name or "(the model itself)")
    for reason, names in reasons.items():
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        lines.append(f"  plain gradient: {shown}: {reason}")
    return "\n".join(lines)
