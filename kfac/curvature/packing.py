"""Packing of symmetric matrices: a triangle travels, not the square.

The upper triangle of a ``[d, d]`` matrix is stored in ``d (d + 1) / 2`` elements by plain block copies (an index gather
of ``triu_indices`` costs more than it saves on wide factors). With the matrix cut after its first ``h = ceil(d / 2)``
rows and columns into ``[[P, Q], [Q^T, R]]``, the packed vector holds the rectangle Q, and then P's upper triangle with
R's lower triangle folded into the free half of the same rectangle (shape ``[h, d + 1 - h]``). The diagonal blocks of a
factor follow each other.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kfac.planning.costs import packed_elements

__all__ = ["pack", "packed_elements", "packed_trace", "unpack"]


def _parts(packed: Tensor, dim: int, blocks: int) -> tuple[Tensor, Tensor, int, int]:
    """Views ``(Q [b, h, d - h], fold [b, h, d + 1 - h], h, s)``.

    P starts in column ``s`` of the fold, R in row ``1 - s``.
    """
    h = (dim + 1) // 2
    low = dim - h
    rows = packed.view(blocks, -1)
    rectangle = rows[:, : h * low].view(blocks, h, low)
    fold = rows[:, h * low :].view(blocks, h, dim + 1 - h)
    return rectangle, fold, h, (dim + 1) % 2


def pack(matrix: Tensor, out: Tensor) -> None:
    """Write the upper triangles of ``matrix [blocks, d, d]`` into ``out [blocks d (d + 1) / 2]``; what lies below the
    diagonals is not read.

    Raises:
        ValueError: if ``out`` has another size.
    """
    blocks, dim, _ = matrix.shape
    if out.shape != (packed_elements((blocks, dim)),):
        raise ValueError(
            f"{blocks} packed {dim} x {dim} matrices have {packed_elements((blocks, dim))} elements, "
            f"not {tuple(out.shape)}"
        )
    if dim == 1:
        out.copy_(matrix.view(blocks))
        return
    rectangle, fold, h, shift = _parts(out, dim, blocks)
    rectangle.copy_(matrix[:, :h, h:])
    fold.zero_()
    fold[:, :, shift:].copy_(torch.triu(matrix[:, :h, :h]))
    fold[:, 1 - shift :, : dim - h].add_(torch.triu(matrix[:, h:, h:]).mT)


def unpack(packed: Tensor, dim: int, blocks: int = 1) -> Tensor:
    """The symmetric matrices ``[blocks, d, d]`` of packed triangles; both halves of each are bitwise equal."""
    if dim == 1:
        return packed.clone().view(blocks, 1, 1)
    rectangle, fold, h, shift = _parts(packed, dim, blocks)
    matrix = packed.new_empty(blocks, dim, dim)
    matrix[:, :h, h:] = rectangle
    matrix[:, h:, :h] = rectangle.mT
    upper = torch.triu(fold[:, :, shift:])
    matrix[:, :h, :h] = upper + torch.triu(upper, 1).mT
    lower = torch.tril(fold[:, 1 - shift :, : dim - h])
    matrix[:, h:, h:] = lower + torch.tril(lower, -1).mT
    return matrix


def packed_trace(packed: Tensor, dim: int, blocks: int = 1) -> Tensor:
    """The trace (0-dim) over all blocks of packed triangles, without unpacking them."""
    if dim == 1:
        return packed.sum()
    _, fold, h, shift = _parts(packed, dim, blocks)
    first = fold.diagonal(shift, 1, 2)[:, :h].sum()
    return first + fold.diagonal(shift - 1, 1, 2)[:, : dim - h].sum()
