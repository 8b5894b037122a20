"""A run that plans anew from its own times (:mod:`kfac.replanning`): when, with how many turns, and its record."""

from __future__ import annotations

import logging
from typing import Any

from experiments.assembly import Learner
from experiments.config import TrainConfig
from experiments.records import RunRecord
from kfac import KFAC
from kfac.communication import Communicator
from kfac.finals import longest
from kfac.replanning import FEWEST, WARM_UP, Replanner
from kfac.replanning_decision import Replanning

logger = logging.getLogger(__name__)


class PlansAnew:
    """How one rank's run plans anew.

    Args:
        config: of the run, with ``replan_after``.
        learner: whose plan it is.
        communicator: the ranks.
        iterations: of the run.

    Attributes:
        replanner: what does it.
    """

    def __init__(self, config: TrainConfig, learner: Learner, communicator: Communicator, iterations: int) -> None:
        assert config.replan_after is not None
        self._config, self._kfac, self._iterations = config, learner.preconditioner, iterations
        self._tells, self._after = communicator.rank == 0, config.replan_after
        if self._tells:
            late = "" if self._after < iterations else f", which is beyond the {iterations} of the run"
            then = "" if late else ": what is chosen then, and why, is said when that is decided"
            text = "planning anew from the run's own times after %d iterations%s%s"
            logger.info(text, self._after, late, then)
        self.replanner = Replanner(
            learner.preconditioner,
            learner.recorder,
            after=self._after,
            iterations=config.profiling.iterations,
            repeats=config.profiling.repeats,
            turns=self._turns(self._after),
            communicator=communicator,
            name=config.model.name,
        )

    def continue_at(self, start: int) -> None:
        """The run continues before this iteration: what was on trial is so from the beginning."""
        if not self.replanner.done:
            self.replanner.turns = self._turns(max(self._after, start + WARM_UP + FEWEST))

    def _turns(self, after: int) -> int:
        """Of each plan, where planning anew begins after so many iterations: none if the run would end undecided."""
        turns = self._config.schedule.replan_turns
        intervals = self._kfac.config.intervals(0)
        fits = after + FEWEST * (intervals.factor - 1) + longest(turns, intervals=intervals) < self._iterations
        if self._tells and turns and not fits and after < self._iterations:
            text = "too few of %d iterations are left for plans to take turns: simulation decides, if it is sure enough"
            logger.info(text, self._iterations)
        return turns if fits else 0


def note_decision(record: RunRecord, kfac: KFAC, found: Replanning, iteration: int) -> dict[str, Any]:
    """Tell it, and put it into the record.

    Returns:
        the row for the trackers.
    """
    facts = found.to_dict()["replanned"]
    logger.info("%s", found)
    record.write("model_profile.json", found.profile.model.to_dict())
    record.write("cluster_profile.json", found.profile.cluster.to_dict())
    record.write("plan.json", kfac.plan.to_dict())
    record.write("choice.json", found.to_dict())
    row = {"simulated_s": found.choice.iteration_s, **{k: v for k, v in facts.items() if k.endswith("_s")}}
    return {"kind": "replan", "iter": iteration, **row}


def note_undecided(record: RunRecord, kfac: KFAC) -> None:
    """The run has ended before the decision: say so, and put the plan of the last iteration into the record."""
    record.write("plan.json", kfac.plan.to_dict())
    text = "the run ended before it had planned anew: under plan %s, which may be one on trial"
    logger.warning(text, kfac.plan.fingerprint)
