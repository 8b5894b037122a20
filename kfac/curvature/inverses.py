"""Inverses, preconditioning and the KL clip."""

from __future__ import annotations

import torch
from torch import Tensor

from kfac.curvature.blocks import multiply_left, multiply_right, pad_to


def damped_inverse(factor: Tensor, damping: float) -> Tensor | None:
    """``(factor + damping I)^-1`` of symmetric blocks ``factor [blocks, d, d]`` by Cholesky.

    The factor is left as it is. What fails in float32 is tried again in float64; where the damping is lost in the
    rounding of the factor itself, eigenvalues below that rounding are raised to it.

    Returns:
        the symmetric inverse, or None where the factor is not finite or has no positive eigenvalue.
    """
    inverse = _cholesky_inverse(factor, damping)
    if inverse is None and factor.dtype != torch.float64:
        inverse = _cholesky_inverse(factor.double(), damping)
    if inverse is None:
        inverse = _inverse_above_rounding(factor, damping)
    return None if inverse is None else inverse.to(factor.dtype)


def _cholesky_inverse(factor: Tensor, damping: float) -> Tensor | None:
    damped = factor.clone()
    damped.diagonal(dim1=1, dim2=2).add_(damping)
    if damped.shape[-1] == 1:
        return damped.reciprocal_() if bool(((damped > 0) & damped.isfinite()).all()) else None
    lower, info = torch.linalg.cholesky_ex(damped)
    if bool(info.any() | ~lower.sum().isfinite()):
        return None
    # LAPACK's result is column-major. Its transpose is the same matrix row by row, so that a rank that receives the
    # inverse computes with bitwise the same operands in the same layout as the one that made it.
    return torch.cholesky_inverse(lower).mT


def _inverse_above_rounding(factor: Tensor, damping: float) -> Tensor | None:
    parts = _eigh(factor.double())
    if parts is None:
        return None
    vectors, values = parts
    floor = torch.finfo(factor.dtype).eps * values.amax(-1, keepdim=True)
    if bool((values < -10 * factor.shape[-1] * floor).any()):
        return None  # that is no rounding
    return inverse_from_eigen(vectors, torch.maximum(values, floor), damping)


def eigendecomposition(factor: Tensor) -> tuple[Tensor, Tensor] | None:
    """Eigenvectors ``[blocks, d, d]`` (columns) and eigenvalues ``[blocks, d]``, none below zero, of symmetric blocks.

    What does not converge in float32 is tried again in float64.

    Returns:
        None where it does not converge even in float64, or is not finite.
    """
    parts = _eigh(factor)
    # What lies below zero is rounding: a factor is a sum of squares.
    return None if parts is None else (parts[0], parts[1].clamp(min=0.0))


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


def precondition(gradient: Tensor, a_inverse: Tensor, g_inverse: Tensor) -> Tensor:
    """``G^-1 gradient A^-1`` for ``gradient [groups, rows, columns]`` and inverses ``[blocks, d, d]``."""
    return multiply_right(multiply_left(g_inverse, gradient), a_inverse)


def kl_clip_factor(kl_clip: float, divergence: Tensor) -> Tensor:
    """``min(1, sqrt(kl_clip / divergence))`` as a 0-dim tensor: the bound on the step's predicted KL divergence.

    ``divergence`` is ``sum over layers lr^2 <v, g>`` of preconditioned and plain gradients; it is not negative, because
    the damped factors are positive definite; one that rounding made negative does not clip.
    """
    return (kl_clip / divergence.clamp(min=0.0)).sqrt().clamp(max=1.0)
