"""T11: what K-FAC is for: Newton's step where it is exact, and steps that do not depend on the inputs' coordinates."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfac import KFAC, KFACConfig
from tests.kfac.oracle import D

UNDAMPED = 1e-14
"""As small as keeps the factors of these problems invertible in float64."""


def full_step(model: nn.Module, x: Tensor, y: Tensor, *, preconditioned: bool, lr: float = 1.0) -> None:
    """One step of gradient descent on the mean squared error, with undamped exact K-FAC or without."""
    model.zero_grad()
    config = KFACConfig(fisher="exact", damping=UNDAMPED, damping_method="plain", kl_clip=None)
    kfac = KFAC(model, config) if preconditioned else None
    output = model(x)
    if kfac is None:
        F.mse_loss(output, y).backward()
    else:
        with kfac.curvature(output, "regression"):
            F.mse_loss(output, y).backward()
        kfac.step()
        kfac.close()
    torch.optim.SGD(model.parameters(), lr).step()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("preconditioned", [True, False], ids=["K-FAC", "control: SGD"])
def test_one_step_reaches_the_least_squares_optimum(preconditioned, bias):
    torch.manual_seed(0)
    x, y = (torch.randn(50, n, dtype=D) for n in (4, 2))
    model = nn.Linear(4, 2, bias=bias).to(D)
    full_step(model, x, y, preconditioned=preconditioned)
    design = torch.cat([x, torch.ones(50, 1, dtype=D)], 1) if bias else x
    optimum = torch.linalg.lstsq(design, y).solution.T
    reached = torch.cat([model.weight, model.bias[:, None]], 1) if bias else model.weight
    error = (reached - optimum).abs().max().item()
    assert error < 1e-10 if preconditioned else error > 0.1


class Transformed(nn.Module):
    """A network for inputs ``M x + c`` that is the same function of x as another."""

    def __init__(self, model: nn.Sequential, m: Tensor, c: Tensor) -> None:
        super().__init__()
        self.model, self.m, self.c = copy.deepcopy(model), m, c
        first = self.model[0]
        first.weight.data = first.weight.data @ torch.linalg.inv(m)
        first.bias.data -= first.weight.data @ c

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x @ self.m.T + self.c)


@pytest.mark.parametrize("preconditioned", [True, False], ids=["K-FAC", "control: SGD"])
def test_the_updated_function_does_not_depend_on_affine_changes_of_the_inputs(preconditioned):
    """Martens and Grosse 2015, section 10: the step in other coordinates is the same function, to rounding."""
    torch.manual_seed(0)
    x, y, unseen = torch.randn(40, 3, dtype=D), torch.randn(40, 2, dtype=D), torch.randn(20, 3, dtype=D)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(D)
    m, c = torch.randn(3, 3, dtype=D) + 2 * torch.eye(3, dtype=D), torch.randn(3, dtype=D)
    twin = Transformed(model, m, c)
    torch.testing.assert_close(twin(unseen), model(unseen), rtol=1e-12, atol=1e-12)
    start = model(unseen).detach()
    for _ in range(3):
        for net in (model, twin):
            full_step(net, x, y, preconditioned=preconditioned, lr=0.3)
    difference, moved = (model(unseen) - twin(unseen)).abs().max().item(), (model(unseen) - start).abs().max().item()
    assert moved > 0.01
    assert difference < 1e-8 * moved if preconditioned else difference > 0.01 * moved
