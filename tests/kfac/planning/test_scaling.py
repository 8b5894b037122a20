"""Costs at other world sizes, by hand, and simulation of many ranks."""

import math
from dataclasses import replace

import pytest

from kfac.planning import LinearCost, TableCost
from kfac.planning.scaling import scaled_cluster
from kfac.planning.shipped_profiles import load_shipped_cluster, load_shipped_model
from kfac.schedules import NAMED_SCHEDULES, make_plan
from kfac.simulation import simulate, simulated_iteration_s


def test_by_hand():
    base = replace(
        load_shipped_cluster(),
        world_size=4,
        all_reduce=LinearCost(2.0, 3.0),
        broadcast=LinearCost(5.0, 7.0),
        reduce=LinearCost(1.0, 1.0),
    )
    tree = scaled_cluster(base, 16)
    assert tree.all_reduce == LinearCost(4.0, 3.75)
    assert (tree.broadcast, tree.reduce) == (LinearCost(10.0, 7.0), LinearCost(2.0, 1.0))
    ring = scaled_cluster(base, 16, "ring")
    assert ring.all_reduce.alpha_s == 2.0 * 15 / 3
    assert ring.broadcast == LinearCost(25.0, 7.0)
    assert (ring.world_size, ring.inverse) == (16, base.inverse)
    same = scaled_cluster(base, 4, "ring")
    assert (same.all_reduce, same.broadcast) == (base.all_reduce, base.broadcast)


def test_mistakes_are_named():
    base = load_shipped_cluster()
    with pytest.raises(ValueError, match="tree, ring"):
        scaled_cluster(base, 8, "star")
    with pytest.raises(ValueError, match="one rank"):
        scaled_cluster(base.at(1), 8)
    with pytest.raises(ValueError, match="broadcast must be a LinearCost"):
        scaled_cluster(replace(base, broadcast=TableCost((0, 1), (0, 1))), 8)


@pytest.mark.parametrize("schedule", ["dkfac", "mpdkfac", "spdkfac"])
def test_iteration_seconds_without_a_timeline(schedule):
    model, cluster = load_shipped_model("resnet50"), load_shipped_cluster("paper64")
    for world_size in (1, 3, 64):
        plan = make_plan(schedule, model, cluster, world_size)
        assert simulated_iteration_s(plan, model, cluster) == simulate(plan, model, cluster).iteration_s


@pytest.mark.parametrize("schedule", ["mpdkfac", "auto"])
def test_ranks_that_do_the_same_share_a_lane_at_any_size(schedule):
    """16,384 ranks cost no more than as many as there are factors, and take as long where costs are the same."""
    model, cluster = load_shipped_model("resnet50"), load_shipped_cluster("paper64")
    plans = {size: make_plan(schedule, model, cluster, size) for size in (1024, 16384)}
    timelines = {size: simulate(plan, model, cluster) for size, plan in plans.items()}
    factors = len(plans[1024].factors)
    for size, timeline in timelines.items():
        assert sum(timeline.rank_counts.values()) == size
        assert len(timeline.ranks) <= factors + 1
    assert len(timelines[1024].spans) == len(timelines[16384].spans)
    assert timelines[1024].iteration_s == timelines[16384].iteration_s


def test_start_up_times_that_grow_make_broadcasting_everything_the_slowest():
    """mpdkfac's many broadcasts lose to dkfac's inverting everywhere when a ring's start-up has grown enough."""
    model = load_shipped_model("resnet50")
    seconds = {}
    for world_size in (16, 4096):
        cluster = scaled_cluster(load_shipped_cluster("paper64"), world_size, "ring")
        for name in ("dkfac", "mpdkfac"):
            plan = make_plan(NAMED_SCHEDULES[name], model, cluster)
            seconds[name, world_size] = simulated_iteration_s(plan, model, cluster)
    assert seconds["mpdkfac", 16] < seconds["dkfac", 16]
    assert seconds["mpdkfac", 4096] > 2 * seconds["dkfac", 4096]
    assert all(math.isfinite(s) for s in seconds.values())
