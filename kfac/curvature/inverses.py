"""Inverses, preconditioning and the KL clip."""

from __future__ import annotations

import torch
from torch import Tensor


def damped_inverse(factor: Tensor, damping: float) -> Tensor | None:
    """``(factor + damping I)^-1`` of a symmetric ``factor [d, d]`` by Cholesky; the factor is left as it is.

    What fails in float32 is tried again in float64.

    Returns:
        the symmetric inverse, or None where the damped factor is not positive definite even in float64.
    """
    damped = factor.clone()
    damped.diagonal().add_(damping)
    lower, info = torch.linalg.cholesky_ex(damped)
    if info.item() == 0:
        # LAPACK's result is column-major. Its transpose is the same matrix row by row, so that a rank that receives the
        # inverse computes with bitwise the same operands in the same layout as the one that made it.
        return torch.cholesky_inverse(lower).mT
    if factor.dtype != torch.float64:
        inverse = damped_inverse(factor.double(), damping)
        return None if inverse is None else inverse.to(factor.dtype)
    return None


def precondition(gradient: Tensor, a_inverse: Tensor, g_inverse: Tensor) -> Tensor:
    """``G^-1 gradient A^-1`` for ``gradient [out, in]``."""
    return g_inverse @ gradient @ a_inverse


def kl_clip_factor(kl_clip: float, lr: float, inner_product: Tensor) -> Tensor:
    """``min(1, sqrt(kl_clip / (lr^2 sum <v, g>)))`` as a 0-dim tensor: the bound on the step's predicted KL divergence.

    ``inner_product`` is ``sum over layers <v, g>`` of preconditioned and plain gradients; it is not negative, because
    the damped factors are positive definite; one that rounding made negative does not clip.
    """
    return (kl_clip / (lr**2 * inner_product.clamp(min=0.0))).sqrt().clamp(max=1.0)
