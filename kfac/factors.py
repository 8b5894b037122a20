"""The factors' state: running averages, kept as packed triangles, and what preconditioning makes of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kfac.curvature.blocks import Blocks
from kfac.curvature.packing import pack, packed_elements, packed_trace, unpack


class FactorState:
    """One factor.

    Args:
        shape: its blocks.

    Attributes:
        average: the running average ``M`` as packed triangles, or None before the first statistic.
        weight: what the statistics in ``M`` weigh in all, ``1 - rho^t`` from zero and 1 from the identity.
        inverse: the damped inverse ``[blocks, dim, dim]``, or None: not inverted yet, or decomposed.
        vectors, values: eigenvectors ``[blocks, dim, dim]`` and eigenvalues ``[blocks, dim]``, or None.
        corrected: on a layer's G: EKFAC's eigenvalues of the layer's curvature ``[groups, rows, columns]``, or None.
    """

    def __init__(self, shape: Blocks) -> None:
        self.shape = shape
        self.average: Tensor | None = None
        self.weight = 0.0
        self.inverse: Tensor | None = None
        self.vectors: Tensor | None = None
        self.values: Tensor | None = None
        self.corrected: Tensor | None = None

    @property
    def elements(self) -> int:
        """Elements of its packed triangles."""
        return packed_elements((self.shape.count, self.shape.dim))

    @property
    def solved(self) -> bool:
        """Whether there is an inverse or a decomposition."""
        return self.inverse is not None or self.vectors is not None

    def update(self, total: Tensor, scale: float, decay: float, from_identity: bool) -> None:
        """``M <- decay M + (1 - decay) scale total`` for a packed sum ``total``."""
        if self.average is None:
            self.average = torch.zeros_like(total)
            if from_identity:
                eye = torch.eye(self.shape.dim, dtype=total.dtype, device=total.device)
                pack(eye.repeat(self.shape.count, 1, 1), self.average)
                self.weight = 1.0
        self.average.mul_(decay).add_(total, alpha=(1.0 - decay) * scale)
        self.weight = decay * self.weight + (1.0 - decay)

    def mean_eigenvalue(self) -> Tensor:
        """The trace over the number of rows (0-dim)."""
        assert self.average is not None
        trace = packed_trace(self.average, self.shape.dim, self.shape.count)
        return trace / (self.weight * self.shape.rows)

    def matrix(self) -> Tensor:
        """The factor ``[blocks, dim, dim]``: the average with its start-up bias divided out; a fresh tensor."""
        assert self.average is not None
        return self.unpack(self.average).div_(self.weight)

    def pack(self, matrix: Tensor) -> Tensor:
        """Packed triangles of symmetric blocks of this factor's shape."""
        packed = matrix.new_empty(self.elements)
        pack(matrix, packed)
        return packed

    def unpack(self, packed: Tensor) -> Tensor:
        """The blocks of packed triangles."""
        return unpack(packed, self.shape.dim, self.shape.count)

    def state_dict(self) -> dict[str, Any]:
        """Copies of everything; the inverse as packed triangles."""

        def copy(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.clone()

        return {
            "dim": self.shape.dim,
            "blocks": self.shape.count,
            "average": copy(self.average),
            "weight": self.weight,
            "inverse": None if self.inverse is None else self.pack(self.inverse),
            "vectors": copy(self.vectors),
            "values": copy(self.values),
            "corrected": copy(self.corrected),
        }

    def load_state_dict(self, state: dict[str, Any], like: Tensor) -> None:
        """Take over a state, on ``like``'s device and in its dtype."""

        def copy(key: str) -> Tensor | None:
            return None if state[key] is None else state[key].to(like, copy=True)

        self.average, self.corrected = copy("average"), copy("corrected")
        self.vectors, self.values = copy("vectors"), copy("values")
        self.weight = state["weight"]
        inverse = copy("inverse")
        self.inverse = None if inverse is None else self.unpack(inverse)
