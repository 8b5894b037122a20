"""T7: a convolution is a linear layer on patches, of which every output pixel sees one."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from kfac import KFAC, KFACConfig
from tests.kfac.oracle import D, Loss, distance, ggn_blocks
from tests.kfac.recipes.ours import blocks_of, kfac_factors

CHANNELS, OUTPUTS = 4, 6
CONVOLUTIONS: dict[str, tuple[type[nn.Module], dict]] = {
    "1d": (nn.Conv1d, {"kernel_size": 3}),
    "1d stride dilation": (nn.Conv1d, {"kernel_size": 3, "stride": 2, "padding": 2, "dilation": 2}),
    "1d same, even kernel": (nn.Conv1d, {"kernel_size": 4, "padding": "same", "padding_mode": "replicate"}),
    "2d": (nn.Conv2d, {"kernel_size": 3, "padding": 1}),
    "2d no bias": (nn.Conv2d, {"kernel_size": 3, "bias": False}),
    "2d valid": (nn.Conv2d, {"kernel_size": (2, 3), "padding": "valid"}),
    "2d stride": (nn.Conv2d, {"kernel_size": 3, "stride": (2, 1), "padding": (0, 2)}),
    "2d dilation": (nn.Conv2d, {"kernel_size": (3, 2), "dilation": (1, 2), "padding": 2}),
    "2d same": (nn.Conv2d, {"kernel_size": (3, 4), "padding": "same", "dilation": (2, 1)}),
    "2d circular": (nn.Conv2d, {"kernel_size": 3, "padding": (1, 2), "padding_mode": "circular"}),
    "2d reflect": (nn.Conv2d, {"kernel_size": (1, 3), "padding": (0, 1), "padding_mode": "reflect"}),
    "3d": (nn.Conv3d, {"kernel_size": (2, 3, 1), "padding": (1, 0, 1), "stride": (1, 2, 1)}),
    "3d dilation": (nn.Conv3d, {"kernel_size": 2, "dilation": (1, 2, 1), "bias": False}),
    "1d groups": (nn.Conv1d, {"kernel_size": 3, "padding": 1, "groups": 2}),
    "2d groups": (nn.Conv2d, {"kernel_size": 2, "stride": 2, "groups": 2, "bias": False}),
    "2d groups dilation": (nn.Conv2d, {"kernel_size": 3, "dilation": 2, "padding": "same", "groups": 2}),
    "2d depthwise": (nn.Conv2d, {"kernel_size": 3, "padding": 1, "groups": CHANNELS, "out_channels": 2 * CHANNELS}),
    "3d groups": (nn.Conv3d, {"kernel_size": (1, 2, 2), "groups": 2}),
}


def make(case: str) -> tuple[nn.Module, Tensor]:
    """A convolution and inputs for it."""
    cls, options = CONVOLUTIONS[case]
    torch.manual_seed(0)
    module = cls(CHANNELS, **{"out_channels": OUTPUTS, **options}).to(D)
    return module, torch.randn(3, CHANNELS, *(6, 5, 3)[: module.weight.dim() - 2], dtype=D)


def patches(module: nn.Module, x: Tensor) -> Tensor:
    """What each output pixel sees, ``[samples, groups, *pixels, columns]`` in the weight's order.

    By the same convolution with weights that pick one input each, so that nothing of ours is used.
    """
    columns = module.weight[0].numel()
    probe = copy.deepcopy(module).requires_grad_(False)
    probe.weight = nn.Parameter(torch.eye(columns, dtype=D).view(columns, *module.weight.shape[1:]), False)
    probe.weight.data = probe.weight.data.repeat(module.groups, *[1] * (module.weight.dim() - 1))
    probe.bias = None
    picked = probe(x)  # [samples, groups * columns, *pixels]
    return picked.unflatten(1, (module.groups, columns)).movedim(2, -1)


class OnPatches(nn.Module):
    """The same function as a convolution with groups, as one linear layer per group on patches."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.convolution = [module]
        outputs, columns = len(module.weight) // module.groups, module.weight[0].numel()
        self.parts = nn.ModuleList()
        for group in range(module.groups):
            part = nn.Linear(columns, outputs, module.bias is not None).to(D)
            own = slice(group * outputs, (group + 1) * outputs)
            part.weight.data.copy_(module.weight.data[own].flatten(1))
            if module.bias is not None:
                part.bias.data.copy_(module.bias.data[own])
            self.parts.append(part)

    def forward(self, x: Tensor) -> Tensor:
        rows = patches(self.convolution[0], x)
        outputs = [part(rows[:, group]) for group, part in enumerate(self.parts)]
        return torch.cat(outputs, -1).movedim(-1, 1)


def step(module: nn.Module, x: Tensor, config: KFACConfig) -> tuple[KFAC, Tensor]:
    """One step with a nonlinear loss in which every output pixel is different."""
    kfac = KFAC(module, config)
    output = module(x)
    weights = torch.linspace(0.5, 2.0, output[0].numel(), dtype=D).view(output[0].shape)
    (torch.tanh(output) * weights).sum((1,)).square().mean().backward()
    kfac.step()
    return kfac, output


def grouped(parts: list[Tensor]) -> Tensor:
    return torch.block_diag(*parts)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("weight_sharing", ["expand", "reduce"])
@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_factors_and_steps_are_those_of_linear_layers_on_patches(case, weight_sharing):
    module, x = make(case)
    twin = OnPatches(module)
    config = KFACConfig(weight_sharing=weight_sharing, damping_method="plain", damping=0.1, kl_clip=None)
    ours, output = step(module, x, config)
    theirs, same = step(twin, x, config)
    torch.testing.assert_close(output, same)
    names = [f"parts.{group}" for group in range(module.groups)]
    for side in "AG":
        expected = grouped([theirs.factor(name, side) for name in names])
        torch.testing.assert_close(ours.factor("", side), expected, rtol=1e-10, atol=1e-13)
    weights = torch.cat([part.weight.grad for part in twin.parts])
    torch.testing.assert_close(module.weight.grad.flatten(1), weights, rtol=1e-8, atol=1e-12)
    if module.bias is not None:
        biases = torch.cat([part.bias.grad for part in twin.parts])
        torch.testing.assert_close(module.bias.grad, biases, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("case", ["1d stride dilation", "2d dilation", "2d circular", "2d groups dilation"])
def test_control_other_patches_are_noticed(case):
    """Without dilation or with zeros for padding A is another (kfac-pytorch ignores dilation)."""
    module, x = make(case)
    twin = OnPatches(module)
    if case == "2d circular":
        twin.convolution[0] = nn.Conv2d(CHANNELS, OUTPUTS, 3, padding=(1, 2))
    else:
        twin.convolution[0] = copy.deepcopy(module)
        twin.convolution[0].dilation = (1,) * len(module.dilation)
    ours, _ = step(module, x, KFACConfig())
    theirs, _ = step(twin, x, KFACConfig())
    a = grouped([theirs.factor(f"parts.{group}", "A") for group in range(module.groups)])
    assert (ours.factor("", "A") - a).norm() > 0.05 * a.norm()


# ---------------------------------------------------------------------- special cases


def same_as_linear(module: nn.Module, x: Tensor, rows: Callable[[Tensor], Tensor]) -> None:
    """The factors of a convolution are those of a linear layer on ``rows(x)`` whose outputs are ``rows(output)``."""
    linear = nn.Linear(module.weight[0].numel(), len(module.weight)).to(D)
    linear.weight.data.copy_(module.weight.data.flatten(1))
    linear.bias.data.copy_(module.bias.data)
    ours, theirs = KFAC(module), KFAC(linear)
    torch.tanh(rows(module(x))).square().mean().backward()
    torch.tanh(linear(rows(x))).square().mean().backward()
    for kfac in (ours, theirs):
        kfac.step()
    for side in "AG":
        torch.testing.assert_close(ours.factor("", side), theirs.factor("", side), rtol=1e-10, atol=1e-14)


def test_a_1x1_convolution_is_a_linear_layer_on_every_pixel():
    torch.manual_seed(0)
    x = torch.randn(3, 4, 5, 2, dtype=D)
    same_as_linear(nn.Conv2d(4, 6, 1).to(D), x, lambda z: z.movedim(1, -1).flatten(1, 2))


@pytest.mark.parametrize(
    ("cls", "size"), [(nn.Conv1d, (5,)), (nn.Conv2d, (3, 4)), (nn.Conv3d, (2, 3, 2))], ids=["1d", "2d", "3d"]
)
def test_a_kernel_of_the_inputs_size_is_a_linear_layer_without_positions(cls, size):
    torch.manual_seed(0)
    x = torch.randn(5, 2, *size, dtype=D)
    same_as_linear(cls(2, 6, size).to(D), x, lambda z: z.flatten(1))


# ---------------------------------------------------------------------- T4 and T5 with a body of convolutions


class Body(nn.Module):
    """A convolution and a 1x1 convolution without a nonlinearity: pixels do not mix after the first layer."""

    def __init__(self, pool: str | None, groups: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(2, 4, 3, stride=2, padding=1, dilation=1, groups=groups)
        self.second = nn.Conv2d(4, 3, 1, groups=1)
        self.pool = pool

    def forward(self, x: Tensor) -> Tensor:
        pixels = self.second(self.first(x)).flatten(2).mT  # [samples, pixels, 3]
        return pixels if self.pool is None else getattr(pixels, self.pool)(1)


def images_and_targets(pool: str | None) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4, 2, 5, 4, generator=generator, dtype=D)
    return x, torch.randn(4, *([6] if pool is None else []), 3, generator=generator, dtype=D)


CONVOLUTION_BODIES = {"expand": None, "reduce, sum": "sum", "reduce, mean": "mean"}


@pytest.mark.parametrize("case", CONVOLUTION_BODIES)
def test_a_body_of_convolutions_is_exact_for_squared_loss(case):
    sharing, pool = case.split(",")[0], CONVOLUTION_BODIES[case]
    model, loss = Body(pool).to(D), Loss("regression")
    x, y = images_and_targets(pool)
    truth = ggn_blocks(model, x, y, loss)
    error = distance(blocks_of(kfac_factors(model, x, y, loss, "exact", weight_sharing=sharing)), truth)
    assert error < 1e-10
    other = "reduce" if sharing == "expand" else "expand"
    error = distance(blocks_of(kfac_factors(model, x, y, loss, "exact", weight_sharing=other)), truth)
    assert error > 0.1, "the control: the other weight sharing is an approximation here"


@pytest.mark.parametrize("case", CONVOLUTION_BODIES)
def test_with_groups_every_group_is_the_ggn_of_its_own_weights(case):
    sharing, pool = case.split(",")[0], CONVOLUTION_BODIES[case]
    model, loss = Body(pool, groups=2).to(D), Loss("regression")
    x, y = images_and_targets(pool)
    truth = ggn_blocks(model, x, y, loss)["first"]
    a, g = kfac_factors(model, x, y, loss, "exact", weight_sharing=sharing)["first"]
    outputs, columns = len(g) // 2, len(a) // 2
    for group in range(2):
        own = [
            side[group * n : (group + 1) * n, group * n : (group + 1) * n] for side, n in ((a, columns), (g, outputs))
        ]
        rows = slice(group * outputs * columns, (group + 1) * outputs * columns)
        error = distance({"": torch.kron(own[1], own[0])}, {"": truth[rows, rows]})
        assert error < 1e-10


# ---------------------------------------------------------------------- what is not covered


def test_what_cannot_be_covered_is_said_at_registration():
    with pytest.raises(ValueError, match="run the model once"):
        KFAC(nn.Sequential(nn.LazyConv2d(3, 3)))
    with pytest.raises(ValueError, match="weight_sharing"):
        KFACConfig(scaling="kaisa", weight_sharing="reduce")
    model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.ConvTranspose2d(3, 2, 2), nn.Conv2d(2, 2, 1)).to(D)
    kfac = KFAC(model)
    assert [item.name for item in kfac.first_order] == ["1"]
    assert "ConvTranspose2d" in kfac.summary()
    model(torch.randn(2, 2, 4, 4, dtype=D)).square().mean().backward()
    plain = model[1].weight.grad.clone()
    kfac.step()
    assert torch.equal(model[1].weight.grad, plain)
