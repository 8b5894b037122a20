"""A small network, its only batch, and the comparison of factors."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfac import KFAC

D = torch.float64
X = torch.randn(6, 3, dtype=D, generator=torch.Generator().manual_seed(1))
Y = torch.tensor([0, 1, 1, 0, 1, 0])


def mlp(*extra: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), *extra, nn.Tanh(), nn.Linear(4, 2)).to(D)


def loss_of(model: nn.Module, scale: float = 1.0) -> Tensor:
    return F.cross_entropy(model(X * scale), Y)


def factors_of(kfac: KFAC) -> dict[tuple[str, str], Tensor]:
    return {(layer.name, side): kfac.factor(layer.name, side) for layer in kfac.layers for side in "AG"}


def same(ours: dict[tuple[str, str], Tensor], expected: dict[tuple[str, str], Tensor]) -> None:
    assert ours.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(ours[key], value), key
