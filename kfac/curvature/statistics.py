"""Factor statistics: the sums that A and G are averages of.

For a layer with inputs x and output gradients g at samples n and shared positions s (a convolution's output pixels, a
sequence's tokens), the statistics are ``sum_{n,s} x x^T`` and ``sum_{n,s} g g^T``. Scaling to factors is stated in
:mod:`kfac.curvature.scaling`.

Statistics are symmetric: only their upper triangle is meaningful, what lies below it may be anything.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK_ELEMENTS = {"cpu": 2**19, "cuda": 2**26}
"""Elements of patches that are made at a time: they stay in a CPU's cache (measured: 2 MB beats all at once by a fifth
for 32x32 images), and bound the memory on a GPU."""

BLOCK_DIM, MAX_BLOCKS = 48, 8
"""On a CPU a product is cut into at most so many blocks of at least so many columns, to compute only those on and above
the diagonal (measured: about a third less time at dimensions from 144 to 2304)."""

SHIFT_ELEMENTS = 2**15
"""Of an input, from which on :func:`add_shifted_moments` is used: it takes more steps, which cost a quarter of a
millisecond more."""


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


def shifts_pay(
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    padding_mode: str = "zeros",
    groups: int = 1,
) -> bool:
    """Whether :func:`add_shifted_moments` applies to a convolution and is faster than its patches.

    Measured on one core: 4 times as fast for 16 channels of 32 x 32 pixels, 3 times for 64 of 8 x 8 and for 128 of 28 x
    28; slower where there are more channels than pixels in all samples. On a GPU the library's reduced precision (TF32)
    would apply.
    """
    common = tuple(kernel_size) == (3, 3) and tuple(stride) == tuple(dilation) == (1, 1) and set(padding) == {1}
    if not common or padding_mode != "zeros" or groups != 1 or x.device.type != "cpu":
        return False
    channels = x.shape[1]
    pixels = x.numel() // max(1, channels)
    return torch.backends.mkldnn.is_available() and pixels >= channels and x.numel() >= SHIFT_ELEMENTS


def add_shifted_moments(x: Tensor, total: Tensor, weight: float, bias: float | None = None) -> None:
    """As :func:`add_moment` of the patches of a 3 x 3 convolution with padding 1, from products of shifted images.

    The block of A for kernel positions k and l is a sum over pixels p of ``x[p + k] x[p + l]^T``. But for the border
    it depends on ``l - k`` alone: 13 products of images instead of the 45 blocks on and above the diagonal, and no
    patches. The backward pass of a convolution has them. A kernel position on one border of the kernel never sees the
    pixels on the opposite border of the image, whose products are subtracted.

    The sums of float32 are less exact (7e-6 of the largest entry over 32,768 pixels, measured, instead of 3e-7).

    Args:
        x: ``[samples, channels, height, width]``.
        total: ``[9 channels, 9 channels]``, one more with a bias; in (kernel row, kernel column, channel) order.
        weight: of the sum.
        bias: an element appended to every patch, or None.
    """
    n, c, h, w = x.shape
    rows = x.new_zeros(n, h + 2, w, c)  # two rows of zeros below: what is shifted beyond the image
    rows[:, :h] = x.movedim(1, -1)
    image = rows.movedim(-1, 1)
    kernel, one = x.new_empty(c, c, 3, 5), (1, 1)
    products = torch.ops.aten.convolution_backward(
        image[:, :, :h], image, kernel, None, one, (0, 2), one, False, (0, 0), 1, (False, True, False)
    )[1]  # [channel at p, channel at p + shift, rows down 0 to 2, columns right -2 to 2]
    products = products.permute(2, 0, 3, 1).reshape(3, c, 5 * c)
    size = 3 * c
    down = torch.stack([products[:, :, (2 - k) * c : (5 - k) * c] for k in range(3)], 1).view(3, size, size)
    for k, edge in ((0, w - 1), (2, 0)):  # a kernel column at the border never sees the opposite column of pixels
        column = rows[:, :, edge].contiguous().view(-1, c)
        below = column.as_strided((len(column) - 2, size), (c, 1)).contiguous()
        here = slice(k * c, (k + 1) * c)
        down[:, here, here] -= (below[:, :c].T @ below).view(c, 3, c).transpose(0, 1)
    for k in range(3):
        for m in range(k, 3):
            total[k * size : (k + 1) * size, m * size : (m + 1) * size].add_(down[m - k], alpha=weight)
    for k, edge in ((0, h - 1), (2, 0)):  # likewise a kernel row
        row = F.pad(rows[:, edge], (0, 0, 1, 1))
        patches = row.as_strided((n, w, size), (row.stride(0), c, 1)).reshape(-1, size)
        total[k * size : (k + 1) * size, k * size : (k + 1) * size].addmm_(patches.T, patches, alpha=-weight)
    if bias is not None:
        sums = F.pad(x.sum(0), (1, 1, 1, 1)).unfold(1, h, 1).unfold(2, w, 1).sum((3, 4))  # [channel, kernel positions]
        total[: 3 * size, 3 * size].add_(sums.permute(1, 2, 0).reshape(-1), alpha=weight * bias)
        total[3 * size, 3 * size].add_(n * h * w * weight * bias**2)


def add_channel_moments(g: Tensor, total: Tensor, weight: float) -> None:
    """Add ``weight sum g g^T`` over samples and positions of ``g [samples, channels, positions]`` to ``total``.

    Without the copy that makes rows of positions, unless there are few positions (measured: a third to a half less time
    from 64 channels of 64 positions on, twice the time at 256 channels of 16).
    """
    _, channels, positions = g.shape
    if positions >= channels:
        total.addbmm_(g, g.mT, alpha=weight)
    else:
        add_moment(g.transpose(0, 1).reshape(channels, -1).T, total, weight)
