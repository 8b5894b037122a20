"""What a run's timelines give away: the profiles that made them, and how much overlapping slows down."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kfac.planning import ClusterProfile, LayerProfile, LinearCost, ModelProfile, PolynomialCost
from kfac.planning.profiles import DisturbedCluster, Interference
from kfac.run_profile import RunProfile, fit_with_prior, idle_sizes, message_elements, profiles_of, rank_times
from kfac.schedules import make_plan
from kfac.simulation import simulate
from kfac.slowdown import slowed
from kfac.timeline import COMMUNICATION_LANE, Timeline

SCHEDULES = ["spdkfac", {"name": "spdkfac", "fusion": "none", "factor_collective": "reduce_to_owner"},
             {"name": "mpdkfac", "gradient_worker_fraction": 0.0}]  # fmt: skip


def truth():
    """A model and a cluster whose seconds are known, for the simulator to make timelines from."""
    sides = [(64, 32), (200, 48), (120, 120), (90, 10)]
    layers = tuple(
        LayerProfile(
            name=f"layer{k}",
            a_dim=a,
            g_dim=g,
            gradient_elements=a * g,
            forward_s=0.001 * (k + 1),
            backward_s=0.002 * (k + 1),
            a_statistics_s=0.0005 * (4 - k),
            g_statistics_s=0.0003,
            precondition_s=1e-9 * a * g * (a + g),
        )
        for k, (a, g) in enumerate(sides)
    )
    model = ModelProfile(name="truth", layers=layers, loss_s=0.003, update_s=0.0007)
    cluster = ClusterProfile(
        world_size=2,
        all_reduce=LinearCost(2e-4, 3e-8),
        reduce=LinearCost(1e-4, 2e-8),
        broadcast=LinearCost(1e-4, 1e-8),
        inverse=PolynomialCost((1e-4, 0.0, 0.0, 0.5)),
    )
    return model, cluster


def of_rank(timeline, rank, waits_s):
    """One rank's spans; before it can join a message it waits, on a channel that is free."""
    free_s, spans = 0.0, []
    for span in (s for s in timeline.spans if s.rank == rank):
        if span.lane == COMMUNICATION_LANE:
            spans.append(replace(span, start_s=max(free_s, span.start_s - waits_s)))
            free_s = span.end_s
        else:
            spans.append(span)
    return Timeline(tuple(spans), total_s=timeline.iteration_s)


def measured(schedule, waits_s=(0.0, 0.01), slower=1.0):
    """The profiles that the simulated timelines of two ranks give; idle ranks are ``1 / slower`` times as slow."""
    model, cluster = truth()
    plan = make_plan(schedule, model, cluster)
    timeline = simulate(plan, model, cluster)
    sizes = tuple(replace(layer, **{k: 0.0 for k in vars(layer) if k.endswith("_s")}) for layer in model.layers)
    ranks = [rank_times([of_rank(timeline, rank, waits_s[rank])] * 3, plan, sizes, rank, "own") for rank in (0, 1)]
    elements = idle_sizes(plan, sizes)
    idle = {
        name: [getattr(cluster, name)(n) / slower for n in elements] for name in ("all_reduce", "reduce", "broadcast")
    }
    return profiles_of(ranks, plan, elements, idle, None, "cpu"), plan


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_made_the_timelines_is_recovered_from_them(schedule):
    model, cluster = truth()
    found, plan = measured(schedule)
    for layer, expected in zip(found.model.layers, model.layers, strict=True):
        for key, value in vars(expected).items():
            assert getattr(layer, key) == (pytest.approx(value, rel=1e-6) if key.endswith("_s") else value), key
    assert (found.model.loss_s, found.model.update_s) == pytest.approx((model.loss_s, model.update_s))
    for name in ("all_reduce", "reduce", "broadcast"):
        for elements in (1, 10_000, 100_000):
            assert getattr(found.cluster, name)(elements) == pytest.approx(getattr(cluster, name)(elements), rel=0.05)
    for factor in plan.factors:
        assert found.cluster.inverse(factor.dim) == pytest.approx(cluster.inverse(factor.dim), rel=1e-3)
    assert found.iteration_s == pytest.approx(simulate(plan, model, cluster).iteration_s)
    again = simulate(plan, found.model, found.cluster).iteration_s
    assert again == pytest.approx(found.iteration_s, rel=0.02), "the simulation of the run is the run"


def test_waiting_for_other_ranks_is_no_time_of_the_channel():
    """The control: where every rank's messages wait, that does count."""
    one, _ = measured("spdkfac", waits_s=(0.0, 0.01))
    both, _ = measured("spdkfac", waits_s=(0.01, 0.01))
    assert both.cluster.all_reduce(1) > 2 * one.cluster.all_reduce(1)


def test_a_busy_channel_is_as_slow_as_in_the_run():
    """Idle ranks say twice as fast; broadcasts, which nobody timed in the run, are taken to be as much slower."""
    found, _ = measured({"name": "spdkfac", "fusion": "none"}, slower=2.0)
    _, cluster = truth()
    for elements in (100, 30_000):
        assert found.cluster.all_reduce(elements) == pytest.approx(cluster.all_reduce(elements), rel=0.1)
        assert found.cluster.broadcast(elements) == pytest.approx(cluster.broadcast(elements), rel=0.1)


def test_one_size_of_message_moves_the_term_that_it_is_made_of():
    prior = LinearCost(1e-4, 1e-9)
    large, _ = fit_with_prior([1e7], [2 * prior(1e7)], prior)
    small, _ = fit_with_prior([10.0], [2 * prior(10.0)], prior)
    assert large.beta_s_per_element == pytest.approx(2e-9, rel=0.1)
    assert large.alpha_s == pytest.approx(1e-4, rel=0.1)
    assert small.alpha_s == pytest.approx(2e-4, rel=0.1)
    assert small.beta_s_per_element == pytest.approx(1e-9, rel=0.1)


def test_elements_are_those_on_the_wire():
    model, cluster = truth()
    whole = make_plan({"name": "spdkfac", "fusion": "none"}, model, cluster)
    half = make_plan({"name": "spdkfac", "fusion": "none", "message_dtype": "bfloat16"}, model, cluster)
    assert message_elements(whole.messages[0], whole) == 64 * 65 // 2 + 1  # and the count of samples
    assert message_elements(half.messages[0], half) == 64 * 65 // 4  # counts travel in the summary


def test_the_slowdown_that_explains_an_overlapped_iteration_is_found():
    model, cluster = truth()
    cluster = replace(cluster, all_reduce=LinearCost(1e-3, 3e-7))
    plan = make_plan("spdkfac", model, cluster)
    profile = RunProfile(model, cluster, None)
    ideal = simulate(plan, model, cluster).iteration_s
    for slowdown in (0.2, 0.5):
        disturbed = DisturbedCluster.disturbed(cluster, Interference(slowdown=slowdown))
        measured = simulate(plan, model, disturbed).iteration_s
        assert measured > ideal * 1.02
        found = slowed(profile, plan, measured)
        assert found.cluster.interference.slowdown == pytest.approx(slowdown, abs=2e-3)
        assert found.iteration_s == measured
    assert slowed(profile, plan, 0.9 * ideal).cluster == cluster, "what is quicker than ideal is not slowed"
