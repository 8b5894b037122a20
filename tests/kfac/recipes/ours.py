"""What kfac computes for one batch, as matrices in the oracle's order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from kfac import KFAC, KFACConfig
from tests.kfac.oracle import Loss

Factors = dict[str, tuple[Tensor, Tensor]]
"""Per layer A and G."""


def accumulated(
    kfac: KFAC, model: nn.Module, x: Tensor, y: Tensor, loss: Loss, splits: Sequence[int], *, tell: bool = True
) -> None:
    """Forward and backward passes of one step over micro-batches of these sizes; ``kfac.step()`` is left to do.

    The gradient is that of ``loss`` of the whole batch: means are weighted by their number of terms.
    """
    model.zero_grad()
    for micro_x, micro_y in zip(x.split(splits), y.split(splits), strict=True):
        weight = loss.count(micro_y) / loss.count(y) if loss.reduction == "mean" else 1.0
        outputs = model(micro_x)
        total = weight * loss(outputs, micro_y)
        if tell:
            with kfac.curvature(outputs, loss.kind, weight, targets=micro_y, ignore_index=loss.ignore_index):
                total.backward()
        else:
            total.backward()


def kfac_factors(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    loss: Loss,
    fisher: str = "empirical",
    *,
    splits: Sequence[int] | None = None,
    tell: bool = True,
    **options: object,
) -> Factors:
    """The factors after one step on a batch; ``tell``: whether the model's outputs are passed to ``kfac.curvature``."""
    splits = splits or (len(x),)
    config = KFACConfig(
        fisher=fisher,
        loss_reduction=loss.reduction,
        accumulation_steps=len(splits),
        **options,  # type: ignore[arg-type]
    )
    kfac = KFAC(model, config)
    accumulated(kfac, model, x, y, loss, splits, tell=tell)
    kfac.step()
    factors = {layer.name: (kfac.factor(layer.name, "A"), kfac.factor(layer.name, "G")) for layer in kfac.layers}
    kfac.close()
    return factors


def blocks_of(factors: Factors) -> dict[str, Tensor]:
    """``G (x) A`` of every layer."""
    return {name: torch.kron(g, a) for name, (a, g) in factors.items()}


def kfac_blocks(
    model: nn.Module, x: Tensor, y: Tensor, loss: Loss, fisher: str, **options: object
) -> dict[str, Tensor]:
    """K-FAC's approximation of every layer's matrix."""
    return blocks_of(kfac_factors(model, x, y, loss, fisher, **options))  # type: ignore[arg-type]
