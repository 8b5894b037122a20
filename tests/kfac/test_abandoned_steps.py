"""Passes that fail: steps that are given up leave nothing behind."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

from kfac import KFAC
from tests.kfac.perceptron import D, X, factors_of, loss_of, mlp, same
from tests.kfac.ranks import run_ranks


def test_a_batch_norm_is_what_it_was_in_the_forward_pass():
    factors = []
    for switched in (False, True):
        model = mlp(nn.BatchNorm1d(4))
        kfac = KFAC(model)
        loss = loss_of(model)
        if switched:
            model.eval()
        loss.backward()
        assert model[1].training == (not switched)
        kfac.step()
        factors.append(factors_of(kfac))
    same(*factors)


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ArithmeticError("mid-backward")


class Fragile(nn.Module):
    """Calls one layer twice, and fails between layers when told to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.again, self.last = (nn.Linear(3, n).to(D) for n in (3, 3, 2))
        self.fails = ""

    def forward(self, x):
        x = self.again(torch.tanh(self.first(x)))
        if self.fails == "forward":
            raise ArithmeticError("mid-forward")
        if self.fails == "backward":
            x = _Fails.apply(x)
        return self.last(self.again(torch.tanh(x)))


@pytest.mark.parametrize("schedule", ["dkfac", "spdkfac"])
@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("how", ["forward", "backward"])
def test_after_an_exception_in_a_pass_a_step_can_be_given_up(how, at, schedule):
    runs = []
    for fails in ("", how):
        model = Fragile()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        kfac = KFAC(model, schedule=schedule)
        for step in range(4):
            if step == at and fails:
                model.fails = fails
                with pytest.raises(ArithmeticError):
                    loss_of(model, 10.0).backward()
                model.fails = ""
                kfac.abandon_step()
            optimizer.zero_grad()
            loss_of(model).backward()
            kfac.step()
            optimizer.step()
        runs.append(factors_of(kfac) | {("", "parameters"): nn.utils.parameters_to_vector(model.parameters()).detach()})
    same(*runs)


def test_control_a_step_that_is_not_given_up_is_told_how_to():
    model = Fragile()
    kfac = KFAC(model)
    model.fails = "backward"
    with pytest.raises(ArithmeticError):
        loss_of(model).backward()
    model.fails = ""
    with pytest.raises(RuntimeError, match=r"kfac\.abandon_step\(\)"):
        loss_of(model)
    kfac.abandon_step()
    loss_of(model)
    model.again(X).sum().backward()
    with pytest.raises(RuntimeError, match=r"kfac\.abandon_step\(\)"):
        kfac.step()


def _abandon(rank, world_size):
    """Rank 1 fails in its backward pass, after messages have left on rank 0 and not on rank 1."""
    parameters = []
    for fails in (False, True):
        model = Fragile()
        kfac = KFAC(model, average_gradients=True)
        for step in range(3):
            if step == 2 and fails:
                model.fails = "backward" if rank else ""
                with contextlib.suppress(ArithmeticError):
                    loss_of(model, 2.0 + rank).backward()
                model.fails = ""
                kfac.abandon_step()
            model.zero_grad()
            loss_of(model, 1.0 + rank).backward()
            kfac.step()
        parameters.append(factors_of(kfac) | {("", "gradient"): model.first.weight.grad})
    return parameters


def test_a_step_is_given_up_on_all_ranks_together():
    for plain, abandoned in run_ranks(_abandon, 2):
        same(abandoned, plain)
