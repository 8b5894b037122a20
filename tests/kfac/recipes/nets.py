"""Small float64 networks and data for the recipes."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from tests.kfac.oracle import D

ACTIVATIONS = {"tanh": nn.Tanh, "sigmoid": nn.Sigmoid, "relu": nn.ReLU, "none": nn.Identity}


def mlp(layers: int = 3, activation: str = "tanh", *, bias: bool = True, seed: int = 0) -> nn.Sequential:
    """Linear layers 3 -> 4 -> 5 -> 3 (or 3 -> 3) with an activation between them."""
    widths = [3, 4, 5, 3] if layers == 3 else [3, 3]
    modules: list[nn.Module] = []
    with torch.random.fork_rng(devices=[]):  # sampled labels do not depend on the initialisation
        torch.manual_seed(seed)
        for inputs, outputs in pairwise(widths):
            modules += [nn.Linear(inputs, outputs, bias=bias), ACTIVATIONS[activation]()]
    return nn.Sequential(*modules[:-1]).to(D)


def data(kind: str, *shape: int, width: int = 3, seed: int = 5) -> tuple[Tensor, Tensor]:
    """Inputs ``[*shape, width]`` and targets for outputs of the same width, in the layout of the loss ``kind``."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, width, generator=generator, dtype=D)
    if kind == "regression":
        return x, torch.randn(*shape, width, generator=generator, dtype=D)
    labels = torch.randint(0, width if kind == "classification" else 2, (*shape, width), generator=generator)
    return (x, labels[..., 0]) if kind == "classification" else (x, labels.to(D))


class TokenNet(nn.Module):
    """Linear layers 3 -> 4 -> 5 -> 4 -> 3 on ``[N, S, 3]``, which may pool over S after some of them.

    Args:
        activation: between the layers.
        pool: ``sum`` or ``mean``, or None.
        pool_after: how many layers see the tokens.
        channels_first: whether outputs are ``[N, 3, S]``, as cross-entropy takes them.
    """

    def __init__(
        self,
        activation: str = "none",
        *,
        pool: str | None = None,
        pool_after: int = 4,
        channels_first: bool = False,
        bias: bool = True,
    ) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.layers = nn.ModuleList(nn.Linear(i, o, bias=bias) for i, o in pairwise([3, 4, 5, 4, 3]))
        self.to(D)
        self.activation = ACTIVATIONS[activation]()
        self.pool, self.pool_after, self.channels_first = pool, pool_after, channels_first

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            if index:
                x = self.activation(x)
            x = layer(x)
            if self.pool is not None and index + 1 == self.pool_after:
                x = getattr(x, self.pool)(1)
        return x.movedim(-1, 1) if self.channels_first else x
