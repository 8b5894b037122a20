"""Factor statistics: the sums that A and G are averages of.

For a layer with inputs x and output gradients g at samples n and shared positions s (a convolution's output pixels, a
sequence's tokens), the statistics are ``sum_{n,s} x x^T`` and ``sum_{n,s} g g^T``. Scaling to factors is stated in
:mod:`kfac.curvature.scaling`.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def patches_2d(
    x: Tensor,
    kernel_size: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int, int, int],
    dilation: tuple[int, int],
    padding_mode: str = "zeros",
) -> Tensor:
    """The inputs that each output pixel of a convolution sees.

    Args:
        x: ``[samples, channels, height, width]``.
        kernel_size, stride, dilation: of the convolution, (rows, columns).
        padding: (left, right, top, bottom), as :func:`torch.nn.functional.pad` takes it.
        padding_mode: of the convolution.

    Returns:
        ``[samples * out_height * out_width, kernel rows * kernel columns * channels]``: channels run fastest, so that
        the copy reads and writes runs of contiguous memory.
    """
    mode = "constant" if padding_mode == "zeros" else padding_mode
    if any(padding):
        x = F.pad(x, padding, mode=mode)
    x = x.permute(0, 2, 3, 1).contiguous()
    samples, height, width, channels = x.shape
    (kh, kw), (sh, sw), (dh, dw) = kernel_size, stride, dilation
    out_h = (height - dh * (kh - 1) - 1) // sh + 1
    out_w = (width - dw * (kw - 1) - 1) // sw + 1
    n_step, h_step, w_step, _ = x.stride()
    size = (samples, out_h, out_w, kh, kw, channels)
    step = (n_step, h_step * sh, w_step * sw, h_step * dh, w_step * dw, 1)
    return x.as_strided(size, step).reshape(samples * out_h * out_w, kh * kw * channels)


def second_moment(rows: Tensor, bias: bool) -> Tensor:
    """``sum_r x_r x_r^T`` over the rows of ``rows [r, d]``, as ``[d, d]``.

    With ``bias`` a trailing 1 is appended to every row: ``[d + 1, d + 1]``.
    """
    if not bias:
        return rows.T @ rows
    d = rows.shape[1]
    moment = rows.new_empty(d + 1, d + 1)
    moment[:d, :d] = rows.T @ rows
    total = rows.sum(0)
    moment[:d, d] = total
    moment[d, :d] = total
    moment[d, d] = rows.shape[0]
    return moment


def patch_moment(patches: Tensor, channels: int, bias: bool) -> Tensor:
    """:func:`second_moment` of :func:`patches_2d`, reordered to (channel, kernel position), the weight's order."""
    positions = patches.shape[1] // channels
    moment = second_moment(patches, bias)
    if positions == 1:
        return moment
    d = positions * channels
    result = moment.new_empty(moment.shape)
    core = moment[:d, :d].view(positions, channels, positions, channels) if not bias else None
    if core is None:
        core = moment[:d, :d].reshape(positions, channels, positions, channels)
        last = moment[:d, d].reshape(positions, channels).T.reshape(d)
        result[:d, d], result[d, :d], result[d, d] = last, last, moment[d, d]
    result[:d, :d].view(channels, positions, channels, positions).copy_(core.permute(1, 0, 3, 2))
    return result


def channel_rows(g: Tensor) -> Tensor:
    """``[samples, channels, ...positions]`` as ``[channels, samples * positions]``."""
    return g.transpose(0, 1).reshape(g.shape[1], -1)
