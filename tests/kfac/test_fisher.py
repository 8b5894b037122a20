"""Fisher types against the generalised Gauss-Newton and the empirical Fisher, computed by torch.func."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kfac import KFAC, KFACConfig
from kfac.curvature.fisher import fisher_vectors
from tests.kfac.models import make_data, make_model, shards
from tests.kfac.ranks import run_ranks

D = torch.float64
LOSSES = {"classification": F.cross_entropy, "regression": F.mse_loss}


def mlp(linear: bool = False) -> nn.Module:
    torch.manual_seed(3)
    middle = nn.Identity if linear else nn.Tanh
    return nn.Sequential(nn.Linear(3, 4), middle(), nn.Linear(4, 5, bias=False), middle(), nn.Linear(5, 3)).to(D)


def data(samples: int, loss_kind: str):
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(samples, 3, generator=generator, dtype=D)
    if loss_kind == "classification":
        return x, torch.randint(0, 3, (samples,), generator=generator)
    return x, torch.randn(samples, 3, generator=generator, dtype=D)


def test_exact_vectors_of_a_regression_and_their_scale():
    x, _ = data(4, "regression")
    exact = sum(v.T @ v for v in fisher_vectors(x, "regression", None))
    torch.testing.assert_close(exact, 2 / 3 / 4 * torch.eye(3, dtype=D))
    doubled = sum((math.sqrt(2) * v).T @ (math.sqrt(2) * v) for v in fisher_vectors(x, "regression", None))
    assert (doubled - exact).norm() > 0.5 * exact.norm()


def test_the_loss_gradient_is_what_it_is_without_the_fisher():
    x, y = data(5, "classification")
    plain = mlp()
    F.cross_entropy(plain(x), y).backward()
    model = mlp()
    kfac = KFAC(model, KFACConfig(fisher="mc", fisher_samples=3))
    output = model(x)
    with kfac.curvature(output, "classification"):
        F.cross_entropy(output, y).backward()
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_a_step_without_the_outputs_is_refused_and_an_unknown_loss_named():
    model = mlp()
    kfac = KFAC(model, KFACConfig(fisher="mc"))
    x, y = data(2, "classification")
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(RuntimeError, match="needs the model's outputs"):
        kfac.step()
    with pytest.raises(ValueError, match=r"hinge.*classification, regression"), kfac.curvature(model(x), "hinge"):
        pass


def _exact(rank, world_size, accumulation):
    model = make_model()
    kfac = KFAC(model, KFACConfig(fisher="exact", accumulation_steps=accumulation), average_gradients=True)
    for step in range(3):
        x, y = make_data(12, step)
        mine = shards(12, world_size)[rank]
        model.zero_grad()
        for micro_x, micro_y in zip(
            x[mine].tensor_split(accumulation), y[mine].tensor_split(accumulation), strict=True
        ):
            weight = len(micro_y) * world_size / 12
            output = model(micro_x)
            with kfac.curvature(output, "classification", weight):
                (F.cross_entropy(output, micro_y) * weight).backward()
        kfac.step()
    return {layer.name: (kfac.factor(layer.name, "A"), kfac.factor(layer.name, "G")) for layer in kfac.layers}


def test_exact_factors_do_not_depend_on_how_the_batch_is_split():
    (alone,) = run_ranks(_exact, 1, 1)
    for world_size, accumulation in ((2, 1), (2, 2)):
        for factors in run_ranks(_exact, world_size, accumulation):
            for name, pair in factors.items():
                for a, b in zip(pair, alone[name], strict=True):
                    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-14)
