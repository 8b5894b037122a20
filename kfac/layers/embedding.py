"""Embeddings."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from kfac.config import KFACConfig
from kfac.curvature import statistics
from kfac.curvature.blocks import Blocks
from kfac.layers.base import GradientAccess, KFACLayer


class EmbeddingLayer(KFACLayer):
    """``nn.Embedding`` on tokens ``[samples, ...]``: a linear layer on one-hot inputs, whose A is diagonal.

    Tokens equal to ``padding_idx`` are inputs of zeros: torch gives them no gradient. They count as positions, so that
    the factors are those of the linear layer, and neither depends on how a batch is split.
    """

    kind = "embedding"
    corrects = False  # a gradient per sample would be as large as the embedding

    def __init__(self, name: str, module: nn.Embedding, config: KFACConfig) -> None:
        super().__init__(name, module, (module.weight,), config)
        self.weight = module.weight
        self.padding_idx = module.padding_idx
        self.a = Blocks.diagonal(module.num_embeddings)
        self.g = Blocks.of(1, module.embedding_dim, config.max_dim)
        self.sample_dims = 1
        self.needs_input = self.padding_idx is not None

    def positions(self, output: Tensor) -> int:  # noqa: D102
        return math.prod(output.shape[1:-1])

    def batched(self, tensor: Tensor) -> Tensor:  # noqa: D102
        return tensor if tensor.dim() > int(tensor.is_floating_point()) else tensor.unsqueeze(0)

    def add_a_statistic(self, x: Tensor, total: Tensor, weight: float, module: nn.Module) -> None:  # noqa: D102
        counts = torch.bincount(x.reshape(-1).long(), minlength=self.a.width)
        if self.padding_idx is not None:
            counts[self.padding_idx] = 0
        total.view(-1).add_(counts.to(total.dtype), alpha=weight)

    def add_g_statistic(  # noqa: D102
        self, g: Tensor, total: Tensor, weight: float, module: nn.Module, x: Tensor | None = None
    ) -> None:
        if x is not None:
            g = g * torch.ne(x, self.padding_idx or 0).unsqueeze(-1)
        statistics.add_moments(g.reshape(1, -1, g.shape[-1]), total, weight)

    def gradient_matrix(self, access: GradientAccess) -> Tensor | None:  # noqa: D102
        gradient = access.get(self.weight)
        return None if gradient is None else gradient.mT[None]

    def set_gradient(self, matrix: Tensor, access: GradientAccess) -> None:  # noqa: D102
        access.set(self.weight, matrix[0].mT)
