"""T2: in a deep linear network with squared loss K-FAC is the GGN, whatever the number of data."""

from __future__ import annotations

import pytest

from tests.kfac.oracle import Loss, curvlinops_ggn, distance, empirical_blocks, ggn_blocks
from tests.kfac.recipes.nets import data, mlp
from tests.kfac.recipes.ours import kfac_blocks


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("splits", [(1,), (6,), (2, 4)], ids=["1", "6", "2+4"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_exact_is_the_ggn(reduction, splits, layers, bias):
    model, loss = mlp(layers, "none", bias=bias), Loss("regression", reduction)
    x, y = data("regression", sum(splits))
    truth = ggn_blocks(model, x, y, loss)
    error = distance(curvlinops_ggn(model, x, y, loss), truth)
    assert error < 1e-10, "the oracles disagree"
    error = distance(kfac_blocks(model, x, y, loss, "exact", splits=splits), truth)
    assert error < 1e-10


@pytest.mark.parametrize("layers", [1, 3])
def test_control_empirical_is_neither_the_ggn_nor_the_empirical_fisher(layers):
    model, loss = mlp(layers, "none"), Loss("regression")
    x, y = data("regression", 6)
    ours = kfac_blocks(model, x, y, loss, "empirical")
    error = distance(ours, ggn_blocks(model, x, y, loss))
    assert error > 0.05
    error = distance(ours, empirical_blocks(model, x, y, loss))
    assert error > 0.05
