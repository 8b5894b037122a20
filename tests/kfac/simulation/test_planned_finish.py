"""What the planners promise is what the simulator says: each planner's own arithmetic against the event simulator."""

import random
from dataclasses import replace

import pytest

from kfac.planning import (
    ClusterProfile,
    LayerProfile,
    LinearCost,
    ModelProfile,
    ScheduleConfig,
    fusion_finish_s,
    placement_finish_s,
    plan_placement,
)
from kfac.planning.joint_fusion import Family, Sent, joint_finish_s
from kfac.planning.placement import sequence_finish_s
from kfac.planning.ready_times import ready_times
from kfac.planning.schedule_config import CHOICES
from kfac.schedules import make_plan
from kfac.simulation import simulate
from kfac.timeline import COMMUNICATION_KINDS
from tests.kfac.simulation.cases import FREE, random_cluster, random_model


def test_fusion_planner_and_simulator_agree_to_the_last_bit():
    dice = random.Random(2)
    for _ in range(60):
        layers = tuple(
            LayerProfile(name=f"l{k}", a_dim=dice.randint(1, 40), g_dim=1, gradient_elements=1, forward_s=dice.random())
            for k in range(8)
        )
        model = ModelProfile(name="m", layers=layers)
        all_reduce = LinearCost(dice.random(), dice.random() / 100)
        cluster = ClusterProfile(world_size=4, all_reduce=all_reduce, reduce=FREE, broadcast=FREE, inverse=FREE)
        for rule in CHOICES["fusion"]:
            plan = make_plan(ScheduleConfig(fusion=rule, threshold_bytes=2000), model, cluster)
            groups = [tuple(i // 2 for i in m.items) for m in plan.messages if m.kind == "A"]
            ready, now = [], 0.0
            for layer in layers:
                now += layer.forward_s
                ready.append(now)
            elements = [layer.a_dim * (layer.a_dim + 1) // 2 for layer in layers]
            spans = [s for s in simulate(plan, model, cluster).spans if s.name.startswith("A message")]
            assert max(s.end_s for s in spans) == fusion_finish_s(groups, ready, elements, all_reduce)


def test_placement_planner_and_simulator_agree_to_the_last_bit():
    dice = random.Random(3)
    for _ in range(12):
        dims = [dice.randint(2, 30) for _ in range(12)]
        layers = tuple(
            LayerProfile(name=f"l{k}", a_dim=dims[2 * k], g_dim=dims[2 * k + 1], gradient_elements=0) for k in range(6)
        )
        model = ModelProfile(name="m", layers=layers)
        cluster = ClusterProfile(
            world_size=dice.choice((2, 3, 8)),
            all_reduce=FREE,
            reduce=FREE,
            broadcast=LinearCost(dice.random(), dice.random() / 50),
            inverse=lambda d: d**1.7,
        )
        for rule in CHOICES["placement"]:
            for late in CHOICES["inverse_broadcast"]:
                plan = make_plan(ScheduleConfig(placement=rule, inverse_broadcast=late), model, cluster)
                finish = simulate(plan, model, cluster).iteration_s
                walked = sequence_finish_s(
                    plan.inverse_owner, plan.inverse_sequence, cluster.world_size, dims, cluster, late
                )
                assert finish == pytest.approx(walked, rel=1e-12)
                placement = plan_placement(dims, cluster.world_size, cluster, rule)
                alone = placement_finish_s(placement, dims, cluster)
                if rule != "lbp" and late == "as_ready":
                    assert finish == alone
                else:
                    assert finish >= alone * (1 - 1e-12)


def test_the_joint_program_and_the_simulator_agree_to_the_last_bit():
    """A, G and gradients on one channel: when the plan's messages have arrived by the program's own arithmetic."""
    dice = random.Random(6)
    several = earlier = 0
    for _ in range(150):
        model = random_model(dice, dice.randint(1, 7))
        layers = tuple(
            replace(layer, forward_s=dice.random(), backward_s=dice.random(), a_statistics_s=dice.random())
            for layer in model.layers
        )
        model, cluster = replace(model, layers=layers), random_cluster(dice, dice.randint(2, 5))
        plan = make_plan(ScheduleConfig(pipelining="layerwise", fusion="optimal"), model, cluster)
        if not plan.messages:
            continue
        times, place = ready_times(model), {layer: k for k, layer in enumerate(plan.layers)}
        layer_of = [place[factor.layer] for factor in plan.factors]
        ready_s = {
            **{("A", i): times.a_s[k] for i, k in enumerate(layer_of)},
            **{("G", i): times.g_s[k] for i, k in enumerate(layer_of)},
            **{("gradient", k): times.gradient_s[k] for k in range(len(layers))},
        }
        elements = {
            **{(kind, i): factor.elements for kind in "AG" for i, factor in enumerate(plan.factors)},
            **{("gradient", k): layer.gradient_elements for k, layer in enumerate(layers)},
        }
        kinds = ("A", "G", "gradient")
        items = [[i for m in plan.messages if m.kind == kind for i in m.items] for kind in kinds]
        families = [
            Family([ready_s[kind, i] for i in of], [elements[kind, i] for i in of])
            for kind, of in zip(kinds, items, strict=True)
        ]
        sent = [
            Sent(k, tuple(items[k].index(i) for i in message.items))
            for message in plan.messages
            for k in (kinds.index(message.kind),)
        ]
        finish_s = joint_finish_s(sent, families, cluster.all_reduce)
        spans = [s for s in simulate(plan, model, cluster).spans if s.kind in COMMUNICATION_KINDS]
        messages = [s for s in spans if " message " in s.name]
        assert max(s.end_s for s in messages) == finish_s
        several += len({message.kind for message in plan.messages}) == 3
        alone = [Sent(k, (i,)) for k, of in enumerate(items) for i in range(len(of))]
        alone.sort(key=lambda one: families[one.family].ready_s[one.group[0]])
        earlier += finish_s < joint_finish_s(alone, families, cluster.all_reduce)
    assert several > 80
    assert earlier > 40, "fusion matters in many, so the number says something"
