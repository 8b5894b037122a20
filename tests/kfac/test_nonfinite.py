"""Gradients that are not finite, where nothing else tells."""

from __future__ import annotations

import pytest
import torch.nn.functional as F
from torch import nn

from kfac import KFAC, KFACConfig, NonFiniteError
from tests.kfac.models import make_data, make_model
from tests.kfac.perceptron import loss_of, mlp
from tests.kfac.ranks import run_ranks


def _bad_gradient(rank, world_size, nonfinite, average):
    model = make_model()
    net = model if average or world_size == 1 else nn.parallel.DistributedDataParallel(model)
    kfac = KFAC(net, KFACConfig(factor_interval=3, nonfinite=nonfinite), average_gradients=average)
    seen: list[object] = []
    for step in range(3):
        net.zero_grad()
        x, y = make_data(4, rank)
        if step == 1 and rank == world_size - 1:
            x = x * float("nan")
        F.cross_entropy(net(x), y).backward()
        try:
            kfac.step()
            seen.append(all(p.grad is None for p in model.parameters()))
        except NonFiniteError as error:
            seen.append(str(error))
    return seen, kfac.skipped_steps, kfac.steps


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
def test_gradients_that_are_not_finite_between_two_updates_of_the_factors(nonfinite, world_size, average):
    for seen, skipped, steps in run_ranks(_bad_gradient, world_size, nonfinite, average):
        assert seen[0] is seen[2] is False
        if nonfinite == "skip":
            assert (seen[1], skipped, steps) == (True, 1, 3)
            continue
        assert skipped == 0
        assert steps == 2
        where = f"rank(s) {world_size - 1}" if average or world_size == 1 else "every rank (they came averaged)"
        assert "step 1: the gradients of 0.weight, 1.weight, 1.bias" in seen[1]
        assert f"not finite on {where}: look for what has exploded there" in seen[1]
        assert "nonfinite='skip'" in seen[1]


def test_large_finite_gradients_in_float64_are_finite():
    model = mlp()
    kfac = KFAC(model, KFACConfig(factor_interval=2))
    for _ in range(2):
        model.zero_grad()
        loss_of(model).backward()
        model[0].weight.grad[0, 0] = 1e200
        kfac.step()


def _overflows_on_the_wire(rank, world_size, schedule, nonfinite):
    """A float64 model whose statistics of one step are 1e45 on rank 1; bfloat16 ends at 3e38."""
    model = make_model()
    kfac = KFAC(model, KFACConfig(kl_clip=1e-2, nonfinite=nonfinite), schedule, average_gradients=True)
    seen: list[object] = []
    for step in range(3):
        model.zero_grad()
        x, y = (t[rank::world_size] for t in make_data(4 * world_size, step))
        F.cross_entropy(model(x * 1e23 if step == 1 and rank == 1 else x), y).backward()
        try:
            kfac.step()
            seen.append(all(p.grad is None for p in model.parameters()))
        except NonFiniteError as error:
            seen.append(str(error))
    averages = [state["average"] for state in kfac.state_dict()["factors"].values()]
    return seen, kfac.skipped_steps, max(float(average.abs().max()) for average in averages)


@pytest.mark.parametrize("collective", ["all_reduce", "reduce_to_owner"])
@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
def test_sums_that_are_infinite_only_as_bfloat16_do_not_reach_the_averages(nonfinite, collective):
    """They poisoned the averages for good: every inversion from then on failed."""
    schedule = {"name": "spdkfac", "message_dtype": "bfloat16", "factor_collective": collective}
    for seen, skipped, largest in run_ranks(_overflows_on_the_wire, 2, schedule, nonfinite):
        assert seen[0] is seen[2] is False
        assert largest < 1e6
        if nonfinite == "skip":
            assert (seen[1], skipped) == (True, 1)
        else:
            assert "step 1: the statistics of A of 0" in seen[1]
            assert "not finite on the sum over the ranks (overflow of bfloat16): look" in seen[1]
    whole = {**schedule, "message_dtype": "full"}
    (seen, skipped, largest), _ = run_ranks(_overflows_on_the_wire, 2, whole, nonfinite)
    assert (seen, skipped) == ([False] * 3, 0), "the control: in full they are finite"
    assert largest > 1e40
