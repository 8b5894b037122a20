"""Damping, inverses and preconditioning."""

from __future__ import annotations

import math

import torch
from torch import Tensor

DAMPING_METHODS = ("plain", "pi")


def factor_damping(
    method: str, damping: float, trace_a: float, dim_a: int, trace_g: float, dim_g: int
) -> tuple[float, float]:
    """What is added to the diagonals of A and of G.

    ``plain`` adds the damping to each. ``pi`` splits it (factored Tikhonov damping, Martens and Grosse 2015, section
    6.3): ``sqrt(damping) pi`` to A and ``sqrt(damping) / pi`` to G, ``pi^2 = (tr A / dim A) / (tr G / dim G)``, so that
    the result does not depend on how a scale is split between A and G. A factor whose trace is not positive (no signal
    yet) leaves pi at 1.
    """
    if method == "plain":
        return damping, damping
    root = math.sqrt(damping)
    mean_a, mean_g = trace_a / dim_a, trace_g / dim_g
    if not (mean_a > 0 and mean_g > 0):
        return root, root
    pi = math.sqrt(mean_a / mean_g)
    return root * pi, root / pi


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
