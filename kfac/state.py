"""The preconditioner's state as plain values and tensors, and whether one fits a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kfac.config import KFACConfig
from kfac.factors import FactorState
from kfac.planning import Plan

STATE_VERSION = 2
"""2 since factors are blocks."""

Factors = Mapping[tuple[str, str], FactorState]
"""The factors by layer and side (A or G)."""


def make_state(factors: Factors, plan: Plan, config: KFACConfig, steps: int, skipped_steps: int) -> dict[str, Any]:
    """What :meth:`kfac.KFAC.state_dict` returns; tensors are copies."""
    return {
        "version": STATE_VERSION,
        "steps": steps,
        "skipped_steps": skipped_steps,
        "plan": plan.to_dict(),
        "config": config.to_dict(),
        "factors": {f"{name}/{side}": factor.state_dict() for (name, side), factor in factors.items()},
    }


def check_state(state: Mapping[str, Any], factors: Factors) -> Plan:
    """The Plan of a state that fits these factors.

    Raises:
        ValueError: if the state is of another model.
    """
    plan = Plan.from_dict(state["plan"])
    dims = {key: (saved["blocks"], saved["dim"]) for key, saved in state["factors"].items()}
    mine = {f"{name}/{side}": (f.shape.count, f.shape.dim) for (name, side), f in factors.items()}
    if dims != mine:
        different = sorted(set(dims.items()) ^ set(mine.items()))
        raise ValueError(f"the state is of another model or schedule: {different[:4]} differ")
    return plan


def load_factors(state: Mapping[str, Any], factors: Factors, like: Tensor) -> None:
    """Take over the factors of a checked state, on ``like``'s device and in its dtype."""
    for (name, side), factor in factors.items():
        factor.load_state_dict(state["factors"][f"{name}/{side}"], like)


def dense(factor: FactorState, order: Tensor | None) -> Tensor:
    """A factor with statistics as one matrix ``[d, d]``, without padding; ``order``: of each group's rows."""
    groups = []
    for blocks in factor.matrix().chunk(factor.shape.groups):
        matrix = torch.block_diag(*blocks)[: factor.shape.width, : factor.shape.width]
        groups.append(matrix if order is None else matrix[order][:, order])
    whole: Tensor = torch.block_diag(*groups)
    return whole
