"""Plans that take turns in a run, so that the quickest one stays: they change when things happen, never the result."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from kfac.communication import Communicator
from kfac.planning import Plan
from kfac.planning.intervals import ALL_DUE, EVERY_STEP, Due, Intervals

TURNS, COUNTED = 2, 2
"""Turns of each plan, and iterations that count in each: not the first one after a change, which is not pipelined."""


MOST = 7
"""Plans that can take part: the choice, the one before, the best with few messages, the best that sends after the
passes, and the named schedules that compute the same (three)."""


ALONE = 4
"""Iterations before the turns in which messages do not overlap with the passes, to know what each takes alone."""


def longest(turns: int, counted: int = COUNTED, intervals: Intervals = EVERY_STEP) -> int:
    """The iterations until :data:`MOST` plans have had their turns, from when there is enough to plan from."""
    return ALONE * intervals.factor + MOST * turns * (counted + 1) * intervals.inverse if turns else 0


class Finals:
    """Whose turn it is, and what its iterations have taken.

    Args:
        plans: by name; the first one wins where none is quicker.
        turns, counted: of each plan, and iterations with inversions that count in each.
        intervals: how often curvature work is due.
    """

    def __init__(
        self,
        plans: Mapping[str, Plan],
        *,
        turns: int = TURNS,
        counted: int = COUNTED,
        intervals: Intervals = EVERY_STEP,
    ) -> None:
        self.plans = dict(plans)
        self._shares = intervals.shares
        self._order = list(plans) * turns
        self._counted = counted
        self._turn, self._seen = 0, 0
        self._seconds: dict[tuple[str, Due], list[float]] = defaultdict(list)

    @property
    def over(self) -> bool:
        """Whether everyone has had all turns."""
        return self._turn == len(self._order)

    @property
    def plan(self) -> Plan:
        """Whose turn it is."""
        return self.plans[self._order[self._turn]]

    def note(self, seconds: float, due: Due = ALL_DUE) -> bool:
        """An iteration has ended in which this was due; whether its plan's turn has, too.

        The first with inversions does not count, nor do those before it.
        """
        if self._seen:
            self._seconds[self._order[self._turn], due].append(seconds)
        self._seen += due.inverses
        if not due.inverses or self._seen <= self._counted:
            return False
        self._turn, self._seen = self._turn + 1, 0
        return True

    def seconds(self, communicator: Communicator) -> dict[str, float]:
        """By name what a plan's quickest iterations have taken on the slowest rank, quickest first; collective.

        Where curvature work is not due in every step, the mean over the steps.
        """
        found: dict[str, float] = dict.fromkeys(self.plans, 0.0)
        for due, share in self._shares.items():
            mine = {name: self._seconds[name, due] for name in self.plans}
            if all(mine.values()):
                for name, seconds in combined(communicator.all_gather_object(mine)).items():
                    found[name] += share * seconds
        return dict(sorted(found.items(), key=lambda item: item[1]))


def combined(of_ranks: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, float]:
    """By name the least of the slowest rank's seconds of an iteration, quickest first; of equals the first.

    What disturbs an iteration only makes it longer.
    """
    found = {
        name: min(max(times) for times in zip(*(rank[name] for rank in of_ranks), strict=True)) for name in of_ranks[0]
    }
    return dict(sorted(found.items(), key=lambda item: item[1]))
