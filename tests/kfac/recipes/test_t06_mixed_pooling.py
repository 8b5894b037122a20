"""T6: pooling in the middle: after it both weight sharings are exact, before it reduce only; they differ in A only."""

from __future__ import annotations

import pytest
import torch

from tests.kfac.oracle import Loss, distance, ggn_blocks
from tests.kfac.recipes.nets import TokenNet, data
from tests.kfac.recipes.ours import blocks_of, kfac_factors

S = 5


def only(blocks: dict, names: set[str]) -> dict:
    return {name: block for name, block in blocks.items() if name in names}


@pytest.mark.parametrize("pool_after", [1, 2, 3])
@pytest.mark.parametrize("pool", ["sum", "mean"])
def test_layers_before_and_after_the_pooling(pool, pool_after):
    model, loss = TokenNet(pool=pool, pool_after=pool_after), Loss("regression")
    x, y = data("regression", 6, S)[0], data("regression", 6)[1]
    truth = ggn_blocks(model, x, y, loss)
    before = {f"layers.{k}" for k in range(pool_after)}
    after = set(truth) - before
    expand, reduce = (kfac_factors(model, x, y, loss, "exact", weight_sharing=how) for how in ("expand", "reduce"))
    exact = distance(blocks_of(reduce), truth), distance(only(blocks_of(expand), after), only(truth, after))
    assert max(exact) < 1e-10
    for name in before:
        error = distance({name: blocks_of(expand)[name]}, {name: truth[name]})
        assert error > 0.1, "the control: expand is an approximation before the pooling"
        assert (expand[name][0] - reduce[name][0]).norm() > 0.1 * reduce[name][0].norm()
        torch.testing.assert_close(expand[name][1], reduce[name][1], rtol=1e-10, atol=1e-14)
    for name in after:
        for ours, theirs in zip(expand[name], reduce[name], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-14)
