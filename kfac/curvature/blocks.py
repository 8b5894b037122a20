"""Factors as equal diagonal blocks, and their products with a gradient.

Every factor is ``blocks`` symmetric matrices ``[blocks, dim, dim]`` on a diagonal: one for most layers, one per group
for grouped convolutions, one per channel for the affine parameters of a norm, ``[classes, 1, 1]`` for the inputs of an
embedding, and a few where one matrix would be too wide. A gradient is ``[groups, rows, columns]``: each group has its
own ``rows / dim`` blocks of G and ``columns / dim`` blocks of A, of which the last may be padded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Blocks:
    """The shape of a factor.

    Args:
        groups: groups of the layer.
        width: rows of the factor of each group, without padding.
        count: diagonal blocks in all; a multiple of ``groups``.
        dim: rows of a block.
    """

    groups: int
    width: int
    count: int
    dim: int

    @classmethod
    def of(cls, groups: int, width: int, max_dim: int) -> Blocks:
        """As few equal blocks per group as keep each within ``max_dim``."""
        dim = math.ceil(width / math.ceil(width / max_dim))
        return cls(groups, width, groups * math.ceil(width / dim), dim)

    @classmethod
    def diagonal(cls, width: int) -> Blocks:
        """Blocks of one element."""
        return cls(1, width, width, 1)

    @property
    def rows(self) -> int:
        """Rows of the whole factor, without padding."""
        return self.groups * self.width

    def identity(self, like: Tensor) -> Tensor:
        """``[count, dim, dim]`` with ones on the diagonal, but zeros in the padding."""
        position = torch.arange(self.count * self.dim, device=like.device) % (self.count // self.groups * self.dim)
        return (position < self.width).to(like.dtype).view(self.count, self.dim).diag_embed()


def pad_to(matrix: Tensor, rows: int, columns: int) -> Tensor:
    """``matrix [groups, ...]`` with zeros appended up to this many rows and columns."""
    missing = rows - matrix.shape[1], columns - matrix.shape[2]
    return F.pad(matrix, (0, missing[1], 0, missing[0])) if any(missing) else matrix


def multiply_left(blocks: Tensor, matrix: Tensor) -> Tensor:
    """``blocks @ matrix`` for ``blocks [count, dim, dim]`` and ``matrix [groups, rows, columns]``."""
    count, dim, _ = blocks.shape
    groups, rows, columns = matrix.shape
    if count == groups:
        # A batch of one is slower than a plain product.
        return (blocks[0] @ matrix[0])[None] if count == 1 else blocks @ matrix
    padded = count // groups * dim
    parts = pad_to(matrix, padded, columns).reshape(count, dim, columns)
    product = blocks * parts if dim == 1 else blocks @ parts
    return product.view(groups, padded, columns)[:, :rows]


def multiply_right(matrix: Tensor, blocks: Tensor) -> Tensor:
    """``matrix @ blocks`` for ``matrix [groups, rows, columns]`` and ``blocks [count, dim, dim]``."""
    if len(blocks) == len(matrix):
        return (matrix[0] @ blocks[0])[None] if len(blocks) == 1 else matrix @ blocks
    return multiply_left(blocks.mT, matrix.mT).mT


def solve_left(upper: Tensor, matrix: Tensor) -> Tensor:
    """``(U^T U)^-1 matrix`` for ``U = upper [count, dim, dim]`` and ``matrix [groups, rows, columns]``."""
    count, dim, _ = upper.shape
    groups, rows, columns = matrix.shape
    padded = count // groups * dim
    parts = pad_to(matrix, padded, columns).reshape(count, dim, columns)
    half = torch.linalg.solve_triangular(upper.mT, parts, upper=False)
    whole: Tensor = torch.linalg.solve_triangular(upper, half, upper=True)
    return whole.reshape(groups, padded, columns)[:, :rows]


def solve_right(matrix: Tensor, upper: Tensor) -> Tensor:
    """``matrix (U^T U)^-1``."""
    return solve_left(upper, matrix.mT).mT
