"""Computing slowed by communication: against an exact second statement of the rules, and what it means in a profile."""

import random
from dataclasses import replace
from fractions import Fraction

import pytest

from kfac.planning import ClusterProfile, LinearCost
from kfac.planning.profiles import NO_INTERFERENCE, DisturbedCluster, Interference, interference_of
from kfac.schedules import make_plan
from kfac.simulation import Task, run_tasks, simulate
from kfac.simulation.contention import run_slowed
from kfac.timeline import COMMUNICATION_LANE
from tests.kfac.simulation.cases import cases, random_cluster, random_model

ORDER = ("channel", "x", "y")


def exact(tasks, slowdown):
    """Every task's remaining work in fractions, one stretch of constant speeds after the other."""
    left = [Fraction(task.duration_s) for task in tasks]
    start, end, now = {}, {}, Fraction(0)
    while len(end) < len(tasks):
        for i, task in enumerate(tasks):
            before = [j for j in range(i) if set(tasks[j].resources) & set(task.resources)]
            if i not in start and all(j in end for j in (*task.after, *before)):
                start[i] = now
        running = [i for i in start if i not in end]
        over = [i for i in running if left[i] == 0]
        if over:
            end |= dict.fromkeys(over, now)
            continue
        sending = any("channel" in tasks[i].resources for i in running)
        speed = {
            i: 1 - slowdown if sending and tasks[i].resources and "channel" not in tasks[i].resources else Fraction(1)
            for i in running
        }
        step = min(left[i] / speed[i] for i in running if speed[i])
        now += step
        for i in running:
            left[i] -= step * speed[i]
    return [(float(start[i]), float(end[i])) for i in range(len(tasks))]


def random_tasks(dice):
    resources = ((), ("channel",), ("channel",), ("x",), ("x",), ("y",), ("x", "y"))
    return [
        Task(
            f"t{i}",
            dice.randint(0, 5),
            dice.choice(resources),
            tuple(sorted(dice.sample(range(i), min(i, dice.choice((0, 0, 1, 2)))))),
        )
        for i in range(dice.randint(1, 12))
    ]


@pytest.mark.parametrize("slowdown", [Fraction(0), Fraction(1, 4), Fraction(2, 3), Fraction(1)])
def test_equals_exact_arithmetic(slowdown):
    dice = random.Random(int(12 * slowdown))
    for _ in range(150):
        tasks = random_tasks(dice)
        found = run_slowed(tasks, ORDER, "channel", float(slowdown))
        for mine, theirs in zip(found, exact(tasks, slowdown), strict=True):
            assert mine == pytest.approx(theirs, abs=1e-9)


def test_no_slowdown_is_the_ideal_simulator():
    dice = random.Random(5)
    for _ in range(150):
        tasks = random_tasks(dice)
        assert run_slowed(tasks, ORDER, "channel", 0.0) == run_tasks(tasks, ORDER)


def test_by_hand():
    """Four seconds of work, two of which fall under a collective at half speed: one second is done in those two."""
    tasks = [Task("work", 4, ("x",)), Task("sum", 2, ("channel",)), Task("wait", 3)]
    assert run_slowed(tasks, ORDER, "channel", 0.5) == [(0, 5), (0, 2), (0, 3)]
    assert run_slowed(tasks, ORDER, "channel", 1.0) == [(0, 6), (0, 2), (0, 3)]


def test_what_cannot_be_run_is_an_error():
    with pytest.raises(ValueError, match="from 0 to 1"):
        run_slowed([], ORDER, "channel", 1.5)
    with pytest.raises(ValueError, match="order"):
        run_slowed([Task("a", 1, ("z",))], ORDER, "channel", 0.5)
    with pytest.raises(ValueError, match="duration"):
        run_slowed([Task("a", -1)], ORDER, "channel", 0.5)
    with pytest.raises(ValueError, match="circle: a, b"):
        run_slowed([Task("a", 1, after=(1,)), Task("b", 1, after=(0,))], ORDER, "channel", 0.5)


def test_an_iteration_is_delayed_by_no_more_than_what_its_collectives_slow():
    for plan, model, cluster in cases(seed=11, count=150):
        ideal = simulate(plan, model, cluster)
        rank = ideal.spans[0].rank if ideal.spans else 0
        sent_s = sum(s.end_s - s.start_s for s in ideal.spans if s.lane == COMMUNICATION_LANE and s.rank == rank)
        slowed = DisturbedCluster.disturbed(cluster, Interference(slowdown=0.5))
        found_s = simulate(plan, model, slowed).iteration_s
        assert ideal.iteration_s - 1e-9 <= found_s <= ideal.iteration_s + 0.5 * sent_s + 1e-9


def test_each_message_costs_those_which_compute_work():
    tasks = [
        Task("passes", 10, ("x",)),
        Task("first", 1, ("channel",), burden_s=0.25),
        Task("second", 3, ("channel",), burden_s=0.75),
        Task("late", 1, ("channel",), (0,), burden_s=9),
        Task("waits", 5),
    ]
    assert run_slowed(tasks, ORDER, "channel", 0.0) == [(0, 11), (0, 1), (1, 4), (11, 12), (0, 5)]
    assert run_slowed(tasks, ORDER, "channel", 0.5) == [(0, 13), (0, 1), (1, 4), (13, 14), (0, 5)]
    free = [replace(task, burden_s=0) for task in tasks]
    assert run_slowed(free, ORDER, "channel", 0.0) == run_tasks(free, ORDER)
    for wrong in (replace(tasks[1], burden_s=-1), replace(tasks[0], burden_s=1)):
        with pytest.raises(ValueError, match="burden"):
            run_slowed([wrong], ORDER, "channel", 0.5)


def test_a_profile_with_a_cost_per_message_delays_what_overlaps_and_nothing_else():
    dice = random.Random(15)
    for _ in range(20):
        model, cluster = random_model(dice), random_cluster(dice, 3)
        costly = DisturbedCluster.disturbed(cluster, Interference(message_s=0.25))
        late = make_plan({"name": "mpdkfac", "gradient_pipelining": False, "placement": "non_dist"}, model, cluster)
        assert simulate(late, model, costly).iteration_s == simulate(late, model, cluster).iteration_s
        plan = make_plan({"name": "spdkfac", "placement": "non_dist"}, model, cluster)
        before, after = (simulate(plan, model, c).busy_s() for c in (cluster, costly))
        lost = sum(after[kind] - before[kind] for kind in ("FF", "BP", "FactorComp"))
        assert lost <= 0.25 * len(plan.messages) + 1e-9
        assert lost > 0 or len(model.layers) == 1


def test_a_cost_per_element_is_one_per_message_where_each_has_as_many():
    """And two elements of bfloat16 are one: they are as many bytes."""
    dice = random.Random(17)
    slower = 0
    for _ in range(20):
        drawn, cluster = random_model(dice), random_cluster(dice, 3)
        layers = tuple(replace(layer, a_dim=3, g_dim=3, gradient_elements=6) for layer in drawn.layers)
        model = replace(drawn, layers=layers)
        for dtype, factor in (("full", 6), ("bfloat16", 3)):
            switches = {"name": "spdkfac", "placement": "non_dist", "fusion": "none", "message_dtype": dtype}
            plan = make_plan({**switches, "gradient_pipelining": False}, model, cluster)
            by_element, by_message = (
                simulate(plan, model, DisturbedCluster.disturbed(cluster, interference)).iteration_s
                for interference in (Interference(element_s=0.125), Interference(message_s=0.125 * factor))
            )
            assert by_element == pytest.approx(by_message)
            slower += by_element > simulate(plan, model, cluster).iteration_s
    assert slower > 20


def test_items_and_waiting_cost_what_they_say():
    dice = random.Random(12)
    for _ in range(40):
        model, cluster = random_model(dice), random_cluster(dice, 3)
        plan = make_plan({"name": "dkfac", "gradient_pipelining": False}, model, cluster)
        bare_s = simulate(plan, model, cluster).iteration_s
        costly = DisturbedCluster.disturbed(cluster, Interference(item_s=2.0, wait_s=5.0))
        carried = len(plan.layers) + len(plan.factors)
        assert simulate(plan, model, costly).iteration_s == bare_s + 2 * carried + 5
        alone = make_plan("kfac", model, cluster, world_size=1)
        assert simulate(alone, model, costly).iteration_s == simulate(alone, model, cluster).iteration_s


def test_inversions_that_begin_as_sums_arrive_do_not_hide_the_waiting():
    dice = random.Random(16)
    free = LinearCost(0, 0)
    for _ in range(20):
        cluster = replace(random_cluster(dice, 3), all_reduce=free, reduce=free, broadcast=free)
        model = random_model(dice)
        plan = make_plan({"name": "spdkfac", "inverse_start": "as_ready"}, model, cluster)
        waiting = DisturbedCluster.disturbed(cluster, Interference(wait_s=50))
        assert simulate(plan, model, waiting).iteration_s == simulate(plan, model, cluster).iteration_s + 50


def test_a_profile_keeps_interference_and_without_it_reads_and_writes_as_ever():
    line = LinearCost(1, 2)
    bare = ClusterProfile(world_size=4, all_reduce=line, reduce=line, broadcast=line, inverse=line)
    assert "interference" not in bare.to_dict()
    fitted = DisturbedCluster.disturbed(bare, Interference(slowdown=0.25, item_s=0.5, wait_s=1.5))
    assert ClusterProfile.from_dict(fitted.to_dict()) == fitted
    older = {key: value for key, value in fitted.to_dict()["interference"].items() if key != "message_s"}
    assert ClusterProfile.from_dict({**bare.to_dict(), "interference": older}) == fitted
    assert ClusterProfile.from_dict(bare.to_dict()) == bare
    assert interference_of(fitted.at(8)) == fitted.interference
    assert interference_of(fitted.at(1)) == interference_of(bare) == NO_INTERFERENCE
    with pytest.raises(ValueError, match="slowdown"):
        Interference(slowdown=1.5)
    with pytest.raises(ValueError, match="item_s"):
        Interference(item_s=-1)
    with pytest.raises(ValueError, match="interference"):
        ClusterProfile.from_dict({**bare.to_dict(), "interference": {"speed": 1}})


def test_plans_do_not_know_of_interference():
    dice = random.Random(13)
    for _ in range(10):
        model, cluster = random_model(dice), random_cluster(dice, 4)
        disturbed = DisturbedCluster.disturbed(cluster, Interference(slowdown=0.9, item_s=3, wait_s=1))
        for name in ("dkfac", "mpdkfac", "spdkfac"):
            assert make_plan(name, model, cluster) == make_plan(name, model, disturbed)
