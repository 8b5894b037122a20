"""The last phase of a step: every gradient times its inverse curvature, and the KL clip over all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kfac.config import options_at
from kfac.curvature.inverses import kl_clip_factor, kronecker_eigenvalues, precondition_in_basis
from kfac.factors import FactorState
from kfac.layers import GradientAccess, KFACLayer


def precondition_gradients(
    layers: Sequence[KFACLayer],
    factors: Sequence[FactorState],
    access: GradientAccess,
    *,
    step: int,
    kl_clip: float | None,
    strength: float = 1.0,
) -> None:
    """Replace the gradients of layers with inverses by ``nu`` times the preconditioned ones, without waiting for the
    device.

    Args:
        layers: in the Plan's order.
        factors: A and G of each layer in turn.
        access: where gradients are.
        step: at which the learning rates (of the KL clip) and dampings hold.
        kl_clip: the bound of the KL clip, or None for ``nu = 1``.
        strength: multiplies every layer's damping.
    """
    configs = [layer.config for layer in layers]
    rates, dampings = options_at(configs, "lr", step), options_at(configs, "damping", step)
    preconditioned: list[tuple[KFACLayer, Tensor]] = []
    products: list[Tensor] = []
    for k, layer in enumerate(layers):
        a, g = factors[2 * k], factors[2 * k + 1]
        if not (a.solved and g.solved):
            continue
        gradient = layer.gradient_matrix(access)
        if gradient is None:
            continue
        gradient = gradient.to(a.dtype)
        result = _solve(a, g, gradient, strength * dampings[k])
        products.append(torch.dot(result.flatten(), gradient.flatten()) * rates[k] ** 2)
        preconditioned.append((layer, result))
    if preconditioned and kl_clip is not None:
        nu = kl_clip_factor(kl_clip, torch.stack(products).sum())
        for _, result in preconditioned:
            result.mul_(nu)
    for layer, result in preconditioned:
        layer.set_gradient(result, access)


def _solve(a: FactorState, g: FactorState, gradient: Tensor, damping: float) -> Tensor:
    if a.vectors is None or a.values is None or g.vectors is None or g.values is None:
        return a.solve_right(g.solve_left(gradient))
    eigenvalues = g.corrected
    if eigenvalues is None:
        eigenvalues = kronecker_eigenvalues(a.values, g.values, a.shape.groups)
    return precondition_in_basis(gradient, a.vectors, g.vectors, eigenvalues, damping)
