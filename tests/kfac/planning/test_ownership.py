"""Who inverts and preconditions what, and what travels of it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from kfac.planning import ClusterProfile, LayerProfile, LinearCost, ModelProfile, PolynomialCost, ScheduleConfig
from kfac.planning.shipped_profiles import load_shipped_cluster, load_shipped_model
from kfac.schedules import make_plan
from kfac.simulation import simulated_second_order_s

CUBIC = PolynomialCost((2.5e-4, 0, 0, 0.54e-3))


def cluster(world_size=4, alpha=1e-3, beta=2e-9):
    half = LinearCost(alpha / 2, beta / 2)
    return ClusterProfile(
        world_size=world_size, all_reduce=LinearCost(alpha, beta), reduce=half, broadcast=half, inverse=CUBIC
    )


def random_model(seed, layers=12):
    dice = random.Random(seed)
    return ModelProfile(
        name="random",
        layers=tuple(
            LayerProfile(
                name=f"l{k}",
                a_dim=dice.randint(1, 900),
                g_dim=dice.randint(1, 300),
                gradient_elements=900 * 300,
                forward_s=dice.random() / 100,
                backward_s=dice.random() / 50,
                precondition_s=dice.random() / 100,
            )
            for k in range(layers)
        ),
    )


def share_held(plan):
    """The mean over ranks of the share of the inverses' elements that they hold."""
    of = [f.elements for f in plan.factors]
    holders = [plan.world_size if plan.gradient_owner[i // 2] is None else 1 for i in range(len(of))]
    return sum(n * h for n, h in zip(of, holders, strict=True)) / (plan.world_size * sum(of))


@pytest.mark.parametrize("placement", ["seq_dist", "lbp", "optimized"])
@pytest.mark.parametrize("fraction", [0.0, 0.3, 0.5, 0.8, 1.0])
def test_ranks_hold_the_share_of_the_inverses_that_was_asked_for(placement, fraction):
    model = random_model(1)
    plan = make_plan({"placement": placement, "gradient_worker_fraction": fraction}, model, cluster())
    assert share_held(plan) <= max(fraction, 1 / plan.world_size) + 1e-12
    owned = [k for k, owner in enumerate(plan.gradient_owner) if owner is not None]
    of = [plan.factors[2 * k].elements + plan.factors[2 * k + 1].elements for k in range(len(plan.gradient_owner))]
    assert sorted(of, reverse=True)[: len(owned)] == sorted((of[k] for k in owned), reverse=True), "the widest layers"
    if 0 < fraction < 1:  # no more of them than needed
        least = min(owned, key=lambda k: of[k])
        assert share_held(plan) + of[least] * (1 - 1 / plan.world_size) / sum(of) > fraction
    if fraction == 0:
        assert None not in plan.gradient_owner
    if fraction == 1:
        assert set(plan.gradient_owner) == {None}


def test_layers_go_to_the_rank_with_the_least_work():
    model = random_model(2, layers=40)
    plan = make_plan({"placement": "lbp", "gradient_worker_fraction": 0.0}, model, cluster())
    work = [0.0] * 4
    for k, owner in enumerate(plan.gradient_owner):
        work[owner] += sum(CUBIC(f.dim) for f in plan.factors[2 * k : 2 * k + 2]) + model.layers[k].precondition_s
    assert max(work) <= 1.1 * sum(work) / 4
    # Broadcasts leave in the order in which their owners are done.
    finished = [work[plan.gradient_owner[group[0]]] for group in plan.gradient_messages]
    assert finished == sorted(finished)
    turns = make_plan({"placement": "seq_dist", "gradient_worker_fraction": 0.0}, model, cluster())
    assert turns.gradient_owner == tuple(k % 4 for k in range(40))


def test_short_layers_share_a_rank_where_a_long_one_takes_longer_anyway():
    layers = (300, *[100] * 30)
    model = ModelProfile(
        name="one wide",
        layers=tuple(
            LayerProfile(name=f"l{k}", a_dim=d, g_dim=d, gradient_elements=d * d) for k, d in enumerate(layers)
        ),
    )
    # The wide one takes 0.54 s, each other 0.02 s: on three ranks they are done in time, on one they are not.
    slow = replace(cluster(32, alpha=0.01), inverse=lambda d: d**3 / 1e8)
    for rule, owners in (("lbp", 31), ("optimized", 4)):
        plan = make_plan({"placement": rule, "gradient_worker_fraction": 0.0}, model, slow)
        assert len(plan.gradient_messages) == owners
        assert plan.gradient_messages[-1] == (0,)


@pytest.mark.parametrize("profile", ["random", "resnet50"])
@pytest.mark.parametrize("alpha", [1e-5, 1e-3])
@pytest.mark.parametrize("late", ["as_ready", "after_all"])
def test_planned_broadcasts_end_no_later_than_single_ones_or_one_per_owner(profile, alpha, late):
    model, on = random_model(3) if profile == "random" else load_shipped_model(profile), cluster(8, alpha)
    seconds, groups = {}, {}
    for how in ("none", "owner", "planned"):
        switches = {"placement": "seq_dist", "inverse_fusion": how, "inverse_broadcast": late}
        plan = make_plan(switches, model, on)
        seconds[how], groups[how] = simulated_second_order_s(plan, model, on), len(plan.inverse_messages)
    assert seconds["planned"] <= min(seconds.values()) * (1 + 1e-9)
    assert groups["owner"] == 8
    assert groups["owner"] <= groups["planned"] <= groups["none"]


def test_sums_go_to_the_ranks_that_need_them():
    model = random_model(4)
    for fusion in ("none", "threshold", "greedy", "optimal"):
        for pipelining in ("layerwise", "none"):
            switches = {"fusion": fusion, "pipelining": pipelining, "placement": "seq_dist"}
            plan = make_plan({**switches, "factor_collective": "reduce_to_owner"}, model, cluster())
            for message in plan.messages:
                assert all(plan.inverse_owner[i] == message.root for i in message.factors)
            assert any(message.root is None for message in plan.messages)
            assert plan.factor_holder == plan.inverse_owner


def test_bytes_decide_when_a_message_is_full():
    """Twice as many elements of two bytes fit below a threshold, and take half the time each."""
    model = random_model(5)
    switches = {"fusion": "threshold", "threshold_bytes": 2**20, "pipelining": "none"}
    full, half = (make_plan({**switches, "message_dtype": dtype}, model, cluster()) for dtype in ("full", "bfloat16"))
    sizes = [[m.elements for m in plan.messages if m.kind == "A" and len(m.items) > 1] for plan in (full, half)]
    assert max(sizes[0]) <= 2**18 < max(sizes[1]) <= 2**19


def test_auto_reduces_to_owners_where_that_is_faster_and_keeps_what_is_fixed():
    model, on = load_shipped_model("resnet50"), load_shipped_cluster().at(16)
    free = make_plan("auto", model, on)
    assert free.schedule.factor_collective != "none"
    assert free.schedule.message_dtype == "full"
    fixed = make_plan({"name": "auto", "factor_collective": "all_reduce", "gradient_worker_fraction": 1.0}, model, on)
    assert fixed.schedule == replace(
        fixed.schedule, factor_collective="all_reduce", gradient_worker_fraction=1.0, message_dtype="full"
    )
    local = make_plan({"name": "auto", "factor_collective": "none", "gradient_worker_fraction": 0.0}, model, on)
    assert local.schedule.factor_collective == "none"


@pytest.mark.parametrize(
    ("switches", "message"),
    [
        ({"placement": "non_dist", "gradient_worker_fraction": 0.5}, "with placement=non_dist every rank inverts"),
        ({"factor_collective": "none"}, "factor_collective=none needs gradient_worker_fraction=0"),
        ({"gradient_worker_fraction": 1.5}, "gradient_worker_fraction=1.5 is a share, from 0 to 1"),
        ({"gradient_worker_fraction": "half"}, "schedule.gradient_worker_fraction must be finite"),
        ({"gradient_worker_fraction": -0.1}, "schedule.gradient_worker_fraction must be finite and not negative"),
        ({"message_dtype": "float16"}, "message_dtype='float16' is not one of: full, bfloat16"),
        (
            {"factor_collective": "none", "gradient_worker_fraction": 0, "message_dtype": "bfloat16"},
            "message_dtype is of factors that travel",
        ),
    ],
)
def test_switches_under_which_ranks_would_diverge_are_refused(switches, message):
    with pytest.raises(ValueError, match=message):
        make_plan(switches, random_model(6), cluster())


def test_a_share_is_a_number_whatever_its_type():
    assert ScheduleConfig(gradient_worker_fraction=0) == ScheduleConfig(gradient_worker_fraction=0.0)
    assert repr(ScheduleConfig(gradient_worker_fraction=1).gradient_worker_fraction) == "1.0"
