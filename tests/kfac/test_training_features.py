"""What training loops and models do beyond the plain: wrappers, groups of parameters, layers that never run."""

from __future__ import annotations

import logging
import math
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfac import KFAC, KFACConfig
from tests.kfac.models import make_data, make_model
from tests.kfac.ranks import run_ranks

D = torch.float64


def flat(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


# ---------------------------------------------------------------------- DistributedDataParallel

WRAPPED: dict[str, dict] = {
    "plain": {},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
    "views": {"gradient_as_bucket_view": True},
    "views and small buckets": {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.001},
}


def _ddp(rank, world_size, micro_batches):
    """Parameters after training, with K-FAC's own averages and in each kind of DistributedDataParallel."""
    results = {}
    for name, options in {"own": None, **WRAPPED}.items():
        model = make_model()
        net = model if options is None else nn.parallel.DistributedDataParallel(model, **options)
        kfac = KFAC(net, KFACConfig(accumulation_steps=micro_batches), average_gradients=options is None)
        counted = [sum(len(module._forward_hooks) for module in layer.modules) for layer in kfac.layers]
        assert counted == [1] * len(kfac.layers)
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        for step in range(3):
            x, y = make_data(8, step)
            optimizer.zero_grad()
            parts = list(zip(x[rank::2].chunk(micro_batches), y[rank::2].chunk(micro_batches), strict=True))
            for k, (micro_x, micro_y) in enumerate(parts):
                # (torch itself fails if a static graph starts with no_sync)
                last = options is None or k == len(parts) - 1 or name == "static"
                with nullcontext() if last else net.no_sync():
                    (F.cross_entropy(net(micro_x), micro_y) / micro_batches).backward()
            kfac.step()
            optimizer.step()
        kfac.close()
        results[name] = flat(model)
    return results


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_every_kind_of_ddp_gives_the_parameters_of_own_averages(micro_batches):
    for results in run_ranks(_ddp, 2, micro_batches):
        for name, parameters in results.items():
            assert (parameters - results["own"]).abs().max() < 1e-12, name
        assert (results["own"] - flat(make_model())).abs().max() > 1e-3


# ---------------------------------------------------------------------- groups of parameters

X = torch.randn(6, 3, dtype=D, generator=torch.Generator().manual_seed(1))
Y = torch.tensor([0, 1, 1, 0, 1, 0])


class TwoParts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 2)
        self.to(D)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)))


def test_a_group_of_parameters_has_its_own_lr_in_the_kl_clip_and_its_own_damping():
    """nu = sqrt(kappa / sum_l lr_l^2 <v_l, g_l>), with the optimizer's two learning rates."""
    lrs, dampings, kappa = {"body": 0.01, "head": 0.3}, {"body": 0.5, "head": 0.01}, 1e-5
    overrides = {name: {"lr": lrs[name], "damping": dampings[name]} for name in lrs}
    model = TwoParts()
    kfac = KFAC(model, KFACConfig(kl_clip=kappa, damping_method="plain", overrides=overrides))
    optimizer = torch.optim.SGD([{"params": getattr(model, name).parameters(), "lr": lrs[name]} for name in lrs])
    F.cross_entropy(model(X), Y).backward()
    gradients = {
        name: torch.cat([m.weight.grad, m.bias.grad[:, None]], 1).clone() for name, m in model.named_children()
    }
    kfac.step()
    steps, product = {}, 0.0
    for name, gradient in gradients.items():
        a, g = (kfac.factor(name, side) for side in "AG")
        eye_a, eye_g = torch.eye(len(a), dtype=D), torch.eye(len(g), dtype=D)
        steps[name] = torch.linalg.solve(g + dampings[name] * eye_g, gradient) @ torch.linalg.inv(
            a + dampings[name] * eye_a
        )
        product += lrs[name] ** 2 * (steps[name] * gradient).sum().item()
    nu = math.sqrt(kappa / product)
    assert nu < 0.5
    before = {name: getattr(model, name).weight.detach().clone() for name in lrs}
    for name, expected in steps.items():
        ours = torch.cat([getattr(model, name).weight.grad, getattr(model, name).bias.grad[:, None]], 1)
        torch.testing.assert_close(ours, nu * expected, rtol=1e-10, atol=1e-14)
    optimizer.step()
    size = 0.0
    for name, lr in lrs.items():
        moved = getattr(model, name).weight.detach() - before[name]
        torch.testing.assert_close(moved, -lr * nu * steps[name][:, :-1], rtol=1e-10, atol=1e-14)
        size += (lr * nu) ** 2 * (steps[name] * gradients[name]).sum().item()
    assert size == pytest.approx(kappa), "the step's size in the model's own metric is what the clip allows"


def test_control_one_lr_for_both_groups_clips_otherwise():
    gradients = []
    for overrides in ({"body": {"lr": 0.01}, "head": {"lr": 0.3}}, {}):
        model = TwoParts()
        kfac = KFAC(model, KFACConfig(kl_clip=1e-5, lr=0.3, overrides=overrides))
        F.cross_entropy(model(X), Y).backward()
        kfac.step()
        gradients.append(model.head.weight.grad.clone())
    assert (gradients[0] - gradients[1]).norm() > 0.01 * gradients[0].norm()


# ---------------------------------------------------------------------- layers that never run forward


def attention_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).to(D)


def test_layers_whose_forward_is_bypassed_keep_their_gradient_with_one_warning(caplog):
    """nn.MultiheadAttention reads the weights of its out_proj; its fused projection is no module at all."""
    x = torch.randn(3, 5, 8, dtype=D, generator=torch.Generator().manual_seed(0))
    plain = attention_model()
    model = attention_model()
    kfac = KFAC(model)
    assert "self_attn" in kfac.summary()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            for net in (plain, model):
                net.zero_grad()
                net(x).square().mean().backward()
            kfac.step()
            attention, expected = model.self_attn, plain.self_attn
            for name in ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias"):
                assert torch.equal(attention.get_parameter(name).grad, expected.get_parameter(name).grad), name
            assert not torch.equal(model.linear1.weight.grad, plain.linear1.weight.grad)
    warned = [record.message for record in caplog.records if "was not used" in record.message]
    assert len(warned) == 1
    assert "out_proj" in warned[0]


# ---------------------------------------------------------------------- modes, other calls, in place


def test_eval_with_gradients_counts():
    """Fine-tuning with frozen BatchNorm averages and no dropout: statistics are those of the layers' real inputs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2)).to(D)
    model.eval()
    kfac = KFAC(model)
    F.cross_entropy(model(X), Y).backward()
    kfac.step()
    rows = torch.cat([model[:3](X).detach(), torch.ones(6, 1, dtype=D)], 1)
    torch.testing.assert_close(kfac.factor("3", "A"), rows.T @ rows / 6)
    assert kfac.steps == 1


def test_functional_calls_with_other_parameters_leave_no_trace():
    """Per-sample gradients by torch.func, of a model that K-FAC has hooked, between forward and backward pass."""
    factors = []
    for called in (False, True):
        model = TwoParts()
        kfac = KFAC(model)
        loss = F.cross_entropy(model(X), Y)
        if called:
            parameters = {name: p.detach() for name, p in model.named_parameters()}

            def one(values, x, y, model=model):
                return F.cross_entropy(torch.func.functional_call(model, values, (x[None],)), y[None])

            per_sample = torch.func.vmap(torch.func.grad(one), (None, 0, 0))(parameters, X, Y)
            assert per_sample["body.weight"].shape == (6, 4, 3)
        loss.backward()
        kfac.step()
        factors.append([kfac.factor(name, side) for name in ("body", "head") for side in "AG"])
    assert all(torch.equal(a, b) for a, b in zip(*factors, strict=True))


def test_hooks_that_change_inputs_and_outputs_are_seen_as_the_layer_sees_them():
    """A hook of the user's own that doubles the output doubles the gradient of what the layer itself has put out."""
    factors = []
    for hooked in (False, True):
        torch.manual_seed(0)
        layer = nn.Linear(3, 4).to(D)
        if hooked:
            layer.register_forward_pre_hook(lambda module, args: (3 * args[0],))
            layer.register_forward_hook(lambda module, args, output: 2 * output)
        kfac = KFAC(layer)
        (layer(X) if hooked else 2 * layer(3 * X)).tanh().sum().backward()
        kfac.step()
        factors.append([kfac.factor("", side) for side in "AG"])
    for plain, own in zip(*factors, strict=True):
        torch.testing.assert_close(own, plain, rtol=1e-12, atol=1e-14)


IN_PLACE: dict[str, tuple] = {
    "linear": (lambda: nn.Linear(4, 4), (3, 4)),
    "linear on sequences": (lambda: nn.Linear(4, 4), (3, 5, 4)),
    "linear without bias on sequences": (lambda: nn.Linear(4, 4, bias=False), (3, 5, 4)),
    "convolution": (lambda: nn.Conv2d(4, 4, 3), (3, 4, 5, 5)),
    "unbatched convolution": (lambda: nn.Conv2d(4, 4, 3), (4, 5, 5)),
    "embedding": (lambda: nn.Embedding(6, 4), (3, 5)),
    "instance norm": (lambda: nn.InstanceNorm1d(4, affine=True), (3, 4, 5)),
    "layer norm": (lambda: nn.LayerNorm(4), (3, 5, 4)),
}


@pytest.mark.parametrize("case", IN_PLACE)
def test_activations_in_place_give_the_same_factors(case):
    make, shape = IN_PLACE[case]
    factors = []
    for in_place in (False, True):
        torch.manual_seed(0)
        layer = make().to(D)
        kfac = KFAC(layer)
        x = torch.randint(0, 6, shape) if case == "embedding" else torch.randn(shape, dtype=D)
        output = layer(x)
        hidden = output.mul_(2.0).relu_() if in_place else (output * 2.0).relu()
        (hidden**3).sum().backward()
        kfac.step()
        factors.append([kfac.factor("", side) for side in "AG"])
    for a, b in zip(*factors, strict=True):
        assert a.norm() > 0
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
