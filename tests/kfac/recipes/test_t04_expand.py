"""T4: K-FAC-expand: positions that do not mix count as samples."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from kfac import KFAC, KFACConfig
from tests.kfac.oracle import Loss, curvlinops_ggn, curvlinops_kfac, distance, ggn_blocks
from tests.kfac.recipes.nets import TokenNet, data
from tests.kfac.recipes.ours import kfac_blocks, kfac_factors

S = 5


def tokens(kind: str, samples: int = 4):
    """A network on ``[samples, S, 3]`` with inputs and targets for a loss of this kind."""
    return TokenNet("tanh", channels_first=kind == "classification"), *data(kind, samples, S)


@pytest.mark.parametrize("splits", [(6,), (2, 4)], ids=["6", "2+4"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_deep_linear_regression_is_the_ggn(reduction, bias, splits):
    model, loss = TokenNet(bias=bias), Loss("regression", reduction)
    x, y = data("regression", 6, S)
    truth = ggn_blocks(model, x, y, loss)
    error = distance(curvlinops_ggn(model, x, y, loss), truth)
    assert error < 1e-10, "the oracles disagree"
    error = distance(kfac_blocks(model, x, y, loss, "exact", splits=splits), truth)
    assert error < 1e-10


@pytest.mark.parametrize("pool", ["sum", "mean"])
def test_control_a_pooled_network_is_not_the_ggn(pool):
    model, loss = TokenNet(pool=pool), Loss("regression")
    x, y = data("regression", 6, S)[0], data("regression", 6)[1]
    error = distance(kfac_blocks(model, x, y, loss, "exact"), ggn_blocks(model, x, y, loss))
    assert error > 0.1


@pytest.mark.parametrize("fisher", ["exact", "empirical"])
@pytest.mark.parametrize("kind", ["classification", "regression", "binary"])
def test_it_is_the_k_fac_expand_of_curvlinops(kind, fisher):
    for reduction, splits in itertools.product(("mean", "sum"), ((4,), (1, 3))):
        model, x, y = tokens(kind)
        loss = Loss(kind, reduction)
        error = distance(
            kfac_blocks(model, x, y, loss, fisher, splits=splits), curvlinops_kfac(model, x, y, loss, fisher)
        )
        assert error < 1e-10, (reduction, splits)


@pytest.mark.parametrize("fisher", ["exact", "empirical"])
@pytest.mark.parametrize("kind", ["classification", "regression", "binary"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_tokens_as_samples_give_the_same(reduction, kind, fisher):
    """K-FAC of ``[N, S, d]`` is K-FAC of ``[N S, d]``: A is S times as large (sums over positions), G 1/S as large."""
    model, x, y = tokens(kind)
    flat, loss = TokenNet("tanh"), Loss(kind, reduction)
    ours = kfac_factors(model, x, y, loss, fisher)
    theirs = kfac_factors(flat, x.flatten(0, 1), y.flatten(0, 1), loss, fisher)
    for side, scale in ((0, S), (1, 1 / S)):
        error = distance(
            {name: pair[side] for name, pair in ours.items()},
            {name: pair[side] * scale for name, pair in theirs.items()},
        )
        assert error < 1e-10


@pytest.mark.parametrize("kind", ["classification", "regression"])
def test_outputs_may_have_any_strides(kind):
    """Outputs that are a transposed view, as of models with channels last, give what their copies give."""
    x, y = data(kind, 4, S)
    if kind == "regression":
        y = y.mT.contiguous()
    factors = []
    for contiguous in (True, False):
        model = TokenNet("tanh", channels_first=True)
        kfac = KFAC(model, KFACConfig(fisher="exact"))
        outputs = model(x).contiguous() if contiguous else model(x)
        with kfac.curvature(outputs, kind):
            (F.cross_entropy if kind == "classification" else F.mse_loss)(outputs, y).backward()
        kfac.step()
        factors.append(kfac.factor("layers.0", "G"))
    torch.testing.assert_close(*factors)
