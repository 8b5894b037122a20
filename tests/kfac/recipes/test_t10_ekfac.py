"""T10: corrected eigenvalues are the Fisher's own in K-FAC's basis, so that no diagonal there is nearer to it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from kfac import KFAC, KFACConfig
from tests.kfac.oracle import D, Loss, curvlinops_kfac, distance, empirical_blocks, ggn_blocks
from tests.kfac.recipes.nets import TokenNet, data, mlp
from tests.kfac.recipes.ours import accumulated

DAMPING = 0.02
ORACLES = {"exact": ggn_blocks, "empirical": empirical_blocks}


@dataclass(frozen=True)
class Corrected:
    """What one layer has after its eigenvalues were corrected."""

    basis: Tensor
    """``U = U_G (x) U_A``, columns."""
    values: Tensor
    """Of the same order."""
    kfac: Tensor
    """``G (x) A``."""
    before: Tensor
    """The gradient, flattened row by row."""
    after: Tensor
    """The preconditioned one."""

    @property
    def matrix(self) -> Tensor:
        """EKFAC's approximation."""
        return self.basis @ torch.diag(self.values) @ self.basis.T


def flat_gradients(model: nn.Module, names: list[str]) -> dict[str, Tensor]:
    result = {}
    for name in names:
        module = model.get_submodule(name)
        parts = [module.weight.grad.flatten(1)] + ([] if module.bias is None else [module.bias.grad[:, None]])
        result[name] = torch.cat(parts, 1).flatten()
    return result


def corrected(
    model: nn.Module, x: Tensor, y: Tensor, loss: Loss, fisher: str, **options: object
) -> dict[str, Corrected]:
    """Two steps on one batch, of which the first finds the basis and the second corrects; without an average."""
    config = KFACConfig(
        fisher=fisher,
        loss_reduction=loss.reduction,
        inverse_method="ekfac",
        damping_method="exact",
        damping=DAMPING,
        inverse_interval=2,
        factor_decay=0.0,
        kl_clip=None,
        **options,  # type: ignore[arg-type]
    )
    kfac = KFAC(model, config)
    names = [layer.name for layer in kfac.layers]
    for _ in range(2):
        accumulated(kfac, model, x, y, loss, (len(x),))
        before = flat_gradients(model, names)
        kfac.step()
    after, state = flat_gradients(model, names), kfac.state_dict()["factors"]
    result = {}
    for name in names:
        a, g = kfac.factor(name, "A"), kfac.factor(name, "G")
        basis = torch.kron(state[f"{name}/G"]["vectors"][0], state[f"{name}/A"]["vectors"][0])
        values = state[f"{name}/G"]["corrected"].flatten()
        result[name] = Corrected(basis, values, torch.kron(g, a), before[name], after[name])
    kfac.close()
    return result


@pytest.mark.parametrize("fisher", ORACLES)
@pytest.mark.parametrize("kind", ["classification", "regression"])
@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_it_is_nearer_to_the_fisher_than_k_fac(activation, kind, fisher):
    """And its eigenvalues are ``diag(U^T F U)``; the control: in a random Kronecker basis that is worse."""
    torch.manual_seed(0)
    model, loss = mlp(activation=activation), Loss(kind)
    x, y = data(kind, 9)
    truth = ORACLES[fisher](model, x, y, loss)
    for name, ours in corrected(model, x, y, loss, fisher).items():
        fisher_matrix = truth[name]
        diagonal = (ours.basis.T @ fisher_matrix @ ours.basis).diagonal()
        torch.testing.assert_close(ours.values, diagonal, rtol=1e-9, atol=1e-12 * diagonal.max().item())
        ekfac, kfac = (fisher_matrix - ours.matrix).norm(), (fisher_matrix - ours.kfac).norm()
        exact = name == "4" and kind == "regression" and fisher == "exact"  # the last layer: K-FAC is exact (T1)
        assert ekfac <= kfac + 1e-12 if exact else ekfac < kfac
        inputs = model.get_submodule(name).in_features + 1
        bases = [torch.linalg.qr(torch.randn(n, n, dtype=D))[0] for n in (len(fisher_matrix) // inputs, inputs)]
        random = torch.kron(*bases)
        nearest = random @ torch.diag((random.T @ fisher_matrix @ random).diagonal()) @ random.T
        assert (fisher_matrix - nearest).norm() > 1.05 * ekfac


@pytest.mark.parametrize(
    ("activation", "kind", "samples"),
    [("tanh", "classification", 1), ("tanh", "regression", 1), ("none", "regression", 6)],
)
def test_where_k_fac_is_exact_it_is_k_fac(activation, kind, samples):
    model, loss = mlp(activation=activation), Loss(kind)
    x, y = data(kind, samples)
    truth = ggn_blocks(model, x, y, loss)
    ours = corrected(model, x, y, loss, "exact")
    for matrices in (
        {name: layer.matrix for name, layer in ours.items()},
        {n: layer.kfac for n, layer in ours.items()},
    ):
        error = distance(matrices, truth)
        assert error < 1e-10


@pytest.mark.parametrize("fisher", ORACLES)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("kind", ["classification", "regression"])
def test_it_is_the_ekfac_of_curvlinops(kind, reduction, fisher):
    model, loss = mlp(), Loss(kind, reduction)
    x, y = data(kind, 9)
    theirs = curvlinops_kfac(model, x, y, loss, fisher, corrected=True)
    error = distance({name: ours.matrix for name, ours in corrected(model, x, y, loss, fisher).items()}, theirs)
    assert error < 1e-9


@pytest.mark.parametrize("fisher", ORACLES)
def test_pooled_tokens_count_as_one_gradient_per_sample(fisher):
    """With weight sharing a sample's gradient is the sum over its positions: the same as curvlinops'."""
    model, loss = TokenNet("tanh", pool="mean"), Loss("classification")
    x, y = data("classification", 4, 5)[0], data("classification", 4)[1]
    theirs = curvlinops_kfac(model, x, y, loss, fisher, corrected=True)
    truth = ORACLES[fisher](model, x, y, loss)
    for name, ours in corrected(model, x, y, loss, fisher).items():
        error = distance({name: ours.matrix}, {name: theirs[name]})
        assert error < 1e-9
        diagonal = (ours.basis.T @ truth[name] @ ours.basis).diagonal()
        torch.testing.assert_close(ours.values, diagonal, rtol=1e-9, atol=1e-12 * diagonal.max().item())


class Convolutions(nn.Module):
    def __init__(self, groups: int = 1) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.first = nn.Conv2d(2, 4, (3, 2), stride=(2, 1), padding=1, groups=groups)
            self.second = nn.Conv2d(4, 3, 2, bias=False)
        self.to(D)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(torch.tanh(self.first(x)))).flatten(2).mean(2)


@pytest.mark.parametrize("fisher", ORACLES)
def test_the_step_is_the_dense_solve_also_for_convolutions(fisher):
    """The damped matrix of curvlinops' EKFAC times our step is the gradient; K-FAC's is not (the control)."""
    x = torch.randn(5, 2, 5, 4, dtype=D, generator=torch.Generator().manual_seed(1))
    y = torch.tensor([0, 1, 2, 1, 0])
    model, loss = Convolutions(), Loss("classification")
    theirs = curvlinops_kfac(model, x, y, loss, fisher, corrected=True)
    uncorrected = curvlinops_kfac(model, x, y, loss, fisher)
    for name, ours in corrected(model, x, y, loss, fisher).items():
        eye = DAMPING * torch.eye(len(ours.before), dtype=D)
        torch.testing.assert_close(
            ours.after, torch.linalg.solve(theirs[name] + eye, ours.before), rtol=1e-8, atol=1e-12
        )
        other = torch.linalg.solve(uncorrected[name] + eye, ours.before)
        assert (other - ours.after).norm() > 0.01 * ours.after.norm()
