"""Cholesky factors in place of inverses, and averages that are not packed, against dense solves in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kfac import KFAC, KFACConfig
from kfac.curvature import inverses
from kfac.curvature.blocks import Blocks, multiply_left, multiply_right, solve_left, solve_right
from kfac.curvature.inverses import (
    BLOCK_DIM,
    damped_cholesky,
    damped_inverse,
    eigendecomposition,
    keeps_cholesky,
)
from kfac.factors import FactorState
from tests.kfac.models import make_data, make_model

D = torch.float64


def moments(count: int, dim: int, seed: int = 0) -> torch.Tensor:
    rows = torch.randn(count, dim + 5, dim, dtype=D, generator=torch.Generator().manual_seed(seed))
    return rows.mT @ rows / dim


def with_garbage_below(matrix: torch.Tensor) -> torch.Tensor:
    return matrix.triu() + torch.full_like(matrix, torch.nan).tril(-1)


@pytest.mark.parametrize("dim", [1, 7, 2 * BLOCK_DIM, 2 * BLOCK_DIM + 3])
@pytest.mark.parametrize("weight", [1.0, 0.25])
def test_cholesky_factors_are_of_the_damped_upper_triangle(dim, weight):
    matrix = moments(2, dim)
    triangle = with_garbage_below(matrix)
    before = triangle.clone()
    upper = damped_cholesky(triangle, 0.1, weight)
    torch.testing.assert_close(triangle, before, equal_nan=True, rtol=0, atol=0)
    upper = upper.triu()
    damped = matrix / weight + 0.1 * torch.eye(dim, dtype=D)
    torch.testing.assert_close(upper.mT @ upper, damped, rtol=1e-11, atol=1e-11)
    inverse = damped_inverse(triangle, 0.1, weight)
    torch.testing.assert_close(inverse @ damped, torch.eye(dim, dtype=D).expand(2, -1, -1), rtol=0, atol=1e-9)


def test_what_has_no_cholesky_factor_and_what_is_lifted_above_its_rounding():
    wide = 2 * BLOCK_DIM
    for dim in (3, wide):
        indefinite = torch.eye(dim)
        indefinite[-1, -1] = -1.0
        assert damped_cholesky(indefinite[None], 0.5) is None
        assert damped_cholesky(torch.full((1, dim, dim), torch.nan), 0.5) is None
    rows = 1e4 * torch.randn(2, 6, generator=torch.Generator().manual_seed(0))
    lost = (rows.T @ rows)[None]  # indefinite by its rounding, by more than the damping
    upper = damped_cholesky(lost, 1e-6)
    inverse = torch.cholesky_inverse(upper[0].triu().double(), upper=True)
    expected = damped_inverse(lost, 1e-6)[0].double()
    assert (inverse - expected).norm() < 1e-2 * expected.norm()


def test_noise_of_messages_is_no_damage():
    """What bfloat16 sums lose may make a singular factor indefinite by more than float32's rounding."""
    rows = torch.randn(4, 12, generator=torch.Generator().manual_seed(0))
    exact = rows.T @ rows  # of rank 4
    rounded = exact.bfloat16().float()[None]
    assert torch.linalg.eigvalsh(rounded)[0, 0] < -1e-4
    noise = torch.finfo(torch.bfloat16).eps
    for solve in (damped_inverse, damped_cholesky, lambda f, d, _, noise=0.0: eigendecomposition(f, d, noise=noise)):
        assert solve(rounded, 1e-6, 1.0) is None
        assert solve(rounded, 1e-6, 1.0, noise=noise) is not None
    _, values = eigendecomposition(rounded, noise=noise)
    assert (values > 0).all()
    broken = rounded.clone()
    broken[0, 0, 0] = -broken[0, 0, 0]
    assert damped_inverse(broken, 1e-6, 1.0, noise) is None


@pytest.mark.parametrize(
    ("groups", "rows", "columns", "max_dim"), [(1, 6, 5, 9), (3, 6, 5, 9), (1, 7, 5, 4), (2, 7, 5, 3)]
)
def test_solves_are_products_with_the_inverse(groups, rows, columns, max_dim):
    matrix = torch.randn(groups, rows, columns, dtype=D)
    shape = Blocks.of(groups, rows, max_dim)
    factor = moments(shape.count, shape.dim)
    inverse, upper = damped_inverse(factor, 0.1), with_garbage_below(damped_cholesky(factor, 0.1))
    torch.testing.assert_close(solve_left(upper, matrix), multiply_left(inverse, matrix), rtol=1e-9, atol=1e-10)
    right = matrix.mT.contiguous()
    torch.testing.assert_close(solve_right(right, upper), multiply_right(right, inverse), rtol=1e-9, atol=1e-10)


def test_a_cholesky_factor_is_kept_where_it_pays():
    cpu = torch.device("cpu")
    assert keeps_cholesky(inverses.SOLVE_DIM["cpu"], 100, cpu)
    assert not keeps_cholesky(inverses.SOLVE_DIM["cpu"] - 1, 100, cpu)
    assert keeps_cholesky(inverses.SHORT_SOLVE_DIM, 1, cpu)
    assert not keeps_cholesky(4096, 1, torch.device("cuda"))


def trained(steps: int, interval: int = 1, kfac_state=None, model_state=None):
    model = make_model()
    if model_state:
        model.load_state_dict(model_state)
    kfac = KFAC(model, KFACConfig(inverse_interval=interval))
    if kfac_state:
        kfac.load_state_dict(kfac_state)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step in range(steps):
        x, y = make_data(6, step)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        kfac.step()
        optimizer.step()
    return model, kfac


def test_steps_with_cholesky_factors_are_those_with_inverses(monkeypatch):
    by_inverses, _ = trained(4)
    monkeypatch.setattr(inverses, "SHORT_SOLVE_DIM", 1)
    by_solves, kfac = trained(4)
    kept = [state.upper is not None and state.inverse is None for state in kfac._factors.values()]
    assert all(kept)
    for one, other in zip(by_inverses.parameters(), by_solves.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


def test_cholesky_factors_resume_within_an_interval_to_the_same_bits(monkeypatch):
    monkeypatch.setattr(inverses, "SHORT_SOLVE_DIM", 1)
    model, kfac = trained(2, interval=3)
    saved = kfac.state_dict()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    ends = []
    for _ in range(2):
        again, _ = trained(2, 3, saved, weights)
        ends.append(nn.utils.parameters_to_vector(again.parameters()))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step in range(2):
        x, y = make_data(6, step)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        kfac.step()
        optimizer.step()
    ends.append(nn.utils.parameters_to_vector(model.parameters()))
    assert torch.equal(ends[0], ends[1])
    assert torch.equal(ends[0], ends[2])


@pytest.mark.parametrize("from_identity", [False, True])
def test_averages_are_the_same_packed_and_not(from_identity):
    shape = Blocks.of(2, 5, 3)
    packed, whole = FactorState(shape), FactorState(shape, packed=False)
    for seed in range(3):
        total = moments(shape.count, shape.dim, seed)
        packed.update(packed.pack(total), 0.5, 0.9, from_identity)
        whole.update(with_garbage_below(total), 0.5, 0.9, from_identity)
    assert torch.equal(packed.matrix(), whole.matrix())
    # The diagonals are the same, but summed in another order.
    torch.testing.assert_close(packed.mean_eigenvalue(), whole.mean_eigenvalue(), rtol=1e-15 * len(total[0]), atol=0)
    states = packed.state_dict(), whole.state_dict()
    assert torch.equal(states[0]["average"], states[1]["average"])
    loaded = FactorState(shape, packed=False)
    loaded.load_state_dict(states[0], torch.empty(0, dtype=D))
    assert torch.equal(loaded.matrix(), whole.matrix())
