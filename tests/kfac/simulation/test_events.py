"""The event simulator against a clock that ticks, one unit at a time."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from kfac.simulation import Task, critical_path, run_tasks


def ticking(tasks, in_order=()):
    """At every tick: end what is due, then start what may start; the rules as the docstring states them."""
    left = [int(task.duration_s) for task in tasks]
    start, end, ready = {}, {}, {}
    for tick in range(10_000):
        changed = True
        while changed:  # tasks of no duration end in the tick in which they start
            changed = False
            for i in list(start):
                if i not in end and tick - start[i] == left[i]:
                    end[i] = tick
                    changed = True
            for i, task in enumerate(tasks):
                before = [j for j in range(i) if any(r in in_order and r in tasks[j].resources for r in task.resources)]
                if i not in ready and all(j in end for j in (*task.after, *before)):
                    ready[i] = tick
                    changed = True
            for i in sorted((i for i in ready if i not in start), key=lambda i: (tasks[i].priority, ready[i], i)):
                held = {r for j in start if j not in end for r in tasks[j].resources}
                if held.isdisjoint(tasks[i].resources):
                    start[i] = tick
                    changed = True
        if len(end) == len(tasks):
            return [(start[i], end[i]) for i in range(len(tasks))]
    raise AssertionError("the tasks never end")


def random_tasks(dice, shortest):
    count = dice.randint(1, 12)
    return [
        Task(
            f"t{i}",
            dice.randint(shortest, 5),
            tuple(dice.sample("abc", dice.choice((0, 1, 1, 1, 2)))),
            tuple(sorted(dice.sample(range(i), min(i, dice.choice((0, 0, 1, 2)))))),
            dice.choice((0, 0, 0, 1)),
        )
        for i in range(count)
    ]


def test_equals_a_ticking_clock():
    dice = random.Random(1)
    for _ in range(400):
        tasks = random_tasks(dice, shortest=1)
        in_order = {r for r in "abc" if dice.random() < 0.5}
        assert run_tasks(tasks, in_order) == ticking(tasks, in_order)


def test_equals_a_ticking_clock_with_tasks_that_take_no_time_where_the_order_is_given():
    dice = random.Random(2)
    for _ in range(400):
        tasks = random_tasks(dice, shortest=0)
        assert run_tasks(tasks, {"a", "b", "c"}) == ticking(tasks, {"a", "b", "c"})


def test_nothing_is_double_booked_and_nothing_starts_before_what_it_waits_for():
    dice = random.Random(3)
    for _ in range(200):
        tasks = random_tasks(dice, shortest=0)
        times = run_tasks(tasks, {"a"})
        for (start, end), task in zip(times, tasks, strict=True):
            assert end - start == task.duration_s
            assert all(times[j][1] <= start for j in task.after)
        for resource in "abc":
            held = sorted(time for time, task in zip(times, tasks, strict=True) if resource in task.resources)
            assert all(first[1] <= second[0] for first, second in pairwise(held))
        on_a = [time for time, task in zip(times, tasks, strict=True) if "a" in task.resources]
        assert on_a == sorted(on_a)


def test_first_ready_first_served_unless_priority_or_order_says_otherwise():
    def starts(*, priority=0, in_order=()):
        tasks = [
            Task("first", 2, ("worker",)),
            Task("late", 3, ("channel",), (0,), priority),
            Task("early", 4, ("channel",)),
            Task("middle", 1, (), ()),
            Task("next", 5, ("channel",), (3,)),
        ]
        times = run_tasks(tasks, in_order)
        return [times[i][0] for i in (1, 2, 4)]

    assert starts() == [9, 0, 4]  # ready at 2, 0 and 1
    assert starts(priority=-1) == [4, 0, 7]
    assert starts(in_order={"channel"}) == [2, 5, 9]


def test_in_order_graphs_take_longer_when_any_task_does():
    dice = random.Random(4)
    for _ in range(100):
        tasks = random_tasks(dice, shortest=0)
        order = {"a", "b", "c"}
        before = run_tasks(tasks, order)
        k = dice.randrange(len(tasks))
        slower = [*tasks]
        slower[k] = Task(tasks[k].name, tasks[k].duration_s + 3, tasks[k].resources, tasks[k].after)
        assert all(late >= early for late, early in zip(run_tasks(slower, order), before, strict=True))
        # Sums and maxima of floats are monotone, too, to the last bit.
        tasks = [replace(task, duration_s=dice.random()) for task in tasks]
        slower = [replace(task, duration_s=task.duration_s + (i == k) * dice.random()) for i, task in enumerate(tasks)]
        assert all(a <= b for a, b in zip(run_tasks(tasks, order), run_tasks(slower, order), strict=True))


def test_the_critical_path_alone_decides_when_all_ends():
    dice = random.Random(7)
    slack = 0
    for _ in range(300):
        tasks = random_tasks(dice, shortest=1)
        times = run_tasks(tasks, "abc")
        end = max(end for _, end in times)
        path = critical_path(tasks, times, "abc")
        assert times[path[0]][0] == 0
        assert times[path[-1]][1] == end
        assert all(times[i][1] == times[j][0] for i, j in pairwise(path))
        without_the_rest = [replace(task, duration_s=task.duration_s * (i in path)) for i, task in enumerate(tasks)]
        assert max(end for _, end in run_tasks(without_the_rest, "abc")) == end
        for i in range(len(tasks)):
            longer = [replace(task, duration_s=task.duration_s + (i == j)) for j, task in enumerate(tasks)]
            delay = max(end for _, end in run_tasks(longer, "abc")) - end
            assert delay == 1 if i in path else delay in (0, 1)
            slack += delay == 0
    assert slack > 300  # so being on the path says something
    assert critical_path([], []) == ()


def test_no_tasks():
    assert run_tasks([]) == []


def test_circles_and_impossible_durations_are_errors():
    with pytest.raises(ValueError, match="circle: a, b"):
        run_tasks([Task("a", 1, after=(1,)), Task("b", 1, after=(0,)), Task("c", 1)])
    with pytest.raises(ValueError, match="circle"):
        run_tasks([Task("a", 1, ("x",), (1,)), Task("b", 1, ("x",))], {"x"})
    for duration in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="duration"):
            run_tasks([Task("a", duration)])
    for order in ((), ("x",)):
        with pytest.raises(ValueError, match="'a' names a resource twice"):
            run_tasks([Task("a", 1, ("x", "x"))], order)
