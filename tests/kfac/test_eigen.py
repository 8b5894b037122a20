"""Eigendecompositions, damping on the eigenvalues, EKFAC and adaptive damping, against dense matrices."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kfac import KFAC, KFACConfig
from tests.kfac.models import make_data, shards
from tests.kfac.ranks import run_ranks

D = torch.float64


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, groups=2),
        nn.GroupNorm(2, 4),
        nn.Tanh(),
        nn.Conv2d(4, 3, 3, stride=2),
        nn.Flatten(),
        nn.Linear(27, 3),
    ).to(D)


def gradients(config: KFACConfig, steps: int = 1, model: nn.Module | None = None):
    """The gradients of a fixed batch before and after each of several steps (the parameters do not move)."""
    model = model or net()
    kfac = KFAC(model, config, "kfac")
    x, y = make_data(6, 0)
    for _ in range(steps):
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        plain = {name: p.grad.clone() for name, p in model.named_parameters()}
        kfac.step()
    return plain, {name: p.grad.clone() for name, p in model.named_parameters()}, kfac


def flat(kfac: KFAC, name: str, grads: dict[str, torch.Tensor]) -> torch.Tensor:
    """A layer's gradient as ``[G's rows, A's rows]`` with the bias last (layers without groups)."""
    prefix = f"{name}."
    weight = grads[prefix + "weight"]
    if weight.dim() == 1:
        return torch.stack([weight, grads[prefix + "bias"]], 1).reshape(-1, 1)
    return torch.cat([weight.flatten(1), grads[prefix + "bias"][:, None]], 1)


@pytest.mark.parametrize("method", ["plain", "pi"])
def test_eigendecompositions_give_the_inverses_that_cholesky_gives(method):
    _, by_cholesky, _ = gradients(KFACConfig(damping=0.01, damping_method=method))
    _, by_eigen, _ = gradients(KFACConfig(damping=0.01, damping_method=method, inverse_method="eigh"))
    for name, gradient in by_eigen.items():
        torch.testing.assert_close(gradient, by_cholesky[name], rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("max_dim", [8192, 5])
def test_exact_damping_solves_the_damped_kronecker_product(max_dim):
    config = KFACConfig(damping=0.02, damping_method="exact", inverse_method="eigh", kl_clip=None, max_dim=max_dim)
    plain, exact, kfac = gradients(config)
    _, pi, _ = gradients(KFACConfig(damping=0.02, kl_clip=None, max_dim=max_dim))
    for name in ("1", "3", "5"):
        A, G = kfac.factor(name, "A"), kfac.factor(name, "G")
        gradient = flat(kfac, name, plain)
        dense = torch.kron(G, A) + 0.02 * torch.eye(len(A) * len(G), dtype=D)
        expected = torch.linalg.solve(dense, gradient.reshape(-1)).view_as(gradient)
        torch.testing.assert_close(flat(kfac, name, exact), expected, rtol=1e-9, atol=1e-12)
        assert (flat(kfac, name, pi) - expected).norm() > 0.01 * expected.norm(), "pi damping is another one"


def per_sample(model: nn.Module, x, y) -> dict[str, torch.Tensor]:
    values = {name: p.detach() for name, p in model.named_parameters()}

    def loss(values, one_x, one_y):
        return F.cross_entropy(torch.func.functional_call(model, values, (one_x[None],)), one_y[None])

    return torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(values, x, y)


def test_ekfac_has_the_diagonal_of_the_fisher_in_the_eigenbasis_and_is_nearer_to_it():
    config = KFACConfig(
        damping=0.02,
        damping_method="exact",
        inverse_method="ekfac",
        inverse_interval=2,
        factor_decay=0.0,
        kl_clip=None,
    )
    plain, result, kfac = gradients(config, steps=2)
    model = net()
    x, y = make_data(6, 0)
    samples = per_sample(model, x, y)
    for name in ("1", "3", "5"):
        rows = torch.stack([flat(kfac, name, {k: v[n] for k, v in samples.items()}).reshape(-1) for n in range(6)])
        fisher = rows.T @ rows / 6
        A, G = kfac.factor(name, "A"), kfac.factor(name, "G")
        # Eigenvectors may be chosen in many ways where eigenvalues repeat: the preconditioner's own are taken.
        a, g = kfac._factors[name, "A"], kfac._factors[name, "G"]
        layer = next(item for item in kfac.layers if item.name == name)
        order = layer.a_order()
        a_vectors = torch.block_diag(*a.vectors)
        a_vectors = a_vectors if order is None else a_vectors[order]
        basis = torch.kron(torch.block_diag(*g.vectors), a_vectors)
        torch.testing.assert_close(basis.T @ basis, torch.eye(len(basis), dtype=D), rtol=1e-9, atol=1e-9)
        corrected = g.corrected.reshape(-1)
        torch.testing.assert_close(corrected, (basis.T @ fisher @ basis).diagonal(), rtol=1e-8, atol=1e-14)
        ekfac = basis @ torch.diag(corrected) @ basis.T
        kron = torch.kron(G, A)
        if name == "1":  # a norm's blocks are the Fisher's: there is nothing to correct
            torch.testing.assert_close(ekfac, kron, rtol=1e-9, atol=1e-14)
        else:
            assert (fisher - ekfac).norm() < 0.999 * (fisher - kron).norm()
        scrambled, _ = torch.linalg.qr(torch.randn(len(basis), len(basis), dtype=D))
        elsewhere = scrambled @ torch.diag((scrambled.T @ fisher @ scrambled).diagonal()) @ scrambled.T
        assert (fisher - elsewhere).norm() > (fisher - ekfac).norm(), "another basis is worse"
        gradient = flat(kfac, name, plain)
        dense = ekfac + 0.02 * torch.eye(len(ekfac), dtype=D)
        expected = torch.linalg.solve(dense, gradient.reshape(-1)).view_as(gradient)
        torch.testing.assert_close(flat(kfac, name, result), expected, rtol=1e-8, atol=1e-12)


def test_ekfac_starts_from_the_eigenvalues_of_kfac_and_moves_with_the_decay():
    def config(decay: float) -> KFACConfig:
        return KFACConfig(
            damping_method="exact", inverse_method="ekfac", inverse_interval=3, factor_decay=decay, kl_clip=None
        )

    _, _, none = gradients(config(0.9), steps=1)
    assert all(factor.corrected is None for factor in none._factors.values())
    _, _, once = gradients(config(0.9), steps=2)
    _, _, all_new = gradients(config(0.0), steps=2)
    key = ("5", "G")
    start = once._factors["5", "G"].values.reshape(-1, 1) * once._factors["5", "A"].values.reshape(1, -1)
    expected = 0.9 * start + 0.1 * all_new._factors[key].corrected[0]
    torch.testing.assert_close(once._factors[key].corrected[0], expected, rtol=1e-8, atol=1e-13)
    _, _, refreshed = gradients(config(0.9), steps=4)
    assert refreshed._factors[key].corrected is None, "a new basis starts anew"


def _ekfac_ranks(rank, world_size):
    model = net()  # and enough samples for factors of full rank: else eigenvectors of the value 0 could be any
    config = KFACConfig(damping=0.01, damping_method="exact", inverse_method="ekfac", inverse_interval=3)
    kfac = KFAC(model, config, "mpdkfac", average_gradients=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for step in range(6):
        x, y = make_data(60, step)
        mine = shards(60, world_size)[rank]
        optimizer.zero_grad()
        (F.cross_entropy(model(x[mine]), y[mine]) * (len(y[mine]) * world_size / 60)).backward()
        kfac.step()
        optimizer.step()
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach()


def test_ekfac_does_not_depend_on_how_the_batch_is_split():
    (alone,) = run_ranks(_ekfac_ranks, 1)
    start = torch.nn.utils.parameters_to_vector(net().parameters()).detach()
    assert (alone - start).norm() > 1e-3
    first, second = run_ranks(_ekfac_ranks, 2)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, alone, rtol=0, atol=1e-9)


def test_ekfac_resumes_inside_an_interval():
    config = KFACConfig(damping_method="exact", inverse_method="ekfac", inverse_interval=4)
    _, _, kfac = gradients(config, steps=2)
    saved = kfac.state_dict()
    kfac.close()
    again = KFAC(net(), config, "kfac")
    again.load_state_dict(saved)
    assert torch.equal(again._factors["5", "G"].corrected, kfac._factors["5", "G"].corrected)
    assert torch.equal(again._factors["5", "A"].vectors, kfac._factors["5", "A"].vectors)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"damping_method": "exact"}, "set inverse_method to eigh or ekfac"),
        ({"inverse_method": "ekfac", "inverse_interval": 2}, "needs damping_method='exact'"),
        ({"inverse_method": "ekfac", "damping_method": "exact"}, "set inverse_interval > 1"),
        ({"overrides": {"*": {"damping_method": "exact"}}}, r"kfac.overrides\['\*'\]"),
    ],
)
def test_combinations_that_contradict_each_other_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        KFACConfig(**options)


# ---------------------------------------------------------------------- adaptive damping


def least_squares(damping: float, lr: float = 1.0):
    """One linear layer under squared loss: with the exact Fisher the quadratic model is the loss itself."""
    torch.manual_seed(0)
    x, y = torch.randn(20, 3, dtype=D), torch.randn(20, 2, dtype=D)
    model = nn.Linear(3, 2).to(D)
    config = KFACConfig(
        damping=damping,
        fisher="exact",
        kl_clip=None,
        damping_adaptation="levenberg_marquardt",
        damping_interval=1,
    )
    kfac = KFAC(model, config, "kfac")
    optimizer = torch.optim.SGD(model.parameters(), lr)

    def step() -> float:
        optimizer.zero_grad()
        output = model(x)
        loss = F.mse_loss(output, y)
        with kfac.curvature(output, "regression"):
            loss.backward()
        kfac.step()
        optimizer.step()
        assert kfac.adapts_damping
        with torch.no_grad():
            again = F.mse_loss(model(x), y)
        return kfac.adapt_damping(loss, again)

    return kfac, step


def test_a_loss_that_is_the_model_has_reduction_ratio_one_and_less_damping():
    kfac, step = least_squares(damping=0.1)
    for number in range(1, 4):
        assert step() == pytest.approx(1.0, abs=1e-9)
        assert kfac.damping_strength == pytest.approx((19 / 20) ** number)


def test_a_step_that_is_worse_than_predicted_raises_the_damping():
    kfac, step = least_squares(damping=1e-6, lr=2.5)  # beyond the optimum: the model predicts a rise, too
    assert step() == -math.inf
    assert kfac.damping_strength == pytest.approx(20 / 19)


def test_damping_that_adapts_is_part_of_the_state_and_must_not_be_forgotten():
    kfac, step = least_squares(damping=0.1)
    step()
    fresh, _ = least_squares(damping=0.1)
    fresh.load_state_dict(kfac.state_dict())
    assert fresh.damping_strength == kfac.damping_strength != 1.0
    with pytest.raises(RuntimeError, match="none is due"):
        fresh.adapt_damping(1.0, 1.0)
    model = net()
    config = KFACConfig(damping_adaptation="levenberg_marquardt", damping_interval=2)
    kfac = KFAC(model, config)
    x, y = make_data(4, 0)
    for _ in range(2):
        F.cross_entropy(model(x), y).backward()
        kfac.step()
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(RuntimeError, match=r"Call kfac\.adapt_damping"):
        kfac.step()
