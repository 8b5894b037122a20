"""Small float64 models and data for tests: without BatchNorm, so that a batch may be split."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn


class Residual(nn.Module):
    """A convolution beside a 1x1 one, as in a residual block, with in-place activations."""

    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Conv2d(4, 6, 3, stride=2, padding=1)
        self.skip = nn.Conv2d(4, 6, 1, stride=2, bias=False)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x):
        return self.act(self.main(x) + self.skip(x))


def conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, bias=False),
        nn.GroupNorm(2, 4),
        nn.ReLU(inplace=True),
        Residual(),
        nn.Conv2d(6, 5, (3, 2), dilation=(1, 2), padding=(2, 1)),
        nn.Tanh(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(20, 7),
        nn.ReLU(inplace=True),
        nn.Linear(7, 3),
    )


def make_model(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(seed)
    return conv_net().to(dtype)


def make_data(samples: int, seed: int, dtype: torch.dtype = torch.float64):
    """Images ``[samples, 2, 8, 8]`` and classes; every sample is different."""
    generator = torch.Generator().manual_seed(1000 + seed)
    x = torch.randn(samples, 2, 8, 8, generator=generator, dtype=dtype)
    return x, torch.randint(0, 3, (samples,), generator=generator)


def recorded_step(kfac, model: nn.Module, recorder, device: str = "cpu"):
    """The timeline of the third step: the first is not pipelined."""
    for step in range(3):
        x, y = (part.to(device) for part in make_data(8, step))
        recorder.start()
        model.zero_grad()
        with recorder.span("FF", "forward"):
            loss = nn.functional.cross_entropy(model(x), y)
        with recorder.span("BP", "backward"):
            loss.backward()
        kfac.step()
        timeline = recorder.stop()
    return timeline


def shards(samples: int, world_size: int) -> list[slice]:
    """Unequal contiguous shards of a batch: rank 0 gets the most."""
    base = [samples // world_size] * world_size
    for rank in range(1, world_size):
        moved = min(rank % 3, base[rank] - 1)
        base[rank] -= moved
        base[0] += moved
    base[0] += samples - sum(base)
    edges = [sum(base[:k]) for k in range(world_size + 1)]
    return [slice(a, b) for a, b in pairwise(edges)]
