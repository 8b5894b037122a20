"""What the collector of statistics remembers of a step: sums, where each layer stands, and the calls under way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, nn

from kfac.curvature.blocks import Blocks


@dataclass
class Side:
    """One factor's sum over this rank's samples of the step, and how many they are (of loss terms, where given)."""

    total: Tensor | None = None
    count: float | Tensor = 0.0

    def sum(self, shape: Blocks, like: Tensor) -> Tensor:
        """The sum so far ``[blocks, dim, dim]``, to be added to."""
        if self.total is None:
            self.total = like.new_zeros(shape.count, shape.dim, shape.dim)
        return self.total


@dataclass
class Progress:
    """Where a layer stands in the step. A pass is a forward pass with one or several calls, and a backward pass."""

    passes: int = 0
    calls: int = 0
    """Of all passes."""
    open_calls: int = 0
    """Calls that wait for their gradient."""
    pass_calls: int = 0
    """Of the pass under way, like what follows."""
    turned: bool = False
    """Whether it had a gradient."""
    over: bool = True
    """Whether a call within a backward pass begins another one: the layer has run outside of it since."""
    a_samples: int = 0
    """The most that one of its calls had."""
    g_samples: int = 0


@dataclass
class Call:
    """One use of a layer in a forward pass."""

    index: int
    module: nn.Module
    positions: int
    x: Tensor | None
    progress: Progress
    training: bool
    """The module's mode in the forward pass."""
    deferred: bool = False
    """It happened within a backward pass, and counts if it gets a gradient."""
    seen: bool = False

    @contextmanager
    def as_it_ran(self) -> Iterator[None]:
        """The module in the mode that it ran in: ``eval()`` between the passes changes no statistic."""
        now, self.module.training = self.module.training, self.training
        try:
            yield
        finally:
            self.module.training = now
