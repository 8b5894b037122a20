"""Sums that are not those of the other schedules: rounded to bfloat16, or of one rank's samples only (DP-KFAC)."""

from __future__ import annotations

import copy
import functools
from collections import Counter
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kfac.communication import LocalCommunicator
from kfac.nonfinite import NonFiniteError
from tests.kfac import reference as sequential
from tests.kfac.recipes.cells import LR, OPTIONS, Run, Tiny, batch, reference, results
from tests.kfac.test_owner_messages import EVERY_STEP, TO_OWNERS, on

# ---------------------------------------------------------------------- bfloat16


@pytest.mark.parametrize("collective", ["all_reduce", "reduce_to_owner"])
def test_bfloat16_messages_round_sums_and_nothing_else(collective):
    """Each rank's sum and each addition is rounded to eight bits; counts and traces are not, nor inverses."""

    def train(rank, communicator, dtype):
        switches = {**TO_OWNERS, "factor_collective": collective, "message_dtype": dtype}
        run = Run(rank, 2, switches, communicator, **EVERY_STEP).steps(1)
        return results(run), {k: f["trace"] for k, f in run.kfac.state_dict()["factors"].items()}

    (rounded, traces), (other, _) = on(2, train, "bfloat16")
    full = on(2, train, "full")[0][0]
    for key, factor in full["factors"].items():
        error = (rounded["factors"][key] - factor).norm() / factor.norm()
        assert 0 <= error < 2**-7
        assert torch.equal(rounded["factors"][key], other["factors"][key])
        weight = 1 - OPTIONS["factor_decay"]
        assert traces[key] == pytest.approx(weight * factor.trace().item(), rel=1e-12)
    assert max((rounded["factors"][k] - f).norm() / f.norm() for k, f in full["factors"].items()) > 2**-12
    assert torch.equal(rounded["parameters"], other["parameters"])
    assert 0 < (rounded["parameters"] - full["parameters"]).abs().max() < 1e-2


# ---------------------------------------------------------------------- statistics that do not travel


def local_reference(owner: dict[str, int], world_size: int, steps: int, samples: int, **changes: int) -> torch.Tensor:
    """The sequential algorithm whose factors of each layer are of its owner's share of the batch only.

    Layers without an owner have no factors; ``changes`` are of OPTIONS.
    """
    share = samples // world_size

    def factors(model, x, y, loss):
        ranks = [slice(r * share, (r + 1) * share) for r in range(world_size)]
        of = [sequential_factors(model, x[part], y[part], loss) for part in ranks]
        return {name: of[rank][name] for name, rank in owner.items()}

    sequential_factors = sequential.factors
    model = Tiny()
    options = {key: OPTIONS[key] for key in ("damping", "kl_clip", "factor_interval", "inverse_interval")} | changes
    kfac = sequential.ReferenceKFAC(model, method="pi", decay=OPTIONS["factor_decay"], lr=LR, **options)
    optimizer = torch.optim.SGD(model.parameters(), LR, momentum=0.9)
    with mock.patch.object(sequential, "factors", factors):
        for step in range(steps):
            kfac.step(*batch(step, samples), F.cross_entropy)
            optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def local(rank, communicator, world_size, stop):
    run = Run(rank, world_size, "dp_kfac", communicator, samples=12)
    state = copy.deepcopy(run.steps(stop).save())
    whole = run.steps(5 - stop).parameters()
    resumed = Run(rank, world_size, "dp_kfac", communicator, samples=12).load(state).steps(5 - stop)
    return whole, resumed.parameters(), run.kfac.plan


@pytest.mark.parametrize("world_size", [2, 4])
def test_statistics_that_do_not_travel_are_the_owners(world_size):
    ranks = on(world_size, local, world_size, 3)
    whole, _, plan = ranks[0]
    owner = {plan.factors[2 * k].layer: rank for k, rank in enumerate(plan.gradient_owner)}
    assert len(set(owner.values())) == world_size
    truth = local_reference(owner, world_size, 5, 12)
    assert (whole - truth).abs().max() <= 1e-12
    assert (whole - reference(5, samples=12)[0]).abs().max() > 1e-4, "the control: it is not the whole batch's"
    moved = {name: (rank + 1) % world_size for name, rank in owner.items()}
    assert (whole - local_reference(moved, world_size, 5, 12)).abs().max() > 1e-4, "the control: nor another rank's"
    for other, other_resumed, _ in ranks:
        assert torch.equal(other, whole)
        assert torch.equal(other_resumed, whole)


def test_statistics_of_other_ranks_layers_are_not_computed():
    def train(rank, communicator):
        seen = Counter()

        def counted(original, layer, *args, **kwargs):
            seen[layer.name] += 1
            return original(*args, **kwargs)

        run = Run(rank, 2, "dp_kfac", communicator, **EVERY_STEP)
        for layer in run.kfac.layers:
            layer.add_a_statistic = functools.partial(counted, layer.add_a_statistic, layer)
            layer.add_g_statistic = functools.partial(counted, layer.add_g_statistic, layer)
        run.steps(2)
        return seen, {run.kfac.plan.factors[2 * k].layer for k in run.kfac.plan.statistics_of(rank)}

    for seen, own in on(2, train):
        assert dict(seen) == dict.fromkeys(own, 4)


def test_one_process_needs_nobody_elses_statistics():
    """On one process every schedule is the sequential algorithm."""
    run = Run(0, 1, "dp_kfac", LocalCommunicator()).steps(4)
    assert (run.parameters() - reference()[0]).abs().max() <= 1e-12


def test_a_rank_without_statistics_of_its_own_is_named_for_its_gradients():
    def train(rank, communicator):
        run = Run(rank, 2, "dp_kfac", communicator, **EVERY_STEP, include=("head",)).steps(1)
        if rank == 1 - run.kfac.plan.gradient_owner[0]:
            run.model.register_forward_pre_hook(lambda _, args: (args[0] * float("nan"),))
        try:
            run.steps(1)
        except NonFiniteError as error:
            return str(error), run.kfac.plan.gradient_owner[0]

    for said, owner in on(2, train):
        assert said.startswith("step 1: ")
        assert f" on rank(s) {1 - owner}: " in said
