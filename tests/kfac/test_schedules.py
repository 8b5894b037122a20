"""Named schedules, how a schedule becomes a Plan, and ``auto``."""

import json
from dataclasses import replace

import pytest

from kfac.planning import (
    ClusterProfile,
    LayerProfile,
    LinearCost,
    ModelProfile,
    Plan,
    PolynomialCost,
    ScheduleConfig,
    plan_placement,
)
from kfac.planning.ready_times import ready_times
from kfac.planning.shipped_profiles import load_shipped_model
from kfac.schedules import NAMED_SCHEDULES, make_plan, resolve_schedule
from kfac.simulation import simulate

CUBIC = PolynomialCost((2.5e-4, 0, 0, 0.54e-3))


def cluster(world_size=4, alpha=1e-3, beta=2e-9, inverse=CUBIC):
    link = LinearCost(alpha, beta)
    half = LinearCost(alpha / 2, beta / 2)
    return ClusterProfile(world_size=world_size, all_reduce=link, reduce=half, broadcast=half, inverse=inverse)


def model():
    """A wide and a narrow layer, one without factors, one more; seconds that differ."""
    return ModelProfile(
        name="four",
        layers=(
            LayerProfile(name="a", a_dim=300, g_dim=64, gradient_elements=19200, forward_s=0.004, backward_s=0.008),
            LayerProfile(
                name="b", a_dim=576, g_dim=128, gradient_elements=73728, a_statistics_s=0.002, backward_s=0.004
            ),
            LayerProfile(name="norm", a_dim=0, g_dim=0, gradient_elements=256, forward_s=0.001, backward_s=0.001),
            LayerProfile(name="c", a_dim=129, g_dim=10, gradient_elements=1290, g_statistics_s=0.001, backward_s=0.003),
        ),
        loss_s=0.001,
    )


def carried(plan, kind):
    return [m.items for m in plan.messages if m.kind == kind]


def test_sgd_sends_gradients_and_nothing_else():
    plan = make_plan("sgd", model(), cluster())
    assert plan.factors == ()
    assert plan.inverse_sequence == ()
    assert {m.kind for m in plan.messages} == {"gradient"}
    assert {m.release for m in plan.messages} == {"ready"}
    assert sum(m.elements for m in plan.messages) == sum(layer.gradient_elements for layer in model().layers)


def test_kfac_is_for_one_process():
    assert make_plan("kfac", model(), cluster(), world_size=1).world_size == 1
    for schedule in ("kfac", {"name": "kfac", "fusion": "threshold"}):
        with pytest.raises(ValueError, match=r"one process, not on 4.*dkfac"):
            make_plan(schedule, model(), cluster())


def test_dkfac_sends_factors_after_the_backward_pass_and_inverts_everything_everywhere():
    plan = make_plan("dkfac", model(), cluster())
    assert [(m.kind, m.release) for m in plan.messages] == [("gradient", "ready"), ("A", "step"), ("G", "step")]
    assert set(plan.inverse_owner) == {None}
    assert [(f.layer, f.side) for f in plan.factors] == [(n, s) for n in "abc" for s in "AG"]


def test_mpdkfac_inverts_round_robin_in_the_order_of_the_layers_and_sends_afterwards():
    plan = make_plan("mpdkfac", model(), cluster())
    assert plan.inverse_owner == (0, 1, 2, 3, 0, 1)
    assert plan.inverse_sequence == (0, 1, 2, 3, 4, 5)
    assert plan.schedule.inverse_broadcast == "after_all"
    assert plan.messages == make_plan("dkfac", model(), cluster()).messages


def test_spdkfac_sends_factors_when_they_are_ready_and_places_by_load():
    on = cluster(alpha=1e-4)
    plan = make_plan("spdkfac", model(), on)
    assert {m.release for m in plan.messages} == {"ready"}
    assert plan.inverse_owner == plan_placement([f.dim for f in plan.factors], 4, on, "lbp").owner
    assert len(set(plan.inverse_owner)) > 1
    # Factors are fused by the greedy rule, gradients as Horovod does it for the paper: here all into one message.
    assert len(carried(plan, "gradient")) == 1


def test_messages_leave_in_the_order_in_which_the_passes_complete_them():
    plan = make_plan({"name": "spdkfac", "fusion": "none"}, model(), cluster())
    order = [(m.kind, *m.items) for m in plan.messages]
    forward = [("A", 0), ("A", 2), ("A", 4)]
    backward = [("G", 5), ("gradient", 3), ("gradient", 2), ("G", 3), ("gradient", 1), ("G", 1), ("gradient", 0)]
    assert order == forward + backward


@pytest.mark.parametrize("fusion", ["none", "threshold", "greedy", "optimal"])
@pytest.mark.parametrize("profile", ["resnet50", "densenet201"])
def test_messages_become_ready_in_the_order_in_which_they_leave(profile, fusion):
    of = load_shipped_model(profile)
    plan = make_plan({"name": "spdkfac", "fusion": fusion, "threshold_bytes": 2**22}, of, cluster(64))
    times = ready_times(of)
    where = {layer.name: k for k, layer in enumerate(of.layers)}

    def ready(m):
        if m.kind == "gradient":
            return max(times.gradient_s[i] for i in m.items)
        seconds = times.a_s if m.kind == "A" else times.g_s
        return max(seconds[where[plan.factors[i].layer]] for i in m.items)

    moments = [ready(m) for m in plan.messages]
    assert moments == sorted(moments)


def test_switches_decide_when_each_kind_leaves():
    def releases(**switches):
        plan = make_plan({"name": "spdkfac", "fusion": "optimal", **switches}, model(), cluster())
        kinds = [m.kind for m in plan.messages]
        return {m.kind: m.release for m in plan.messages}, kinds

    assert releases()[0] == {"A": "ready", "G": "ready", "gradient": "ready"}
    late, kinds = releases(gradient_pipelining=False)
    assert late == {"A": "ready", "G": "ready", "gradient": "step"}
    assert kinds[-1] == "gradient"
    late, kinds = releases(pipelining="none", gradient_pipelining=False)
    assert late == {"A": "step", "G": "step", "gradient": "step"}
    assert kinds == ["gradient", "A", "G"]  # all ready at once: one message each is optimal


def test_ready_times_by_hand():
    times = ready_times(model())
    assert times.a_s == pytest.approx((0.004, 0.006, 0.007, 0.007))
    assert times.g_s == pytest.approx((0.017, 0.013, 0.012, 0.009))
    assert times.gradient_s == pytest.approx((0.025, 0.017, 0.013, 0.012))
    assert times.backward_end_s == pytest.approx(0.025)
    plain = ready_times(model(), curvature=False)
    assert plain.backward_end_s == pytest.approx(0.022)


def test_resolving_names_switches_and_values():
    assert resolve_schedule("dkfac") == NAMED_SCHEDULES["dkfac"]
    assert resolve_schedule(NAMED_SCHEDULES["mpdkfac"]) is NAMED_SCHEDULES["mpdkfac"]
    assert resolve_schedule({"name": "dkfac", "placement": "lbp"}) == replace(NAMED_SCHEDULES["dkfac"], placement="lbp")
    assert resolve_schedule({"fusion": "none"}) == ScheduleConfig(fusion="none")
    assert resolve_schedule({}) == ScheduleConfig() == NAMED_SCHEDULES["spdkfac"]
    assert len(set(NAMED_SCHEDULES.values())) == len(NAMED_SCHEDULES)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ("kafc", "unknown schedule 'kafc'; choices: sgd, kfac, dkfac, mpdkfac, spdkfac, dp_kfac, auto"),
        ({"name": "best"}, "unknown schedule 'best'"),
        ({"name": "dkfac", "fused": True}, "unknown schedule key"),
        ({"fusion": "some"}, "schedule.fusion='some' is not one of: none, threshold, greedy, optimal"),
        ("auto", "make_plan chooses"),
    ],
)
def test_mistakes_are_named(schedule, message):
    with pytest.raises(ValueError, match=message):
        resolve_schedule(schedule)


@pytest.mark.parametrize("name", [*NAMED_SCHEDULES, "auto"])
def test_plans_are_deterministic_and_survive_json(name):
    plan = make_plan(name, model(), cluster(), world_size=1)
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    assert make_plan(name, model(), cluster(), world_size=1).fingerprint == plan.fingerprint


def test_auto_is_a_schedule_like_others():
    """What it chooses is what its switches alone give (tests/kfac/test_choice.py compares it with named schedules)."""
    of, on = load_shipped_model("resnet50"), cluster(8, beta=4e-8)
    chosen = make_plan("auto", of, on)
    assert chosen == make_plan(chosen.schedule, of, on)


def test_auto_keeps_the_switches_that_are_given():
    of, on = load_shipped_model("resnet50"), cluster(64)
    free = make_plan("auto", of, on)
    assert free.schedule.pipelining == "layerwise"
    fixed = make_plan({"name": "auto", "pipelining": "none", "placement": "seq_dist"}, of, on)
    assert (fixed.schedule.pipelining, fixed.schedule.placement) == ("none", "seq_dist")
    assert simulate(fixed, of, on).iteration_s > simulate(free, of, on).iteration_s
    with pytest.raises(ValueError, match="unknown schedule key"):
        make_plan({"name": "auto", "speed": "high"}, of, on)


def test_world_size_overrides_the_profile_and_one_rank_communicates_for_free():
    assert make_plan("mpdkfac", model(), cluster(4), world_size=2).inverse_owner == (0, 1, 0, 1, 0, 1)
    alone = make_plan("mpdkfac", model(), cluster(4), world_size=1)
    assert set(alone.inverse_owner) == {None}


@pytest.mark.parametrize("schedule", [None, 3, ["spdkfac"], b"sgd"])
def test_what_is_no_schedule_lists_the_names(schedule):
    for ask in (lambda: resolve_schedule(schedule), lambda: make_plan(schedule, model(), cluster())):
        with pytest.raises(
            ValueError, match=r"a schedule is a name \(sgd, kfac, dkfac, mpdkfac, spdkfac, dp_kfac, auto\)"
        ):
            ask()


def test_keys_that_are_no_names_are_refused():
    with pytest.raises(ValueError, match=r"unknown schedule key\(s\) 1, fused"):
        make_plan({1: 2, "fused": True}, model(), cluster())


@pytest.mark.parametrize("world_size", [0, 2.0, "4", True])
def test_a_world_size_is_a_whole_number(world_size):
    with pytest.raises(ValueError, match="world_size must be a whole number"):
        make_plan("spdkfac", model(), cluster(), world_size=world_size)


@pytest.mark.parametrize("name", [*NAMED_SCHEDULES, "auto"])
def test_a_plan_fits_the_model_it_was_made_for(name):
    make_plan(name, model(), cluster(), world_size=1).check_model(model())
