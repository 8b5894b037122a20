"""Levenberg-Marquardt damping: how well the quadratic model predicts the loss decides how far it is trusted."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from kfac.communication import Communicator
from kfac.curvature.blocks import multiply_left, multiply_right
from kfac.factors import FactorState
from kfac.layers import GradientAccess, KFACLayer

DECAY = 19 / 20
"""The damping is scaled by this to the power of the interval, or its inverse (Martens and Grosse 2015, section 6.5)."""

LOWER, UPPER = 1 / 4, 3 / 4
"""Below the first reduction ratio the damping grows, above the second it falls (the same section)."""


class LevenbergMarquardt:
    """A factor on every layer's damping, adapted every ``interval`` steps.

    The reduction ratio is ``(h(theta + delta) - h(theta)) / (M(delta) - M(0))`` with the loss h of one batch before and
    after the optimizer's step delta, and the model ``M(delta) - M(0) = <gradient, delta> + 1/2 delta^T (A x G) delta``,
    without damping; parameters without factors enter by their gradient only.

    Attributes:
        strength: the factor.
    """

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self.strength = 1.0
        self._before: list[tuple[nn.Parameter, Tensor, Tensor]] = []

    @property
    def waiting(self) -> bool:
        """Whether a step has been noted whose loss afterwards is not known yet."""
        return bool(self._before)

    def note(self, step: int, parameters: Sequence[nn.Parameter], access: GradientAccess) -> None:
        """Keep parameters and gradients as they are before a step that counts (gradients not yet preconditioned)."""
        if (step + 1) % self._interval == 0:
            gradients = [(p, access.get(p)) for p in parameters]
            self._before = [(p, p.detach().clone(), g.clone()) for p, g in gradients if g is not None]

    def forget(self) -> None:
        """The step does not count (it was skipped)."""
        self._before = []

    @torch.no_grad()
    def adapt(self, before: float, after: float, layers: Sequence[KFACLayer], factors: Sequence[FactorState]) -> float:
        """Change :attr:`strength`; the same arguments change it in the same way on every rank.

        Args:
            before, after: the batch's loss before and after the step.
            layers, factors: as of the step; A and G of each layer in turn.

        Returns:
            the reduction ratio.
        """
        moves = {id(p): p.detach() - old for p, old, _ in self._before}
        predicted = sum(float((gradient * moves[id(p)]).sum()) for p, _, gradient in self._before)
        for k, layer in enumerate(layers):
            a, g = factors[2 * k], factors[2 * k + 1]
            move = layer.gradient_matrix(_Moves(moves))
            if move is None or a.average is None or g.average is None:
                continue
            move = move.to(a.average.dtype)
            curved = multiply_right(multiply_left(g.matrix(), move), a.matrix())
            predicted += 0.5 * float((curved * move).sum())
        self._before = []
        actual = after - before
        ratio = actual / predicted if predicted < 0 else -math.inf
        if not math.isfinite(actual) or ratio < LOWER:
            self.strength /= DECAY**self._interval
        elif ratio > UPPER:
            self.strength *= DECAY**self._interval
        return ratio


def mean_over_ranks(losses: Sequence[float | Tensor], communicator: Communicator) -> tuple[float, float]:
    """The means of (before, after) over the ranks; collective."""
    everyone = communicator.all_gather_object([float(torch.as_tensor(loss).detach()) for loss in losses])
    before, after = (sum(values) / len(everyone) for values in zip(*everyone, strict=True))
    return before, after


class _Moves(GradientAccess):
    """The parameters' changes in place of their gradients."""

    def __init__(self, moves: dict[int, Tensor]) -> None:
        self._moves = moves

    def get(self, parameter: Tensor) -> Tensor | None:
        return self._moves.get(id(parameter))

    def set(self, parameter: Tensor, gradient: Tensor) -> None:
        raise NotImplementedError
