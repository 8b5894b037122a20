"""What is made of a damped factor, and how it travels: an inverse, a Cholesky factor, or an eigendecomposition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from kfac.config import KFACConfig
from kfac.curvature.inverses import (
    begin_cholesky,
    begin_inverse,
    eigendecomposition,
    inverse_from_eigen,
    keeps_cholesky,
)
from kfac.curvature.packing import pack
from kfac.factors import FactorState

Parts = tuple[Tensor, ...]
"""An inverse, or eigenvectors and eigenvalues."""

Begun = Callable[[], Parts | None]
"""Work that has been issued: waits for it and returns the parts; None where there is no solution."""


class Method(Protocol):
    """What is made of a factor, and how it travels."""

    def elements(self, factor: FactorState) -> int:
        """Of the flat tensor that travels."""

    def begin(self, factor: FactorState, damping: float) -> Begun:
        """Issue the work."""

    def flatten(self, parts: Parts, out: Tensor) -> None:
        """Write the parts into one flat tensor."""

    def parts(self, factor: FactorState, flat: Tensor) -> Parts:
        """The parts in a flat tensor."""

    def store(self, factor: FactorState, parts: Parts) -> None:
        """Make them the factor's."""


class _Inverse:
    """The damped inverse, which travels as packed triangles."""

    def __init__(self, eigen: bool) -> None:
        self._eigen = eigen

    def elements(self, factor: FactorState) -> int:
        return factor.elements

    def begin(self, factor: FactorState, damping: float) -> Begun:
        if self._eigen:
            parts = eigendecomposition(factor.matrix(), damping, noise=factor.noise)
            return _single(lambda: None if parts is None else inverse_from_eigen(*parts, damping))
        return _single(begin_inverse(factor.upper_average(), damping, factor.weight, factor.noise))

    def flatten(self, parts: Parts, out: Tensor) -> None:
        pack(parts[0], out)

    def parts(self, factor: FactorState, flat: Tensor) -> Parts:
        return (factor.unpack(flat),)

    def store(self, factor: FactorState, parts: Parts) -> None:
        factor.solution = parts[0], None, None, None, factor.corrected, False


class _Cholesky(_Inverse):
    """The Cholesky factor of the damped factor, for wide ones."""

    def __init__(self) -> None:
        super().__init__(eigen=False)

    def begin(self, factor: FactorState, damping: float) -> Begun:
        return _single(begin_cholesky(factor.upper_average(), damping, factor.weight, factor.noise))

    def store(self, factor: FactorState, parts: Parts) -> None:
        factor.solution = None, parts[0], None, None, factor.corrected, False


class _Decomposition:
    """Eigenvectors and, behind them, eigenvalues."""

    def elements(self, factor: FactorState) -> int:
        return factor.shape.count * factor.shape.dim * (factor.shape.dim + 1)

    def begin(self, factor: FactorState, damping: float) -> Begun:
        parts = eigendecomposition(factor.matrix(), damping, noise=factor.noise)
        return lambda: parts

    def flatten(self, parts: Parts, out: Tensor) -> None:
        torch.cat([part.reshape(-1) for part in parts], out=out)

    def parts(self, factor: FactorState, flat: Tensor) -> Parts:
        count, dim = factor.shape.count, factor.shape.dim
        vectors, values = flat.split([count * dim * dim, count * dim])
        return vectors.view(count, dim, dim), values.view(count, dim)

    def store(self, factor: FactorState, parts: Parts) -> None:
        factor.solution = None, None, *parts, None, False  # corrected eigenvalues were for the old vectors


def _single(result: Callable[[], Tensor | None]) -> Begun:
    def parts() -> Parts | None:
        one = result()
        return None if one is None else (one,)

    return parts


def method_for(config: KFACConfig, factor: FactorState, interval: int) -> Method:
    """How a factor is to be solved under these options for ``interval`` steps."""
    if config.damping_method == "exact":
        return _Decomposition()
    if config.inverse_method == "cholesky" and keeps_cholesky(factor.shape.dim, interval, factor.like.device):
        return _Cholesky()
    return _Inverse(eigen=config.inverse_method == "eigh")
