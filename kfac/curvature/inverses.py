"""Inverses, preconditioning and the KL clip."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kfac.curvature.blocks import multiply_left, multiply_right, pad_to

SOLVE_DIM = {"cpu": 1024}
"""From this dimension on a Cholesky factor is kept instead of the inverse: it takes less than a third of the time, and
two triangular solves take as long as one product with the inverse (measured on one core: from 1,152 columns on, within
a fifth). On a GPU products are much faster than solves."""

LONG_INTERVAL, SHORT_SOLVE_DIM = 5, 256
"""Below so many steps between inversions, from this dimension on (measured: an inverse of 576 columns, or 288, pays for
itself after 11, or 6, steps)."""

Begun = Callable[[], Tensor | None]
"""Work that has been issued: waits for it and returns its result, by dearer means where the quick ones have failed."""

BLOCK_DIM = 192
"""Rows that a blocked Cholesky decomposition takes at a time (measured on one core: 0.6 to 0.75 of the library's time
at 512, 2,304 and 4,608 columns, a quarter at 1,024, where it suffers from the power of two, the same at 576)."""


def keeps_cholesky(dim: int, interval: int, device: torch.device) -> bool:
    """Whether :func:`damped_cholesky` serves ``interval`` steps better than :func:`damped_inverse`."""
    if device.type not in SOLVE_DIM:
        return False
    return dim >= (SHORT_SOLVE_DIM if interval < LONG_INTERVAL else SOLVE_DIM[device.type])


def damped_inverse(factor: Tensor, damping: float, weight: float = 1.0, noise: float = 0.0) -> Tensor | None:
    """``(factor / weight + damping I)^-1`` of symmetric blocks ``factor [blocks, d, d]`` by Cholesky.

    The factor is left as it is, and only its upper triangles are read. What fails in float32 is tried again in float64;
    where the damping is lost in the rounding of the factor itself, eigenvalues below that rounding are raised to it.
    ``noise``: as for :func:`eigendecomposition`.

    Returns:
        the symmetric inverse, or None where it is not finite, or indefinite by more than rounding and damping.
    """
    return begin_inverse(factor, damping, weight, noise)()


def begin_inverse(factor: Tensor, damping: float, weight: float = 1.0, noise: float = 0.0) -> Begun:
    """Issue :func:`damped_inverse` without waiting for the device; the factor must stay until the result is there."""
    upper, good = _cholesky(factor, damping, weight)
    inverse = _inverse_of(upper, good)

    def result() -> Tensor | None:
        if inverse is not None and bool(good):
            return inverse
        again: Tensor | None = None
        if factor.dtype != torch.float64:
            upper, well = _cholesky(factor.double(), damping, weight)
            again = _inverse_of(upper, well) if bool(well) else None
        if again is None:
            parts = _above_rounding(factor, weight, noise)
            again = None if parts is None else inverse_from_eigen(*parts, damping)
        return None if again is None else again.to(factor.dtype)

    return result


def damped_cholesky(factor: Tensor, damping: float, weight: float = 1.0, noise: float = 0.0) -> Tensor | None:
    """The U with ``U^T U = factor / weight + damping I`` of symmetric blocks ``factor [blocks, d, d]``.

    U is upper triangular: what is below the diagonal may be anything. Otherwise as :func:`damped_inverse`.
    """
    return begin_cholesky(factor, damping, weight, noise)()


def begin_cholesky(factor: Tensor, damping: float, weight: float = 1.0, noise: float = 0.0) -> Begun:
    """Issue :func:`damped_cholesky`, as :func:`begin_inverse` does its work."""
    upper, good = _cholesky(factor, damping, weight)

    def result() -> Tensor | None:
        if bool(good):
            return upper
        again, well = upper, good
        if factor.dtype != torch.float64:
            again, well = _cholesky(factor.double(), damping, weight)
        if not bool(well) and (parts := _above_rounding(factor, weight, noise)) is not None:
            again, well = _cholesky((parts[0] * parts[1].unsqueeze(-2)) @ parts[0].mT, damping)
        return again.to(factor.dtype) if bool(well) else None

    return result


def _inverse_of(upper: Tensor, good: Tensor) -> Tensor | None:
    """The inverse of ``upper^T upper``; None where a CPU knows already that there is none."""
    if good.device.type == "cpu" and not bool(good):
        return None
    if upper.shape[-1] == 1:
        return upper.square_().reciprocal_()
    # LAPACK's result is column-major. Its transpose is the same matrix row by row, so that a rank that receives the
    # inverse computes with bitwise the same operands in the same layout as the one that made it.
    return torch.cholesky_inverse(upper.mT).mT


def _cholesky(factor: Tensor, damping: float, weight: float = 1.0) -> tuple[Tensor, Tensor]:
    """As :func:`damped_cholesky` in the factor's own dtype, and whether it is right, on the device."""
    damped = factor / weight
    damped.diagonal(dim1=1, dim2=2).add_(damping)
    if damped.shape[-1] == 1:
        good = ((damped > 0) & damped.isfinite()).all()
        return damped.sqrt_(), good
    upper, good = _blocked_cholesky(damped)
    return upper, good & upper.diagonal(dim1=1, dim2=2).sum().isfinite()


def _blocked_cholesky(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The Cholesky factors (upper triangles) of ``matrix [blocks, d, d]``, which is overwritten, and whether there are.

    On a CPU a wide matrix is taken ``BLOCK_DIM`` rows at a time, so that most of the work is in matrix products.
    """
    dim = matrix.shape[-1]
    if matrix.device.type != "cpu" or dim < 2 * BLOCK_DIM:
        lower, info = torch.linalg.cholesky_ex(matrix.mT)  # column by column, as LAPACK takes it
        return lower.mT, ~info.any()
    good = torch.ones((), dtype=torch.bool)
    for low in range(0, dim, BLOCK_DIM):
        high = min(dim, low + BLOCK_DIM)
        for one in matrix:
            if low:
                one[low:high, low:].addmm_(one[:low, low:high].T, one[:low, low:], alpha=-1)
            lower, info = torch.linalg.cholesky_ex(one[low:high, low:high].T)
            good &= info == 0
            one[low:high, low:high] = lower.T
            one[low:high, high:] = torch.linalg.solve_triangular(lower, one[low:high, high:], upper=False)
    return matrix, good


def _above_rounding(factor: Tensor, weight: float, noise: float) -> tuple[Tensor, Tensor] | None:
    """As :func:`eigendecomposition` of ``factor / weight``, in float64, with the rounding of the factor's own dtype."""
    upper = factor.triu().double() / weight
    return eigendecomposition(upper + upper.triu(1).mT, rounding=torch.finfo(factor.dtype).eps, noise=noise)


def eigendecomposition(
    factor: Tensor, damping: float = 0.0, rounding: float | None = None, noise: float = 0.0
) -> tuple[Tensor, Tensor] | None:
    """Eigenvectors ``[blocks, d, d]`` (columns) and eigenvalues ``[blocks, d]`` of symmetric blocks.

    A factor is a sum of squares: eigenvalues that are smaller than the rounding of a block's largest, or below zero,
    are noise, and raised to that rounding. What does not converge in float32 is tried again in float64.

    Args:
        factor: ``[blocks, d, d]``.
        damping: that will be added to the eigenvalues.
        rounding: relative to the largest eigenvalue; None: of the factor's dtype.
        noise: relative to the largest entries, how much coarser the factor has been rounded on its way: so far below
            zero eigenvalues may lie, too.

    Returns:
        None where it does not converge even in float64, is not finite, or has an eigenvalue so far below zero that
        neither rounding nor the damping makes up for it.
    """
    parts = _eigh(factor)
    if parts is None:
        return None
    vectors, values = parts
    floor = (torch.finfo(factor.dtype).eps if rounding is None else rounding) * values.amax(-1, keepdim=True)
    allowed = factor.shape[-1] * torch.maximum(10 * floor, noise * values.amax(-1, keepdim=True))
    if bool(((values < -allowed) & (values <= -damping)).any()):
        return None
    return vectors, torch.maximum(values, floor)


def _eigh(factor: Tensor) -> tuple[Tensor, Tensor] | None:
    if not bool(factor.isfinite().all()):
        return None
    if factor.shape[-1] == 1:
        return torch.ones_like(factor), factor[:, :, 0]
    try:
        values, vectors = torch.linalg.eigh(factor)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        again = None if factor.dtype == torch.float64 else _eigh(factor.double())
        return None if again is None else (again[0].to(factor.dtype), again[1].to(factor.dtype))
    return vectors.contiguous(), values


def inverse_from_eigen(vectors: Tensor, values: Tensor, damping: float) -> Tensor | None:
    """``(factor + damping I)^-1`` from the factor's eigenvectors and eigenvalues, or None where that is singular."""
    damped = values + damping
    if not bool((damped > 0).all()):
        return None
    half = vectors * damped.rsqrt().unsqueeze(-2)
    return half @ half.mT


def precondition_in_basis(
    gradient: Tensor, a_vectors: Tensor, g_vectors: Tensor, eigenvalues: Tensor, damping: float
) -> Tensor:
    """``(F + damping I)^-1`` times the gradient for a curvature F that is diagonal in a Kronecker-factored basis.

    Args:
        gradient: ``[groups, rows, columns]``.
        a_vectors, g_vectors: eigenvectors ``[blocks, d, d]`` of A and G.
        eigenvalues: of F, ``[groups, padded rows, padded columns]``: ``lambda_G lambda_A^T``, or corrected ones.
        damping: added to the eigenvalues.
    """
    _, rows, columns = gradient.shape
    padded = pad_to(gradient, *eigenvalues.shape[1:])
    inside = multiply_right(multiply_left(g_vectors.mT, padded), a_vectors)
    outside = multiply_right(multiply_left(g_vectors, inside / (eigenvalues + damping)), a_vectors.mT)
    return outside[:, :rows, :columns]


def kronecker_eigenvalues(a_values: Tensor, g_values: Tensor, groups: int) -> Tensor:
    """``lambda_G lambda_A^T`` as ``[groups, padded rows, padded columns]`` from ``[blocks, d]`` of A and of G."""
    return g_values.reshape(groups, -1, 1) * a_values.reshape(groups, 1, -1)


def kl_clip_factor(kl_clip: float, divergence: Tensor) -> Tensor:
    """``min(1, sqrt(kl_clip / divergence))`` as a 0-dim tensor: the bound on the step's predicted KL divergence.

    ``divergence`` is ``sum over layers lr^2 <v, g>`` of preconditioned and plain gradients; it is not negative, because
    the damped factors are positive definite; one that rounding made negative does not clip.
    """
    return (kl_clip / divergence.clamp(min=0.0)).sqrt().clamp(max=1.0)
