"""The bound on a whole iteration: below every plan, near the best one."""

import random
from dataclasses import replace

import pytest

from kfac.planning.iteration_bound import iteration_lower_bound_s, merged_family, message_families
from kfac.planning.schedule_config import CHOICES
from kfac.planning.shipped_profiles import load_shipped_cluster, load_shipped_model
from kfac.schedules import NAMED_SCHEDULES, make_plan
from kfac.simulation import simulated_iteration_s
from tests.kfac.simulation.cases import random_cluster, random_model, random_schedule

EVERYTHING_EVERYWHERE = {
    "factor_collective": "all_reduce",
    "message_dtype": "full",
    "inverse_fusion": "none",
    "gradient_worker_fraction": 1.0,
}
"""What the bound is for."""


def test_no_simulated_plan_ends_earlier():
    dice = random.Random(1)
    near = dict.fromkeys(CHOICES["inverse_start"], 0)
    for _ in range(80):
        model, cluster = random_model(dice), random_cluster(dice, dice.randint(1, 5))
        drawn = replace(random_schedule(dice), **EVERYTHING_EVERYWHERE)
        for start in near:
            schedule = replace(drawn, inverse_start=start)
            bound = iteration_lower_bound_s(model, cluster, inverse_start=start)
            assert iteration_lower_bound_s(model, cluster) <= bound
            seconds = simulated_iteration_s(make_plan(schedule, model, cluster), model, cluster)
            assert not schedule.curvature or bound <= seconds * (1 + 1e-6)
            near[start] += bound > 0.8 * seconds
    assert all(count > 20 for count in near.values())  # a bound of nothing is valid too


def test_control_the_tighter_bound_is_not_one_for_inversions_that_start_early():
    model, paper = load_shipped_model("resnet152"), load_shipped_cluster("paper64").at(4)
    cluster = replace(paper, all_reduce=lambda n: 3 * paper.all_reduce(n))
    plan = make_plan({"name": "auto", "inverse_start": "as_ready", **EVERYTHING_EVERYWHERE}, model, cluster)
    seconds = simulated_iteration_s(plan, model, cluster)
    assert iteration_lower_bound_s(model, cluster) <= seconds
    assert iteration_lower_bound_s(model, cluster, inverse_start="after_all") > seconds


@pytest.mark.parametrize("key", ["resnet50", "inceptionv4"])
def test_auto_is_within_a_twentieth_of_it_on_the_papers_cluster(key):
    model, cluster = load_shipped_model(key), load_shipped_cluster("paper64")
    bound = iteration_lower_bound_s(model, cluster)
    schedules = {"auto": {"name": "auto", **EVERYTHING_EVERYWHERE}, "dkfac": "dkfac", "less": "auto"}
    seconds = {
        name: simulated_iteration_s(make_plan(schedule, model, cluster), model, cluster)
        for name, schedule in schedules.items()
    }
    assert bound <= seconds["auto"] <= 1.05 * bound
    assert seconds["dkfac"] > 1.3 * bound
    assert seconds["less"] <= seconds["auto"]


def test_families_are_what_plans_carry():
    model, cluster = load_shipped_model("resnet50"), load_shipped_cluster("paper64")
    families = message_families(model)
    for kind, family in families.items():
        plan = make_plan(NAMED_SCHEDULES["spdkfac"], model, cluster)
        assert sum(family.elements) == sum(m.elements for m in plan.messages if m.kind == kind)
    merged = merged_family(list(families.values()))
    assert list(merged.ready_s) == sorted(merged.ready_s)
    assert len(merged.elements) == sum(len(family.elements) for family in families.values())
