"""The last phase of a step: every gradient times its inverses, and the KL clip over all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kfac.config import options_at
from kfac.curvature.inverses import kl_clip_factor, precondition
from kfac.factors import FactorState
from kfac.layers import GradientAccess, KFACLayer


def precondition_gradients(
    layers: Sequence[KFACLayer],
    sides: Mapping[str, tuple[FactorState, FactorState]],
    access: GradientAccess,
    *,
    step: int,
    kl_clip: float | None,
) -> None:
    """Replace the gradients of layers with inverses by ``nu G^-1 gradient A^-1``, without waiting for the device.

    Args:
        layers: in the Plan's order.
        sides: per layer its factors A and G.
        access: where gradients are.
        step: at which the learning rates hold, for the KL clip.
        kl_clip: its bound, or None for ``nu = 1``.
    """
    preconditioned: list[tuple[KFACLayer, Tensor]] = []
    products: list[Tensor] = []
    for layer, lr in zip(layers, options_at([layer.config for layer in layers], "lr", step), strict=True):
        a, g = (side.inverse for side in sides[layer.name])
        gradient = layer.gradient_matrix(access)
        if a is None or g is None or gradient is None:
            continue
        gradient = gradient.to(a.dtype)
        result = precondition(gradient, a, g)
        products.append((result * gradient).sum() * lr**2)
        preconditioned.append((layer, result))
    if preconditioned and kl_clip is not None:
        nu = kl_clip_factor(kl_clip, torch.stack(products).sum())
        for _, result in preconditioned:
            result.mul_(nu)
    for layer, result in preconditioned:
        layer.set_gradient(result, access)
