"""Inverses, preconditioning and the KL clip."""

from __future__ import annotations

import torch
from torch import Tensor

from kfac.curvature.blocks import multiply_left, multiply_right


def damped_inverse(factor: Tensor, damping: float) -> Tensor | None:
    """``(factor + damping I)^-1`` of symmetric blocks ``factor [blocks, d, d]`` by Cholesky.

    The factor is left as it is. What fails in float32 is tried again in float64.

    Returns:
        the symmetric inverse, or None where the damped factor is not positive definite even in float64.
    """
    damped = factor.clone()
    damped.diagonal(dim1=1, dim2=2).add_(damping)
    if damped.shape[-1] == 1:
        return damped.reciprocal_() if bool((damped > 0).all()) else None
    lower, info = torch.linalg.cholesky_ex(damped)
    if not bool(info.any()):
        # LAPACK's result is column-major. Its transpose is the same matrix row by row, so that a rank that receives the
        # inverse computes with bitwise the same operands in the same layout as the one that made it.
        return torch.cholesky_inverse(lower).mT
    if factor.dtype != torch.float64:
        inverse = damped_inverse(factor.double(), damping)
        return None if inverse is None else inverse.to(factor.dtype)
    return None


def precondition(gradient: Tensor, a_inverse: Tensor, g_inverse: Tensor) -> Tensor:
    """``G^-1 gradient A^-1`` for ``gradient [groups, rows, columns]`` and inverses ``[blocks, d, d]``."""
    return multiply_right(multiply_left(g_inverse, gradient), a_inverse)


def kl_clip_factor(kl_clip: float, divergence: Tensor) -> Tensor:
    """``min(1, sqrt(kl_clip / divergence))`` as a 0-dim tensor: the bound on the step's predicted KL divergence.

    ``divergence`` is ``sum over layers lr^2 <v, g>`` of preconditioned and plain gradients; it is not negative, because
    the damped factors are positive definite; one that rounding made negative does not clip.
    """
    return (kl_clip / divergence.clamp(min=0.0)).sqrt().clamp(max=1.0)
