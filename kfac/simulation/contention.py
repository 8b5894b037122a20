"""Task graphs in which computing is slower while a collective is under way: two clocks instead of one.

A collective takes its seconds whatever the ranks compute meanwhile, but it takes some of the accelerator, the memory
and the bus from them: computing goes on at a part of its speed, and loses what the collective costs by itself
(:attr:`~kfac.simulation.events.Task.burden_s`). As both are the same for all tasks, one clock of *work done* serves all
of them: it runs slower than the other while the channel is busy, and is set back when a collective starts.

Unlike the ideal simulation this one is not monotone in every cost, nor is what it describes: a collective that has to
wait longer may find less computing to disturb, so that dearer work before it can let everything end earlier.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Hashable, Sequence

from kfac.simulation.conservation import check_slowed_durations, check_times
from kfac.simulation.events import Task, check_tasks, dependencies


def run_slowed(
    tasks: Sequence[Task],
    in_order: Collection[Hashable],
    channel: Hashable,
    slowdown: float,
) -> list[tuple[float, float]]:
    """``(start, end)`` of every task in seconds, where tasks that share the channel slow the others.

    Args:
        tasks: each one's duration is what it takes by itself; those without a resource are waiting, which nothing
            slows.
        in_order: every resource of the tasks; each serves its tasks in the order of the list.
        channel: the resource whose tasks slow those of all others, and are not slowed themselves.
        slowdown: the part of their speed that the others lose meanwhile, from 0 to 1.

    Raises:
        ValueError: for a resource that serves in another order or is named twice by a task, a slowdown outside its
            range, a duration or burden that is negative or not finite, a burden of what is not of the channel, or if
            tasks wait for each other in a circle.
        ConservationError: if the result breaks a law (see :mod:`kfac.simulation.conservation`); never seen.
    """
    if not 0 <= slowdown <= 1:
        raise ValueError(f"slowdown={slowdown!r} is a part of the speed, from 0 to 1")
    check_tasks(tasks)
    for task in tasks:
        if any(resource not in in_order for resource in task.resources):
            raise ValueError(f"task {task.name!r}: where tasks slow others every resource serves in the list's order")
        if not 0 <= task.burden_s < math.inf or (task.burden_s and channel not in task.resources):
            raise ValueError(
                f"task {task.name!r}: burden {task.burden_s!r} is no number of seconds >= 0 of the channel's"
            )
    waits_for, releases = dependencies(tasks, in_order)
    starts, ends = [0.0] * len(tasks), [-1.0] * len(tasks)
    clocks = {True: 0.0, False: 0.0}  # seconds, and the work done by now of a lane that is never idle
    running: dict[bool, list[tuple[float, int]]] = {True: [], False: []}  # by whether seconds count, or work
    sending = 0
    ready = [i for i, count in enumerate(waits_for) if not count]
    while ready or running[True] or running[False]:
        for i in ready:
            starts[i] = clocks[True]
            timed = not tasks[i].resources or channel in tasks[i].resources
            if channel in tasks[i].resources:
                sending += 1
                clocks[False] -= tasks[i].burden_s
            heapq.heappush(running[timed], (clocks[timed] + tasks[i].duration_s, i))
        speed = 1.0 - slowdown if sending else 1.0
        timed, clocks = _next(running, clocks, speed)
        i = heapq.heappop(running[timed])[1]
        ends[i] = clocks[True]
        sending -= channel in tasks[i].resources
        ready = []
        for j in releases[i]:
            waits_for[j] -= 1
            if not waits_for[j]:
                ready.append(j)
    stuck = [task.name for task, end in zip(tasks, ends, strict=True) if end < 0]
    if stuck:
        raise ValueError(f"tasks wait for each other in a circle: {', '.join(stuck[:5])}")
    times = list(zip(starts, ends, strict=True))
    check_times(tasks, times, in_order)
    check_slowed_durations(tasks, times, channel, slowdown)
    return times


def _next(
    running: dict[bool, list[tuple[float, int]]], clocks: dict[bool, float], speed: float
) -> tuple[bool, dict[bool, float]]:
    """On which clock the next task ends, and both clocks then."""
    now, done = clocks[True], clocks[False]
    by_seconds = running[True][0][0] - now if running[True] else float("inf")
    work = running[False][0][0] - done if running[False] else float("inf")
    by_work = 0.0 if work <= 0 else work / speed if speed else float("inf")
    if by_seconds <= by_work:
        return True, {True: running[True][0][0], False: done + by_seconds * speed}
    return False, {True: now + by_work, False: running[False][0][0]}
