"""Parameters that are no matrices: scales and shifts of norms, biases by themselves."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfac.config import KFACConfig
from kfac.curvature import statistics
from kfac.curvature.blocks import Blocks
from kfac.layers.base import GradientAccess, KFACLayer
from kfac.layers.weight import Convolution


class VectorLayer(KFACLayer):
    """Parameters seen as the outputs of a linear layer whose only input is 1: A is 1, and G holds the second moments of
    each sample's gradient, in blocks.

    Attributes:
        parts: parts of a sample's gradient that are independent of each other.
    """

    def __init__(self, name: str, module: nn.Module, parameters: Sequence[Tensor], config: KFACConfig) -> None:
        super().__init__(name, module, parameters, config)
        self.a = Blocks(1, 1, 1, 1)
        self.parts = 1
        self.channels = self.parameters[0].numel()

    def positions(self, output: Tensor) -> int:  # noqa: D102
        return 1  # a sample's gradient is summed over its positions

    def add_a_statistic(self, x: Tensor, total: Tensor, weight: float, module: nn.Module) -> None:  # noqa: D102
        total += weight * x.shape[0]

    @abstractmethod
    def rows(self, x: Tensor | None, g: Tensor, module: nn.Module) -> Tensor:
        """Every sample's gradient ``[samples, rows of G]``, in the order of :meth:`gradient_matrix`."""

    def sample_gradients(  # noqa: D102
        self, x: Tensor, g: Tensor, module: nn.Module
    ) -> Iterator[tuple[Tensor, Tensor]]:
        rows = self.rows(x, g, module)
        yield rows.new_ones(1, len(rows), 1, 1), rows[None, :, None]

    def add_g_statistic(  # noqa: D102
        self, g: Tensor, total: Tensor, weight: float, module: nn.Module, x: Tensor | None = None
    ) -> None:
        rows = self.rows(x, g, module)
        statistics.add_moments(rows.view(len(rows), self.parts, -1).transpose(0, 1), total, weight)

    def gradient_matrix(self, access: GradientAccess) -> Tensor | None:  # noqa: D102
        parts = [access.get(parameter) for parameter in self.parameters]
        if all(part is None for part in parts):
            return None
        filled = [
            torch.zeros_like(parameter) if part is None else part
            for part, parameter in zip(parts, self.parameters, strict=True)
        ]
        return torch.stack([part.reshape(-1) for part in filled], 1).view(1, -1, 1)

    def set_gradient(self, matrix: Tensor, access: GradientAccess) -> None:  # noqa: D102
        columns = matrix.view(self.channels, -1)
        for parameter, column in zip(self.parameters, columns.unbind(1), strict=True):
            access.set(parameter, column.reshape(parameter.shape))


class BiasLayer(VectorLayer):
    """A bias whose weight is frozen; G is one matrix."""

    kind = "bias"

    def __init__(self, name: str, module: nn.Module, config: KFACConfig) -> None:
        assert isinstance(module, nn.Linear | Convolution)
        assert module.bias is not None
        super().__init__(name, module, (module.bias,), config)
        self.g = Blocks.of(1, self.channels, config.max_dim)
        self.sample_dims = 2 if isinstance(module, nn.Linear) else module.weight.dim()

    def rows(self, x: Tensor | None, g: Tensor, module: nn.Module) -> Tensor:  # noqa: D102
        if isinstance(module, nn.Linear):
            return g.reshape(len(g), -1, self.channels).sum(1)
        return g.flatten(2).sum(2)


class NormLayer(VectorLayer):
    """The scale and shift of a normalisation: one 2 x 2 block of G per channel (1 x 1 with only one of them trainable).

    For statistics over the batch (BatchNorm), a sample's gradient is taken with the mean and variance as constants.
    """

    kind = "norm"
    needs_input = True

    def __init__(self, name: str, module: nn.Module, config: KFACConfig) -> None:
        weight, bias = module.weight, getattr(module, "bias", None)
        trainable = [p for p in (weight, bias) if isinstance(p, Tensor) and p.requires_grad]
        super().__init__(name, module, trainable, config)
        self._scaled = any(p is weight for p in trainable)
        self._shifted = any(p is bias for p in trainable)
        self.g = Blocks(1, self.channels * len(trainable), self.channels, len(trainable))
        self.parts = self.channels
        self._trailing = len(getattr(module, "normalized_shape", ()))
        if self._trailing:
            self.sample_dims = 1 + self._trailing
        elif isinstance(module, INSTANCE_NORMS):
            self.sample_dims = 3 + next(k for k, cls in enumerate(INSTANCE_NORMS) if isinstance(module, cls))

    def _per_channel(self, tensor: Tensor) -> Tensor:
        """Sums over the positions of each sample: ``[samples, channels]``."""
        if self._trailing:
            return tensor.reshape(tensor.shape[0], -1, self.channels).sum(1)
        return tensor.reshape(tensor.shape[0], self.channels, -1).sum(2)

    def rows(self, x: Tensor | None, g: Tensor, module: nn.Module) -> Tensor:  # noqa: D102
        assert x is not None
        columns = [self._per_channel(g * normalized(module, x))] if self._scaled else []
        columns += [self._per_channel(g)] if self._shifted else []
        return torch.stack(columns, 2).flatten(1)


BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
NORMS = (*BATCH_NORMS, *INSTANCE_NORMS, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def normalized(module: nn.Module, x: Tensor) -> Tensor:
    """What ``module`` makes of its input before it scales and shifts it."""
    if isinstance(module, nn.LayerNorm):
        return F.layer_norm(x, module.normalized_shape, None, None, module.eps)
    if isinstance(module, nn.RMSNorm):
        return F.rms_norm(x, module.normalized_shape, None, module.eps)
    if isinstance(module, nn.GroupNorm):
        return F.group_norm(x, module.num_groups, None, None, module.eps)
    assert isinstance(module, (*BATCH_NORMS, *INSTANCE_NORMS))
    of_batch = module.training or module.running_mean is None
    mean, variance = (None, None) if of_batch else (module.running_mean, module.running_var)
    if mean is not None and variance is not None:
        mean, variance = mean.to(x.dtype), variance.to(x.dtype)
    if isinstance(module, INSTANCE_NORMS):
        return F.instance_norm(x, mean, variance, use_input_stats=of_batch, eps=module.eps)
    return F.batch_norm(x, mean, variance, training=of_batch, eps=module.eps)
