"""How far a run is, in one line every now and then."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Sequence

from experiments.summary import describe_metric

logger = logging.getLogger(__name__)

LONGEST_WAIT_S = 5.0
"""The ranks agree on whether to stop at least as often as this, as far as iterations are not longer."""


class Progress:
    """When the ranks report, and what rank 0 says then.

    Args:
        most: iterations between two reports, where these are quick.
        first: the first iteration that runs now.
        iterations: of the whole run.
        metric: of the objective.

    Attributes:
        every: iterations between two reports; the same on every rank.
    """

    def __init__(self, most: int, first: int, iterations: int, metric: str) -> None:
        self._most, self._first, self._iterations, self._metric = most, first, iterations, metric
        self._started_s = time.perf_counter()
        self.every = most

    def adapt(self, iteration_s: float) -> None:
        """Whoever asks a run of slow iterations to stop has an answer within seconds too."""
        self.every = max(1, min(self._most, int(LONGEST_WAIT_S / max(iteration_s, 1e-9))))

    def tell(
        self, done: int, epoch: float, averages: Sequence[Sequence[float]], seconds: Sequence[float], stopping: bool
    ) -> None:
        """Log one line.

        Args:
            done: iterations of the run.
            epoch: that they come to.
            averages: loss and metric of each iteration since the last line.
            seconds: of each of them.
            stopping: whether somebody asked for it.
        """
        loss, metric = (statistics.fmean(column) for column in zip(*averages, strict=True))
        passed_s = time.perf_counter() - self._started_s
        left_s = passed_s / (done - self._first) * (self._iterations - done)
        logger.info(
            "iteration %d/%d  epoch %.2f  loss %.4f  %s  %.1f ms  %.2f it/s  %s",
            done,
            self._iterations,
            epoch,
            loss,
            describe_metric(self._metric, metric),
            1e3 * statistics.median(seconds),
            (done - self._first) / passed_s,
            "asked to stop" if stopping else f"ETA {int(left_s // 60)}:{int(left_s % 60):02d}",
        )
