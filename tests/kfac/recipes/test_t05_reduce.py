"""T5: K-FAC-reduce: where positions are summed or averaged before the loss, they are summed in the statistics."""

from __future__ import annotations

import pytest

from tests.kfac.oracle import Loss, curvlinops_kfac, distance, ggn_blocks
from tests.kfac.recipes.nets import TokenNet, data
from tests.kfac.recipes.ours import kfac_blocks

S = 5


def inputs_and_targets(kind: str = "regression", samples: int = 6):
    return data(kind, samples, S)[0], data(kind, samples)[1]


@pytest.mark.parametrize("splits", [(6,), (2, 4)], ids=["6", "2+4"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("pool", ["sum", "mean"])
def test_pooled_deep_linear_regression_is_the_ggn(pool, reduction, bias, splits):
    model, loss = TokenNet(pool=pool, bias=bias), Loss("regression", reduction)
    x, y = inputs_and_targets()
    truth = ggn_blocks(model, x, y, loss)
    error = distance(kfac_blocks(model, x, y, loss, "exact", weight_sharing="reduce", splits=splits), truth)
    assert error < 1e-10
    error = distance(kfac_blocks(model, x, y, loss, "exact", weight_sharing="expand", splits=splits), truth)
    assert error > 0.5, "the control: expand is no good approximation here"


@pytest.mark.parametrize("fisher", ["exact", "empirical"])
@pytest.mark.parametrize("kind", ["classification", "regression"])
@pytest.mark.parametrize("pool", ["sum", "mean"])
def test_it_is_the_k_fac_reduce_of_curvlinops(pool, kind, fisher):
    """Also where it is an approximation: with a nonlinearity, and pooling before the end."""
    x, y = inputs_and_targets(kind)
    for reduction in ("mean", "sum"):
        model, loss = TokenNet("tanh", pool=pool, pool_after=3), Loss(kind, reduction)
        theirs = curvlinops_kfac(model, x, y, loss, fisher, approximation="reduce")
        error = distance(kfac_blocks(model, x, y, loss, fisher, weight_sharing="reduce"), theirs)
        assert error < 1e-10, reduction
