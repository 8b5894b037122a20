"""From the sums of a step's statistics to the factors' running averages."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch import Tensor

from kfac.communication import Communicator
from kfac.config import options_at
from kfac.curvature.scaling import factor_scale
from kfac.ekfac import EigenvalueCorrection
from kfac.exchange import Received
from kfac.factors import FactorState
from kfac.layers import KFACLayer
from kfac.planning import Plan
from kfac.recording import Recorder

logger = logging.getLogger(__name__)


class RunningAverages:
    """Updates the running averages.

    Args:
        plan: the Plan.
        layers: in its order.
        factors: A and G of each layer in turn.
        communicator: the ranks.
        recorder: records the work.
        warned: what has been warned of; is added to.
        correction: of eigenvalues.
    """

    def __init__(
        self,
        plan: Plan,
        layers: Sequence[KFACLayer],
        factors: Sequence[FactorState],
        communicator: Communicator,
        recorder: Recorder,
        warned: set[str],
        correction: EigenvalueCorrection | None,
    ) -> None:
        self._plan, self._layers, self._factors = plan, layers, factors
        # Sums that do not travel are those of one rank.
        self._ranks = 1 if plan.schedule.factor_collective == "none" else communicator.world_size
        self._recorder = recorder
        self._warned, self._correction = warned, correction
        self.begin()

    def begin(self) -> None:
        """Start a step."""
        self._counts: dict[int, float] = {}
        self._former: dict[int, tuple[Tensor | None, float | None, float]] = {}
        self._scales: list[float | None] = [None] * len(self._layers)

    def add(self, received: Received, step: int) -> None:
        """Add sums over all ranks, which have arrived in a step: :meth:`settle` or :meth:`undo` follows.

        They are taken out of ``received``, so that their memory is not held any longer.
        """
        decays = self._decays(step)
        with self._recorder.span("FactorComp", "running averages"):
            for i in sorted(received):
                sums = received.pop(i)
                self._counts[i] = sums.count
                if sums.count == 0:
                    continue
                self._former[i] = self._factors[i].statistics
                options, side = self._layers[i // 2].config, self._plan.factors[i].side
                scale = factor_scale(options.scaling, side, sums.count, self._ranks, options.loss_reduction)
                identity = options.average_from == "identity"
                self._factors[i].update(sums.total, scale, decays[i // 2], identity, sums.trace)
                if side == "G":
                    self._scales[i // 2] = scale

    def settle(self, step: int) -> bool:
        """End a step whose sums have all been added; collective with corrected eigenvalues.

        Returns:
            whether the averages are what :meth:`add` made of them: without any loss term they are as before.

        Raises:
            RuntimeError: if no layer has been used.
        """
        if not self._counts:
            return True
        if not any(self._counts.values()):
            raise RuntimeError(
                "step() without any statistics: no layer has seen a forward and a backward pass since the last step(). "
                "Where torch.compile has been at work, give KFAC the compiled model, or make it before the first call"
            )
        if not any(count for i, count in self._counts.items() if self._plan.factors[i].side == "G"):
            self._warn(
                "loss terms",
                "no target of a step counts as a loss term (all equal ignore_index): its statistics are left out",
            )
            self.undo()
            return False
        for i, count in self._counts.items():
            if not count:
                self._warn_unused(self._layers[i // 2].name)
        if self._correction:
            self._correction.update(self._scales, self._decays(step))
        self.begin()
        return True

    def undo(self) -> None:
        """Make the averages what they were when the step began."""
        for i, statistics in self._former.items():
            self._factors[i].statistics = statistics
        self.begin()

    def _decays(self, step: int) -> list[float]:
        return options_at([layer.config for layer in self._layers], "factor_decay", step)

    def _warn_unused(self, name: str) -> None:
        self._warn(
            f"layer {name}",
            f"layer {name!r} was not used in a step (its forward is bypassed, conditional, or in code that was "
            "compiled before KFAC was made): without statistics its gradient stays as it is",
        )

    def _warn(self, what: str, message: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            logger.warning("%s", message)
