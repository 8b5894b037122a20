"""Every result is checked for what no simulation may break: each law by results that break it alone, and in the loops
by faults put into them."""

import random
from dataclasses import replace

import pytest

from kfac.schedules import make_plan
from kfac.simulation import ConservationError, Task, contention, events, run_tasks, simulate
from kfac.simulation.conservation import check_durations, check_slowed_durations, check_times
from kfac.simulation.contention import run_slowed
from tests.kfac.simulation.cases import random_cluster, random_model

ORDER = ("x", "channel")


def moved(times, i, start_s, end_s=None):
    before = times[i]
    return [*times[:i], (start_s, start_s + before[1] - before[0] if end_s is None else end_s), *times[i + 1 :]]


def test_each_broken_law_is_named():
    tasks = [Task("a", 2, ("x",)), Task("b", 3, ("x",)), Task("c", 1, ("y",), (0,)), Task("d", 1, (), (1,))]
    times = run_tasks(tasks, ORDER)
    assert times == [(0, 2), (2, 5), (2, 3), (5, 6)]
    check_times(tasks, times, ORDER)
    check_durations(tasks, times)
    for i, start_s, law in (
        (1, 1, "'b' ran from 1 to 4.0 s, but cannot begin before 2"),  # x serves a until 2
        (2, 1, "'c' ran from 1 to 2.0 s, but cannot begin before 2"),  # comes after a
        (3, 4.5, "'d' .* cannot begin before 5"),  # comes after b, without a resource
        (1, 2.5, "'b' .* could have begun at 2"),  # nothing keeps x
        (0, 1, "'a' .* could have begun at 0"),
    ):
        with pytest.raises(ConservationError, match=f"please report it: {law}"):
            check_times(tasks, moved(times, i, start_s), ORDER)
    for end_s in (4.999, 5.001):
        with pytest.raises(ConservationError, match=r"'b' .* takes 3 s"):
            check_durations(tasks, moved(times, 1, 2, end_s))


def test_a_resource_that_serves_in_any_order_serves_one_at_a_time():
    tasks = [Task("late", 2, ("y",), (1,)), Task("first", 3), Task("early", 2, ("y",))]
    assert run_tasks(tasks) == [(3, 5), (0, 3), (0, 2)]  # the list's order is not the resource's
    check_times(tasks, [(3, 5), (0, 3), (1, 3)], ())
    with pytest.raises(ConservationError, match=r"'late' .* has 'y' while 'early' has it"):
        check_times(tasks, [(3, 5), (0, 3), (1.5, 3.5)], ())


def test_work_that_messages_slow_is_all_done():
    """Computing of 8 s beside messages of 2 and 3 s which take half its speed, and half a second each to begin."""
    tasks = [
        Task("work", 8, ("x",)),
        Task("wait", 1),
        Task("m", 2, ("channel",), (1,), burden_s=0.5),
        Task("n", 3, ("channel",), burden_s=0.5),
    ]
    times = run_slowed(tasks, ORDER, "channel", 0.5)
    assert times == [(0, 11.5), (0, 1), (1, 3), (3, 6)]
    check_slowed_durations(tasks, times, "channel", 0.5)
    for i, end_s in ((0, 11.4), (0, 11.6), (1, 1.1), (2, 2.9), (3, 6.1)):
        with pytest.raises(ConservationError, match="takes"):
            check_slowed_durations(tasks, moved(times, i, times[i][0], end_s), "channel", 0.5)
    for slowdown, burden_s in ((0.4, 0.5), (0.6, 0.5), (0.5, 0.4), (0.5, 0.6)):
        burdened = [*tasks[:3], replace(tasks[3], burden_s=burden_s)]
        with pytest.raises(ConservationError, match="'work'"):
            check_slowed_durations(burdened, times, "channel", slowdown)


def test_a_message_that_begins_with_a_task_may_cost_it_something_or_not():
    tasks = [Task("work", 2, ("x",)), Task("m", 1, ("channel",), burden_s=1)]
    for end_s in (2, 3):
        check_slowed_durations(tasks, [(0, end_s), (0, 1)], "channel", 0)
    for end_s in (1.9, 3.1):
        with pytest.raises(ConservationError, match="'work'"):
            check_slowed_durations(tasks, [(0, end_s), (0, 1)], "channel", 0)


def forgetful(tasks, in_order):
    """Without the first dependency of the last task."""
    return real_dependencies([*tasks[:-1], replace(tasks[-1], after=tasks[-1].after[1:])], in_order)


def out_of_line(tasks, in_order):
    """No resource serves in order."""
    return real_dependencies(tasks, ())


real_dependencies = events.dependencies


@pytest.mark.parametrize("fault", [forgetful, out_of_line])
def test_faults_of_the_loops_end_them(fault, monkeypatch):
    tasks = [Task("a", 2, ("x",)), Task("b", 3, ("x",)), Task("m", 1, ("channel",)), Task("n", 1, ("x",), (1, 2))]
    if fault is forgetful:
        tasks = [*tasks, Task("end", 1, (), (3, 0))]
    run_tasks(tasks, ORDER)
    run_slowed(tasks, ORDER, "channel", 0.5)
    monkeypatch.setattr(events, "dependencies", fault)
    monkeypatch.setattr(contention, "dependencies", fault)
    if fault is forgetful:  # where nothing serves in order, run_tasks still serves one at a time
        with pytest.raises(ConservationError, match="cannot begin before"):
            run_tasks(tasks, ORDER)
    with pytest.raises(ConservationError, match="cannot begin before"):
        run_slowed(tasks, ORDER, "channel", 0.5)


class Fickle(Task):
    """A task that is longer each time that somebody asks."""

    @property
    def duration_s(self):
        asked[0] += 1
        return asked[0]

    @duration_s.setter
    def duration_s(self, _):
        pass


asked = [0]


def test_tasks_that_do_not_take_their_time_end_the_simulation():
    with pytest.raises(ConservationError, match=r"'fickle' ran from 0.0 to .* s, but takes"):
        run_tasks([_fickle()], ORDER)
    with pytest.raises(ConservationError, match=r"'fickle' ran from 0.0 to .* s, but takes"):
        run_slowed([_fickle()], ORDER, "channel", 0.5)


def _fickle():
    task = object.__new__(Fickle)
    for key, value in (("name", "fickle"), ("resources", ("x",)), ("after", ()), ("priority", 0), ("burden_s", 0.0)):
        object.__setattr__(task, key, value)
    return task


def test_burdens_far_greater_than_all_work_raise_no_alarm():
    """The clock of work is set back by them, and remembers less of what is small."""
    for burden_s in (1e3, 1e9, 1e12):
        tasks = [Task("work", 0.1, ("x",)), Task("m", 0.3, ("channel",), burden_s=burden_s), Task("more", 0.7, ("x",))]
        for slowdown in (0.0, 0.3, 1.0):
            run_slowed(tasks, ORDER, "channel", slowdown)


def test_clocks_that_run_wrong_end_a_simulation(monkeypatch):
    tasks = [Task("work", 8, ("x",)), Task("m", 2, ("channel",))]
    real = contention._next
    monkeypatch.setattr(contention, "_next", lambda running, clocks, speed: real(running, clocks, 1.0))
    assert run_slowed(tasks, ORDER, "channel", 0) == [(0, 8), (0, 2)]
    with pytest.raises(ConservationError, match=r"'work' ran from 0.0 to 8.0 s, but takes 9.0"):
        run_slowed(tasks, ORDER, "channel", 0.5)


def test_simulations_of_an_iteration_are_checked(monkeypatch):
    dice = random.Random(3)
    model, cluster = random_model(dice), random_cluster(dice, 4)
    plan = make_plan("spdkfac", model, cluster)
    simulate(plan, model, cluster)
    monkeypatch.setattr(events, "dependencies", lambda tasks, _: real_dependencies([*tasks[:-1], Task("", 0)], ()))
    with pytest.raises(ConservationError):
        simulate(plan, model, cluster)


def test_what_waits_longer_may_disturb_less():
    """Why only ideal simulations are monotone in every cost: the message begins with the work, or when it is done."""
    tasks = [
        Task("before", 1, ("z",)),
        Task("message", 0.2, ("channel",), (0,), burden_s=1),
        Task("work", 1.4, ("x",)),
    ]
    order = ("x", "z", "channel")
    dearer = [replace(tasks[0], duration_s=1.5), *tasks[1:]]
    ends = [max(end for _, end in run_slowed(some, order, "channel", 0.0)) for some in (tasks, dearer)]
    assert ends == pytest.approx([2.4, 1.7])
    ideal = [max(end for _, end in run_tasks(some, order)) for some in (tasks, dearer)]
    assert ideal == pytest.approx([1.4, 1.7])
