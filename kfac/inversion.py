"""The inversion phase: every rank inverts what the Plan gives it, and the inverses travel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kfac.communication import Communicator, Work
from kfac.config import options_at
from kfac.curvature.damping import factor_damping
from kfac.curvature.inverses import damped_inverse
from kfac.curvature.packing import pack
from kfac.factors import FactorState
from kfac.layers import KFACLayer
from kfac.planning import Plan
from kfac.recording import Recorder


class FactorInversionError(RuntimeError):
    """A damped factor is not positive definite; raised on every rank."""


def dampings(layers: Sequence[KFACLayer], factors: Sequence[FactorState], step: int) -> list[float | None]:
    """Per factor (A and G of each layer in turn) what is added to its diagonal; None where a side has no statistics.

    Waits for the device once, for all traces together.
    """
    known = [factor.average is not None for factor in factors]
    means = [factor.mean_eigenvalue() for factor, ok in zip(factors, known, strict=True) if ok]
    values = iter(torch.stack(means).tolist() if means else ())
    mean = [next(values) if ok else 0.0 for ok in known]
    result: list[float | None] = []
    values_of_layers = options_at([layer.config for layer in layers], "damping", step)
    for k, (layer, damping) in enumerate(zip(layers, values_of_layers, strict=True)):
        a, g = 2 * k, 2 * k + 1
        pair = factor_damping(layer.config.damping_method, damping, mean[a], mean[g])
        result += pair if known[a] and known[g] else (None, None)
    return result


def invert(
    factors: Sequence[FactorState],
    dampings: Sequence[float | None],
    plan: Plan,
    communicator: Communicator,
    recorder: Recorder,
) -> None:
    """Set the inverses of all factors that have a damping (None: not inverted); collective.

    A rank that cannot invert sends NaN, so that every rank learns of it and none waits for ever.

    Raises:
        FactorInversionError: on every rank, naming the factors; inverses are then as before.
    """
    rank = communicator.rank
    sequence = [i for i in plan.inverse_sequence if dampings[i] is not None]
    inverses: dict[int, Tensor] = {}
    buffers: dict[int, Tensor] = {}
    works: dict[int, Work] = {}

    def send(i: int) -> None:
        owner = plan.inverse_owner[i]
        assert owner is not None
        name = f"inverse of {_label(plan, i)}"
        works[i] = communicator.broadcast(buffers[i], owner, "kfac_InverseComm")
        recorder.flight("InverseComm", name, works[i])

    for i in sequence:
        owner = plan.inverse_owner[i]
        if owner in (None, rank):
            with recorder.span("InverseComp", f"invert {_label(plan, i)}"):
                inverses[i] = _inverse_or_nan(factors[i], dampings[i])
        if owner is None or communicator.world_size == 1:
            continue
        buffers[i] = _like(factors[i]).new_empty(factors[i].elements)
        if owner == rank:
            with recorder.span("InverseComp", f"pack {_label(plan, i)}"):
                pack(inverses[i], buffers[i])
        if plan.schedule.inverse_broadcast == "as_ready":
            send(i)
    for i in [i for i in sequence if i in buffers and i not in works]:
        send(i)
    for i, work in works.items():
        work.wait()
        if i not in inverses:
            with recorder.span("InverseComp", f"unpack {_label(plan, i)}"):
                inverses[i] = factors[i].unpack(buffers[i])
    _check(inverses, plan)
    for i, inverse in inverses.items():
        factors[i].inverse = inverse


def _like(factor: FactorState) -> Tensor:
    assert factor.average is not None
    return factor.average


def _inverse_or_nan(factor: FactorState, damping: float | None) -> Tensor:
    assert damping is not None
    inverse = damped_inverse(factor.matrix(), damping)
    if inverse is None:
        return torch.full_like(factor.matrix(), float("nan"))
    return inverse


def _label(plan: Plan, i: int) -> str:
    return f"{plan.factors[i].side} of {plan.factors[i].layer}"


def _check(inverses: dict[int, Tensor], plan: Plan) -> None:
    if not inverses:
        return
    indices = sorted(inverses)
    traces = torch.stack([inverses[i].diagonal(dim1=1, dim2=2).sum() for i in indices])
    if bool(torch.isfinite(traces).all()):
        return
    bad = [_label(plan, i) for i, ok in zip(indices, torch.isfinite(traces).tolist(), strict=True) if not ok]
    raise FactorInversionError(
        f"not positive definite even in float64: {', '.join(bad)}. Raise KFACConfig.damping, or look for a layer whose "
        "inputs or gradients have exploded"
    )
