"""Every kind of layer against another way to compute the same: one-hot tokens, single groups, per-sample gradients."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kfac import KFAC, KFACConfig
from tests.kfac.models import make_data, make_model

D = torch.float64
CONFIG = KFACConfig(damping=0.01, kl_clip=None)


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=D)


def stepped(model: nn.Module, x: torch.Tensor, config: KFACConfig = CONFIG, probe=None) -> KFAC:
    """One step on the mean over samples of a fixed random linear form of the outputs."""
    kfac = KFAC(model, config, "kfac")
    model.zero_grad()
    output = model(x)
    probe = rand(*output.shape, seed=7) if probe is None else probe
    ((output * probe).sum() / len(x)).backward()
    kfac.step()
    return kfac


def per_sample_gradients(model: nn.Module, x: torch.Tensor, probe: torch.Tensor) -> dict[str, torch.Tensor]:
    values = {name: p.detach() for name, p in model.named_parameters()}

    def form(values, one, one_probe):
        return (torch.func.functional_call(model, values, (one[None],))[0] * one_probe).sum()

    return torch.func.vmap(torch.func.grad(form), (None, 0, 0))(values, x, probe)


# ---------------------------------------------------------------------- groups


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (nn.Conv2d, {"groups": 2, "padding": 1}),
        (nn.Conv2d, {"groups": 4, "padding": 1, "bias": False}),
        (nn.Conv1d, {"groups": 2, "dilation": 2}),
        (nn.Conv3d, {"groups": 2, "stride": (1, 2, 1)}),
    ],
    ids=["2d", "depthwise", "1d", "3d"],
)
@pytest.mark.parametrize("max_dim", [8192, 5])
def test_a_grouped_convolution_is_its_groups_side_by_side(cls, options, max_dim):
    torch.manual_seed(0)
    groups = options["groups"]
    model = cls(4, 8, 3, **options).to(D)
    x = rand(3, 4, *(6, 5, 4)[: model.weight.dim() - 2])
    config = KFACConfig(damping=0.01, kl_clip=None, max_dim=max_dim, damping_method="plain")
    kfac = stepped(model, x, config)
    probe = rand(*model(x).shape, seed=7)
    single = {**options, "groups": 1}
    a_width, g_width = kfac.layers[0].a.width, kfac.layers[0].g.width
    for k in range(groups):
        one = cls(4 // groups, 8 // groups, 3, **single).to(D)
        rows = slice(k * 8 // groups, (k + 1) * 8 // groups)
        with torch.no_grad():
            one.weight.copy_(model.weight[rows])
            if model.bias is not None:
                one.bias.copy_(model.bias[rows])
        alone = stepped(one, x[:, k * 4 // groups : (k + 1) * 4 // groups], config, probe[:, rows])
        for side, width in (("A", a_width), ("G", g_width)):
            whole = kfac.factor("", side)[k * width : (k + 1) * width]
            block = whole[:, k * width : (k + 1) * width]
            torch.testing.assert_close(block, alone.factor("", side), rtol=1e-12, atol=1e-14)
            assert whole.count_nonzero() == block.count_nonzero(), "nothing between the groups"
        for p, q in zip(model.parameters(), one.parameters(), strict=True):
            torch.testing.assert_close(p.grad[rows], q.grad, rtol=1e-10, atol=1e-12)


# ---------------------------------------------------------------------- wide factors


@pytest.mark.parametrize("max_dim", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("average_from", ["zero", "identity"])
def test_a_wide_factor_is_the_diagonal_blocks_of_the_whole_one(max_dim, average_from):
    torch.manual_seed(0)
    model = nn.Linear(6, 5).to(D)
    x = rand(9, 6)
    config = KFACConfig(damping=0.01, kl_clip=None, max_dim=max_dim, average_from=average_from)
    whole = stepped(copy.deepcopy(model), x, KFACConfig(average_from=average_from))
    probe = rand(9, 5, seed=7)
    (model(x) * probe).sum().div(9).backward()
    gradient = torch.cat([model.weight.grad, model.bias.grad[:, None]], 1).clone()
    kfac = stepped(model, x, config)
    expected = {}
    for side, width in (("A", 7), ("G", 5)):
        full, dim = whole.factor("", side), getattr(kfac.layers[0], side.lower()).dim
        assert dim <= max_dim
        index = torch.arange(width) // dim
        expected[side] = full * (index[:, None] == index)
        torch.testing.assert_close(kfac.factor("", side), expected[side], rtol=1e-12, atol=1e-14)
        assert dim == width or (expected[side] - full).norm() > 0.01 * full.norm()
    A, G = expected["A"], expected["G"]
    pi = ((A.trace() / 7) / (G.trace() / 5)).sqrt()
    damped_a, damped_g = A + 0.1 * pi * torch.eye(7, dtype=D), G + 0.1 / pi * torch.eye(5, dtype=D)
    result = torch.linalg.inv(damped_g) @ gradient @ torch.linalg.inv(damped_a)
    torch.testing.assert_close(model.weight.grad, result[:, :-1], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(model.bias.grad, result[:, -1], rtol=1e-9, atol=1e-12)


# ---------------------------------------------------------------------- embeddings


@pytest.mark.parametrize("padding_idx", [None, 2])
def test_an_embedding_is_a_linear_layer_on_one_hot_tokens(padding_idx):
    torch.manual_seed(0)
    tokens = torch.randint(0, 6, (5, 4), generator=torch.Generator().manual_seed(1))
    embedding = nn.Embedding(7, 3, padding_idx=padding_idx).to(D)
    linear = nn.Linear(7, 3, bias=False).to(D)
    with torch.no_grad():
        linear.weight.copy_(embedding.weight.T)
    one_hot = F.one_hot(tokens, 7).to(D)
    probe = rand(5, 4, 3, seed=7)
    if padding_idx is not None:  # such tokens are no inputs, and what follows them sends no gradient
        one_hot[..., padding_idx] = 0
        probe[tokens == padding_idx] = 0
    by_tokens = stepped(embedding, tokens, probe=rand(5, 4, 3, seed=7))
    by_one_hot = stepped(linear, one_hot, probe=probe)
    for side in "AG":
        torch.testing.assert_close(by_tokens.factor("", side), by_one_hot.factor("", side), rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(embedding.weight.grad.T, linear.weight.grad, rtol=1e-9, atol=1e-12)
    assert embedding.weight.grad.norm() > 0


def test_padding_counts_as_positions_however_the_batch_is_split():
    """Micro-batches with much and with little padding give the factors of the whole batch."""
    tokens = torch.randint(1, 6, (6, 4), generator=torch.Generator().manual_seed(1))
    tokens[:2, 1:], tokens[2, 3:] = 0, 0
    probe = rand(6, 4, 3, seed=7)
    results = []
    for splits in ([6], [2, 2, 2]):
        torch.manual_seed(0)
        model = nn.Embedding(7, 3, padding_idx=0).to(D)
        kfac = KFAC(model, KFACConfig(accumulation_steps=len(splits)), "kfac")
        for x, p in zip(tokens.split(splits), probe.split(splits), strict=True):
            ((model(x) * p).sum() / 6).backward()
        kfac.step()
        results.append(torch.block_diag(kfac.factor("", "A"), kfac.factor("", "G")))
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-15)
    counts = torch.bincount(tokens.flatten(), minlength=7).to(D) / 6
    torch.testing.assert_close(results[0].diagonal()[1:7], counts[1:], rtol=1e-12, atol=0)
    assert results[0][0, 0] == 0.0 < counts[0]


def test_embeddings_that_change_their_weight_keep_the_plain_gradient():
    for options, reason in (({"max_norm": 1.0}, "max_norm"), ({"sparse": True}, "sparse")):
        model = nn.Sequential(nn.Embedding(5, 3, **options), nn.Linear(3, 2))
        assert reason in KFAC(model).summary()


# ---------------------------------------------------------------------- norms and biases

NORMS = {
    "group": (nn.GroupNorm(2, 4), (4, 3, 3)),
    "layer": (nn.LayerNorm(4), (5, 4)),
    "layer of two sizes": (nn.LayerNorm((2, 3)), (5, 2, 3)),
    "layer without bias": (nn.LayerNorm(4, bias=False), (4,)),
    "rms": (nn.RMSNorm(4, eps=1e-5), (5, 4)),
    "instance": (nn.InstanceNorm2d(4, affine=True), (4, 3, 3)),
    "a subclass of instance": (type("OwnNorm", (nn.InstanceNorm2d,), {})(4, affine=True), (4, 3, 3)),
    "batch, eval": (nn.BatchNorm2d(4).eval(), (4, 3, 3)),
    "batch 1d, eval": (nn.BatchNorm1d(4).eval(), (4,)),
}


@pytest.mark.parametrize(("norm", "shape"), NORMS.values(), ids=NORMS.keys())
def test_a_norm_has_the_second_moments_of_per_sample_gradients(norm, shape):
    model = copy.deepcopy(norm).to(D)
    x = rand(6, *shape) * 2 + 1
    if hasattr(model, "running_mean") and model.running_mean is not None:
        model.running_mean.copy_(rand(4, seed=3))
        model.running_var.copy_(rand(4, seed=4).square() + 0.5)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(rand(*p.shape, seed=5))
    probe = rand(*x.shape, seed=7)
    gradients = per_sample_gradients(model, x, probe)
    rows = torch.stack([g.flatten(1) for g in gradients.values()], 2)  # [samples, channels, parameters]
    blocks = torch.einsum("nci,ncj->cij", rows, rows) / len(x)
    kfac = stepped(model, x)
    torch.testing.assert_close(kfac.factor("", "G"), torch.block_diag(*blocks), rtol=1e-10, atol=1e-14)
    assert kfac.factor("", "A").tolist() == [[1.0]]
    mean = rows.mean(0)  # [channels, parameters]
    pi = (1.0 / (blocks.diagonal(dim1=1, dim2=2).mean())).sqrt()
    damped = blocks + 0.1 / pi * torch.eye(rows.shape[2], dtype=D)
    expected = torch.linalg.solve(damped, mean[:, :, None])[:, :, 0] / (1 + 0.1 * pi)
    for k, p in enumerate(model.parameters()):
        torch.testing.assert_close(p.grad.flatten(), expected[:, k], rtol=1e-9, atol=1e-12)


def test_batch_norm_in_training_normalises_by_the_batch():
    model = nn.BatchNorm2d(3).to(D)
    x, probe = rand(5, 3, 4, 4) * 3 + 2, rand(5, 3, 4, 4, seed=7)
    kfac = stepped(model, x)
    x_hat = (x - x.mean((0, 2, 3), keepdim=True)) / (x.var((0, 2, 3), correction=0, keepdim=True) + model.eps).sqrt()
    rows = torch.stack([(probe * x_hat).sum((2, 3)), probe.sum((2, 3))], 2)
    blocks = torch.einsum("nci,ncj->cij", rows, rows) / len(x)
    torch.testing.assert_close(kfac.factor("", "G"), torch.block_diag(*blocks), rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("kind", ["linear", "convolution"])
def test_a_bias_whose_weight_is_frozen_has_the_moments_of_its_gradients(kind):
    torch.manual_seed(0)
    model = (nn.Linear(3, 4) if kind == "linear" else nn.Conv2d(3, 4, 2)).to(D)
    model.weight.requires_grad_(False)
    x = rand(6, 5, 3) if kind == "linear" else rand(6, 3, 4, 4)
    probe = rand(*model(x).shape, seed=7)
    rows = probe.sum(1) if kind == "linear" else probe.sum((2, 3))
    weight = model.weight.clone()
    kfac = stepped(model, x)
    torch.testing.assert_close(kfac.factor("", "G"), rows.T @ rows / 6, rtol=1e-10, atol=1e-14)
    assert model.weight.grad is None
    assert torch.equal(model.weight, weight)
    assert [layer.kind for layer in kfac.layers] == ["bias"]


# ---------------------------------------------------------------------- shared parameters


class Twice(nn.Module):
    """One function of two inputs of three features: by one module called twice, or by two that share their weight."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, 3)
        self.second = self.first
        if tied:
            self.second = nn.Linear(3, 3)
            self.second.weight, self.second.bias = self.first.weight, self.first.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


def test_tied_modules_sum_their_statistics_as_one_module_called_twice_does():
    x = rand(5, 3)
    results = []
    for tied in (False, True):
        model = Twice(tied).to(D)
        inputs: list[torch.Tensor] = []
        gradients: list[torch.Tensor] = []

        def remember(_, args, out, inputs=inputs, gradients=gradients):
            inputs.append(torch.cat([args[0].detach(), torch.ones(5, 1, dtype=D)], 1))
            out.register_hook(gradients.append)

        for module in {model.first, model.second}:
            module.register_forward_hook(remember)
        kfac = stepped(model, x)
        A = sum(rows.T @ rows for rows in inputs)
        G = sum((5 * g).T @ (5 * g) for g in gradients)
        assert len(inputs) == len(gradients) == 2
        torch.testing.assert_close(kfac.factor("first", "A"), A / 5, rtol=1e-10, atol=1e-14)
        torch.testing.assert_close(kfac.factor("first", "G"), G / (5 * 2), rtol=1e-10, atol=1e-14)
        results.append(model.first.weight.grad.clone())
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-15)


def test_what_is_tied_across_kinds_or_with_another_bias_keeps_the_plain_gradient():
    model = nn.ModuleDict({"wte": nn.Embedding(6, 4), "middle": nn.Linear(4, 4), "head": nn.Linear(4, 6, bias=False)})
    model["head"].weight = model["wte"].weight
    kfac = KFAC(model)
    assert [layer.name for layer in kfac.layers] == ["middle"]
    assert "wte: its weight is tied to a Linear's" in kfac.summary()
    other = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4), "c": nn.Linear(4, 4)})
    other["b"].weight = other["a"].weight
    kfac = KFAC(other)
    assert [layer.name for layer in kfac.layers] == ["c"]
    assert sum(item.parameters for item in kfac.first_order) == 16 + 4 + 4


# ---------------------------------------------------------------------- choice of layers


def test_kinds_and_patterns_choose_what_is_preconditioned():
    model = make_model()
    every = [layer.kind for layer in KFAC(model).layers]
    assert every.count("norm") == 1
    fewer = KFAC(make_model(), KFACConfig(layers=("linear",), exclude=("8",)))
    assert [layer.name for layer in fewer.layers] == ["10"]
    assert "layers of kind norm are not in KFACConfig.layers" in fewer.summary()
    assert all(layer.kind in ("linear", "convolution") for layer in KFAC(make_model(), KFACConfig.paper()).layers)


def test_overrides_hold_for_the_layers_they_name():
    def gradients(config: KFACConfig) -> dict[str, torch.Tensor]:
        model = make_model()
        x, y = make_data(6, 0)
        kfac = KFAC(model, config)
        F.cross_entropy(model(x), y).backward()
        kfac.step()
        return {name: p.grad for name, p in model.named_parameters()}

    base, strong = KFACConfig(kl_clip=None), KFACConfig(kl_clip=None, damping=1.0)
    mixed = gradients(KFACConfig(kl_clip=None, overrides={"1*": {"damping": 3.0}, "10": {"damping": 1.0}}))
    for name, gradient in mixed.items():
        same = gradients(strong if name.startswith("10.") else base)[name]
        assert torch.equal(gradient, same) == (not name.startswith("1.")), name


def test_a_parameter_that_is_no_layer_is_listed_once_with_its_reason():
    model = nn.Sequential(nn.Linear(3, 4), nn.PReLU(4), nn.Linear(4, 2))
    kfac = KFAC(model)
    assert [(item.name, item.parameters) for item in kfac.first_order] == [("1", 4)]
    assert "PReLU has no Kronecker factors here" in kfac.summary()
