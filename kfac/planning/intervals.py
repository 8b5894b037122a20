"""How often curvature work is due: what a Plan is worth depends on the steps without it, too."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from kfac.planning.checks import whole


class Due(NamedTuple):
    """What an iteration does beside its passes and preconditioning.

    Attributes:
        statistics: factor statistics, and their sums over the ranks.
        inverses: inversions, and what is sent of them.
    """

    statistics: bool
    inverses: bool


ALL_DUE = Due(True, True)


@dataclass(frozen=True)
class Intervals:
    """Steps between updates.

    Args:
        factor: of the statistics.
        inverse: of the inverses.

    Raises:
        ValueError: for what is no whole number from 1 on.
    """

    factor: int = 1
    inverse: int = 1

    def __post_init__(self) -> None:
        for key in ("factor", "inverse"):
            object.__setattr__(self, key, whole(f"{key}_interval", getattr(self, key), 1))

    def at(self, step: int) -> Due:
        """What is due in a step."""
        return Due(step % self.factor == 0, step % self.inverse == 0)

    @property
    def shares(self) -> dict[Due, float]:
        """Of all steps, those in which this is due; they add up to one."""
        both = 1 / math.lcm(self.factor, self.inverse)
        statistics, inverses = 1 / self.factor - both, 1 / self.inverse - both
        found = {
            ALL_DUE: both,
            Due(True, False): statistics,
            Due(False, True): inverses,
            Due(False, False): 1 - both - statistics - inverses,
        }
        return {due: share for due, share in found.items() if share > 1e-12}


EVERY_STEP = Intervals()
