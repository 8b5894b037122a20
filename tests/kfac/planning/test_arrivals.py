"""When sums arrive, and the order of inversions then."""

import itertools
import random
from dataclasses import replace

import pytest

from kfac.planning.arrivals import Arrivals, in_order_of_arrival, plan_arrivals
from kfac.planning.shipped_profiles import load_shipped_cluster, load_shipped_model
from kfac.schedules import make_plan
from kfac.simulation import simulate, simulated_iteration_s
from kfac.timeline import COMMUNICATION_LANE
from tests.kfac.simulation.cases import random_cluster, random_model, random_schedule

ALL_REDUCED = {"curvature": True, "factor_collective": "all_reduce", "message_dtype": "full"}


def test_arrivals_are_those_of_the_simulator():
    dice = random.Random(1)
    late = 0
    for _ in range(60):
        model, cluster = random_model(dice), random_cluster(dice, dice.randint(2, 5))
        plan = make_plan(replace(random_schedule(dice), **ALL_REDUCED), model, cluster)
        found = plan_arrivals(plan.messages, plan.factors, model, cluster.all_reduce)
        timeline = simulate(plan, model, cluster)
        end = max(s.end_s for s in timeline.spans if s.kind == "BP")
        sent = {s.name: s.end_s for s in timeline.spans if s.lane == COMMUNICATION_LANE}
        of_factor = {}
        for number, message in enumerate(plan.messages):
            arrived = sent[f"{message.kind} message {number} ({len(message.items)} items)"]
            of_factor |= dict.fromkeys(message.factors, arrived)
            late = max(late, arrived - end)
        for i, there in enumerate(found.there_s):
            assert there == pytest.approx(max(0.0, of_factor[i] - end, of_factor[i ^ 1] - end))
        last = max(sent[f"{m.kind} message {n} ({len(m.items)} items)"] for n, m in enumerate(plan.messages))
        assert found.channel_free_s == pytest.approx(max(0.0, last - end))
    assert late > 0


def finish_s(order, arrived, invert):
    now = 0.0
    for i in order:
        now = max(now, arrived[i]) + invert[i]
    return now


def test_one_rank_never_ends_later_than_in_any_other_order():
    dice = random.Random(2)
    gained = 0
    for _ in range(200):
        count = dice.randint(1, 6)
        arrived = [dice.choice((0, 0, dice.randint(0, 20))) for _ in range(count)]
        invert = {i: dice.randint(1, 6) for i in range(count)}
        order = list(range(count))
        dice.shuffle(order)
        found = in_order_of_arrival(order, arrived, invert, dict.fromkeys(range(count), 1.0))
        every = [finish_s(other, arrived, invert) for other in itertools.permutations(range(count))]
        assert finish_s(found, arrived, invert) == min(every)
        waited = Arrivals(tuple(arrived), 0.0).waiting_s(list(invert.values()))
        assert waited == min(every) - sum(invert.values())
        gained += min(every) < max(every)
    assert gained > 50


def test_what_has_arrived_keeps_its_order():
    order = (3, 1, 0, 2)
    nothing = dict.fromkeys(range(4), 1.0)
    assert in_order_of_arrival(order, [0.0] * 4, nothing, nothing) == order
    assert in_order_of_arrival(order, [0.0, 0.0, 0.0, 5.0], nothing, nothing) == (1, 0, 2, 3)


def test_inversions_that_start_early_pay_where_channels_are_slow():
    """ResNet-152 on four ranks whose all-reduce takes three times that of the paper's cluster."""
    model, paper = load_shipped_model("resnet152"), load_shipped_cluster("paper64").at(4)
    cluster = replace(paper, all_reduce=lambda n: 3 * paper.all_reduce(n))
    seconds = {
        start: simulated_iteration_s(
            make_plan({"name": "auto", "factor_collective": "all_reduce", "inverse_start": start}, model, cluster),
            model,
            cluster,
        )
        for start in ("after_all", "as_ready")
    }
    assert seconds["as_ready"] < 0.95 * seconds["after_all"]
