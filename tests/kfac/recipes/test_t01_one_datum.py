"""T1: for one datum K-FAC is no approximation."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.kfac.oracle import Loss, curvlinops_kfac, distance, empirical_blocks, ggn_blocks, transposed
from tests.kfac.recipes.nets import data, mlp
from tests.kfac.recipes.ours import blocks_of, kfac_blocks, kfac_factors

KINDS, REDUCTIONS = ("classification", "regression", "binary"), ("mean", "sum")
ORACLES = {"exact": ggn_blocks, "empirical": empirical_blocks}


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("fisher", ORACLES)
@pytest.mark.parametrize("kind", KINDS)
def test_one_datum_gives_the_ggn_and_the_empirical_fisher(kind, fisher, layers):
    """Every layer, for every activation, loss reduction and with and without biases; in both flattenings."""
    x, y = data(kind, 1)
    for activation, reduction, bias in itertools.product(("tanh", "sigmoid", "relu"), REDUCTIONS, (True, False)):
        model, loss = mlp(layers, activation, bias=bias), Loss(kind, reduction)
        factors = kfac_factors(model, x, y, loss, fisher)
        truth = ORACLES[fisher](model, x, y, loss)
        error = distance(blocks_of(factors), truth)
        assert error < 1e-10, (activation, reduction, bias)
        columnwise = {name: transposed(block, len(factors[name][1])) for name, block in truth.items()}
        error = distance({name: torch.kron(a, g) for name, (a, g) in factors.items()}, columnwise)
        assert error < 1e-10


@pytest.mark.parametrize("fisher", ORACLES)
@pytest.mark.parametrize("kind", KINDS)
def test_control_several_data_are_approximated(kind, fisher):
    """With seven data and a nonlinearity every layer but the last differs; the last of a regression stays exact."""
    model, loss = mlp(), Loss(kind)
    x, y = data(kind, 7)
    ours, truth = kfac_blocks(model, x, y, loss, fisher), ORACLES[fisher](model, x, y, loss)
    errors = {name: distance({name: ours[name]}, {name: truth[name]}) for name in truth}
    assert min(errors["0"], errors["2"]) > 0.01
    assert (errors["4"] < 1e-10) == (kind == "regression" and fisher == "exact")


@pytest.mark.parametrize("splits", [(7,), (2, 5)])
@pytest.mark.parametrize("fisher", ORACLES)
@pytest.mark.parametrize("kind", KINDS)
def test_where_it_approximates_it_is_the_k_fac_of_curvlinops(kind, fisher, splits):
    for reduction, bias in itertools.product(REDUCTIONS, (True, False)):
        model, loss = mlp(bias=bias), Loss(kind, reduction)
        x, y = data(kind, 7)
        ours = kfac_blocks(model, x, y, loss, fisher, splits=splits)
        error = distance(ours, curvlinops_kfac(model, x, y, loss, fisher))
        assert error < 1e-10, (reduction, bias)
