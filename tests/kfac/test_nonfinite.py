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
        assert seen[1].endswith(f"not finite on {where}")


def test_large_finite_gradients_in_float64_are_finite():
    model = mlp()
    kfac = KFAC(model, KFACConfig(factor_interval=2))
    for _ in range(2):
        model.zero_grad()
        loss_of(model).backward()
        model[0].weight.grad[0, 0] = 1e200
        kfac.step()
