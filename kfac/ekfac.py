"""EKFAC: eigenvalues of a layer's curvature from the gradients of single samples, in the basis that K-FAC has found.

George et al. 2018, "Fast approximate natural gradient descent in a Kronecker-factored eigenbasis", section 3: with the
basis ``U = U_A x U_G`` of ``A x G`` the nearest diagonal matrix to the Fisher F is ``diag(U^T F U)``: the second
moments of the samples' gradients in that basis. They are averaged over the steps that follow an inversion, from K-FAC's
own ``lambda_G lambda_A^T`` on, until the next one changes the basis.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from kfac.communication import Communicator
from kfac.curvature.blocks import multiply_right, pad_to
from kfac.curvature.inverses import kronecker_eigenvalues
from kfac.factors import FactorState
from kfac.layers import KFACLayer
from kfac.recording import Recorder
from kfac.streams import on_device

CHUNK_ELEMENTS = 2**22
"""Elements of the samples' gradients that are made at a time."""


class EigenvalueCorrection:
    """Collects the second moments of a step's sample gradients and keeps the corrected eigenvalues.

    They live on the factors G (:attr:`kfac.factors.FactorState.corrected`).

    Args:
        layers: in the Plan's order.
        factors: A and G of each layer in turn.
        communicator: the ranks.
        recorder: records the communication.
    """

    def __init__(
        self,
        layers: Sequence[KFACLayer],
        factors: Sequence[FactorState],
        communicator: Communicator,
        recorder: Recorder,
    ) -> None:
        self._layers, self._factors = layers, factors
        self._communicator, self._recorder = communicator, recorder
        self.begin(False)

    def begin(self, active: bool) -> None:
        """Start a step; ``active``: it collects, and its inversions do not change the basis."""
        self._wanted = [
            active and layer.corrects and self._factors[2 * k + 1].vectors is not None
            for k, layer in enumerate(self._layers)
        ]
        self._sums: dict[int, Tensor] = {}
        self._several: set[int] = set()

    def wants(self, index: int) -> bool:
        """Whether the layer's inputs and output gradients are needed in this step."""
        return self._wanted[index]

    def add(self, index: int, x: Tensor, g: Tensor, module: nn.Module, several: bool) -> None:
        """Add a call's sample gradients.

        A layer that is called several times in a pass keeps K-FAC's eigenvalues: a sample's gradient would be a sum
        over calls that are not there at the same time.
        """
        if several:
            self._several.add(index)
            return
        a, g_state = self._factors[2 * index], self._factors[2 * index + 1]
        assert a.vectors is not None
        assert g_state.vectors is not None
        for a_rows, g_rows in self._layers[index].sample_gradients(x, g, module):
            squares = _moments(_project(a_rows, a.vectors), _project(g_rows, g_state.vectors))
            self._sums[index] = self._sums[index] + squares if index in self._sums else squares

    def update(self, scales: Sequence[float | None], decays: Sequence[float]) -> None:
        """Sum over the ranks and update the averages; collective.

        Args:
            scales: per layer what the sum of squares is multiplied by to give the Fisher's eigenvalues; None where the
                step has no statistics.
            decays: per layer rho of the running average.
        """
        wanted = [k for k, wants in enumerate(self._wanted) if wants and scales[k] is not None]
        if not wanted:
            return
        sums = [self._sums.get(k, torch.zeros_like(self._before(k))) for k in wanted]
        flags = on_device([float(k in self._several) for k in wanted], sums[0])
        flat = torch.cat([*(part.reshape(-1) for part in sums), flags])
        issue = partial(self._communicator.all_reduce, flat, "kfac_FactorComm")
        self._recorder.flight("FactorComm", "eigenvalues", issue).wait()
        *parts, several = flat.split([*(part.numel() for part in sums), len(wanted)])
        for k, part, flag in zip(wanted, parts, several.tolist(), strict=True):
            if flag:
                continue
            before, scale = self._before(k), scales[k]
            assert scale is not None
            new = part.view(before.shape).mul_((1.0 - decays[k]) * scale)
            self._factors[2 * k + 1].corrected = new.add_(before, alpha=decays[k])

    def _before(self, k: int) -> Tensor:
        a, g = self._factors[2 * k], self._factors[2 * k + 1]
        if g.corrected is not None:
            return g.corrected
        assert a.values is not None
        assert g.values is not None
        return kronecker_eigenvalues(a.values, g.values, a.shape.groups)


def _project(rows: Tensor, vectors: Tensor) -> Tensor:
    """``rows [groups, samples, positions, width]`` in the basis ``vectors [blocks, d, d]``, padded."""
    groups, samples, positions, _ = rows.shape
    flat = rows.reshape(groups, samples * positions, -1)
    padded = len(vectors) // groups * vectors.shape[-1]
    return multiply_right(pad_to(flat, flat.shape[1], padded), vectors).view(groups, samples, positions, padded)


def _moments(a: Tensor, g: Tensor) -> Tensor:
    """``sum_n (sum_s g_ns a_ns^T)^2`` elementwise, as ``[groups, rows, columns]``."""
    groups, _, positions, columns = a.shape
    rows = g.shape[-1]
    if positions == 1:
        return g[:, :, 0].square().mT @ a[:, :, 0].square()
    total = a.new_zeros(groups, rows, columns)
    for part_a, part_g in zip(
        a.split(max(1, CHUNK_ELEMENTS // (groups * rows * columns)), 1),
        g.split(max(1, CHUNK_ELEMENTS // (groups * rows * columns)), 1),
        strict=True,
    ):
        total += (part_g.mT @ part_a).square().sum(1)
    return total
