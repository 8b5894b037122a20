"""The inversion phase: every rank inverts or decomposes what the Plan gives it, and the results travel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from kfac.communication import Communicator, Work
from kfac.config import KFACConfig, options_at
from kfac.curvature.damping import factor_damping
from kfac.curvature.inverses import (
    damped_cholesky,
    damped_inverse,
    eigendecomposition,
    inverse_from_eigen,
    keeps_cholesky,
)
from kfac.factors import FactorState
from kfac.layers import KFACLayer
from kfac.planning import Plan
from kfac.recording import Recorder


class FactorInversionError(RuntimeError):
    """A damped factor is not positive definite; raised on every rank."""


def dampings(
    layers: Sequence[KFACLayer], factors: Sequence[FactorState], step: int, strength: float = 1.0
) -> list[float | None]:
    """Per factor (A and G of each layer in turn) what is added to its diagonal; None where a side has no statistics.

    Waits for the device once, for all traces together. ``strength`` multiplies every layer's damping.
    """
    known = [factor.average is not None for factor in factors]
    means = [factor.mean_eigenvalue() for factor, ok in zip(factors, known, strict=True) if ok]
    values = iter(torch.stack(means).tolist() if means else ())
    mean = [next(values) if ok else 0.0 for ok in known]
    result: list[float | None] = []
    configured = options_at([layer.config for layer in layers], "damping", step)
    for k, (layer, damping) in enumerate(zip(layers, configured, strict=True)):
        a, g = 2 * k, 2 * k + 1
        pair = factor_damping(layer.config.damping_method, strength * damping, mean[a], mean[g])
        result += pair if known[a] and known[g] else (None, None)
    return result


Parts = tuple[Tensor, ...]
"""An inverse, or eigenvectors and eigenvalues."""


class _Method(Protocol):
    """What is made of a factor, and how it travels."""

    def elements(self, factor: FactorState) -> int:
        """Of the flat tensor that travels."""

    def solve(self, factor: FactorState, damping: float) -> Parts | None:
        """The parts; None where there is no solution."""

    def flatten(self, factor: FactorState, parts: Parts) -> Tensor:
        """The parts as one flat tensor."""

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

    def solve(self, factor: FactorState, damping: float) -> Parts | None:
        inverse: Tensor | None
        if self._eigen:
            parts = eigendecomposition(factor.matrix(), damping)
            inverse = None if parts is None else inverse_from_eigen(*parts, damping)
        else:
            inverse = damped_inverse(factor.upper_average(), damping, factor.weight)
        return None if inverse is None else (inverse,)

    def flatten(self, factor: FactorState, parts: Parts) -> Tensor:
        return factor.pack(parts[0])

    def parts(self, factor: FactorState, flat: Tensor) -> Parts:
        return (factor.unpack(flat),)

    def store(self, factor: FactorState, parts: Parts) -> None:
        factor.inverse, factor.upper, factor.vectors, factor.values = parts[0], None, None, None


class _Cholesky(_Inverse):
    """The Cholesky factor of the damped factor, for wide ones."""

    def __init__(self) -> None:
        super().__init__(eigen=False)

    def solve(self, factor: FactorState, damping: float) -> Parts | None:
        upper = damped_cholesky(factor.upper_average(), damping, factor.weight)
        return None if upper is None else (upper,)

    def store(self, factor: FactorState, parts: Parts) -> None:
        factor.inverse, factor.upper, factor.vectors, factor.values = None, parts[0], None, None


class _Decomposition:
    """Eigenvectors and, behind them, eigenvalues."""

    def elements(self, factor: FactorState) -> int:
        return factor.shape.count * factor.shape.dim * (factor.shape.dim + 1)

    def solve(self, factor: FactorState, damping: float) -> Parts | None:
        return eigendecomposition(factor.matrix(), damping)

    def flatten(self, factor: FactorState, parts: Parts) -> Tensor:
        return torch.cat([part.reshape(-1) for part in parts])

    def parts(self, factor: FactorState, flat: Tensor) -> Parts:
        count, dim = factor.shape.count, factor.shape.dim
        vectors, values = flat.split([count * dim * dim, count * dim])
        return vectors.view(count, dim, dim), values.view(count, dim)

    def store(self, factor: FactorState, parts: Parts) -> None:
        factor.inverse, factor.upper, factor.vectors, factor.values = None, None, *parts
        factor.corrected = None  # it was for the old vectors


def _method(config: KFACConfig, factor: FactorState, interval: int) -> _Method:
    if config.damping_method == "exact":
        return _Decomposition()
    if config.inverse_method == "cholesky" and keeps_cholesky(factor.shape.dim, interval, _like(factor).device):
        return _Cholesky()
    return _Inverse(eigen=config.inverse_method == "eigh")


def invert(
    layers: Sequence[KFACLayer],
    factors: Sequence[FactorState],
    dampings: Sequence[float | None],
    interval: int,
    plan: Plan,
    communicator: Communicator,
    recorder: Recorder,
) -> None:
    """Invert or decompose all factors that have a damping (None: left alone) for ``interval`` steps; collective.

    A rank that cannot do it sends NaN, so that every rank learns of it and none waits for ever.

    Raises:
        FactorInversionError: on every rank, naming the factors; everything is then as before.
    """
    rank = communicator.rank
    sequence = [i for i in plan.inverse_sequence if dampings[i] is not None]
    methods = {i: _method(layers[i // 2].config, factors[i], interval) for i in sequence}
    parts: dict[int, Parts] = {}
    buffers: dict[int, Tensor] = {}
    works: dict[int, Work] = {}

    def send(i: int) -> None:
        owner = plan.inverse_owner[i]
        assert owner is not None
        works[i] = communicator.broadcast(buffers[i], owner, "kfac_InverseComm")
        recorder.flight("InverseComm", f"inverse of {_label(plan, i)}", works[i])

    for i in sequence:
        method, owner = methods[i], plan.inverse_owner[i]
        if owner in (None, rank):
            with recorder.span("InverseComp", f"invert {_label(plan, i)}"):
                parts[i] = _parts_or_nan(method, factors[i], dampings[i])
        if owner is None or communicator.world_size == 1:
            continue
        if owner == rank:
            with recorder.span("InverseComp", f"pack {_label(plan, i)}"):
                buffers[i] = method.flatten(factors[i], parts[i])
        else:
            buffers[i] = _like(factors[i]).new_empty(method.elements(factors[i]))
        if plan.schedule.inverse_broadcast == "as_ready":
            send(i)
    for i in [i for i in buffers if i not in works]:
        send(i)
    for i, work in works.items():
        work.wait()
        if i not in parts:
            with recorder.span("InverseComp", f"unpack {_label(plan, i)}"):
                parts[i] = methods[i].parts(factors[i], buffers[i])
    _check(parts, plan)
    for i, found in parts.items():
        methods[i].store(factors[i], found)


def _like(factor: FactorState) -> Tensor:
    assert factor.average is not None
    return factor.average


def _parts_or_nan(method: _Method, factor: FactorState, damping: float | None) -> Parts:
    assert damping is not None
    parts = method.solve(factor, damping)
    if parts is not None:
        return parts
    return method.parts(factor, _like(factor).new_full((method.elements(factor),), float("nan")))


def _label(plan: Plan, i: int) -> str:
    return f"{plan.factors[i].side} of {plan.factors[i].layer}"


def _check(parts: dict[int, Parts], plan: Plan) -> None:
    if not parts:
        return
    indices = sorted(parts)
    sums = torch.stack([torch.stack([part.sum() for part in parts[i]]).sum() for i in indices])
    if bool(torch.isfinite(sums).all()):
        return
    bad = [_label(plan, i) for i in indices if not all(bool(torch.isfinite(part).all()) for part in parts[i])]
    if bad:
        raise FactorInversionError(
            f"not positive definite even in float64: {', '.join(bad)}. Raise KFACConfig.damping, or look for a layer "
            "whose inputs or gradients have exploded"
        )
