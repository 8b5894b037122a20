"""Statistics, packing, damping and inverses against oracles that share no code with them."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kfac import KFAC, KFACConfig
from kfac.curvature import statistics
from kfac.curvature.damping import factor_damping
from kfac.curvature.inverses import damped_inverse, kl_clip_factor
from kfac.curvature.packing import pack, packed_elements, packed_trace, unpack
from tests.kfac.models import make_data, make_model
from tests.kfac.reference import factors

D = torch.float64


def spd(dim: int, seed: int = 0, dtype: torch.dtype = D) -> torch.Tensor:
    data = torch.randn(dim, 2 * dim, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    moment = data @ data.T / dim
    return (moment + moment.T) / 2


@pytest.mark.parametrize("dim", [1, 2, 3, 4, 5, 8, 31, 64])
def test_packing_is_exactly_the_triangle(dim):
    matrices = torch.stack([spd(dim, seed) for seed in range(3)])
    packed = torch.empty(packed_elements((3, dim)), dtype=D)
    pack(matrices, packed)
    rows, columns = torch.triu_indices(dim, dim)
    for one, part in zip(matrices, packed.chunk(3), strict=True):
        assert sorted(part.tolist()) == sorted(one[rows, columns].tolist())
    assert torch.equal(unpack(packed, dim, 3), matrices)
    trace = sum(one.trace().item() for one in matrices)
    assert packed_trace(packed, dim, 3).item() == pytest.approx(trace, rel=1e-12)


@pytest.mark.parametrize("dim", [4, 5])
def test_packing_reads_the_upper_triangle_only(dim):
    matrix = torch.arange(dim * dim, dtype=D).view(1, dim, dim)
    packed = torch.empty(packed_elements(dim), dtype=D)
    pack(matrix, packed)
    assert torch.equal(unpack(packed, dim), matrix.triu() + matrix.triu(1).mT)


def test_packing_refuses_a_buffer_of_another_size():
    matrix = torch.zeros(1, 4, 4, dtype=D)
    with pytest.raises(ValueError, match="have 10 elements"):
        pack(matrix, torch.empty(16, dtype=D))


CONVOLUTIONS = {
    "3x3": (nn.Conv2d, {"kernel_size": 3, "padding": 1}),
    "stride": (nn.Conv2d, {"kernel_size": 3, "stride": (2, 1), "padding": (0, 2)}),
    "dilation": (nn.Conv2d, {"kernel_size": (3, 2), "dilation": (1, 2), "padding": 2}),
    "1x1": (nn.Conv2d, {"kernel_size": 1, "stride": 2, "bias": False}),
    "same": (nn.Conv2d, {"kernel_size": (3, 4), "padding": "same", "dilation": (2, 1)}),
    "valid": (nn.Conv2d, {"kernel_size": 3, "padding": "valid"}),
    "circular": (nn.Conv2d, {"kernel_size": 3, "padding": 1, "padding_mode": "circular"}),
    "reflect": (nn.Conv2d, {"kernel_size": (1, 3), "padding": (0, 1), "padding_mode": "reflect", "bias": False}),
    "1d": (nn.Conv1d, {"kernel_size": 3, "padding": 2, "dilation": 2, "stride": 2}),
    "1d same": (nn.Conv1d, {"kernel_size": 4, "padding": "same", "padding_mode": "replicate"}),
    "3d": (nn.Conv3d, {"kernel_size": (2, 3, 1), "padding": (1, 0, 1), "stride": (1, 2, 1)}),
}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize(("cls", "options"), CONVOLUTIONS.values(), ids=CONVOLUTIONS.keys())
def test_convolution_factors_from_weight_gradients(cls, options):
    """The gradient of one sample is ``sum_s g_s x_s^T``: probing with one-hot output gradients gives back every patch.

    So A must be the sum over output pixels of the outer products of the weight gradients that autograd itself computes.
    """
    torch.manual_seed(0)
    conv = cls(2, 3, **options).to(D)
    sizes = (6, 5, 3)[: conv.weight.dim() - 2]
    x = torch.randn(2, 2, *sizes, dtype=D)
    expected = 0.0
    for n in range(len(x)):
        output = conv(x[n : n + 1])
        for pixel in range(output[0, 0].numel()):
            probe = torch.zeros_like(output)
            probe.view(3, -1)[0, pixel] = 1.0
            parts = torch.autograd.grad(output, list(conv.parameters()), probe, retain_graph=True)
            row = torch.cat([p.reshape(3, -1)[0] for p in parts])
            expected = expected + torch.outer(row, row)
    expected = expected / len(x)
    kfac = KFAC(conv, KFACConfig(max_dim=64))
    output = conv(x)
    gradient = torch.randn(output.shape, dtype=D)
    output.backward(gradient)
    plain = {name: p.grad.clone() for name, p in conv.named_parameters()}
    kfac.step()
    rows = gradient.movedim(1, -1).reshape(-1, 3) * len(x)
    A, G = kfac.factor("", "A"), kfac.factor("", "G")
    torch.testing.assert_close(A, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(G, rows.T @ rows / len(rows), rtol=1e-10, atol=1e-12)
    assert_preconditioned(conv, plain, A, G, KFACConfig())


def assert_preconditioned(module, plain, A, G, config):
    """The gradient is ``nu G^-1 grad A^-1`` of the damped factors, nu the KL clip's."""
    gradient = plain["weight"].flatten(1)
    if "bias" in plain:
        gradient = torch.cat([gradient, plain["bias"][:, None]], 1)
    add_a, add_g = factor_damping("pi", config.damping, A.trace().item() / len(A), G.trace().item() / len(G))
    result = torch.linalg.solve(G + add_g * torch.eye(len(G), dtype=D), gradient)
    result = torch.linalg.solve(A + add_a * torch.eye(len(A), dtype=D), result.T).T
    nu = min(1.0, math.sqrt(config.kl_clip / (config.lr**2 * (result * gradient).sum().item())))
    columns = plain["weight"][0].numel()
    torch.testing.assert_close(module.weight.grad.flatten(1), nu * result[:, :columns], rtol=1e-8, atol=1e-12)
    if "bias" in plain:
        torch.testing.assert_close(module.bias.grad, nu * result[:, columns], rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("bias", [None, 1.5])
@pytest.mark.parametrize("shape", [(2, 3, 5, 4), (1, 2, 1, 6), (3, 1, 2, 2), (2, 4, 1, 1), (4, 16, 32, 32)], ids=str)
def test_shifted_products_are_those_of_the_patches(shape, bias):
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=D)
    channels = shape[1]
    patches = F.unfold(x, 3, padding=1).view(shape[0], channels, 9, -1).transpose(1, 2)  # torch's own, channels last
    rows = patches.reshape(shape[0], 9 * channels, -1).transpose(1, 2).flatten(0, 1)
    if bias is not None:
        rows = torch.cat([rows, torch.full((len(rows), 1), bias, dtype=D)], 1)
    total = torch.ones(rows.shape[1], rows.shape[1], dtype=D)
    statistics.add_shifted_moments(x, total, 0.5, bias)
    torch.testing.assert_close(total.triu(), (1 + 0.5 * rows.T @ rows).triu(), rtol=1e-11, atol=1e-11)


def test_a_layer_that_uses_shifted_products_has_the_factors_of_its_patches(monkeypatch):
    torch.manual_seed(0)
    conv = nn.Conv2d(8, 4, 3, padding=1).to(D)
    x = torch.randn(5, 8, 32, 32, dtype=D)
    assert x.numel() >= statistics.SHIFT_ELEMENTS
    factors = []
    for elements in (statistics.SHIFT_ELEMENTS, x.numel() + 1):
        monkeypatch.setattr(statistics, "SHIFT_ELEMENTS", elements)
        kfac = KFAC(conv, KFACConfig())
        conv(x).square().mean().backward()
        kfac.step()
        factors.append([kfac.factor("", side) for side in "AG"])
        kfac.close()
    torch.testing.assert_close(factors[0], factors[1], rtol=1e-11, atol=1e-13)
    assert not torch.equal(factors[0][0], factors[1][0])  # so they were made in two ways


def test_shifted_products_are_for_the_convolutions_that_they_describe():
    x = torch.zeros(4, 16, 32, 32)
    fitting = {"kernel_size": (3, 3), "stride": (1, 1), "padding": [1] * 4, "dilation": (1, 1)}
    assert statistics.shifts_pay(x, **fitting)
    assert not statistics.shifts_pay(x[:, :, :4, :4], **fitting)
    for other in (
        {"kernel_size": (3, 1)},
        {"stride": (1, 2)},
        {"padding": [1, 1, 0, 0]},
        {"dilation": (2, 2)},
        {"padding_mode": "circular"},
        {"groups": 2},
    ):
        assert not statistics.shifts_pay(x, **{**fitting, **other})


@pytest.mark.parametrize("positions", [3, 50])
def test_moments_of_channels(positions):
    g = torch.randn(4, 7, positions, dtype=D)
    total = torch.ones(7, 7, dtype=D)
    statistics.add_channel_moments(g, total, 2.0)
    expected = 1 + 2.0 * torch.einsum("ncp,ndp->cd", g, g)
    torch.testing.assert_close(total.triu(), expected.triu(), rtol=1e-12, atol=1e-12)


def test_one_datum_equals_the_empirical_fisher_of_torch_func():
    """With one sample K-FAC's block is exactly the empirical Fisher's (a negative control: with seven it is not)."""

    def blocks(samples: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        torch.manual_seed(1)
        model = nn.Sequential(
            nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3, bias=False), nn.Sigmoid(), nn.Linear(3, 4)
        ).to(D)
        x, y = torch.randn(samples, 4, dtype=D), torch.randint(0, 4, (samples,))
        parameters = {name: p.detach() for name, p in model.named_parameters()}

        def loss(values, one_x, one_y):
            output = torch.func.functional_call(model, values, (one_x[None],))
            return F.cross_entropy(output, one_y[None])

        per_sample = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(parameters, x, y)
        kfac = KFAC(model, KFACConfig())
        F.cross_entropy(model(x), y).backward()
        kfac.step()
        pairs = []
        for layer in kfac.layers:
            gradient = per_sample[f"{layer.name}.weight"]
            if layer.bias is not None:
                gradient = torch.cat([gradient, per_sample[f"{layer.name}.bias"][:, :, None]], 2)
            flat = gradient.flatten(1)
            block = torch.kron(kfac.factor(layer.name, "G"), kfac.factor(layer.name, "A"))
            pairs.append((block, flat.T @ flat / samples))
        return pairs

    for block, fisher in blocks(1):
        torch.testing.assert_close(block, fisher, rtol=1e-10, atol=1e-14)
    block, fisher = blocks(7)[0]
    assert (block - fisher).norm() / fisher.norm() > 0.01


@pytest.mark.parametrize("repeats", [2, 8])
def test_factors_do_not_change_when_the_data_is_repeated(repeats):
    def factor(times: int, side: str) -> torch.Tensor:
        model = make_model()
        x, y = make_data(4, 0)
        kfac = KFAC(model, KFACConfig())
        F.cross_entropy(model(x.repeat(times, 1, 1, 1)), y.repeat(times)).backward()
        kfac.step()
        return kfac.factor("0", side)

    for side in "AG":
        torch.testing.assert_close(factor(repeats, side), factor(1, side), rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("scaling", ["standard", "spdkfac", "kaisa"])
def test_scaling_conventions(scaling):
    """Against the published formulas of each code, for a convolution (S = 64 positions) and a linear layer (S = 1)."""
    model = make_model()
    x, y = make_data(6, 0)
    kfac = KFAC(model, KFACConfig(scaling=scaling))
    F.cross_entropy(model(x), y).backward()
    kfac.step()
    standard = factors(make_model(), x, y, F.cross_entropy)
    s, n = 64, 6
    ratios = {"standard": (1, 1), "spdkfac": (s**-2, s**2), "kaisa": (s**-3, s**-2 / n**2)}[scaling]
    for name, expected in (("0", ratios), ("10", (1, ratios[1] if scaling != "spdkfac" else 1))):
        a_ratio, g_ratio = expected
        if name == "10" and scaling == "kaisa":
            g_ratio = 1 / n**2
        torch.testing.assert_close(kfac.factor(name, "A"), standard[name][0] * a_ratio, rtol=1e-10, atol=1e-20)
        torch.testing.assert_close(kfac.factor(name, "G"), standard[name][1] * g_ratio, rtol=1e-10, atol=1e-20)


def test_pi_damping_ignores_how_scale_is_split_and_plain_damping_does_not():
    A, G, gradient = spd(4), spd(3, 1), torch.randn(3, 4, dtype=D, generator=torch.Generator().manual_seed(2))

    def result(method: str, scale: float) -> torch.Tensor:
        a, g = A * scale, G / scale
        add_a, add_g = factor_damping(method, 0.03, a.trace().item() / 4, g.trace().item() / 3)
        return (
            torch.linalg.inv(g + add_g * torch.eye(3, dtype=D))
            @ gradient
            @ torch.linalg.inv(a + add_a * torch.eye(4, dtype=D))
        )

    torch.testing.assert_close(result("pi", 100.0), result("pi", 1.0), rtol=1e-9, atol=1e-12)
    assert (result("plain", 100.0) - result("plain", 1.0)).norm() > 0.1 * result("plain", 1.0).norm()
    a, g = factor_damping("pi", 0.03, A.trace().item() / 4, G.trace().item() / 3)
    assert a * g == pytest.approx(0.03)
    assert factor_damping("pi", 0.04, 0.0, 1.0) == (0.2, 0.2)


@pytest.mark.parametrize("condition", [1e2, 1e10])
def test_inverse_error(condition):
    q, _ = torch.linalg.qr(torch.randn(20, 20, dtype=D, generator=torch.Generator().manual_seed(0)))
    matrix = q @ torch.diag(torch.logspace(0, -math.log10(condition), 20, dtype=D)) @ q.T
    before = matrix.clone()
    inverses = damped_inverse(torch.stack([matrix, 2 * matrix]), 0.0)
    assert inverses is not None
    torch.testing.assert_close(inverses[1], inverses[0] / 2, rtol=1e-4, atol=0.0)
    inverse = inverses[0]
    assert (inverse @ matrix - torch.eye(20, dtype=D)).norm() <= 10 * torch.finfo(D).eps * condition * 20
    assert torch.equal(matrix, before), "inverting must not change the factor"
    assert torch.equal(inverse, inverse.T)


def test_what_fails_in_float32_is_inverted_in_float64():
    """A damping that float32 rounds away beside large entries: only float64 can see that the matrix is definite."""
    matrix = torch.full((3, 3), 1024.0)
    damping = 1e-5
    damped = matrix + damping * torch.eye(3)
    assert torch.linalg.cholesky_ex(damped).info.item() != 0
    inverse = damped_inverse(matrix[None], damping)
    assert inverse is not None
    (inverse,) = inverse
    expected = torch.linalg.inv(matrix.double() + damping * torch.eye(3, dtype=D))
    torch.testing.assert_close(inverse.double(), expected, rtol=1e-5, atol=1e-2)


def test_a_damping_below_the_rounding_of_the_factor_gives_a_bounded_inverse():
    """A float32 moment of rank 2 is indefinite by its rounding, far more than by this damping."""
    rows = 1e4 * torch.randn(2, 6, generator=torch.Generator().manual_seed(0))
    matrix = rows.T @ rows
    damping = 1e-6
    assert torch.linalg.cholesky_ex(matrix.double() + damping * torch.eye(6, dtype=D)).info.item() != 0
    inverse = damped_inverse(matrix[None], damping)
    assert inverse is not None
    values = torch.linalg.eigvalsh(inverse[0].double())
    top = torch.linalg.eigvalsh(matrix.double())[-1]
    assert values[0] > -1e-6 * values[-1]
    assert values[-1] <= 1.01 / (torch.finfo(torch.float32).eps * top)


def test_an_indefinite_factor_has_no_inverse():
    matrix = torch.stack([torch.eye(3), -torch.eye(3)])
    assert damped_inverse(matrix.clone(), 0.5) is None
    assert damped_inverse(matrix.clone(), 2.0) is not None


def test_kl_clip_bounds_the_predicted_divergence():
    for inner in (1e-6, 1.0, 1e4):
        nu = kl_clip_factor(1e-3, 0.1**2 * torch.tensor(inner, dtype=D)).item()
        assert nu <= 1.0
        assert 0.1**2 * nu**2 * inner <= 1e-3 * (1 + 1e-12)
    assert kl_clip_factor(1e-3, torch.tensor(0.0)).item() == 1.0
    assert kl_clip_factor(1e-3, torch.tensor(100.0)).item() == pytest.approx(math.sqrt(1e-3 / (0.01 * 1e4)))


def test_one_step_on_linear_least_squares_reaches_the_optimum():
    """One linear layer, squared loss, damping to zero, lr 1: the GGN step is Newton's; SGD's is not.

    The empirical Fisher of K-FAC is not the GGN here, so A alone is inverted: G is made the identity by scaling it out.
    """
    torch.manual_seed(0)
    x, y = torch.randn(50, 4, dtype=D), torch.randn(50, 2, dtype=D)
    model = nn.Linear(4, 2).to(D)
    kfac = KFAC(model, KFACConfig(damping=1e-14, damping_method="plain", kl_clip=None))
    (0.5 * ((model(x) - y) ** 2).sum(1).mean()).backward()
    plain = torch.cat([model.weight.grad, model.bias.grad[:, None]], 1).clone()
    kfac.step()
    stepped = kfac.factor("", "G") @ torch.cat([model.weight.grad, model.bias.grad[:, None]], 1)
    start = torch.cat([model.weight.detach(), model.bias.detach()[:, None]], 1)
    design = torch.cat([x, torch.ones(50, 1, dtype=D)], 1)
    optimum = torch.linalg.lstsq(design, y).solution.T
    torch.testing.assert_close(start - stepped, optimum, rtol=1e-9, atol=1e-9)
    assert (start - plain - optimum).norm() > 0.1
