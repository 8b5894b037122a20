"""The factors' state: running averages, and what preconditioning makes of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kfac.curvature.blocks import Blocks, multiply_left, multiply_right, solve_left, solve_right
from kfac.curvature.packing import pack, packed_elements, packed_trace, unpack


class FactorState:
    """One factor.

    Args:
        shape: its blocks.
        packed: whether the running average is kept as packed triangles, as it travels, or as ``[blocks, dim, dim]``, of
            which only the upper triangles are meant: one process alone needs no packing.

    Attributes:
        average: the running average ``M``, or None before the first statistic.
        weight: what the statistics in ``M`` weigh in all, ``1 - rho^t`` from zero and 1 from the identity.
        inverse: the damped inverse ``[blocks, dim, dim]``, or None: not inverted yet, or decomposed.
        upper: instead, the Cholesky factor of the damped factor; only its upper triangles are meant.
        vectors, values: eigenvectors ``[blocks, dim, dim]`` and eigenvalues ``[blocks, dim]``, or None.
        corrected: on a layer's G: EKFAC's eigenvalues of the layer's curvature ``[groups, rows, columns]``, or None.
    """

    def __init__(self, shape: Blocks, packed: bool = True) -> None:
        self.shape = shape
        self.packed = packed
        self.average: Tensor | None = None
        self.weight = 0.0
        self.inverse: Tensor | None = None
        self.upper: Tensor | None = None
        self.vectors: Tensor | None = None
        self.values: Tensor | None = None
        self.corrected: Tensor | None = None

    @property
    def elements(self) -> int:
        """Elements of its packed triangles."""
        return packed_elements((self.shape.count, self.shape.dim))

    @property
    def dtype(self) -> torch.dtype:
        """Of everything in it, once there is a statistic."""
        assert self.average is not None
        return self.average.dtype

    @property
    def solved(self) -> bool:
        """Whether there is an inverse or a decomposition."""
        return any(part is not None for part in (self.inverse, self.upper, self.vectors))

    def solve_left(self, matrix: Tensor) -> Tensor:
        """``(factor + damping)^-1 matrix`` for ``matrix [groups, rows, columns]``."""
        if self.upper is not None:
            return solve_left(self.upper, matrix)
        assert self.inverse is not None
        return multiply_left(self.inverse, matrix)

    def solve_right(self, matrix: Tensor) -> Tensor:
        """``matrix (factor + damping)^-1`` for ``matrix [groups, rows, columns]``."""
        if self.upper is not None:
            return solve_right(matrix, self.upper)
        assert self.inverse is not None
        return multiply_right(matrix, self.inverse)

    def update(self, total: Tensor, scale: float, decay: float, from_identity: bool) -> None:
        """``M <- decay M + (1 - decay) scale total`` for a sum ``total`` in the average's form."""
        if self.average is None:
            self.average = torch.zeros_like(total)
            if from_identity:
                eyes = self.shape.identity(total)
                self.average = self.pack(eyes) if self.packed else eyes
                self.weight = 1.0
        self.average.mul_(decay).add_(total, alpha=(1.0 - decay) * scale)
        self.weight = decay * self.weight + (1.0 - decay)

    def mean_eigenvalue(self) -> Tensor:
        """The trace over the number of rows (0-dim)."""
        assert self.average is not None
        if self.packed:
            trace = packed_trace(self.average, self.shape.dim, self.shape.count)
        else:
            trace = self.average.diagonal(dim1=1, dim2=2).sum()
        return trace / (self.weight * self.shape.rows)

    def upper_average(self) -> Tensor:
        """The average as ``[blocks, dim, dim]``, of which only the upper triangles are meant; not to be changed."""
        assert self.average is not None
        return self.unpack(self.average) if self.packed else self.average

    def matrix(self) -> Tensor:
        """The factor ``[blocks, dim, dim]``: the average with its start-up bias divided out; a fresh tensor."""
        upper = self.upper_average()
        whole = upper if self.packed else upper.triu() + upper.triu(1).mT
        return whole.div_(self.weight)

    def pack(self, matrix: Tensor) -> Tensor:
        """Packed triangles of symmetric blocks of this factor's shape."""
        packed = matrix.new_empty(self.elements)
        pack(matrix, packed)
        return packed

    def unpack(self, packed: Tensor) -> Tensor:
        """The blocks of packed triangles."""
        return unpack(packed, self.shape.dim, self.shape.count)

    def state_dict(self) -> dict[str, Any]:
        """Copies of everything; what is symmetric or triangular as packed triangles."""

        def copy(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.clone()

        return {
            "dim": self.shape.dim,
            "blocks": self.shape.count,
            "average": copy(self.average) if self.packed or self.average is None else self.pack(self.average),
            "weight": self.weight,
            "inverse": None if self.inverse is None else self.pack(self.inverse),
            "upper": None if self.upper is None else self.pack(self.upper),
            "vectors": copy(self.vectors),
            "values": copy(self.values),
            "corrected": copy(self.corrected),
        }

    def load_state_dict(self, state: dict[str, Any], like: Tensor) -> None:
        """Take over a state, on ``like``'s device and in its dtype."""

        def copy(key: str) -> Tensor | None:
            return None if state[key] is None else state[key].to(like, copy=True)

        self.average, self.corrected = copy("average"), copy("corrected")
        if self.average is not None and not self.packed:
            self.average = self.unpack(self.average)
        self.vectors, self.values = copy("vectors"), copy("values")
        self.weight = state["weight"]
        inverse, upper = copy("inverse"), copy("upper")
        self.inverse = None if inverse is None else self.unpack(inverse)
        self.upper = None if upper is None else self.unpack(upper)
