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
        like: a tensor of the dtype of everything in it, on its device.

    Attributes:
        average: the running average ``M``, or None before the first statistic, or where only another rank has it.
        trace: the trace of ``M``, where it is kept beside it: the same number on every rank, whoever has ``M``.
        weight: what the statistics in ``M`` weigh in all, ``1 - rho^t`` from zero and 1 from the identity.
        inverse: the damped inverse ``[blocks, dim, dim]``, or None: not inverted yet, or decomposed.
        upper: instead, the Cholesky factor of the damped factor; only its upper triangles are meant.
        vectors, values: eigenvectors ``[blocks, dim, dim]`` and eigenvalues ``[blocks, dim]``, or None.
        corrected: on a layer's G: EKFAC's eigenvalues of the layer's curvature ``[groups, rows, columns]``, or None.
        solved_elsewhere: only another rank has what was made of it.
        noise: how coarsely statistics are rounded on their way, relative to their entries; 0: not at all.
    """

    def __init__(self, shape: Blocks, packed: bool = True, like: Tensor | None = None) -> None:
        self.shape = shape
        self.packed = packed
        self._like = torch.empty(0) if like is None else like
        self.average: Tensor | None = None
        self.trace: float | None = None
        self.weight = 0.0
        self.inverse: Tensor | None = None
        self.upper: Tensor | None = None
        self.vectors: Tensor | None = None
        self.values: Tensor | None = None
        self.corrected: Tensor | None = None
        self.solved_elsewhere = False
        self.noise = 0.0

    @property
    def elements(self) -> int:
        """Elements of its packed triangles."""
        return packed_elements((self.shape.count, self.shape.dim))

    @property
    def like(self) -> Tensor:
        """A tensor of the dtype of everything in it, on its device."""
        return self._like if self.average is None else self.average

    @property
    def known(self) -> bool:
        """Whether there are statistics, here or elsewhere; the same on every rank."""
        return self.average is not None or self.trace is not None

    @property
    def solved(self) -> bool:
        """Whether there is an inverse or a decomposition, here or elsewhere; the same on every rank."""
        return self.solved_elsewhere or any(part is not None for part in (self.inverse, self.upper, self.vectors))

    @property
    def solution(self) -> tuple[Any, ...]:
        """What was made of it, to be set again."""
        return self.inverse, self.upper, self.vectors, self.values, self.corrected, self.solved_elsewhere

    @solution.setter
    def solution(self, parts: tuple[Any, ...]) -> None:
        self.inverse, self.upper, self.vectors, self.values, self.corrected, self.solved_elsewhere = parts

    @property
    def statistics(self) -> tuple[Tensor | None, float | None, float]:
        """What :meth:`update` changes, to be set again; it leaves these tensors as they are."""
        return self.average, self.trace, self.weight

    @statistics.setter
    def statistics(self, parts: tuple[Tensor | None, float | None, float]) -> None:
        self.average, self.trace, self.weight = parts

    def keep(self, *, average: bool, solution: bool, trace: bool) -> None:
        """Keep of what every rank has only what this one needs: the average, what was made of it, a trace beside it."""
        if not trace:
            self.trace = None
        elif self.trace is None and self.average is not None:
            self.trace = float(self._trace(self.average))
        if not average:
            self.average = None
        if not solution and self.solved:
            self.solution = (None,) * 5 + (True,)

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

    def update(
        self, total: Tensor | None, scale: float, decay: float, from_identity: bool, trace: float | None = None
    ) -> None:
        """``M <- decay M + (1 - decay) scale total``.

        Args:
            total: a sum in the average's form, which becomes the average; None: only another rank has it.
            scale, decay: as above.
            from_identity: whether the average starts from the identity, not from zero.
            trace: of the sum, where the average's is kept beside it.
        """
        if not self.known and from_identity:
            self.weight = 1.0
        if trace is not None:
            start = float(self.shape.rows) if from_identity else 0.0
            former = start if self.trace is None else self.trace
            self.trace = decay * former + (1.0 - decay) * scale * trace
        self.weight = decay * self.weight + (1.0 - decay)
        if total is None:
            return
        before = self.average
        if before is None and from_identity:
            eyes = self.shape.identity(total)
            before = self.pack(eyes) if self.packed else eyes
        total.mul_((1.0 - decay) * scale)
        self.average = total if before is None else total.add_(before, alpha=decay)

    def mean_eigenvalue(self) -> Tensor | float:
        """The trace over the number of rows; as a 0-dim tensor, unless the trace is kept."""
        if self.trace is not None:
            return self.trace / (self.weight * self.shape.rows)
        assert self.average is not None
        return self._trace(self.average) / (self.weight * self.shape.rows)

    def _trace(self, average: Tensor) -> Tensor:
        if self.packed:
            return packed_trace(average, self.shape.dim, self.shape.count)
        return average.diagonal(dim1=1, dim2=2).sum()

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
            "trace": self.trace,
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
        self.weight, self.trace = state["weight"], state["trace"]
        self.solved_elsewhere = False
        inverse, upper = copy("inverse"), copy("upper")
        self.inverse = None if inverse is None else self.unpack(inverse)
        self.upper = None if upper is None else self.unpack(upper)
