"""What K-FAC knows of a layer: its factors' shapes, its statistics, and its gradient as a matrix."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Protocol

from torch import Tensor, nn

from kfac.config import KFACConfig
from kfac.curvature.blocks import Blocks


class GradientAccess(Protocol):
    """Where gradients are read from and written to, after they have been averaged over the ranks."""

    def get(self, parameter: Tensor) -> Tensor | None:
        """The whole gradient of a parameter; collective where gradients are partitioned."""

    def set(self, parameter: Tensor, gradient: Tensor) -> None:
        """Overwrite the whole gradient of a parameter; collective where gradients are partitioned."""


class PlainGradients:
    """Gradients in ``.grad``."""

    def get(self, parameter: Tensor) -> Tensor | None:
        """``parameter.grad``."""
        return parameter.grad

    def set(self, parameter: Tensor, gradient: Tensor) -> None:
        """Copy into ``parameter.grad``, where there is one."""
        if parameter.grad is not None:
            parameter.grad.copy_(gradient)


class KFACLayer(ABC):
    """Parameters that share one pair of factors: those of a module, or of several modules that share them.

    Args:
        name: the (first) module's name in the model.
        module: the module.
        parameters: the parameters that are preconditioned.
        config: the options that hold for this layer.

    Attributes:
        modules: all modules that hold the parameters.
        a, g: the shapes of the factors.
    """

    kind: str
    """As in ``KFACConfig.layers``."""
    sample_dims = 2
    """Dimensions of an input with a sample dimension and no shared positions beyond what the layer needs."""
    corrects = True
    """Whether :meth:`sample_gradients` exists, so that EKFAC can correct the eigenvalues."""
    needs_input = False
    """Whether the statistic of G is made from the input as well."""
    a: Blocks
    g: Blocks

    def __init__(self, name: str, module: nn.Module, parameters: Sequence[Tensor], config: KFACConfig) -> None:
        self.name = name
        self.modules = [module]
        self.parameters = tuple(parameters)
        self.config = config

    def batched(self, tensor: Tensor) -> Tensor:
        """``tensor`` with a leading sample dimension (an unbatched one is one sample)."""
        return tensor if tensor.dim() >= self.sample_dims else tensor.unsqueeze(0)

    @abstractmethod
    def positions(self, output: Tensor) -> int:
        """Shared positions per sample of an output ``[samples, ...]``."""

    @abstractmethod
    def add_a_statistic(self, x: Tensor, total: Tensor, weight: float, module: nn.Module) -> None:
        """Add ``weight sum x x^T`` of an input of ``module`` to the upper triangles of ``total`` (of A's blocks)."""

    @abstractmethod
    def add_g_statistic(
        self, g: Tensor, total: Tensor, weight: float, module: nn.Module, x: Tensor | None = None
    ) -> None:
        """Add ``weight sum g g^T`` of an output gradient to the upper triangles of ``total`` (of G's blocks).

        ``x`` is the input of the same call, where the layer needs it.
        """

    def sample_gradients(self, x: Tensor, g: Tensor, module: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
        """Rows whose products are the gradients of single samples, some samples at a time.

        Sample n's gradient is the sum over the positions s of the outer products of ``g_rows[:, n, s]`` and
        ``a_rows[:, n, s]``.

        Yields:
            ``a_rows [groups, samples, positions, rows of A]`` and ``g_rows [groups, samples, positions, rows of G]``.
        """
        raise NotImplementedError

    @abstractmethod
    def gradient_matrix(self, access: GradientAccess) -> Tensor | None:
        """The gradient as ``[groups, rows of G, rows of A]``, or None if there is none."""

    @abstractmethod
    def set_gradient(self, matrix: Tensor, access: GradientAccess) -> None:
        """Overwrite the gradient with what :meth:`gradient_matrix` returned, preconditioned."""

    def a_order(self) -> Tensor | None:
        """Where the rows of each group's A stand in ``weight.view(out, -1)`` (bias last); None: they are in order."""
        return None
