"""T3: with sampled labels K-FAC converges to the GGN where T1 and T2 hold, at the rate of Monte Carlo.

A batch of R copies of the same data, with s sampled labels each, is R s samples in s backward passes (T8: copies do not
change what is estimated).
"""

from __future__ import annotations

import math

import pytest
import torch

from tests.kfac.oracle import Loss, distance, ggn_blocks
from tests.kfac.recipes.nets import data, mlp
from tests.kfac.recipes.ours import kfac_blocks

CASES = {
    "one datum, classification": ("classification", "tanh", 1),
    "one datum, regression": ("regression", "tanh", 1),
    "one datum, binary": ("binary", "tanh", 1),
    "deep linear regression": ("regression", "none", 4),
}


def problem(case: str):
    kind, activation, samples = CASES[case]
    return mlp(activation=activation), Loss(kind), *data(kind, samples)


def estimate(case: str, count: int, passes: int = 10):
    """K-FAC from ``count`` sampled labels per datum."""
    model, loss, x, y = problem(case)
    copies = count // passes
    x, y = x.repeat(copies, 1), y.repeat(copies, *[1] * (y.dim() - 1))
    return kfac_blocks(model, x, y, loss, "mc", fisher_samples=passes)


def agrees(case: str) -> bool:
    """Whether 25 000 samples give the GGN: every entry within 5 % or 1 % of the largest."""
    model, loss, x, y = problem(case)
    truth, ours = ggn_blocks(model, x, y, loss), estimate(case, 25_000)
    return all(torch.allclose(ours[n], block, rtol=5e-2, atol=1e-2 * block.abs().max()) for n, block in truth.items())


@pytest.mark.parametrize("case", CASES)
def test_many_samples_give_the_ggn(case):
    torch.manual_seed(0)
    assert agrees(case)


@pytest.mark.parametrize("case", CASES)
def test_the_error_falls_with_the_root_of_the_samples(case):
    torch.manual_seed(1)
    model, loss, x, y = problem(case)
    truth = ggn_blocks(model, x, y, loss)
    errors = []
    for count in (100, 1000, 10_000):
        runs = [distance(estimate(case, count), truth) for _ in range(20)]
        errors.append(sum(runs) / len(runs))
    slope = math.log(errors[-1] / errors[0]) / math.log(100)
    assert slope == pytest.approx(-0.5, abs=0.1)
    assert math.log(errors[1] / errors[0]) / math.log(10) == pytest.approx(-0.5, abs=0.15)


@pytest.mark.parametrize("case", CASES)
def test_control_labels_of_another_distribution_are_noticed(case, monkeypatch):
    """Targets of twice the variance, or labels or bits that are all as likely, must not converge to the GGN."""
    normal, multinomial, bernoulli = torch.randn_like, torch.multinomial, torch.bernoulli
    monkeypatch.setattr(torch, "randn_like", lambda tensor: math.sqrt(2) * normal(tensor))
    monkeypatch.setattr(torch, "multinomial", lambda p, count: multinomial(torch.ones_like(p), count))
    monkeypatch.setattr(torch, "bernoulli", lambda p: bernoulli(torch.full_like(p, 0.5)))
    torch.manual_seed(0)
    assert not agrees(case)
