"""Packing of symmetric matrices: a triangle travels, not the square.

The upper triangle of a ``[d, d]`` matrix is stored in ``d (d + 1) / 2`` elements by plain block copies (an index gather
of ``triu_indices`` costs more than it saves on wide factors). With the matrix cut after its first ``h = ceil(d / 2)``
rows and columns into ``[[P, Q], [Q^T, R]]``, the packed vector holds the rectangle Q, and then P's upper triangle with
R's lower triangle folded into the free half of the same rectangle (shape ``[h, d + 1 - h]``).
"""

from __future__ import annotations

import torch
from torch import Tensor


def packed_elements(dim: int) -> int:
    """Elements of the packed triangle of a ``dim x dim`` matrix."""
    return dim * (dim + 1) // 2


def _blocks(packed: Tensor, dim: int) -> tuple[Tensor, Tensor, int, int]:
    """Views ``(Q [h, d - h], fold [h, d + 1 - h], h, s)``; P starts in column ``s`` of the fold, R in row ``1 - s``."""
    h = (dim + 1) // 2
    low = dim - h
    rectangle = packed[: h * low].view(h, low)
    fold = packed[h * low :].view(h, dim + 1 - h)
    return rectangle, fold, h, (dim + 1) % 2


def pack(matrix: Tensor, out: Tensor) -> None:
    """Write the upper triangle of ``matrix [d, d]`` into ``out [d (d + 1) / 2]``; what lies below it is not read.

    Raises:
        ValueError: if ``out`` has another size.
    """
    dim = matrix.shape[0]
    if out.shape != (packed_elements(dim),):
        raise ValueError(f"a packed {dim} x {dim} matrix has {packed_elements(dim)} elements, not {tuple(out.shape)}")
    rectangle, fold, h, shift = _blocks(out, dim)
    rectangle.copy_(matrix[:h, h:])
    fold.zero_()
    fold[:, shift:].copy_(torch.triu(matrix[:h, :h]))
    fold[1 - shift :, : dim - h].add_(torch.triu(matrix[h:, h:]).T)


def unpack(packed: Tensor, dim: int) -> Tensor:
    """The symmetric matrix ``[d, d]`` of a packed triangle; both of its triangles are bitwise equal."""
    rectangle, fold, h, shift = _blocks(packed, dim)
    matrix = packed.new_empty(dim, dim)
    matrix[:h, h:] = rectangle
    matrix[h:, :h] = rectangle.T
    upper = torch.triu(fold[:, shift:])
    matrix[:h, :h] = upper + torch.triu(upper, 1).T
    lower = torch.tril(fold[1 - shift :, : dim - h])
    matrix[h:, h:] = lower + torch.tril(lower, -1).T
    return matrix


def packed_trace(packed: Tensor, dim: int) -> Tensor:
    """The trace (0-dim) of the matrix of a packed triangle, without unpacking it."""
    _, fold, h, shift = _blocks(packed, dim)
    low = dim - h
    first = fold.diagonal(shift)[:h].sum()
    return first + fold.diagonal(shift - 1)[:low].sum()
