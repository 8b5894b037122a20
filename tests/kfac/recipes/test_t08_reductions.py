"""T8: factors depend neither on how often the data is repeated nor on how the loss counts its terms."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.kfac.oracle import D, Loss, distance
from tests.kfac.recipes.nets import TokenNet, data, mlp
from tests.kfac.recipes.ours import Factors, kfac_factors


def sides(factors: Factors) -> dict[str, Tensor]:
    """A and G of every layer under one name each, to be compared apart."""
    return {f"{side} of {name}": pair[k] for name, pair in factors.items() for k, side in enumerate("AG")}


class UNet(nn.Module):
    """Images to an equal number of labelled pixels, through a smaller image and a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.down = nn.Conv2d(2, 4, 3, stride=2, padding=1)
            self.middle = nn.Conv2d(4, 4, 3, padding=1)
            self.up = nn.Conv2d(6, 3, 1)
        self.to(D)

    def forward(self, x: Tensor) -> Tensor:
        small = torch.tanh(self.middle(torch.tanh(self.down(x))))
        return self.up(torch.cat([x, nn.functional.interpolate(small, scale_factor=2)], 1))


def problem(case: str) -> tuple[nn.Module, Tensor, Tensor]:
    """A network whose loss has one term per sample, per token, or per pixel."""
    generator = torch.Generator().manual_seed(1)
    if case == "samples":
        return mlp(), *data("classification", 6)
    if case == "tokens":
        return TokenNet("tanh", channels_first=True), *data("classification", 6, 5)
    x = torch.randn(3, 2, 4, 6, generator=generator, dtype=D)
    return UNet(), x, torch.randint(0, 3, (3, 4, 6), generator=generator)


CASES = ("samples", "tokens", "pixels")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("fisher", ["exact", "empirical"])
@pytest.mark.parametrize("repeats", [2, 8, 32])
def test_repeated_data_gives_the_same_factors_of_a_mean_loss(repeats, fisher, case):
    model, x, y = problem(case)
    many = x.repeat(repeats, *[1] * (x.dim() - 1)), y.repeat(repeats, *[1] * (y.dim() - 1))
    once = kfac_factors(model, x, y, Loss("classification"), fisher)
    error = distance(sides(kfac_factors(model, *many, Loss("classification"), fisher)), sides(once))
    assert error < 1e-10


@pytest.mark.parametrize("repeats", [2, 8, 32])
def test_control_kaisas_scaling_shrinks_g_with_the_square_of_the_repeats(repeats):
    model, x, y = problem("samples")
    many = x.repeat(repeats, 1), y.repeat(repeats)
    once = kfac_factors(model, x, y, Loss("classification"), scaling="kaisa")
    several = kfac_factors(model, *many, Loss("classification"), scaling="kaisa")
    for name, (a, g) in once.items():
        torch.testing.assert_close(several[name][0], a, rtol=1e-10, atol=1e-14)
        torch.testing.assert_close(several[name][1], g / repeats**2, rtol=1e-10, atol=1e-18)


@pytest.mark.parametrize("splits", [None, (2, 1)], ids=["one batch", "micro-batches"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("fisher", ["exact", "empirical"])
def test_g_of_a_sum_is_that_of_the_mean_times_the_number_of_terms(fisher, case, splits):
    model, x, y = problem(case)
    x, y = x[:3], y[:3]
    mean = kfac_factors(model, x, y, Loss("classification"), fisher, splits=splits)
    total = kfac_factors(model, x, y, Loss("classification", "sum"), fisher, splits=splits)
    divided = {name: (a, g / y.numel()) for name, (a, g) in total.items()}
    error = distance(sides(divided), sides(mean))
    assert error < 1e-10
    error = distance(sides(total), sides(mean))
    assert error > 1.0, "the control: without the division they differ"


IGNORED = -7


def with_padding(case: str) -> tuple[nn.Module, Tensor, Tensor]:
    """A problem in which about half of the terms do not count."""
    model, x, y = problem(case)
    y = y.clone()
    y[torch.rand(y.shape, generator=torch.Generator().manual_seed(2)) < 0.5] = IGNORED
    assert 0 < (y == IGNORED).sum() < y.numel()
    return model, x, y


@pytest.mark.parametrize("fisher", ["exact", "empirical"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_ignored_samples_are_not_in_g(reduction, fisher):
    """G is that of the other samples alone; A is that of all inputs."""
    model, x, y = with_padding("samples")
    loss = Loss("classification", reduction, IGNORED)
    counted = y != IGNORED
    ours, others = (kfac_factors(model, *batch, loss, fisher) for batch in ((x, y), (x[counted], y[counted])))
    everything = kfac_factors(model, x, y.clamp(min=0), loss, fisher)
    for name, (a, g) in ours.items():
        torch.testing.assert_close(g, others[name][1], rtol=1e-10, atol=1e-16)
        torch.testing.assert_close(a, everything[name][0], rtol=1e-10, atol=1e-16)
        assert (g - everything[name][1]).norm() > 1e-3 * g.norm(), "the control: the ignored ones would change G"


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("fisher", ["exact", "empirical"])
def test_ignored_terms_do_not_count_in_a_mean(fisher, case):
    """T8 (a) and (b) with padding: the number of terms is that of the labels that count."""
    model, x, y = with_padding(case)
    terms = int((y != IGNORED).sum())
    mean = kfac_factors(model, x, y, Loss("classification", "mean", IGNORED), fisher)
    total = kfac_factors(model, x, y, Loss("classification", "sum", IGNORED), fisher)
    error = distance(sides({name: (a, g / terms) for name, (a, g) in total.items()}), sides(mean))
    assert error < 1e-10
    error = distance(sides({name: (a, g / y.numel()) for name, (a, g) in total.items()}), sides(mean))
    assert error > 0.1, "the control: all labels are too many"
    many = x.repeat(4, *[1] * (x.dim() - 1)), y.repeat(4, *[1] * (y.dim() - 1))
    error = distance(sides(kfac_factors(model, *many, Loss("classification", "mean", IGNORED), fisher)), sides(mean))
    assert error < 1e-10


@pytest.mark.parametrize("case", ["tokens", "pixels"])
def test_control_without_being_told_the_terms_samples_are_counted(case):
    """G is then too small by the number of terms per sample, whatever the kind of layer."""
    model, x, y = problem(case)
    told, untold = (kfac_factors(model, x, y, Loss("classification"), tell=tell) for tell in (True, False))
    for name, (a, g) in told.items():
        torch.testing.assert_close(untold[name][0], a, rtol=1e-10, atol=1e-16)
        torch.testing.assert_close(untold[name][1] * (y.numel() / len(y)), g, rtol=1e-10, atol=1e-16)
