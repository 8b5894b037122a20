"""Planning anew from a run's own times: one Plan on all ranks, bitwise continuation, refusals."""

from __future__ import annotations

import copy
from itertools import islice
from types import SimpleNamespace

import pytest
import torch

from kfac import KFAC, KFACConfig
from kfac.communication import LocalCommunicator, get_communicator
from kfac.recording import Recorder
from kfac.replanning import Replanner
from kfac.replanning_decision import Replanning
from tests.kfac.models import make_model
from tests.kfac.ranks import run_ranks
from tests.kfac.replanning_runs import Run


def replanned(rank, world_size, sure=True):
    Replanning.outweighs = property(lambda _: sure)  # which measurements decide otherwise
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


def test_what_simulation_is_not_sure_of_leaves_the_plan():
    first, second = run_ranks(replanned, 2, False)
    assert first["plans"] == second["plans"]
    before, started, chosen, own, continued = first["plans"]
    assert before == started == own == continued != chosen
    assert first["facts"]["replanned"]["kept"] == before
    assert f"plan {before} stays: the new one is simulated to gain " in first["said"]
    assert first["result"] == (True, None)
    assert first["same"]


@pytest.mark.parametrize(
    ("gain", "before_s", "measured_s", "sure"),
    [
        (0.10, 0.95, 1.0, True),  # 10 % gained, 5 % off
        (0.04, 0.95, 1.0, False),
        (0.04, 1.05, 1.0, False),  # either way
        (0.04, 1.03, 1.0, True),
        (-0.1, 1.0, 1.0, False),
        (None, None, 1.0, True),  # nothing to compare with
        (0.0, 0.9, None, True),
    ],
)
def test_a_gain_counts_if_it_is_greater_than_the_simulations_own_error(gain, before_s, measured_s, sure):
    empty = SimpleNamespace(iteration_s=measured_s)
    found = Replanning(
        step=5, choice=None, profile=empty, before=None, before_s=before_s, gain=gain, took_s=0.0, kept=None
    )
    assert found.outweighs == sure


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
