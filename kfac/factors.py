"""The factors' state: running averages, kept as packed triangles, and inverses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kfac.curvature.packing import pack, packed_elements, packed_trace, unpack


@dataclass
class FactorState:
    """One factor.

    Args:
        dim: its dimension.
        average: the running average ``M`` as a packed triangle, or None before the first statistic.
        weight: what the statistics in ``M`` weigh in all, ``1 - rho^t`` from zero and 1 from the identity.
        inverse: the damped inverse ``[dim, dim]``, or None before the first inversion.
    """

    dim: int
    average: Tensor | None = None
    weight: float = 0.0
    inverse: Tensor | None = None

    def update(self, total: Tensor, scale: float, decay: float, from_identity: bool) -> None:
        """``M <- decay M + (1 - decay) scale total`` for a packed sum ``total``."""
        if self.average is None:
            self.average = torch.zeros_like(total)
            if from_identity:
                pack(torch.eye(self.dim, dtype=total.dtype, device=total.device), self.average)
                self.weight = 1.0
        self.average.mul_(decay).add_(total, alpha=(1.0 - decay) * scale)
        self.weight = decay * self.weight + (1.0 - decay)

    def trace(self) -> Tensor:
        """The trace (0-dim) of the factor."""
        assert self.average is not None
        return packed_trace(self.average, self.dim) / self.weight

    def matrix(self) -> Tensor:
        """The factor ``[dim, dim]``: the average with its start-up bias divided out; a fresh tensor."""
        assert self.average is not None
        return unpack(self.average, self.dim).div_(self.weight)

    def state_dict(self) -> dict[str, Any]:
        """Copies of everything; the inverse as a packed triangle."""
        inverse = None
        if self.inverse is not None:
            inverse = self.inverse.new_empty(packed_elements(self.dim))
            pack(self.inverse, inverse)
        average = None if self.average is None else self.average.clone()
        return {"dim": self.dim, "average": average, "weight": self.weight, "inverse": inverse}

    def load_state_dict(self, state: dict[str, Any], like: Tensor) -> None:
        """Take over a state, on ``like``'s device and in its dtype."""
        average, inverse = state["average"], state["inverse"]
        self.average = None if average is None else average.to(like, copy=True)
        self.weight = state["weight"]
        self.inverse = None if inverse is None else unpack(inverse.to(like), self.dim)
