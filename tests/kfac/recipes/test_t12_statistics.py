"""T12: statistics: running averages, micro-batches, hooks, in-place activations, frozen parameters."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfac import KFAC, KFACConfig
from tests.kfac.models import make_data, make_model
from tests.kfac.oracle import D, Loss
from tests.kfac.recipes.nets import data, mlp
from tests.kfac.recipes.ours import accumulated, kfac_factors

LOSS = Loss("classification")


def repeated(config: KFACConfig, steps: int) -> dict[str, Tensor]:
    """The factors of the first layer after steps on one and the same batch, without changing the parameters."""
    model = mlp()
    x, y = data("classification", 6)
    kfac = KFAC(model, config)
    for _ in range(steps):
        accumulated(kfac, model, x, y, LOSS, (len(x),))
        kfac.step()
    return {side: kfac.factor("0", side) for side in "AG"}


def statistic() -> dict[str, Tensor]:
    a, g = kfac_factors(mlp(), *data("classification", 6), LOSS)["0"]
    return {"A": a, "G": g}


@pytest.mark.parametrize("steps", [1, 2, 7, 40])
def test_averages_of_a_constant_are_the_constant(steps):
    average, single = repeated(KFACConfig(factor_decay=0.9), steps), statistic()
    for side, matrix in average.items():
        torch.testing.assert_close(matrix, single[side], rtol=1e-12, atol=1e-16)


@pytest.mark.parametrize("steps", [1, 2, 7, 40])
def test_averages_from_the_identity_forget_it_slowly(steps):
    """``S (1 - rho^t) + rho^t I``; the control: that is not S until rho^t has vanished."""
    average, single = repeated(KFACConfig(factor_decay=0.9, average_from="identity"), steps), statistic()
    for side, matrix in average.items():
        kept = 0.9**steps
        expected = single[side] * (1 - kept) + kept * torch.eye(len(matrix), dtype=D)
        torch.testing.assert_close(matrix, expected, rtol=1e-12, atol=1e-16)
        assert (matrix - single[side]).norm() > 1e-3 * single[side].norm()


@pytest.mark.parametrize("fisher", ["empirical", "exact"])
@pytest.mark.parametrize("splits", [(6, 6), (3, 3, 3, 3), (7, 4, 1)], ids=str)
def test_micro_batches_are_one_batch(splits, fisher):
    """Equal and unequal ones, each loss weighted by its share; the factors and the preconditioned gradients."""
    results = []
    for sizes in ((12,), splits):
        model = make_model()
        kfac = KFAC(model, KFACConfig(fisher=fisher, accumulation_steps=len(sizes), factor_decay=0.5))
        for step in range(2):
            accumulated(kfac, model, *make_data(12, step), LOSS, sizes)
            kfac.step()
        factors = [kfac.factor(layer.name, side) for layer in kfac.layers for side in "AG"]
        results.append(factors + [p.grad.clone() for p in model.parameters()])
    for one, several in zip(*results, strict=True):
        torch.testing.assert_close(several, one, rtol=1e-10, atol=1e-13)


def test_control_micro_batches_with_unweighted_losses_are_noticed():
    """Losses that are not divided give a G that is k times too large in each gradient."""
    x, y = make_data(12, 0)
    model = make_model()
    kfac = KFAC(model, KFACConfig(accumulation_steps=2))
    for part in (slice(0, 6), slice(6, 12)):
        F.cross_entropy(model(x[part]), y[part]).backward()
    kfac.step()
    right = kfac_factors(make_model(), x, y, LOSS, splits=(6, 6))["10"][1]
    torch.testing.assert_close(kfac.factor("10", "G"), 4 * right, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("schedule", ["dkfac", "spdkfac"])
@pytest.mark.parametrize("fisher", ["empirical", "mc", "exact"])
def test_hooks_never_touch_the_gradients(fisher, schedule):
    """Before ``step()`` gradients are bitwise those of the plain model, on collecting steps and on others."""
    x, y = make_data(6, 0)
    plain, hooked = make_model(), make_model()
    kfac = KFAC(hooked, KFACConfig(fisher=fisher, factor_interval=2), schedule)
    for step in range(4):
        for model in (plain, hooked):
            model.zero_grad()
        F.cross_entropy(plain(x), y).backward()
        accumulated(kfac, hooked, x, y, LOSS, (6,))
        for a, b in zip(plain.parameters(), hooked.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)
        kfac.step()
        changed = [
            not torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), hooked.parameters(), strict=True)
        ]
        assert any(changed), f"the control: step {step} preconditions"


class Activations(nn.Module):
    """Layers whose outputs are overwritten by what follows them, or are not."""

    def __init__(self, inplace: bool) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.first, self.second, self.third = nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 1), nn.Linear(16, 3)
        self.to(D)
        self.inplace = inplace

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x), self.inplace)
        y = self.second(x)
        y = y.add_(x) if self.inplace else y + x
        return self.third(F.leaky_relu(F.hardtanh(y, -2, 2, self.inplace), 0.2, self.inplace).flatten(1))


@pytest.mark.parametrize("fisher", ["empirical", "exact"])
def test_in_place_activations_give_the_same_factors(fisher):
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(5, 2, 4, 4, generator=generator, dtype=D), torch.tensor([0, 1, 2, 1, 0])
    usual, overwritten = (kfac_factors(Activations(inplace), x, y, LOSS, fisher) for inplace in (False, True))
    for name, pair in usual.items():
        for a, b in zip(pair, overwritten[name], strict=True):
            assert torch.equal(a, b)
    changed = kfac_factors(Activations(False), x + 0.1, y, LOSS, fisher)
    assert not torch.equal(changed["first"][1], usual["first"][1]), "the control: other data gives another G"


@pytest.mark.parametrize("frozen", ["0", "2", "4"])
def test_frozen_parameters_stay_frozen(frozen):
    """They get no gradient and do not move; the layers around them are preconditioned as ever."""
    x, y = data("classification", 6)
    model = mlp()
    model.get_submodule(frozen).requires_grad_(False)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    kfac = KFAC(model, KFACConfig(fisher="exact"))
    assert frozen not in [layer.name for layer in kfac.layers]
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    accumulated(kfac, model, x, y, LOSS, (6,))
    kfac.step()
    optimizer.step()
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) == name.startswith(frozen)
        assert (p.grad is None) == name.startswith(frozen)
    whole = kfac_factors(mlp(), x, y, LOSS, "exact")
    for layer in kfac.layers:
        for ours, other in zip((kfac.factor(layer.name, side) for side in "AG"), whole[layer.name], strict=True):
            torch.testing.assert_close(ours, other, rtol=1e-12, atol=1e-16)


@pytest.mark.parametrize("what", ["weight", "bias"])
def test_half_frozen_layers_train_what_is_left(what):
    model = mlp(1)
    getattr(model[0], what).requires_grad_(False)
    frozen = getattr(model[0], what).detach().clone()
    kfac = KFAC(model, KFACConfig())
    x, y = data("classification", 6)
    accumulated(kfac, model, x, y, LOSS, (6,))
    other = model[0].bias if what == "weight" else model[0].weight
    plain = other.grad.clone()
    kfac.step()
    torch.optim.SGD([other], 0.1).step()
    assert torch.equal(getattr(model[0], what), frozen)
    assert getattr(model[0], what).grad is None
    assert not torch.equal(other.grad, plain)


# ---------------------------------------------------------------------- loss scales

SCALES = {
    "1": ([1.0], 1e-12),
    "65536": ([2.0**16], 1e-12),
    "10000": ([1e4], 1e-6),
    "cyclic": ([1.0, 2.0**11, 2.0**-8, 2.0**19], 1e-12),
}
"""Scales in turn, and how nearly the trajectories agree: torch keeps one over the scale in float32."""


def trained_with_scale(
    scales: list[float], *, told: bool = True, overflow_at: int | None = None
) -> tuple[Tensor, KFAC]:
    """The parameters after some steps with a ``GradScaler`` whose scale goes round."""
    model = mlp()
    scaler = torch.amp.GradScaler("cpu", init_scale=scales[0])
    config = KFACConfig(damping=0.01, factor_decay=0.9, kl_clip=1e-3)
    kfac = KFAC(model, config, grad_scaler=scaler if told else None)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    x, y = data("classification", 9)
    for step in range(6):
        optimizer.zero_grad()
        before = kfac.state_dict()["factors"]
        loss = LOSS(model(x), y) * (math.inf if step == overflow_at else 1.0)
        scaler.scale(loss).backward()
        kfac.step()
        if step == overflow_at:
            after = kfac.state_dict()["factors"]
            assert all(torch.equal(after[name]["average"], f["average"]) for name, f in before.items())
        scaler.step(optimizer)
        scaler.update(scales[(step + 1) % len(scales)])
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach(), kfac


@pytest.mark.parametrize(("scales", "tolerance"), SCALES.values(), ids=SCALES.keys())
def test_a_loss_scale_does_not_change_the_trajectory(scales, tolerance):
    """The control: a scale that K-FAC is not told of does."""
    plain, _ = trained_with_scale([1.0], told=False)
    scaled, _ = trained_with_scale(scales)
    assert (scaled - plain).abs().max() <= tolerance
    if scales != [1.0]:
        untold, _ = trained_with_scale(scales, told=False)
        assert (untold - plain).abs().max() > 1e-3


def test_an_overflow_leaves_the_statistics_untouched():
    """And the step is none: the trajectory is that without the batch."""
    parameters, kfac = trained_with_scale([1e4], overflow_at=3)
    assert kfac.skipped_steps == 1
    assert bool(torch.isfinite(parameters).all())
    whole, _ = trained_with_scale([1e4])
    assert not torch.equal(parameters, whole)
