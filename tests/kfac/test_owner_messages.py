"""Ranks that get and make only what the Plan leaves to them: bytes, faults, states, statistics that do not travel."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from kfac import KFAC, KFACConfig
from kfac.inversion import FactorInversionError
from kfac.nonfinite import NonFiniteError
from kfac.planning.profiles import ModelProfile
from kfac.planning.shipped_profiles import load_shipped_cluster
from kfac.simulation import simulate
from tests.kfac.communicators import Recording
from tests.kfac.recipes.cells import Run, Tiny, reference
from tests.kfac.recipes.delays import World

EVERY_STEP = {"factor_interval": 1, "inverse_interval": 1}
TO_OWNERS = {"name": "spdkfac", "placement": "seq_dist", "factor_collective": "reduce_to_owner"}
OWNERS_ALONE = {**TO_OWNERS, "gradient_worker_fraction": 0.0}


def on(world_size: int, function, *args, seed: int = 0) -> list[Any]:
    """``function(rank, communicator, *args)`` on ranks that are threads."""
    return World(world_size, seed).run(lambda rank, communicator: function(rank, communicator, *args))


def counted(communicator: Recording) -> tuple[Counter[str], Counter[str]]:
    """Elements and calls, by collective and what they carry."""
    elements: Counter[str] = Counter()
    for one in communicator.sent:
        elements[f"{one.operation} {one.kind}"] += one.elements
    return elements, Counter(f"{one.operation} {one.kind}" for one in communicator.sent)


def sent(schedule: Any, world_size: int = 4) -> tuple[Counter[str], Counter[str]]:
    """Elements and calls of one rank's step in which everything is due."""

    def train(rank, communicator):
        recording = Recording(communicator)
        run = Run(rank, world_size, schedule, recording, **EVERY_STEP).steps(1)
        recording.sent.clear()
        run.steps(1)
        return counted(recording)

    return on(world_size, train)[0]


def test_sums_go_to_owners_alone_and_inverses_do_not_travel():
    plan = Run(0, 1, "dkfac").kfac.plan
    factors = sum(factor.elements for factor in plan.factors)
    diagonal = sum(factor.elements for factor in plan.factors if factor.dim == 1)
    summary = 2 * len(plan.factors)
    weights = sum(p.numel() for p in Tiny().parameters())

    elements, _ = sent({"name": "spdkfac", "placement": "seq_dist"})
    assert elements["all_reduce FactorComm"] == factors + len(plan.factors)
    assert elements["broadcast InverseComm"] == factors - diagonal

    elements, _ = sent(TO_OWNERS)
    assert elements["all_reduce FactorComm"] == diagonal + summary
    assert elements["reduce FactorComm"] == factors - diagonal
    assert elements["broadcast InverseComm"] == factors - diagonal

    elements, _ = sent(OWNERS_ALONE)
    assert elements["all_reduce FactorComm"] == summary
    assert elements["reduce FactorComm"] == factors
    assert elements["broadcast InverseComm"] == 0
    assert elements["broadcast GradComm"] == weights + len(plan.factors)  # and two flags per layer

    elements, _ = sent("dp_kfac")
    assert elements["all_reduce FactorComm"] == summary
    assert elements["reduce FactorComm"] == elements["broadcast InverseComm"] == 0


def test_inverses_of_one_owner_share_a_broadcast():
    alone, together = (sent({**TO_OWNERS, "inverse_fusion": how}) for how in ("none", "owner"))
    assert alone[0] == together[0]
    assert alone[1]["broadcast InverseComm"] == 9  # A of the norm is a number
    assert together[1]["broadcast InverseComm"] == 4


def test_a_step_without_inversions_sends_no_flags():
    def train(rank, communicator):
        recording = Recording(communicator)
        run = Run(rank, 2, OWNERS_ALONE, recording, factor_interval=1, inverse_interval=2).steps(1)
        recording.sent.clear()
        run.steps(1)
        return counted(recording)[0]

    assert on(2, train)[0]["broadcast GradComm"] == sum(p.numel() for p in Tiny().parameters())


# ---------------------------------------------------------------------- as simulated


@pytest.mark.parametrize("late", ["as_ready", "after_all"])
@pytest.mark.parametrize("switches", [{}, {"inverse_fusion": "owner"}, {"gradient_worker_fraction": 0.5}])
def test_collectives_leave_in_the_order_of_the_simulation(switches, late):
    def train(rank, communicator):
        run = Run(
            rank,
            2,
            {**TO_OWNERS, "fusion": "optimal", "inverse_broadcast": late, **switches},
            communicator,
            **EVERY_STEP,
        ).steps(1)
        recorder = run.kfac._recorder
        recorder.start()
        run.steps(1)
        names = [flight.name for flight in recorder._flights]
        recorder.stop()
        return run.kfac.plan, run.kfac.layer_sizes, names

    plan, layers, names = on(2, train)[0]
    timeline = simulate(plan, ModelProfile(name="tiny", layers=layers), load_shipped_cluster())
    expected = [s.name for s in timeline.spans if s.rank == 0 and s.kind in ("GradComm", "FactorComm", "InverseComm")]
    assert names == expected
    assert len(names) > 5


# ---------------------------------------------------------------------- faults


def poisoned(rank, communicator, schedule, nonfinite):
    """What rank 1's NaN in the second batch makes of a step."""
    run = Run(rank, 3, schedule, communicator, nonfinite=nonfinite, **EVERY_STEP).steps(1)
    before = run.kfac.state_dict()["factors"]
    if rank == 1:
        run.model.register_forward_pre_hook(lambda _, args: (args[0] * float("nan"),))
    try:
        run.steps(1)
        said = "skipped"
    except NonFiniteError as error:
        said = str(error)
    after = run.kfac.state_dict()["factors"]
    same = all(torch.equal(after[key]["average"], before[key]["average"]) for key in before)
    return said, same, run.kfac.skipped_steps


@pytest.mark.parametrize("schedule", [TO_OWNERS, OWNERS_ALONE], ids=["to owners", "owners alone"])
def test_what_is_not_finite_is_named_with_its_rank_where_no_rank_has_all_sums(schedule):
    ranks = on(3, poisoned, schedule, "raise")
    assert len({said for said, _, _ in ranks}) == 1
    said, same, _ = ranks[2]
    assert said.startswith("step 1: the statistics of A of conv, G of conv")
    assert "are not finite on rank(s) 1: look for what has exploded there" in said
    assert same
    assert all(found == ("skipped", True, 1) for found in on(3, poisoned, schedule, "skip"))


def uninvertible(rank, communicator, layer):
    run = Run(rank, 3, OWNERS_ALONE, communicator, **{**EVERY_STEP, "factor_interval": 9}).steps(1)
    before = run.kfac.state_dict()["factors"]
    factor = run.kfac._factors[layer, "G"]
    if factor.average is not None:
        factor.average.neg_()  # a damaged average: no statistics give a negative factor
    try:
        run.steps(1)
        said = "nothing"
    except FactorInversionError as error:
        said = str(error)
    after = run.kfac.state_dict()["factors"]
    solutions = [key for key in before for name in ("inverse", "upper") if before[key][name] is not None]
    same = all(torch.equal(after[key]["inverse"], before[key]["inverse"]) for key in solutions)
    return said, same, len(solutions), run.gradients()


@pytest.mark.parametrize("layer", ["conv", "head"])
def test_an_owner_that_cannot_invert_ends_the_step_on_every_rank(layer):
    ranks = on(3, uninvertible, layer)
    for said, same, solutions, gradients in ranks:
        assert said.startswith(f"not positive definite even in float64: G of {layer}.")
        assert same
        assert solutions == 10
        assert gradients.isfinite().all()


# ---------------------------------------------------------------------- states and other plans


def replanned(rank, communicator, schedules):
    run = Run(rank, 3, schedules[0], communicator, **EVERY_STEP)
    for schedule in schedules[1:]:
        run.steps(1)
        run.kfac.replan(None, None, schedule)
    return run.steps(1).parameters()


def test_plans_with_other_owners_take_over_from_each_other():
    rounds = {**OWNERS_ALONE, "placement": "optimized"}
    schedules = (OWNERS_ALONE, "dkfac", TO_OWNERS, rounds, {**OWNERS_ALONE, "factor_collective": "all_reduce"})
    ranks = on(3, replanned, schedules)
    truth, _ = reference(len(schedules), **EVERY_STEP)
    for parameters in ranks:
        assert torch.equal(parameters, ranks[0])
        assert (parameters - truth).abs().max() <= 1e-12


def test_every_rank_saves_the_whole_state_and_holds_only_its_own():
    def train(rank, communicator):
        run = Run(rank, 3, OWNERS_ALONE, communicator).steps(2)
        own = sorted(f"{name}/{side}" for (name, side), f in run.kfac._factors.items() if f.average is not None)
        solved = sorted(f"{name}/{side}" for (name, side), f in run.kfac._factors.items() if f.inverse is not None)
        try:
            run.kfac.factor("head", "A")
            asked = "here"
        except KeyError as error:
            asked = error.args[0]
        return run.kfac.state_dict()["factors"], own, solved, asked, run.kfac.plan

    ranks = on(3, train)
    held = [own for _, own, _, _, _ in ranks]
    assert sorted(key for own in held for key in own) == sorted(ranks[0][0])
    for saved, own, solved, asked, plan in ranks:
        assert own == solved
        assert all(torch.equal(saved[key]["average"], ranks[0][0][key]["average"]) for key in saved)
        assert all(saved[key]["inverse"] is not None for key in saved)
        holder = plan.inverse_owner[[f.layer for f in plan.factors].index("head")]
        assert asked == "here" if "head/A" in own else asked.startswith(f"only rank {holder} has A of 'head'")


# ---------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("options", "schedule", "message"),
    [
        (
            {"inverse_method": "ekfac", "damping_method": "exact", "inverse_interval": 2},
            OWNERS_ALONE,
            "inverse_method='ekfac' needs .* on every rank: set schedule.gradient_worker_fraction=1",
        ),
        (
            {"damping_adaptation": "levenberg_marquardt"},
            TO_OWNERS,
            "levenberg_marquardt' needs every factor on every rank: set schedule.factor_collective=all_reduce",
        ),
    ],
)
def test_options_that_need_what_a_rank_would_lack_are_refused_and_auto_avoids_it(options, schedule, message):
    def make(rank, communicator, schedule):
        return KFAC(Tiny(), KFACConfig(**options), schedule, communicator=communicator).plan.schedule

    with pytest.raises(ValueError, match=message):
        on(2, make, schedule)
    switches = on(2, make, "auto")[0]
    assert "ekfac" not in str(options) or switches.gradient_worker_fraction == 1
    assert "levenberg" not in str(options) or switches.factor_collective == "all_reduce"


def test_corrected_eigenvalues_with_factors_that_only_owners_get():
    options = {"damping_method": "exact", "inverse_method": "ekfac"}
    ranks = on(2, lambda rank, c: Run(rank, 2, TO_OWNERS, c, **options).steps(4).parameters())
    alone = Run(0, 1, "dkfac", **options).steps(4).parameters()
    assert torch.equal(ranks[0], ranks[1])
    assert (ranks[0] - alone).abs().max() <= 1e-12
