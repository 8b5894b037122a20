"""Planning anew from a run's own times: what timelines give away, one Plan on all ranks, bitwise continuation."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import islice

import pytest
import torch
import torch.nn.functional as F

from kfac import KFAC, KFACConfig
from kfac.communication import LocalCommunicator, get_communicator
from kfac.finals import ALONE, COUNTED, MOST, Finals, combined, longest
from kfac.planning import ClusterProfile, LayerProfile, LinearCost, ModelProfile, PolynomialCost
from kfac.planning.profiles import DisturbedCluster, Interference
from kfac.recording import Recorder
from kfac.replanning import Replanner
from kfac.run_profile import RunProfile, fit_with_prior, idle_sizes, message_elements, profiles_of, rank_times
from kfac.schedules import make_plan
from kfac.simulation import simulate
from kfac.slowdown import slowed
from kfac.timeline import COMMUNICATION_LANE, Timeline
from tests.kfac.models import make_data, make_model
from tests.kfac.ranks import run_ranks

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


# ---------------------------------------------------------------------- real ranks


class Run:
    """A small training run, with its preconditioner, optimizer and batches."""

    def __init__(self, rank, world_size, *, schedule="auto", config=None, after=5, turns=0, **options):
        self.model = make_model()
        self.recorder = Recorder("cpu", rank)
        self.kfac = KFAC(
            self.model, config or KFACConfig(kl_clip=1e-2), schedule, average_gradients=True, recorder=self.recorder
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.9)
        self.replanner = Replanner(self.kfac, self.recorder, after=after, repeats=1, turns=turns, **options)
        self.batches = (
            tuple(t[rank::world_size] for t in make_data(4 * world_size, seed)) for seed in range(1_000_000)
        )

    def train(self, count):
        for x, y in islice(self.batches, count):
            with self.replanner.iteration():
                with self.recorder.span("FF", "forward"):
                    loss = F.cross_entropy(self.model(x), y)
                with self.recorder.span("BP", "backward"):
                    loss.backward()
                self.kfac.step()
                self.optimizer.step()
                self.optimizer.zero_grad()
        return self

    def state(self):
        parts = ("model", "kfac", "optimizer", "replanner")
        return {name: getattr(self, name).state_dict() for name in parts}

    def load(self, state):
        for name, part in state.items():
            getattr(self, name).load_state_dict(part)
        return self

    def parameters(self):
        return torch.nn.utils.parameters_to_vector(self.model.parameters()).detach()


def replanned(rank, world_size):
    run = Run(rank, world_size).train(4)
    first = run.kfac.plan.fingerprint
    run.train(3)  # planned anew after the fifth step
    found = run.replanner.result
    state = copy.deepcopy(run.state())
    uninterrupted = run.train(3).parameters()
    own, after = run.kfac.plan.fingerprint, found.choice.plan.fingerprint
    other = Run(rank, world_size)
    next(islice(other.batches, 6, 7))
    started = other.kfac.plan.fingerprint
    continued = other.load(state).train(3)
    return {
        "plans": (first, started, after, own, continued.kfac.plan.fingerprint),
        "step": found.step,
        "said": str(found),
        "facts": found.to_dict(),
        "model": found.profile.model.to_dict(),
        "cluster": found.profile.cluster.to_dict(),
        "result": (continued.replanner.done, continued.replanner.result),
        "same": torch.equal(uninterrupted, continued.parameters()),
        "parameters": uninterrupted,
    }


def test_two_ranks_plan_anew_alike_and_continue_bitwise():
    first, second = run_ranks(replanned, 2)
    before, started, chosen, own, continued = first["plans"]
    assert second["plans"] == first["plans"]
    assert before == started, "planned from the shipped profile"
    assert chosen == own == continued, "and continued with the measured one's"
    assert first["model"] == second["model"]
    assert first["cluster"] == second["cluster"]
    assert first["step"] == 5
    assert first["same"]
    assert second["same"]
    assert torch.equal(first["parameters"], second["parameters"])
    assert first["result"] == (True, None), "once is enough"
    facts = first["facts"]
    assert facts["plan"] == chosen
    assert facts["sources"] == {"model": "measured", "cluster": "measured"}
    assert facts["replanned"]["before"] == before
    assert facts["iteration_s"] <= min(facts["named_s"][name] for name in ("dkfac", "mpdkfac", "spdkfac"))
    assert facts["replanned"]["measured_s"] > 0
    assert "planned anew after 5 steps" in first["said"]
    assert "of_the_run" in first["cluster"]["provenance"]["all_reduce"]
    assert first["model"]["provenance"]["iterations"] == 3


def alone(**options):
    return Run(0, 1, **options)


def test_iterations_without_statistics_are_not_measured():
    run = alone(config=KFACConfig(factor_interval=2, inverse_interval=100, kl_clip=1e-2), after=3).train(6)
    assert not run.replanner.done, "of iterations 2, 3, 4, 5 two had statistics"
    run.train(1)
    assert run.replanner.result.step == 7
    assert run.replanner.result.profile.iteration_s is None
    assert run.replanner.result.profile.cluster.inverse(20) > 0, "timed beside the run, which has not inverted"
    assert "not measured with all curvature work" in str(run.replanner.result)


def test_passes_without_spans_are_refused():
    run = alone(after=3).train(4)
    run.recorder.start()
    timeline = run.recorder.stop()
    run.replanner.note(timeline)
    with pytest.raises(ValueError, match=r'recorder\.span\("FF", "forward"\)'):
        run.replanner.replan()


def test_statistics_that_only_their_owner_has_are_refused():
    model = make_model()
    kfac = KFAC(model, KFACConfig(), "sgd", communicator=LocalCommunicator())
    with pytest.raises(ValueError, match="curvature=true"):
        Replanner(kfac, Recorder())


def test_an_exception_ends_the_recording():
    run = alone(after=3).train(2)
    with pytest.raises(ZeroDivisionError), run.replanner.iteration():
        assert 1 / int(not run.recorder.active) > 0, "not recorded"
    assert not run.recorder.active


def test_the_schedule_is_kept_and_its_fixed_switches_too():
    run = alone(schedule={"name": "auto", "fusion": "none"}, after=3).train(6)
    assert run.replanner.done
    assert run.kfac.schedule == {"name": "auto", "fusion": "none"}
    assert run.kfac.plan.schedule.fusion == "none"
    other = KFAC(make_model(), run.kfac.config, {"name": "auto", "fusion": "none"}, communicator=get_communicator())
    assert other.schedule == run.kfac.schedule


# ---------------------------------------------------------------------- turns in the run


def plans_by_turns(rank, world_size):
    run = Run(rank, world_size, turns=2).train(5)
    seen = [run.kfac.plan.fingerprint]
    decided = None
    for step in range(6, 6 + longest(2)):
        run.train(1)
        seen.append(run.kfac.plan.fingerprint)
        if run.replanner.done:
            decided = step
            break
    found = run.replanner.result
    state = copy.deepcopy(run.state())
    uninterrupted = run.train(3).parameters()
    other = Run(rank, world_size, turns=2)
    next(islice(other.batches, decided - 1, decided))
    continued = other.load(state).train(3)
    fixed = Run(rank, world_size, schedule="dkfac", turns=2)
    fixed.kfac.load_state_dict(fixed.kfac.state_dict())
    return {
        "seen": seen,
        "decided": decided,
        "kept": found.kept.fingerprint,
        "own": run.kfac.plan.fingerprint,
        "tried": dict(found.tried_s),
        "said": str(found),
        "facts": found.to_dict()["replanned"],
        "same": torch.equal(uninterrupted, continued.parameters()),
        "parameters": uninterrupted,
    }


def test_finalists_take_turns_and_the_quickest_stays():
    first, second = run_ranks(plans_by_turns, 2)
    assert first["seen"] == second["seen"]
    assert first["tried"] == second["tried"], "what the slowest rank took, everywhere"
    finalists = len(first["tried"])
    assert 2 <= finalists <= MOST
    assert first["decided"] == 5 + ALONE + finalists * 2 * (COUNTED + 1)
    assert len(set(first["seen"])) >= finalists
    quickest, *others = first["tried"].items()
    assert all(quickest[1] <= seconds for _, seconds in others)
    assert first["kept"] == first["own"] == first["seen"][-1]
    assert f"{quickest[0]} stays" in first["said"]
    assert first["facts"]["tried_s"] == first["tried"]
    assert first["same"]
    assert second["same"]
    assert torch.equal(first["parameters"], second["parameters"])


def stopped_in_the_middle_of_turns(rank, world_size):
    found = {}
    for name, count in {"without overlap": 7, "turns": 5 + ALONE + 8}.items():
        run = Run(rank, world_size, turns=2)
        own = run.kfac.plan.fingerprint
        run.train(count)
        assert not run.replanner.done
        state = copy.deepcopy(run.state())
        continued = Run(rank, world_size, turns=1)
        next(islice(continued.batches, count - 1, count))
        continued.load(state)
        found[name] = own, continued.kfac.plan.fingerprint, run.kfac.plan.fingerprint
        while not continued.replanner.done:
            continued.train(1)
            assert continued.kfac.steps < count + 10 + longest(1)
        found[name] += (continued.replanner.result.before.fingerprint, len(continued.replanner.result.tried_s))
    return found


def test_a_run_that_is_stopped_while_others_are_tried_starts_over_with_its_own_plan():
    first, second = run_ranks(stopped_in_the_middle_of_turns, 2)
    assert first == second
    for own, continued, tried, before, finalists in first.values():
        assert own == continued == before != tried
        assert finalists >= 2


def turns_where_inversions_are_rare(rank, world_size):
    config = KFACConfig(factor_interval=2, inverse_interval=4, kl_clip=1e-2)
    run = Run(rank, world_size, config=config, turns=1, after=10)
    while not run.replanner.done:
        run.train(1)
        assert run.kfac.steps < 12 + 4 * longest(1)
    return dict(run.replanner.result.tried_s), run.kfac.plan.fingerprint, str(run.replanner.result.choice)


def test_turns_include_steps_without_inversions():
    first, second = run_ranks(turns_where_inversions_are_rare, 2)
    assert first == second
    tried, _, said = first
    assert len(tried) >= 2
    assert min(tried.values()) > 0
    assert "in the mean (statistics every 2, inverses every 4 steps)" in said


def test_the_plan_with_the_quickest_iteration_of_the_slowest_rank_wins():
    of_ranks = [{"a": [1.0, 9.0, 4.0], "b": [2.0, 2.0, 2.0]}, {"a": [5.0, 1.0, 4.0], "b": [3.5, 9.0, 3.0]}]
    assert combined(of_ranks) == {"b": 3.0, "a": 4.0}
    assert list(combined(of_ranks)) == ["b", "a"]
    assert list(combined([{"first": [1.0], "second": [1.0]}])) == ["first", "second"]


def test_the_first_iteration_of_a_turn_does_not_count():
    finals = Finals({"a": None, "b": None}, turns=2, counted=1)
    ended = []
    for seconds in (9.0, 1.0, 9.0, 2.0, 9.0, 3.0, 9.0, 4.0):
        assert not finals.over
        ended.append(finals.note(seconds))
    assert ended == [False, True] * 4
    assert finals.over
    assert finals.seconds(LocalCommunicator()) == {"a": 1.0, "b": 2.0}


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


def test_what_does_not_overlap_is_measured_before_planning_anew():
    run = run_ranks(without_overlap, 2)[0]
    assert run["during"] == ("none", False)
    assert run["before"] == run["so far"]


def without_overlap(rank, world_size):
    run = Run(rank, world_size, schedule={"name": "auto", "pipelining": "layerwise"}, turns=1)
    assert run.replanner._without_overlap() is None, "a fixed switch forbids it"
    run = Run(rank, world_size, turns=1).train(5)
    during = run.kfac.plan.schedule
    first = Run(rank, world_size).kfac.plan.fingerprint
    run.train(ALONE)
    few = Run(rank, world_size, turns=1, iterations=1).train(10 + longest(1))
    assert few.replanner.done, "fewer iterations to plan from than are measured without overlap"
    back = Run(rank, world_size, turns=1).train(5)
    back.replanner.load_state_dict({"done": False})
    assert back.replanner._overlapped is None, "what was measured before a state was loaded says nothing of it"
    return {
        "during": (during.pipelining, during.gradient_pipelining),
        "before": run.replanner.result.before.fingerprint,
        "so far": first,
    }
