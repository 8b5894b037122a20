"""Linear layers and convolutions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from kfac.config import KFACConfig
from kfac.curvature import statistics
from kfac.curvature.blocks import Blocks
from kfac.layers.base import GradientAccess, KFACLayer

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d
Geometry = tuple[Sequence[int], Sequence[int], Sequence[int], Sequence[int], str, int]
"""What :func:`kfac.curvature.statistics.convolution_patches` asks of a convolution."""


class WeightLayer(KFACLayer):
    """A module with a matrix-like weight, and perhaps a bias, that is applied at every position.

    With ``weight_sharing="expand"`` every position counts as a sample; with ``"reduce"`` inputs are summed and output
    gradients averaged over the positions of a sample first (Eschenhagen et al. 2023, section 3).
    """

    module: nn.Linear | Convolution

    def __init__(self, name: str, module: nn.Linear | Convolution, config: KFACConfig) -> None:
        self.weight: Tensor = module.weight
        self.bias: Tensor | None = module.bias if module.bias is not None and module.bias.requires_grad else None
        super().__init__(name, module, (self.weight,) if self.bias is None else (self.weight, self.bias), config)
        self.groups = getattr(module, "groups", 1)
        self.columns = math.prod(self.weight.shape[1:])
        self.a = Blocks.of(self.groups, self.columns + (self.bias is not None), config.max_dim)
        self.g = Blocks.of(self.groups, self.weight.shape[0] // self.groups, config.max_dim)
        self._reduce = config.weight_sharing == "reduce"

    def matrix_from_weight(self, weight: Tensor) -> Tensor:
        """A tensor of the weight's shape as ``[groups, outputs, inputs]`` in A's order."""
        return weight.reshape(self.groups, self.g.width, -1)

    def weight_from_matrix(self, matrix: Tensor) -> Tensor:
        """The inverse of :meth:`matrix_from_weight`."""
        return matrix.reshape(self.weight.shape)

    def gradient_matrix(self, access: GradientAccess) -> Tensor | None:  # noqa: D102
        weight = access.get(self.weight)
        bias = None if self.bias is None else access.get(self.bias)
        if weight is None:
            return None
        matrix = self.matrix_from_weight(weight)
        if self.bias is None:
            return matrix
        column = matrix.new_zeros(self.g.rows) if bias is None else bias
        return torch.cat([matrix, column.view(self.groups, -1, 1)], 2)

    def set_gradient(self, matrix: Tensor, access: GradientAccess) -> None:  # noqa: D102
        access.set(self.weight, self.weight_from_matrix(matrix[:, :, : self.columns]))
        if self.bias is not None:
            access.set(self.bias, matrix[:, :, -1].reshape(-1))

    def with_bias(self, rows: Tensor) -> Tensor:
        """``rows [..., columns]`` with a trailing 1 where there is a bias."""
        return rows if self.bias is None else torch.cat([rows, rows.new_ones(*rows.shape[:-1], 1)], -1)

    def add_inputs(self, rows: Tensor, total: Tensor, weight: float) -> None:
        """Add the moments of ``rows [groups, samples, positions, columns]`` to A."""
        groups, _, positions, columns = rows.shape
        if self._reduce:
            rows, bias = rows.sum(2), float(positions)
        else:
            rows, bias = rows.reshape(groups, -1, columns), 1.0
        statistics.add_moments(rows, total, weight, None if self.bias is None else bias)

    def add_output_gradients(self, g: Tensor, total: Tensor, weight: float) -> None:
        """Add the moments of ``g [outputs, samples, positions]`` to G."""
        if self._reduce:
            weight *= g.shape[2]
            g = g.mean(2)
        statistics.add_moments(g.reshape(self.groups, self.g.width, -1).mT, total, weight)


class LinearLayer(WeightLayer):
    """``nn.Linear`` on ``[samples, ..., in]``; inner dimensions are shared positions."""

    kind = "linear"

    def positions(self, output: Tensor) -> int:  # noqa: D102
        return math.prod(output.shape[1:-1])

    def add_a_statistic(self, x: Tensor, total: Tensor, weight: float, module: nn.Module) -> None:  # noqa: D102
        self.add_inputs(x.reshape(1, x.shape[0], -1, x.shape[-1]), total, weight)

    def add_g_statistic(  # noqa: D102
        self, g: Tensor, total: Tensor, weight: float, module: nn.Module, x: Tensor | None = None
    ) -> None:
        self.add_output_gradients(g.reshape(g.shape[0], -1, g.shape[-1]).movedim(2, 0), total, weight)

    def sample_gradients(  # noqa: D102
        self, x: Tensor, g: Tensor, module: nn.Module
    ) -> Iterator[tuple[Tensor, Tensor]]:
        yield tuple(t.reshape(1, len(t), -1, t.shape[-1]) for t in (self.with_bias(x), g))  # type: ignore[misc]


class ConvolutionLayer(WeightLayer):
    """``nn.Conv1d``, ``Conv2d`` or ``Conv3d`` on ``[samples, channels, *sizes]``; output pixels are shared positions.

    The inputs of A are in (kernel position, channel) order. With groups, each has its own block of A and of G.
    """

    kind = "convolution"

    def __init__(self, name: str, module: Convolution, config: KFACConfig) -> None:
        super().__init__(name, module, config)
        self.sample_dims = self.weight.dim()

    def positions(self, output: Tensor) -> int:  # noqa: D102
        return math.prod(output.shape[2:])

    def add_a_statistic(self, x: Tensor, total: Tensor, weight: float, module: nn.Module) -> None:  # noqa: D102
        if len(total) == 1 and not self._reduce and statistics.shifts_pay(x, *self._geometry(module)):
            statistics.add_shifted_moments(x, total[0], weight, None if self.bias is None else 1.0)
            return
        for patches in self._patches(x, module):
            self.add_inputs(patches, total, weight)

    def _geometry(self, module: nn.Module) -> Geometry:
        assert isinstance(module, Convolution)
        padding = _padding(module)
        return module.kernel_size, module.stride, padding, module.dilation, module.padding_mode, self.groups

    def _patches(self, x: Tensor, module: nn.Module) -> Iterator[Tensor]:
        return statistics.convolution_patches(x, *self._geometry(module))

    def add_g_statistic(  # noqa: D102
        self, g: Tensor, total: Tensor, weight: float, module: nn.Module, x: Tensor | None = None
    ) -> None:
        if len(total) == 1 and not self._reduce:
            statistics.add_channel_moments(g.flatten(2), total[0], weight)
        else:
            self.add_output_gradients(g.flatten(2).transpose(0, 1), total, weight)

    def sample_gradients(  # noqa: D102
        self, x: Tensor, g: Tensor, module: nn.Module
    ) -> Iterator[tuple[Tensor, Tensor]]:
        done = 0
        for patches in self._patches(x, module):
            part = g[done : done + patches.shape[1]].flatten(2)
            done += len(part)
            rows = part.view(len(part), self.groups, self.g.width, -1).permute(1, 0, 3, 2)
            yield self.with_bias(patches), rows

    def matrix_from_weight(self, weight: Tensor) -> Tensor:  # noqa: D102
        return weight.movedim(1, -1).reshape(self.groups, self.g.width, -1)

    def weight_from_matrix(self, matrix: Tensor) -> Tensor:  # noqa: D102
        out, channels, *kernel = self.weight.shape
        return matrix.reshape(out, *kernel, channels).movedim(-1, 1)

    def a_order(self) -> Tensor | None:  # noqa: D102
        ours = torch.arange(self.columns).expand(self.groups, self.g.width, self.columns)
        order = self.weight_from_matrix(ours).reshape(self.g.rows, -1)[0]
        return torch.cat([order, torch.arange(self.columns, self.a.width)])


def _padding(module: Convolution) -> list[int]:
    """(before, after) of the last size first, as :func:`torch.nn.functional.pad` takes it."""
    totals = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
    if module.padding == "valid":
        pairs = [(0, 0) for _ in totals]
    elif module.padding == "same":
        pairs = [(total // 2, total - total // 2) for total in totals]
    else:
        pairs = [(int(p), int(p)) for p in module.padding]
    return [side for pair in reversed(pairs) for side in pair]
