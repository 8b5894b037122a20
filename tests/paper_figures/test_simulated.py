from dataclasses import replace

import pytest

from kfac.planning import ClusterProfile, LayerProfile, LinearCost, ModelProfile, PolynomialCost
from kfac.planning.shipped_profiles import load_shipped_cluster, load_shipped_model
from kfac.schedules import make_plan
from kfac.simulation import simulate
from paper_figures import interference, published, simulated
from paper_figures.simulated import exclusion_levels_s

CLUSTER = ClusterProfile(
    world_size=4,
    all_reduce=LinearCost(1.0, 0.01),
    reduce=LinearCost(1.0, 0.01),
    broadcast=LinearCost(0.5, 0.01),
    inverse=PolynomialCost((0.0, 1.0), 1.0),
)
MODEL = ModelProfile(
    name="two layers",
    layers=tuple(
        LayerProfile(
            name=name,
            a_dim=a,
            g_dim=g,
            gradient_elements=100,
            forward_s=1.0,
            backward_s=2.0,
            a_statistics_s=3.0,
            g_statistics_s=4.0,
            precondition_s=0.5,
        )
        for name, a, g in (("first", 3, 4), ("second", 4, 5))
    ),
)


@pytest.mark.parametrize("schedule", ["dkfac", "mpdkfac", "spdkfac"])
def test_levels_rise_to_the_simulated_iteration(schedule):
    plan = make_plan(schedule, MODEL, CLUSTER)
    levels_s = exclusion_levels_s(plan, MODEL, CLUSTER)
    assert list(levels_s) == sorted(levels_s)
    assert levels_s[-1] == simulate(plan, MODEL, CLUSTER).iteration_s


def test_levels_of_dkfac_by_hand():
    levels_s = exclusion_levels_s(make_plan("dkfac", MODEL, CLUSTER), MODEL, CLUSTER)
    gradients_s = 1.0 + 2.0  # one message of 200 elements after the backward pass
    factors_s = 14.0 + 1.0  # statistics and preconditioning of both layers
    packed_a, packed_g = 6 + 10, 10 + 15
    factor_messages_s = 1.0 + 0.01 * packed_a + 1.0 + 0.01 * packed_g
    inversions_s = 3 + 4 + 4 + 5  # every rank all of them
    steps_s = (6.0, gradients_s, factors_s, factor_messages_s, inversions_s, 0.0)
    expected = [sum(steps_s[: k + 1]) for k in range(len(steps_s))]
    assert levels_s == pytest.approx(expected, rel=1e-12)


def test_mpdkfac_spreads_inversions_and_pays_broadcasts():
    levels_s = exclusion_levels_s(make_plan("mpdkfac", MODEL, CLUSTER), MODEL, CLUSTER)
    assert levels_s[4] - levels_s[3] == pytest.approx(5.0)  # the largest of four, one per rank
    assert levels_s[5] - levels_s[4] == pytest.approx(4 * 0.5 + 0.01 * (6 + 10 + 10 + 15))


def test_slower_inversions_change_only_their_level():
    plan = make_plan("dkfac", MODEL, CLUSTER)
    slow = replace(CLUSTER, inverse=PolynomialCost((0.0, 2.0), 1.0))
    usual_s, slow_s = (exclusion_levels_s(plan, MODEL, cluster) for cluster in (CLUSTER, slow))
    assert slow_s[:4] == usual_s[:4]
    assert slow_s[4] - slow_s[3] == pytest.approx(2 * (usual_s[4] - usual_s[3]))


@pytest.mark.parametrize("key", published.model_keys())
def test_what_the_profiles_are_fitted_to_comes_back_from_the_simulation(key):
    d = simulated.simulated(key, simulated.SCHEDULES["D-KFAC"]).exposed_s
    bars = published.breakdown_s(key, "D-KFAC")
    assert d["FF&BP"] == pytest.approx(float(bars["FF&BP"]), rel=1e-4)
    assert d["InverseComp"] == pytest.approx(float(bars["InverseComp"]), rel=1e-4)
    assert d["InverseComm"] == 0.0
    mpd = simulated.simulated(key, simulated.SCHEDULES["MPD-KFAC"]).exposed_s
    assert mpd["InverseComm"] == pytest.approx(float(published.inverse_s(key, "Seq-Dist")["InverseComm"]), rel=0.16)


def test_shipped_profiles_are_the_ones_simulated():
    model, cluster = load_shipped_model("resnet50"), load_shipped_cluster("paper64")
    expected_s = simulate(make_plan("spdkfac", model, cluster), model, cluster).iteration_s
    assert simulated.simulated("resnet50", simulated.SCHEDULES["SPD-KFAC"]).iteration_s == expected_s
    as_run = make_plan({"name": "spdkfac", "lbp_rule": 1400}, model, cluster)
    everywhere = [f.dim for f, owner in zip(as_run.factors, as_run.inverse_owner, strict=True) if owner is None]
    assert len(everywhere) == published.load()["lbp"]["counts_by_threshold"]["resnet50"]["1400"]["on_every_rank"]
    assert simulated.simulated("resnet50", interference.AS_RUN).plan == as_run
