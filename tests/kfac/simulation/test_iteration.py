"""The simulated iteration: against a second statement of the engine's steps, and its laws."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from kfac.planning import (
    ClusterProfile,
    LayerProfile,
    LinearCost,
    ModelProfile,
    ScheduleConfig,
)
from kfac.schedules import NAMED_SCHEDULES, make_plan
from kfac.simulation import iteration, simulate
from kfac.timeline import COMMUNICATION_LANE, COMPUTE_LANE
from tests.kfac.simulation.cases import FREE, cases, random_cluster, random_model


def walk(plan, model, cluster):
    """The engine's steps with a clock per rank and one for the channel: every rank by itself, no shared lanes, no
    events. Returns the iteration's seconds."""
    layers = {layer.name: layer for layer in model.layers}
    factor = {(f.layer, f.side): i for i, f in enumerate(plan.factors)}
    covered = [name for name in plan.layers if (name, "A") in factor]
    alone, everyone = plan.world_size == 1, range(plan.world_size)
    local = plan.schedule.factor_collective == "none" and not alone
    ready, clocks = {}, []
    for rank in everyone:
        mine = {name for k, name in enumerate(covered) if not local or plan.gradient_owner[k] == rank}
        clock = 0
        for name in plan.layers:
            clock += layers[name].forward_s
            if name in mine:
                clock += layers[name].a_statistics_s
                ready["A", factor[name, "A"], rank] = clock
        clock += model.loss_s
        for k in reversed(range(len(plan.layers))):
            name = plan.layers[k]
            if name in mine:
                clock += layers[name].g_statistics_s
                ready["G", factor[name, "G"], rank] = clock
            clock += layers[name].backward_s
            ready["gradient", k, rank] = clock
        clocks.append(clock)
    channel, clock = 0, max(clocks)
    arrived = {}
    if not alone:
        for message in plan.messages:
            issued = max(ready[message.kind, i, rank] for i in message.items for rank in everyone)
            issued = clock if message.release == "step" else issued
            half = message.kind != "gradient" and plan.schedule.message_dtype == "bfloat16"
            cost = cluster.all_reduce if message.root is None else cluster.reduce
            channel = max(channel, issued) + cost(message.elements / (2 if half else 1))
            arrived |= dict.fromkeys(message.factors, channel)
        rooted = any(message.root is not None for message in plan.messages)
        if covered and (rooted or local or plan.schedule.message_dtype == "bfloat16"):
            channel = max(channel, clock) + cluster.all_reduce(2 * len(plan.factors))
    begin, clock = clock, max(clock, channel)
    if not plan.schedule.curvature:
        return clock + model.update_s
    # Per rank: the moment at which it reaches each broadcast. First the inverses that all need, then own layers.
    private = [not alone and owner is not None for owner in plan.gradient_owner]
    walks = []
    for rank in everyone:
        early = plan.schedule.inverse_start == "as_ready" and not alone
        now, when, left, late = begin if early else clock, {}, {i: g for g in plan.inverse_messages for i in g}, []
        done = set()
        for i in plan.inverse_sequence:
            if private[i // 2]:
                continue
            if plan.inverse_owner[i] in (None, rank):
                now = max(now, arrived[i], arrived[i ^ 1]) if early else now
                now += cluster.inverse(plan.factors[i].dim)
            done.add(i)
            if not alone and i in left and done.issuperset(left[i]):
                when[left[i]] = now
                late.append(left[i])
        if plan.schedule.inverse_broadcast == "after_all":
            when = dict.fromkeys(late, now)
        for group in () if alone else plan.gradient_messages:
            if plan.gradient_owner[group[0]] == rank:
                now = max(now, clock)
                for k in group:
                    now += sum(cluster.inverse(plan.factors[i].dim) for i in (2 * k, 2 * k + 1))
                    now += layers[covered[k]].precondition_s
            when["gradient", group] = now
        walks.append((when, now))
    inverses_there = clock
    for what in walks[0][0]:
        start = max(channel, *(when[what] for when, _ in walks))
        if what[0] == "gradient":
            seconds = cluster.broadcast(sum(layers[covered[k]].matrix_elements for k in what[1]))
        else:
            seconds = cluster.broadcast(sum(plan.factors[i].elements for i in what))
        channel = start + seconds
        if what[0] != "gradient":
            inverses_there = channel
    work = sum(layers[name].precondition_s for k, name in enumerate(covered) if not private[k])
    ends = [max(now, inverses_there) + work for _, now in walks]
    return max(channel, *ends) + model.update_s


def test_equals_the_engines_steps_walked_rank_by_rank():
    for plan, model, cluster in cases(seed=1, count=400):
        assert simulate(plan, model, cluster).iteration_s == walk(plan, model, cluster)


def test_lanes_are_never_double_booked_and_work_waits_for_what_it_needs():
    began_early = 0
    for plan, model, cluster in cases(seed=4, count=150):
        timeline = simulate(plan, model, cluster)
        for rank in timeline.ranks:
            lanes = {
                lane: [s for s in timeline.spans if s.rank == rank and s.lane == lane]
                for lane in (COMPUTE_LANE, COMMUNICATION_LANE)
            }
            for spans in lanes.values():
                assert all(a.end_s <= b.start_s for a, b in pairwise(spans))
            named = {(s.kind, s.name): s for s in lanes[COMPUTE_LANE]}
            backward_end = max(s.end_s for s in lanes[COMPUTE_LANE] if s.kind == "BP")
            sent = {s.name: s for s in lanes[COMMUNICATION_LANE]}
            arrived, of_factor = backward_end, {}
            for number, message in enumerate(plan.messages if plan.world_size > 1 else ()):
                span = sent[f"{message.kind} message {number} ({len(message.items)} items)"]
                half = message.kind != "gradient" and plan.schedule.message_dtype != "full"
                cost = cluster.all_reduce if message.root is None else cluster.reduce
                assert span.duration_s == pytest.approx(cost(message.elements / (2 if half else 1)))
                arrived = max(arrived, span.end_s)
                of_factor |= dict.fromkeys(message.factors, span.end_s)
                if message.release == "step":
                    assert span.start_s >= backward_end
                for i in message.items:
                    if message.kind == "gradient":
                        source = named["BP", plan.layers[i]]
                    else:
                        source = named["FactorComp", f"{message.kind} {plan.factors[i].layer}"]
                    assert span.start_s >= source.end_s
            inversions = [s for s in lanes[COMPUTE_LANE] if s.kind == "InverseComp"]
            for i, factor in enumerate(plan.factors):
                span = named.get(("InverseComp", f"invert {factor.side} of {factor.layer}"))
                early = plan.schedule.inverse_start == "as_ready" and plan.gradient_owner[i // 2] is None and of_factor
                there = max(backward_end, of_factor[i], of_factor[i ^ 1]) if early else arrived
                assert span is None or span.start_s >= there
                began_early += span is not None and span.start_s < arrived
            assert len(inversions) == (len(plan.inverted_by(rank)) if plan.schedule.curvature else 0)
            for s in lanes[COMPUTE_LANE]:
                k = next((k for k in range(len(plan.gradient_owner)) if plan.factors[2 * k].layer == s.name), 0)
                if s.kind == "Precondition" and plan.solution_holder(2 * k) is None:
                    inverses = [other for other in sent.values() if other.kind == "InverseComm"]
                    assert all(s.start_s >= other.end_s for other in (*inversions, *inverses))
                elif s.kind == "Precondition":
                    own = [named["InverseComp", f"invert {side} of {s.name}"] for side in "AG"]
                    assert all(s.start_s >= other.end_s for other in own)
            for group in plan.inverse_messages if plan.world_size > 1 else ():
                if plan.inverse_owner[group[0]] == rank:
                    place = {i: p for p, i in enumerate(plan.inverse_sequence)}
                    span = sent[plan.broadcast_name(sorted(group, key=place.get))]
                    for factor in (plan.factors[i] for i in group):
                        assert span.start_s >= named["InverseComp", f"invert {factor.side} of {factor.layer}"].end_s
            for group in plan.gradient_messages if plan.world_size > 1 else ():
                if plan.gradient_owner[group[0]] == rank:
                    for k in group:
                        span = named["Precondition", plan.factors[2 * k].layer]
                        assert sent[plan.gradient_name(group)].start_s >= span.end_s
    assert began_early > 20


def test_dearer_work_never_ends_earlier():
    dice = random.Random(5)
    for plan, model, cluster in cases(seed=5, count=150):
        before = simulate(plan, model, cluster).iteration_s
        k = dice.randrange(len(model.layers))
        field = dice.choice(("forward_s", "backward_s", "a_statistics_s", "g_statistics_s", "precondition_s"))
        layer = replace(model.layers[k], **{field: getattr(model.layers[k], field) + 2})
        slower = replace(model, layers=(*model.layers[:k], layer, *model.layers[k + 1 :]))
        assert simulate(plan, slower, cluster).iteration_s >= before
        for kind in ("all_reduce", "reduce", "broadcast", "inverse"):
            cost = getattr(cluster, kind)
            dearer = replace(cluster, **{kind: lambda n, cost=cost: cost(n) + 1})
            assert simulate(plan, model, dearer).iteration_s >= before


def test_free_communication_leaves_the_computing_of_the_slowest_rank():
    for plan, model, cluster in cases(seed=6, count=100):
        free = replace(cluster, all_reduce=FREE, reduce=FREE, broadcast=FREE)
        passes = model.loss_s + model.update_s + sum(layer.forward_s + layer.backward_s for layer in model.layers)
        layers = [layer for layer in model.layers if layer.has_factors and plan.schedule.curvature]
        own = range(plan.world_size)
        statistics = max(
            sum(layers[k].a_statistics_s + layers[k].g_statistics_s for k in plan.statistics_of(rank)) for rank in own
        )
        inverting = max(
            sum(cluster.inverse(plan.factors[i].dim) for i in plan.inverted_by(rank))
            + sum(layers[k].precondition_s for k in range(len(layers)) if plan.solution_holder(2 * k) in (None, rank))
            for rank in own
        )
        iteration_s = simulate(plan, model, free).iteration_s
        if all(owner is None for owner in plan.gradient_owner):
            assert iteration_s == passes + statistics + inverting
        else:  # ranks wait for the inverses of others between what they precondition alone and the rest
            assert iteration_s >= passes + statistics + inverting


def test_one_rank_sends_nothing():
    dice = random.Random(7)
    model, cluster = random_model(dice), random_cluster(dice, 8)
    for name in NAMED_SCHEDULES:
        timeline = simulate(make_plan(name, model, cluster, world_size=1), model, cluster)
        assert {s.lane for s in timeline.spans} == {COMPUTE_LANE}


def test_the_breakdown_accounts_for_the_whole_iteration():
    for plan, model, cluster in cases(seed=8, count=60):
        timeline = simulate(plan, model, cluster)
        breakdown = timeline.breakdown_s()
        assert sum(breakdown.values()) == pytest.approx(timeline.iteration_s)
        assert breakdown["FF"] == pytest.approx(sum(layer.forward_s for layer in model.layers))
        assert breakdown["Other"] >= model.update_s
        assert timeline.source == "simulated"


def test_layerwise_pipelining_hides_what_sending_afterwards_exposes():
    layers = tuple(
        LayerProfile(name=f"l{k}", a_dim=8, g_dim=8, gradient_elements=10, forward_s=4, backward_s=8) for k in range(4)
    )
    model = ModelProfile(name="m", layers=layers)
    cluster = ClusterProfile(
        world_size=2, all_reduce=LinearCost(1, 1 / 36), reduce=FREE, broadcast=FREE, inverse=lambda d: 1
    )
    hidden, exposed = (
        simulate(make_plan(ScheduleConfig(pipelining=how, fusion="none"), model, cluster), model, cluster)
        for how in ("layerwise", "none")
    )
    assert exposed.hidden_s()["FactorComm"] == 0
    assert exposed.breakdown_s()["FactorComm"] == pytest.approx(16)  # eight factors, two seconds each
    # A and G of the layers travel while later layers compute; only the last gradient's message is left over.
    assert hidden.breakdown_s()["FactorComm"] == 0
    assert hidden.hidden_s()["FactorComm"] == pytest.approx(16)


def test_ranks_that_do_the_same_share_lanes():
    dice = random.Random(9)
    model = ModelProfile(
        name="m",
        layers=tuple(
            LayerProfile(name=f"l{k}", a_dim=dice.randint(20, 90), g_dim=dice.randint(20, 90), gradient_elements=1)
            for k in range(20)
        ),
    )
    cluster = ClusterProfile(
        world_size=16384,
        all_reduce=LinearCost(1, 0.01),
        reduce=FREE,
        broadcast=LinearCost(1, 0.01),
        inverse=lambda d: d / 4,
    )
    for name in ("dkfac", "mpdkfac", "spdkfac", "auto"):
        plan = make_plan(name, model, cluster)
        timeline = simulate(plan, model, cluster)
        assert sum(timeline.rank_counts.values()) == 16384
        assert set(timeline.rank_counts) == set(timeline.ranks)
        assert len(timeline.ranks) == 1 + len({o for o in plan.inverse_owner if o is not None})
        assert max(timeline.rank_counts.values()) >= 16384 - 40


def test_a_plan_for_another_model_is_an_error():
    dice = random.Random(10)
    model, cluster = random_model(dice), random_cluster(dice, 2)
    plan = make_plan("spdkfac", model, cluster)
    with pytest.raises(ValueError, match="layer 0 is 'l0' in the plan, 'l1' in the model"):
        simulate(plan, replace(model, layers=model.layers[1:]), cluster)
    k = next(k for k, layer in enumerate(model.layers) if layer.has_factors)
    for key, message in (("a_dim", f"A of layer 'l{k}'"), ("gradient_elements", "gradient message")):
        other = replace(model.layers[k], **{key: getattr(model.layers[k], key) + 1})
        with pytest.raises(ValueError, match=message):
            simulate(plan, replace(model, layers=(*model.layers[:k], other, *model.layers[k + 1 :])), cluster)


@pytest.mark.parametrize("name", ["all_reduce", "broadcast", "inverse"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0, None])
def test_a_cost_that_is_no_number_of_seconds_is_named(name, bad):
    dice = random.Random(11)
    model, cluster = random_model(dice), random_cluster(dice, 2)
    plan = make_plan("mpdkfac", model, cluster)
    with pytest.raises(ValueError, match=rf"cost {name}\(\d+\) must be finite and not negative"):
        simulate(plan, model, replace(cluster, **{name: lambda size: bad}))


def test_a_task_graph_grows_with_the_factors_not_with_ranks_times_layers():
    """Preconditioning that begins everywhere at once is one task per layer: what bounds the time of large worlds."""
    layers = tuple(LayerProfile(name=f"l{k}", a_dim=2 + k, g_dim=2, gradient_elements=1) for k in range(100))
    cluster = ClusterProfile(world_size=4096, all_reduce=FREE, reduce=FREE, broadcast=FREE, inverse=lambda d: d)
    model = ModelProfile(name="m", layers=layers)
    graph = iteration._Graph(make_plan("mpdkfac", model, cluster), model, cluster)
    graph.build()
    assert len(graph.tasks) < 10 * len(layers)
    assert sum(len(task.after) for task in graph.tasks) < 20 * len(layers)
