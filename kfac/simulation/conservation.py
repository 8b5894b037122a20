"""What every simulation must obey, whatever its costs: checked on each result, apart from the loop that made it.

Checked is that the graph was carried out as it is. Whether it is the right graph, with the right costs, the tests say.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Hashable, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kfac.simulation.events import Task

_ROUNDING = 1e-9
"""Relative to the end of all and what messages burden: what sums of thousands of floats may be off by."""


class ConservationError(RuntimeError):
    """A simulation broke a law: a fault of the simulator, never of its costs. Its numbers are not to be used."""


def check_times(tasks: Sequence[Task], times: Sequence[tuple[float, float]], in_order: Collection[Hashable]) -> None:
    """No resource serves two tasks at once, each task waits for what it comes after, and for nothing else.

    Resources named in ``in_order`` must have served their tasks in the list's order. A task may begin late only where
    it waits for a resource that serves in another order; otherwise it begins the moment the last thing ends that it
    waits for.

    Raises:
        ConservationError: for a broken law, naming the tasks.
    """
    free_s: dict[Hashable, float] = {}
    shared: dict[Hashable, list[int]] = defaultdict(list)
    for i, task in enumerate(tasks):
        start_s, end_s = times[i]
        earliest_s = 0.0
        for j in task.after:
            earliest_s = max(earliest_s, times[j][1])
        waits_in_line = True
        for resource in task.resources:
            if resource in in_order:
                if (free := free_s.get(resource, 0.0)) > earliest_s:
                    earliest_s = free
                free_s[resource] = end_s
            else:
                waits_in_line = False
                shared[resource].append(i)
        if start_s < earliest_s:
            raise ConservationError(_fault(task, times[i], f"cannot begin before {earliest_s!r} s"))
        if waits_in_line and start_s > earliest_s:
            raise ConservationError(_fault(task, times[i], f"could have begun at {earliest_s!r} s"))
    for resource, users in shared.items():
        users.sort(key=lambda i: times[i])
        for before, after in pairwise(users):
            if times[after][0] < times[before][1]:
                text = f"has {resource!r} while {tasks[before].name!r} has it"
                raise ConservationError(_fault(tasks[after], times[after], text))


def check_durations(tasks: Sequence[Task], times: Sequence[tuple[float, float]]) -> None:
    """Every task takes its seconds, to the last bit.

    Raises:
        ConservationError: otherwise, naming the task.
    """
    for task, (start_s, end_s) in zip(tasks, times, strict=True):
        if end_s != start_s + task.duration_s:
            raise ConservationError(_fault(task, (start_s, end_s), f"takes {task.duration_s!r} s"))


def check_slowed_durations(
    tasks: Sequence[Task],
    times: Sequence[tuple[float, float]],
    channel: Hashable,
    slowdown: float,
) -> None:
    """Every task does its seconds of work: all of its time, without what it loses to the channel's tasks meanwhile.

    Those that begin at the very moment at which another one does or ends may or may not burden it.

    Raises:
        ConservationError: otherwise, naming the task.
    """
    sent = sorted((*times[i], task.burden_s) for i, task in enumerate(tasks) if channel in task.resources)
    starts = [start for start, *_ in sent]
    busy_s = [0.0, *accumulate(end - start for start, end, _ in sent)]
    burden_s = [0.0, *accumulate(burden for *_, burden in sent)]

    def sent_by(moment: float) -> tuple[float, int]:
        """For how long the channel was busy until then, and how many messages had begun, the last one included."""
        k = bisect_right(starts, moment)
        return (busy_s[k] - max(0.0, sent[k - 1][1] - moment) if k else 0.0), k

    tolerance = _ROUNDING * (max((end for _, end in times), default=0.0) + burden_s[-1])
    for task, (start_s, end_s) in zip(tasks, times, strict=True):
        least = most = task.duration_s
        if task.resources and channel not in task.resources:
            (before_s, begun), (until_s, all_begun) = sent_by(start_s), sent_by(end_s)
            least += slowdown * (until_s - before_s)
            most = least
            if burden_s[-1]:
                most += burden_s[all_begun] - burden_s[bisect_left(starts, start_s, hi=begun)]
                least += max(0.0, burden_s[bisect_left(starts, end_s, hi=all_begun)] - burden_s[begun])
        if not least - tolerance <= end_s - start_s <= most + tolerance:
            raise ConservationError(_fault(task, (start_s, end_s), f"takes {least!r} to {most!r} s"))


def _fault(task: Task, time: tuple[float, float], law: str) -> str:
    return f"fault of the simulator, please report it: {task.name!r} ran from {time[0]!r} to {time[1]!r} s, but {law}"
