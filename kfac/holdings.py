"""Which rank holds which factors and inverses under a Plan, and how all of them come together again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kfac.communication import Communicator
from kfac.factors import FactorState
from kfac.layers import KFACLayer
from kfac.planning import Plan

Factors = Mapping[tuple[str, str], FactorState]
"""The factors by layer and side (A or G)."""


def make_factors(layers: Sequence[KFACLayer], dtype: torch.dtype, device: torch.device, packed: bool) -> Factors:
    """The factors of layers, without statistics yet (see :class:`~kfac.factors.FactorState`)."""
    like = torch.empty(0, dtype=dtype, device=device)
    shapes = [((layer.name, side), shape) for layer in layers for side, shape in (("A", layer.a), ("G", layer.g))]
    return {key: FactorState(shape, packed, like) for key, shape in shapes}


def settle(factors: Factors, plan: Plan, rank: int) -> None:
    """Keep on ``rank`` only what it needs under a Plan, of factors that every rank has in full or that are settled."""
    for i, spec in enumerate(plan.factors):
        factors[spec.layer, spec.side].keep(
            average=plan.factor_holder[i] in (None, rank),
            solution=plan.solution_holder(i) in (None, rank),
            trace=plan.summarised,
        )


def gather(factors: Factors, plan: Plan, communicator: Communicator) -> dict[tuple[str, str], dict[str, Any]]:
    """The states of all factors that not every rank has in full, on every rank; collective where there are any."""
    held: dict[int, list[tuple[str, str]]] = {}
    for i, spec in enumerate(plan.factors):
        holder = plan.solution_holder(i)
        holder = plan.factor_holder[i] if holder is None else holder
        if holder is not None:
            held.setdefault(holder, []).append((spec.layer, spec.side))
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for holder in sorted(held):
        mine = {key: _on_cpu(factors[key].state_dict()) for key in held[holder]} if communicator.rank == holder else {}
        everyones = communicator.broadcast_object(mine, holder)
        for key in held[holder]:
            found[key] = {name: _like(value, factors[key].like) for name, value in everyones[key].items()}
    return found


def share(factors: Factors, plan: Plan, communicator: Communicator) -> None:
    """Give every rank all factors in full; collective where not every one has them."""
    for key, state in gather(factors, plan, communicator).items():
        factors[key].load_state_dict(state, factors[key].like)


def _on_cpu(state: dict[str, Any]) -> dict[str, Any]:
    """A tensor that travels as an object arrives on the device that it comes from, which may be another rank's."""
    return {name: value.cpu() if isinstance(value, Tensor) else value for name, value in state.items()}


def _like(value: Any, like: Tensor) -> Any:
    return value.to(like) if isinstance(value, Tensor) else value


def holder_of(plan: Plan, layer: str, side: str) -> int | None:
    """The rank that alone has a factor, or None: every rank has it."""
    places = [i for i, spec in enumerate(plan.factors) if (spec.layer, spec.side) == (layer, side)]
    return plan.factor_holder[places[0]] if places else None
