"""The last phase of a step: every gradient times its inverse curvature, and the KL clip over all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kfac.communication import Communicator
from kfac.config import options_at
from kfac.curvature.inverses import kl_clip_factor, kronecker_eigenvalues, precondition_in_basis
from kfac.factors import FactorState
from kfac.inversion import Inversions
from kfac.layers import GradientAccess, KFACLayer
from kfac.owned_gradients import OwnedGradients
from kfac.planning import Plan
from kfac.recording import Recorder


def precondition_gradients(
    layers: Sequence[KFACLayer],
    factors: Sequence[FactorState],
    access: GradientAccess,
    plan: Plan,
    communicator: Communicator,
    recorder: Recorder,
    *,
    step: int,
    kl_clip: float | None,
    strength: float = 1.0,
    inversions: Inversions | None = None,
) -> None:
    """Replace the gradients of layers with inverses by ``nu`` times the preconditioned ones; collective where the Plan
    leaves layers to one rank, or with ``inversions``. Without these nobody waits for the device.

    Args:
        layers: in the Plan's order.
        factors: A and G of each layer in turn.
        access: where gradients are.
        plan, communicator, recorder: who preconditions what, the ranks, and what records the work.
        step: at which the learning rates (of the KL clip) and dampings hold.
        kl_clip: the bound of the KL clip, or None for ``nu = 1``.
        strength: multiplies every layer's damping.
        inversions: in a step in which factors are inverted: a phase that has been started.

    Raises:
        FactorInversionError: on every rank, if a factor could not be inverted; gradients are as before then.
    """
    configs = [layer.config for layer in layers]
    rates, dampings = options_at(configs, "lr", step), options_at(configs, "damping", step)
    preconditioned: dict[int, Tensor] = {}
    products: dict[int, Tensor] = {}

    def gradient_of(k: int) -> Tensor | None:
        a, g = factors[2 * k], factors[2 * k + 1]
        gradient = layers[k].gradient_matrix(access) if a.solved and g.solved else None
        return None if gradient is None else gradient.to(a.like.dtype)

    def solve(k: int, gradient: Tensor) -> Tensor:
        return _solve(factors[2 * k], factors[2 * k + 1], gradient, strength * dampings[k])

    def add(k: int, gradient: Tensor, result: Tensor) -> None:
        products[k] = torch.dot(result.flatten(), gradient.flatten()) * rates[k] ** 2
        preconditioned[k] = result

    owned = OwnedGradients(plan, communicator, recorder, factors[0].like, inversions)
    owned.send(gradient_of, solve)
    if inversions:
        inversions.finish()
    with recorder.span("Precondition", "precondition"):
        for k in range(len(layers)):
            if plan.solution_holder(2 * k) is None and (gradient := gradient_of(k)) is not None:
                add(k, gradient, solve(k, gradient))
    for k, gradient, result in owned.receive():
        add(k, gradient, result)
    with recorder.span("Precondition", "KL clip"):
        if preconditioned and kl_clip is not None:
            nu = kl_clip_factor(kl_clip, torch.stack([products[k] for k in sorted(products)]).sum())
            for result in preconditioned.values():
                result.mul_(nu)
        for k in sorted(preconditioned):
            layers[k].set_gradient(preconditioned[k], access)


def _solve(a: FactorState, g: FactorState, gradient: Tensor, damping: float) -> Tensor:
    if a.vectors is None or a.values is None or g.vectors is None or g.values is None:
        return a.solve_right(g.solve_left(gradient))
    eigenvalues = g.corrected
    if eigenvalues is None:
        eigenvalues = kronecker_eigenvalues(a.values, g.values, a.shape.groups)
    return precondition_in_basis(gradient, a.vectors, g.vectors, eigenvalues, damping)
