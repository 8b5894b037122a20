"""A small exact event simulator: tasks with durations, dependencies and exclusive resources."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass

from kfac.simulation.conservation import check_durations, check_times


@dataclass(frozen=True)
class Task:
    """Something that takes time.

    Args:
        name: for people.
        duration_s: seconds.
        resources: what it occupies exclusively from its start to its end; a collective occupies the one channel.
        after: tasks (indices into the list) that must have ended first; a collective comes after whatever its
            participants do before they reach it.
        priority: lower goes first where several tasks wait for a resource.
        burden_s: seconds of work that those which are running lose when it starts, where tasks disturb each other
            (:func:`kfac.simulation.contention.run_slowed`).
    """

    name: str
    duration_s: float
    resources: tuple[Hashable, ...] = ()
    after: tuple[int, ...] = ()
    priority: int = 0
    burden_s: float = 0.0


def run_tasks(tasks: Sequence[Task], in_order: Collection[Hashable] = ()) -> list[tuple[float, float]]:
    """``(start, end)`` of every task in seconds.

    A task is ready when the tasks it comes after have ended. Resources named in ``in_order`` serve their tasks strictly
    in the order of the list, as a stream does; on the others, whenever something ends, the waiting tasks are looked
    through by priority, then by the moment at which they became ready, then by place in the list, and each one whose
    resources are all free starts. Nothing is ever preempted.

    Raises:
        ValueError: for a duration that is negative or not finite, a resource that a task names twice, or if tasks wait
            for each other in a circle.
        ConservationError: if the result breaks a law (see :mod:`kfac.simulation.conservation`); never seen.
    """
    check_tasks(tasks)
    waits_for, releases = dependencies(tasks, in_order)
    times: list[tuple[float, float] | None] = [None] * len(tasks)
    busy: set[Hashable] = set()
    waiting = [(task.priority, 0.0, i) for i, task in enumerate(tasks) if not waits_for[i]]
    heapq.heapify(waiting)
    running: list[tuple[float, int]] = []
    now = 0.0
    while True:
        blocked = []
        while waiting:
            entry = heapq.heappop(waiting)
            i = entry[2]
            if busy.isdisjoint(tasks[i].resources):
                busy.update(tasks[i].resources)
                times[i] = (now, now + tasks[i].duration_s)
                heapq.heappush(running, (now + tasks[i].duration_s, i))
            else:
                blocked.append(entry)
        waiting = blocked  # popped in order, so still a heap
        if not running:
            break
        now = running[0][0]
        while running and running[0][0] == now:
            i = heapq.heappop(running)[1]
            busy.difference_update(tasks[i].resources)
            for j in releases[i]:
                waits_for[j] -= 1
                if not waits_for[j]:
                    heapq.heappush(waiting, (tasks[j].priority, now, j))
    stuck = [task.name for task, time in zip(tasks, times, strict=True) if time is None]
    if stuck:
        raise ValueError(f"tasks wait for each other in a circle: {', '.join(stuck[:5])}")
    found = [time for time in times if time is not None]
    check_times(tasks, found, in_order)
    check_durations(tasks, found)
    return found


def check_tasks(tasks: Sequence[Task]) -> None:
    """Whether the numbers and resources of tasks make sense.

    Raises:
        ValueError: for a duration that is negative or not finite, or a resource that a task names twice.
    """
    for task in tasks:
        if not 0 <= task.duration_s < math.inf:
            raise ValueError(f"task {task.name!r}: duration {task.duration_s!r} is not a number of seconds >= 0")
        if len(task.resources) > 1 and len(set(task.resources)) < len(task.resources):
            raise ValueError(f"task {task.name!r} names a resource twice: {task.resources}")


def critical_path(
    tasks: Sequence[Task], times: Sequence[tuple[float, float]], in_order: Collection[Hashable] = ()
) -> tuple[int, ...]:
    """The tasks, first to last, of which each begins when the one before it ends, up to the end of all.

    Where any of them were quicker (and no other path equally long), all would end earlier. Of several such paths, the
    one through the tasks that stand last in the list.

    Args:
        tasks, in_order: as for :func:`run_tasks`.
        times: start and end of every task, from :func:`run_tasks`.
    """
    if not tasks:
        return ()
    before: list[list[int]] = [[] for _ in tasks]
    for i, released in enumerate(dependencies(tasks, in_order)[1]):
        for j in released:
            before[j].append(i)
    users: dict[Hashable, list[int]] = defaultdict(list)
    for i, task in enumerate(tasks):
        for resource in task.resources:
            if resource not in in_order:
                users[resource].append(i)
    current = max(range(len(tasks)), key=lambda i: (times[i][1], i))
    path = [current]
    seen = {current}
    while times[current][0] > 0:
        start = times[current][0]
        others = (j for resource in tasks[current].resources for j in users[resource])
        waited = [j for j in (*before[current], *others) if times[j][1] == start and j not in seen]
        if not waited:
            break
        current = max(waited)
        path.append(current)
        seen.add(current)
    return tuple(reversed(path))


def dependencies(tasks: Sequence[Task], in_order: Collection[Hashable]) -> tuple[list[int], list[list[int]]]:
    """How many tasks each one waits for, and which tasks each one releases."""
    waits_for = [0] * len(tasks)
    releases: list[list[int]] = [[] for _ in tasks]
    last: dict[Hashable, int] = {}
    for i, task in enumerate(tasks):
        before = set(task.after)
        for resource in task.resources:
            if resource in in_order:
                if resource in last:
                    before.add(last[resource])
                last[resource] = i
        waits_for[i] = len(before)
        for j in before:
            releases[j].append(i)
    return waits_for, releases
