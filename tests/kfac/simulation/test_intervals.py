"""Steps in which curvature work is not due: what they take, and what ``auto`` makes of them."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from kfac.choice import choose
from kfac.finals import Finals
from kfac.planning import ClusterProfile, LinearCost, ModelProfile
from kfac.planning.intervals import ALL_DUE, EVERY_STEP, Due, Intervals
from kfac.planning.shipped_profiles import load_shipped_cluster, load_shipped_model
from kfac.schedules import make_plan, search
from kfac.simulation import simulate, simulated_iteration_s, simulated_second_order_s
from kfac.simulation.iteration import _iteration_s, _run
from tests.kfac.simulation.test_contention import random_cluster, random_model

SAME_MATHEMATICS = ("dkfac", "mpdkfac", "spdkfac")


@pytest.mark.parametrize(("factor", "inverse"), [(1, 1), (1, 10), (5, 10), (10, 10), (2, 3), (10, 4)])
def test_shares_are_how_often_each_step_occurs(factor, inverse):
    intervals = Intervals(factor, inverse)
    steps = [intervals.at(step) for step in range(6 * factor * inverse)]
    assert intervals.shares == pytest.approx({due: steps.count(due) / len(steps) for due in set(steps)})
    assert steps[0] == ALL_DUE


@pytest.mark.parametrize("bad", [0, -1, 1.5, True, "often"])
def test_an_impossible_interval_is_named(bad):
    with pytest.raises(ValueError, match="inverse_interval"):
        Intervals(1, bad)


def costless(model: ModelProfile, cluster: ClusterProfile, gradients: set[float], due: Due):
    """Profiles by which what is not due takes no time; messages of gradients are told by their sizes."""
    layers = model.layers
    if not due.statistics:
        layers = tuple(replace(layer, a_statistics_s=0, g_statistics_s=0) for layer in layers)

    def only_gradients(cost):
        return lambda elements: cost(elements) if elements in gradients else 0

    costs = {}
    if not due.statistics:
        costs = {"all_reduce": only_gradients(cluster.all_reduce), "reduce": lambda _: 0}
    if not due.inverses:
        costs |= {"inverse": lambda _: 0, "broadcast": only_gradients(cluster.broadcast)}
    return replace(model, layers=layers), replace(cluster, **costs)


@pytest.mark.parametrize("due", [Due(True, False), Due(False, True), Due(False, False)])
@pytest.mark.parametrize(
    "switches",
    [
        {"placement": "non_dist"},
        {"placement": "seq_dist", "inverse_broadcast": "after_all"},
        {"placement": "seq_dist", "factor_collective": "reduce_to_owner"},
        {"placement": "optimized", "gradient_worker_fraction": 0.0},
        {"placement": "optimized", "gradient_worker_fraction": 0.5},
    ],
    ids=str,
)
def test_what_is_not_due_takes_no_time_and_the_rest_its_own(switches, due):
    dice = random.Random(5)
    for _ in range(15):
        model, cluster = random_model(dice), random_cluster(dice, 3)
        plan = make_plan({"name": "dkfac", **switches}, model, cluster)
        layers = [layer for layer in model.layers if layer.has_factors]
        sizes = {m.elements for m in plan.messages if m.kind == "gradient"}
        sizes |= {sum(layers[k].matrix_elements for k in group) for group in plan.gradient_messages}
        found_s = _iteration_s(_run(plan, model, cluster, due)[1], model)
        whole_s = simulate(plan, model, cluster).iteration_s
        others = {m.elements for m in plan.messages if m.kind != "gradient"} | {plan.summary_elements}
        others |= {sum(plan.factors[i].elements for i in group) for group in plan.inverse_messages}
        if not sizes & others:
            assert found_s == simulate(plan, *costless(model, cluster, sizes, due)).iteration_s
        assert found_s < whole_s


def test_the_mean_is_that_of_the_steps():
    dice = random.Random(6)
    for _ in range(10):
        model, cluster = random_model(dice), random_cluster(dice, 4)
        plan = make_plan({"name": "spdkfac", "inverse_start": "as_ready"}, model, cluster)
        intervals = Intervals(2, 4)
        steps = [_iteration_s(_run(plan, model, cluster, intervals.at(step))[1], model) for step in range(8)]
        assert simulated_iteration_s(plan, model, cluster, intervals) == pytest.approx(sum(steps) / 8)
        assert simulated_iteration_s(plan, model, cluster) == steps[0] == max(steps)
        rare_s = simulated_second_order_s(plan, model, cluster, Intervals(1, 10**6))
        assert rare_s < simulated_second_order_s(plan, model, cluster)


@pytest.mark.parametrize(
    ("name", "layers", "interval"), [("resnet50", 60, 4), ("resnet50", 60, 10), ("resnet152", 30, 10)]
)
def test_auto_is_not_slower_in_the_mean_where_curvature_is_rare(name, layers, interval):
    """Planned for steps with all of it, the whole ResNet-152 takes 1.6 times as long as under spdkfac."""
    whole, cluster = load_shipped_model(name), load_shipped_cluster("paper64")
    model, intervals = replace(whole, layers=whole.layers[-layers:]), Intervals(interval, interval)
    named = {
        key: simulated_iteration_s(make_plan(key, model, cluster), model, cluster, intervals)
        for key in SAME_MATHEMATICS
    }
    plan = make_plan("auto", model, cluster, intervals=intervals)
    assert simulated_iteration_s(plan, model, cluster, intervals) <= min(named.values()) * (1 + 1e-12)
    if name == "resnet152":
        for_all = search({}, model, cluster).plan
        assert simulated_iteration_s(for_all, model, cluster, intervals) > 1.2 * min(named.values())


def test_a_choice_says_for_which_steps_it_is():
    model, cluster = random_model(random.Random(1)), random_cluster(random.Random(1), 2)
    seconds = {"all_reduce": LinearCost(1e-3, 1e-9), "broadcast": LinearCost(1e-3, 1e-9)}
    choice = choose("auto", model, replace(cluster, **seconds), intervals=Intervals(5, 10))
    assert "in the mean (statistics every 5, inverses every 10 steps)" in str(choice)
    assert choice.to_dict()["intervals"] == {"factor": 5, "inverse": 10}
    assert "in the mean" not in str(choose("auto", model, replace(cluster, **seconds)))


class Alone:
    def all_gather_object(self, value):
        return [value]


def test_turns_are_judged_by_the_mean_over_their_steps():
    """The plan that is quicker with inversions is slower without them, and there are more of these."""
    takes = {"a": {True: 10.0, False: 5.0}, "b": {True: 12.0, False: 4.0}}
    intervals = Intervals(1, 4)
    finals = Finals({"a": None, "b": None}, turns=2, counted=2, intervals=intervals)
    step = 1
    while not finals.over:
        name = next(key for key, plan in takes.items() if finals._order[finals._turn] == key)
        due = intervals.at(step)
        slow = 100.0 if not finals._seen else 0.0  # not pipelined yet: must not count
        finals.note(takes[name][due.inverses] + slow, due)
        step += 1
    found = finals.seconds(Alone())
    assert found == pytest.approx({"b": 12 / 4 + 4 * 3 / 4, "a": 10 / 4 + 5 * 3 / 4})
    assert list(found) == ["b", "a"]
    assert step - 1 == 2 * 2 * 3 * 4, "each turn has three steps with inversions, of which two count"


def test_every_step_is_what_it_was():
    assert EVERY_STEP.shares == {ALL_DUE: 1.0}
    assert math.isclose(sum(Intervals(3, 7).shares.values()), 1)
