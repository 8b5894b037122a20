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


def ggn_blocks(model: nn.Module, x: torch.Tensor, loss_kind: str) -> dict[str, torch.Tensor]:
    """Per layer ``(1/N) sum_n J_n^T H_n J_n``, rows in the order of ``[weight | bias]`` flattened row by row."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def output(values, one):
        return torch.func.functional_call(model, values, (one[None],))[0]

    def loss(z):
        y = torch.zeros((), dtype=torch.long) if loss_kind == "classification" else torch.zeros(3, dtype=D)
        return LOSSES[loss_kind](z[None], y[None])

    blocks: dict[str, torch.Tensor] = {}
    for one in x:
        jacobian = torch.func.jacrev(output)(parameters, one)
        hessian = torch.func.hessian(loss)(output(parameters, one))
        for name in {key.rsplit(".", 1)[0] for key in parameters}:
            j = jacobian[f"{name}.weight"]
            if f"{name}.bias" in jacobian:
                j = torch.cat([j, jacobian[f"{name}.bias"][..., None]], -1)
            j = j.flatten(1)
            blocks[name] = blocks.get(name, 0) + j.T @ hessian @ j / len(x)
    return blocks


def kfac_blocks(model: nn.Module, x, y, loss_kind: str, fisher: str, samples: int = 1) -> dict[str, torch.Tensor]:
    kfac = KFAC(model, KFACConfig(fisher=fisher, fisher_samples=samples))
    model.zero_grad()
    output = model(x)
    loss = LOSSES[loss_kind](output, y)
    with kfac.curvature(output, loss_kind):
        loss.backward()
    kfac.step()
    names = [layer.name for layer in kfac.layers]
    blocks = {name: torch.kron(kfac.factor(name, "G"), kfac.factor(name, "A")) for name in names}
    kfac.close()
    return blocks


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    return max(((a[name] - b[name]).norm() / b[name].norm()).item() for name in b)


@pytest.mark.parametrize("loss_kind", LOSSES)
def test_t1_one_datum_exact_is_the_ggn(loss_kind):
    model = mlp()
    x, y = data(1, loss_kind)
    assert distance(kfac_blocks(model, x, y, loss_kind, "exact"), ggn_blocks(model, x, loss_kind)) < 1e-12
    x, y = data(7, loss_kind)
    seven = kfac_blocks(model, x, y, loss_kind, "exact")
    assert distance(seven, ggn_blocks(model, x, loss_kind)) > 0.01, "for several samples K-FAC is an approximation"


@pytest.mark.parametrize("samples", [1, 6])
def test_t2_deep_linear_regression_exact_is_the_ggn(samples):
    model = mlp(linear=True)
    x, y = data(samples, "regression")
    ggn = ggn_blocks(model, x, "regression")
    assert distance(kfac_blocks(model, x, y, "regression", "exact"), ggn) < 1e-12
    assert distance(kfac_blocks(model, x, y, "regression", "empirical"), ggn) > 0.05


@pytest.mark.parametrize("loss_kind", LOSSES)
def test_t3_monte_carlo_converges_to_the_ggn_as_one_over_the_root_of_samples(loss_kind):
    model = mlp()
    x, y = data(1, loss_kind)
    ggn = ggn_blocks(model, x, loss_kind)
    torch.manual_seed(0)
    counts = (20, 80, 320)
    errors = []
    for count in counts:
        runs = [distance(kfac_blocks(model, x, y, loss_kind, "mc", count), ggn) for _ in range(8)]
        errors.append(sum(runs) / len(runs))
    slope = math.log(errors[-1] / errors[0]) / math.log(counts[-1] / counts[0])
    assert slope == pytest.approx(-0.5, abs=0.15)
    assert errors[-1] < 0.15


def test_vectors_of_a_wrong_distribution_would_be_noticed():
    """The control of T3: doubling the variance doubles the Fisher."""
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
