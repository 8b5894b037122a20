"""T1 for parameters that are no matrices on dense inputs: norms, lone biases, embeddings, tied weights.

The blocks of norms and biases are exact for any number of data: G holds the second moments of each sample's gradient.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.kfac.oracle import D, Loss, distance, empirical_blocks, ggn_blocks
from tests.kfac.recipes.nets import data
from tests.kfac.recipes.ours import blocks_of, kfac_factors

ORACLES = {"exact": ggn_blocks, "empirical": empirical_blocks}
FISHERS = tuple(ORACLES)
KINDS = ("classification", "regression")


class Normed(nn.Module):
    """A norm between two layers, on ``[N, 6]``, ``[N, 6, 4]`` or ``[N, 4, 6]`` (the norm's channels last)."""

    def __init__(self, norm: nn.Module, shape: tuple[int, ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before, self.norm, self.after = nn.Linear(3, 24), norm, nn.Linear(24, 3)
        self.shape = shape
        self.to(D)
        for parameter in norm.parameters():
            nn.init.normal_(parameter)
        for buffer in norm.buffers():
            if buffer.is_floating_point():
                nn.init.uniform_(buffer, 0.5, 2.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(torch.tanh(self.norm(self.before(x).view(-1, *self.shape))).flatten(1))


NORMS = {
    "LayerNorm": (lambda: nn.LayerNorm(6), (4, 6)),
    "LayerNorm of two sizes": (lambda: nn.LayerNorm((4, 6)), (4, 6)),
    "LayerNorm without shift": (lambda: nn.LayerNorm(6, bias=False), (4, 6)),
    "RMSNorm": (lambda: nn.RMSNorm(6), (4, 6)),
    "GroupNorm": (lambda: nn.GroupNorm(2, 6), (6, 4)),
    "InstanceNorm": (lambda: nn.InstanceNorm1d(6, affine=True), (6, 4)),
    "BatchNorm, eval": (lambda: nn.BatchNorm1d(6).eval(), (6, 4)),
}


@pytest.mark.parametrize("fisher", FISHERS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NORMS)
def test_the_blocks_of_norms_are_those_of_the_whole_matrix(name, kind, fisher):
    """One block of (scale, shift) per channel; the control: blocks of other channels are not zero, but left out."""
    make, shape = NORMS[name]
    model, loss = Normed(make(), shape), Loss(kind)
    x, y = data(kind, 7)
    whole = ORACLES[fisher](model, x, y, loss)["norm"]
    a, g = kfac_factors(model, x, y, loss, fisher)["norm"]
    size = sum(1 for _ in model.norm.parameters())
    mask = torch.block_diag(*[torch.ones(size, size, dtype=D)] * (len(whole) // size))
    torch.testing.assert_close(torch.kron(g, a), whole * mask, rtol=1e-10, atol=1e-15)
    assert (whole * (1 - mask)).norm() > 0.1 * whole.norm()


@pytest.mark.parametrize("fisher", FISHERS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layer", ["linear", "convolution"])
def test_a_bias_with_a_frozen_weight_has_its_whole_matrix(layer, kind, fisher):
    torch.manual_seed(0)
    first = nn.Linear(3, 5) if layer == "linear" else nn.Conv1d(1, 5, 2, padding=1)
    shape = nn.Identity() if layer == "linear" else nn.Unflatten(1, (1, 3))
    last = nn.Sequential(nn.Flatten(), nn.Linear(5 if layer == "linear" else 20, 3))
    model, loss = nn.Sequential(shape, first, nn.Tanh(), last).to(D), Loss(kind)
    x, y = data(kind, 7)
    truth = ORACLES[fisher](model, x, y, loss)["1"]
    weight = first.weight[0].numel()
    rows = torch.arange(len(truth)).view(5, -1)[:, weight]  # the bias's
    first.weight.requires_grad_(False)
    a, g = kfac_factors(model, x, y, loss, fisher)["1"]
    error = distance({"": torch.kron(g, a)}, {"": truth[rows][:, rows]})
    assert error < 1e-10


class Embedded(nn.Module):
    """Tokens, looked up and mapped, one by one."""

    def __init__(self, activation: nn.Module, padding_idx: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(6, 4, padding_idx)
        self.activation, self.head = activation, nn.Linear(4, 3)
        self.to(D)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.activation(self.table(tokens)))


def tokens_and_targets(*shape: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    return torch.randint(0, 6, shape, generator=generator), torch.randn(*shape, 3, generator=generator, dtype=D)


@pytest.mark.parametrize("shape", [(1,), (9,), (9, 5)], ids=str)
def test_an_embedding_is_exact_where_a_linear_layer_is(shape):
    """T1 and T2 on one-hot inputs, whose A is diagonal; rows and columns are those of the transposed table."""
    tokens, y = tokens_and_targets(*shape)
    loss = Loss("regression")
    linear, nonlinear = (Embedded(activation) for activation in (nn.Identity(), nn.Tanh()))
    factors = kfac_factors(linear, tokens, y, loss, "exact")
    assert torch.equal(factors["table"][0], factors["table"][0].diagonal().diag())
    error = distance(blocks_of(factors), ggn_blocks(linear, tokens, y, loss))
    assert error < 1e-10
    error = distance(
        blocks_of(kfac_factors(nonlinear, tokens, y, loss, "exact")), ggn_blocks(nonlinear, tokens, y, loss)
    )
    assert error < 1e-10 if shape == (1,) else error > 0.01, "the control: several tokens are approximated"


def test_padding_of_an_embedding_is_no_input():
    """Its row has no curvature; the other rows' is exact but for the share of tokens that are none."""
    tokens, y = tokens_and_targets(9, 5)
    model, loss = Embedded(nn.Identity(), padding_idx=2), Loss("regression")
    truth = ggn_blocks(model, tokens, y, loss)["table"]
    a, g = kfac_factors(model, tokens, y, loss, "exact")["table"]
    share = (tokens != 2).double().mean().item()
    assert 0.5 < share < 0.95
    assert a[2, 2] == 0.0
    error = distance({"": torch.kron(g, a) / share}, {"": truth})
    assert error < 1e-10


class Tied(nn.Module):
    """Two modules of one weight, side by side, or one module that is used twice, or on both inputs at once."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head = nn.Linear(3, 4), nn.Linear(4, 3)
        self.how = how
        if how == "two modules":
            self.second = nn.Linear(3, 4)
            self.second.weight, self.second.bias = self.first.weight, self.first.bias
        self.to(D)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "one call":
            return self.head(self.first(x).sum(1))
        second = self.second if self.how == "two modules" else self.first
        return self.head(self.first(x[:, 0]) + second(x[:, 1]))


@pytest.mark.parametrize("fisher", FISHERS)
@pytest.mark.parametrize("how", ["two modules", "two calls"])
def test_tied_weights_are_positions_of_one_layer(how, fisher):
    """Statistics are summed over the uses, as over the positions of one use; the control: one use's alone are not."""
    x, y = data("regression", 6, 2)[0], data("regression", 6)[1]
    loss = Loss("regression")
    ours, joint = (kfac_factors(Tied(kind), x, y, loss, fisher)["first"] for kind in (how, "one call"))
    for side, expected in zip(ours, joint, strict=True):
        torch.testing.assert_close(side, expected, rtol=1e-10, atol=1e-15)
    alone = torch.cat([x[:, 0], torch.ones(6, 1, dtype=D)], 1)
    assert (ours[0] - alone.T @ alone / 6).norm() > 0.1 * ours[0].norm()
