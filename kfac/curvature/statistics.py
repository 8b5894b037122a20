"""Factor statistics: the sums that A and G are averages of.

For a layer with inputs x and output gradients g at samples n and shared positions s (a convolution's output pixels, a
sequence's tokens), the statistics are ``sum_{n,s} x x^T`` and ``sum_{n,s} g g^T``. Scaling to factors is stated in
:mod:`kfac.curvature.scaling`.

Statistics are symmetric: only their upper triangle is meaningful, what lies below it may be anything.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch.nn.functional as F
from torch import Tensor

CHUNK_ELEMENTS = {"cpu": 2**19, "cuda": 2**26}
"""Elements of patches that are made at a time: they stay in a CPU's cache (measured: 2 MB beats all at once by a fifth
for 32x32 images), and bound the memory on a GPU."""

BLOCK_DIM, MAX_BLOCKS = 48, 4
"""On a CPU a product is cut into at most so many blocks of at least so many columns, to compute only those on and above
the diagonal (measured: about a third less time at dimensions from 144 to 2304)."""


def convolution_patches(
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    padding_mode: str = "zeros",
    groups: int = 1,
) -> Iterator[Tensor]:
    """The inputs that each output pixel of a convolution sees, some samples at a time.

    Args:
        x: ``[samples, channels, *sizes]`` with one, two or three sizes.
        kernel_size, stride, dilation: of the convolution, one per size.
        padding: as :func:`torch.nn.functional.pad` takes it: (before, after) of the last size first.
        padding_mode, groups: of the convolution.

    Yields:
        ``[groups, some samples, output pixels, kernel positions * channels of a group]``; the last kernel size runs
        fastest, channels faster still.
    """
    mode = "constant" if padding_mode == "zeros" else padding_mode
    if any(padding):
        x = F.pad(x, tuple(padding), mode=mode)
    x = x.movedim(1, -1).contiguous()
    _, *sizes, channels = x.shape
    n_step, *steps, _ = x.stride()
    outputs = [
        (size - d * (k - 1) - 1) // s + 1 for size, k, s, d in zip(sizes, kernel_size, stride, dilation, strict=True)
    ]
    between_outputs = [step * s for step, s in zip(steps, stride, strict=True)]
    within_kernel = [step * d for step, d in zip(steps, dilation, strict=True)]
    own = channels // groups
    strides = (own, n_step, *between_outputs, *within_kernel, 1)
    pixels, dim = math.prod(outputs), math.prod(kernel_size) * own
    limit = CHUNK_ELEMENTS.get(x.device.type, CHUNK_ELEMENTS["cuda"])
    for part in x.split(max(1, limit // max(1, pixels * dim * groups))):
        shape = (groups, len(part), *outputs, *kernel_size, own)
        yield part.as_strided(shape, strides, part.storage_offset()).reshape(groups, len(part), pixels, dim)


def add_moments(rows: Tensor, total: Tensor, weight: float, bias: float | None = None) -> None:
    """Add ``weight sum_r x_r x_r^T`` over the rows of every group to the diagonal blocks that ``total`` holds.

    Args:
        rows: ``[groups, r, d]``.
        total: ``[blocks, dim, dim]``; each group has its own ``blocks / groups`` blocks, the last of which may be
            padded. Only upper triangles are meant.
        weight: of the sum.
        bias: an element appended to every row, or None.
    """
    groups, count, width = rows.shape
    full, dim = width + (bias is not None), total.shape[-1]
    blocks = total.view(groups, -1, dim, dim)
    if dim == 1:
        blocks[:, :width, 0, 0] += weight * rows.square().sum(1)
        if bias is not None:
            blocks[:, width, 0, 0] += count * weight * bias**2
        return
    for k in range(blocks.shape[1]):
        low = k * dim
        last = bias if low + dim >= full else None
        part = rows[:, :, low : low + dim]
        if groups == 1:
            add_moment(part[0], blocks[0, k], weight, last)
            continue
        block, d = blocks[:, k], part.shape[-1]
        block[:, :d, :d].baddbmm_(part.mT, part, alpha=weight)
        if last is not None:
            block[:, :d, d] += (weight * last) * part.sum(1)
            block[:, d, d] += count * weight * last**2


def add_moment(rows: Tensor, total: Tensor, weight: float, bias: float | None = None) -> None:
    """Add ``weight sum_r x_r x_r^T`` over the rows of ``rows [r, d]`` to the upper triangle of ``total``.

    ``bias`` is appended to every row: ``total`` has at least ``d + 1`` rows then, else ``d``.
    """
    d = rows.shape[1]
    blocks = min(MAX_BLOCKS, max(1, d // BLOCK_DIM)) if rows.device.type == "cpu" else 1
    edges = [d * k // blocks for k in range(blocks)]
    for low, high in zip(edges, [*edges[1:], d], strict=True):
        total[low:high, low:d].addmm_(rows[:, low:high].T, rows[:, low:], alpha=weight)
    if bias is not None:
        total[:d, d].add_(rows.sum(0), alpha=weight * bias)
        total[d, d].add_(rows.shape[0] * weight * bias**2)
