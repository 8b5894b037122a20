"""T16: the inverses' error is bounded by the condition number, and what has no inverse has a named error."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from kfac import KFAC, KFACConfig
from kfac.curvature.inverses import damped_inverse, eigendecomposition, inverse_from_eigen
from kfac.inversion import FactorInversionError
from tests.kfac.oracle import D, Loss
from tests.kfac.recipes.nets import data, mlp
from tests.kfac.recipes.ours import accumulated

DTYPES = {"float64": torch.float64, "float32": torch.float32}


def by_eigenvalues(blocks: Tensor, damping: float) -> Tensor | None:
    """Inverses from eigendecompositions."""
    parts = eigendecomposition(blocks, damping)
    return None if parts is None else inverse_from_eigen(*parts, damping)


KERNELS: dict[str, Callable[[Tensor, float], Tensor | None]] = {"cholesky": damped_inverse, "eigh": by_eigenvalues}
"""From blocks ``[blocks, d, d]`` and a damping to their inverses, or None."""


def inverse(matrix: Tensor, damping: float = 0.0, kernel: str = "cholesky") -> Tensor | None:
    """What kfac makes of one matrix; None if it has no inverse."""
    result = KERNELS[kernel](matrix[None], damping)
    return None if result is None else result[0]


def orthogonal(n: int, seed: int = 0) -> Tensor:
    return torch.linalg.qr(torch.randn(n, n, dtype=D, generator=torch.Generator().manual_seed(seed)))[0]


def with_eigenvalues(values: Tensor) -> Tensor:
    q = orthogonal(len(values))
    matrix = q @ torch.diag(values) @ q.T
    return (matrix + matrix.T) / 2


def moments(n: int, rows: int) -> Tensor:
    x = torch.randn(rows, n, dtype=D, generator=torch.Generator().manual_seed(1))
    return x.T @ x / rows


MATRICES: dict[str, tuple[Tensor, float]] = {
    "well conditioned": (with_eigenvalues(torch.logspace(0, -2, 20, dtype=D)), 0.0),
    "condition 1e10": (with_eigenvalues(torch.logspace(0, -10, 20, dtype=D)), 0.0),
    "rank deficient": (moments(30, 7), 1e-3),
    "rank one": (moments(12, 1), 1e-8),
    "zero": (torch.zeros(5, 5, dtype=D), 0.1),
    "one element": (torch.full((1, 1), 3.0, dtype=D), 1e-3),
    "tiny element": (torch.full((1, 1), 1e-30, dtype=D), 0.0),
    "diagonal": (torch.diag(torch.logspace(0, -8, 16, dtype=D)), 0.0),
    "wide": (moments(200, 400), 1e-6),
}
"""Matrix and damping."""


def bound(matrix: Tensor, dtype: torch.dtype) -> float:
    """``10 eps kappa``."""
    values = torch.linalg.eigvalsh(matrix.to(D))
    return 10 * torch.finfo(dtype).eps * (values[-1] / values[0]).item()


def error(candidate: Tensor, matrix: Tensor) -> float:
    """The spectral norm of ``X M - I``."""
    return torch.linalg.matrix_norm(candidate.to(D) @ matrix.to(D) - torch.eye(len(matrix), dtype=D), 2).item()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MATRICES)
def test_error_is_within_ten_epsilons_times_the_condition_number(name, dtype, kernel):
    matrix, damping = MATRICES[name]
    matrix = matrix.to(DTYPES[dtype])
    before = matrix.clone()
    result = inverse(matrix, damping, kernel)
    assert torch.equal(matrix, before), "inverting must not change the factor"
    damped = matrix.to(D) + damping * torch.eye(len(matrix), dtype=D)
    values = torch.linalg.eigvalsh(damped)
    if values[0] <= 0:  # rounded to float32 it is not definite any more
        assert dtype == "float32"
        check_above_rounding(result, values, damping)
        return
    assert result is not None
    assert result.dtype == matrix.dtype
    assert torch.equal(result, result.T)
    limit = bound(damped, matrix.dtype)
    assert error(result, damped) <= limit
    if len(matrix) > 1 and limit < 1:
        assert error(result * (1 + 3 * limit), damped) > limit, "the control: a slightly wrong inverse is found"


def check_above_rounding(result: Tensor | None, values: Tensor, damping: float) -> None:
    """Eigenvalues below the rounding of the largest count as that rounding, whatever the method.

    The least eigenvalue of the inverse is beyond float32, and not looked at.
    """
    assert result is not None
    least = torch.finfo(torch.float32).eps * values[-1] + damping
    assert torch.equal(result, result.T)
    assert torch.linalg.matrix_norm(result.to(D), 2).item() * least == pytest.approx(1.0, rel=1e-3)


def test_blocks_are_inverted_each_by_itself():
    blocks = torch.stack([moments(6, 20), with_eigenvalues(torch.logspace(0, -6, 6, dtype=D)), 5 * moments(6, 8)])
    together = damped_inverse(blocks, 1e-3)
    assert together is not None
    for block, one in zip(blocks, together, strict=True):
        single = inverse(block, 1e-3)
        torch.testing.assert_close(one, single, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("others", [0, 2], ids=["alone", "among others"])
def test_what_fails_in_float32_is_inverted_in_float64(others):
    """A damping that float32 rounds away beside large entries: only float64 sees that the matrix is definite."""
    matrix, damping = torch.full((3, 3), 1024.0), 1e-5
    assert torch.linalg.cholesky_ex(matrix + damping * torch.eye(3)).info.item() != 0, "the control: float32 fails"
    result = damped_inverse(torch.stack([matrix, *[torch.eye(3)] * others]), damping)
    assert result is not None
    expected = torch.linalg.inv(matrix.double() + damping * torch.eye(3, dtype=D))
    torch.testing.assert_close(result[0].double(), expected, rtol=1e-5, atol=1e-2)


NOTHING = {
    "indefinite": torch.diag(torch.tensor([1.0, -1.0, 2.0], dtype=D)),
    "NaN": torch.full((3, 3), math.nan, dtype=D),
    "one NaN": torch.eye(3, dtype=D).index_put((torch.tensor([2]), torch.tensor([2])), torch.tensor(math.nan, dtype=D)),
    "infinite": torch.diag(torch.tensor([1.0, math.inf, 1.0], dtype=D)),
    "NaN element": torch.full((1, 1), math.nan, dtype=D),
    "infinite element": torch.full((1, 1), math.inf, dtype=D),
    "negative element": torch.full((1, 1), -1.0, dtype=D),
}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", NOTHING)
def test_what_has_no_inverse_has_none(name, kernel):
    assert inverse(NOTHING[name], 0.5, kernel) is None


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_damping_below_the_rounding_of_a_factor_gives_no_larger_inverse_than_that_rounding(kernel):
    """One sample of float32: all but one eigenvalue are noise, which 1 / damping = 1e12 would blow up."""
    x = torch.randn(12, 1, generator=torch.Generator().manual_seed(1))
    matrix = x @ x.T - 1e-7 * torch.eye(12)  # what rounding may make of it
    result = inverse(matrix, 1e-12, kernel)
    assert result is not None
    largest = torch.linalg.eigvalsh(matrix.to(D))[-1].item()
    expected = 1 / (torch.finfo(torch.float32).eps * largest)
    assert torch.linalg.matrix_norm(result.to(D), 2).item() == pytest.approx(expected, rel=1e-2)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("side", ["A", "G"])
@pytest.mark.parametrize("method", ["plain", "pi", "exact"])
def test_a_factor_that_is_not_finite_raises_an_error_with_its_name(method, side, value):
    """A running average that has overflowed or been damaged: the layer and the side are named, nothing hangs."""
    model = mlp()
    how = {"damping_method": method, "inverse_method": "eigh" if method == "exact" else "cholesky"}
    kfac = KFAC(model, KFACConfig(factor_interval=1000, **how))
    x, y = data("classification", 6)
    accumulated(kfac, model, x, y, Loss("classification"), (6,))
    kfac.step()
    state = kfac.state_dict()
    part = "vectors" if method == "exact" else "inverse"
    made = {name: factor[part].clone() for name, factor in state["factors"].items()}
    damaged = kfac._factors["2", side].average
    assert damaged is not None
    damaged[0] = value  # (a state that holds such a number is refused)
    accumulated(kfac, model, x, y, Loss("classification"), (6,))
    with pytest.raises(FactorInversionError, match=f"{side} of 2"):
        kfac.step()
    after = kfac.state_dict()["factors"]
    assert all(torch.equal(after[name][part], before) for name, before in made.items())


def test_control_a_finite_factor_raises_nothing():
    model = nn.Sequential(nn.Linear(3, 3)).to(D)
    kfac = KFAC(model, KFACConfig(factor_interval=1000))
    x, y = data("classification", 6)
    for _ in range(2):
        accumulated(kfac, model, x, y, Loss("classification"), (6,))
        kfac.step()
