"""Which parameters of torchvision's classification models K-FAC preconditions: ``python -m benchmarks.coverage``.

Every family takes three steps on random images; ``docs/coverage.md`` is the table of it.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

from kfac import KFAC, KFACConfig

SIZES = {
    "alexnet": 64,
    "convnext_tiny": 32,
    "densenet121": 32,
    "efficientnet_b0": 32,
    "efficientnet_v2_s": 32,
    "googlenet": 32,
    "inception_v3": 299,
    "maxvit_t": 224,
    "mnasnet0_5": 32,
    "mobilenet_v2": 32,
    "mobilenet_v3_small": 32,
    "regnet_y_400mf": 32,
    "resnet18": 32,
    "resnext50_32x4d": 32,
    "shufflenet_v2_x0_5": 32,
    "squeezenet1_1": 32,
    "swin_t": 32,
    "swin_v2_t": 32,
    "vgg11": 32,
    "vit_b_16": 32,
    "wide_resnet50_2": 32,
}
"""The smallest model of every family, and the pixels of images that it takes."""

MAX_DIM = 32
"""Widest block: three steps of a VGG take seconds. What is covered does not depend on it."""

BATCH, CLASSES, STEPS = 2, 10, 3
START, END = "<!-- table: python -m benchmarks.coverage -->", "<!-- end of table -->"
PAGE = Path(__file__).parent.parent / "docs" / "coverage.md"


@dataclass(frozen=True)
class Coverage:
    """What three steps of a model showed.

    Args:
        name: of the model.
        parameters: trainable parameters.
        kinds: preconditioned layers by kind.
        first_order: elements with their plain gradient, by reason.
        finite: whether all parameters and losses stayed finite.
    """

    name: str
    parameters: int
    kinds: dict[str, int]
    first_order: dict[str, int]
    finite: bool

    @property
    def share(self) -> float:
        """Preconditioned parameters among all."""
        return 1.0 - sum(self.first_order.values()) / self.parameters


def build(name: str) -> nn.Module:
    """A model with random weights."""
    options: dict[str, Any] = {"vit_b_16": {"image_size": SIZES["vit_b_16"]}}.get(name, {})
    if name in ("googlenet", "inception_v3"):
        options = {"init_weights": True}
    model: nn.Module = getattr(torchvision.models, name)(weights=None, num_classes=CLASSES, **options)
    return model


def loss_of(outputs: Any, labels: Tensor) -> Tensor:
    """Cross-entropy, summed over the outputs of models with auxiliary classifiers."""
    heads = outputs if isinstance(outputs, tuple) else (outputs,)
    return torch.stack([F.cross_entropy(head, labels) for head in heads if head is not None]).sum()


def three_steps(name: str) -> Coverage:
    """Train a model for three steps, with norms and all."""
    torch.manual_seed(0)
    model = build(name)
    kfac = KFAC(model, KFACConfig(max_dim=MAX_DIM, lr=0.01), "kfac")
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    losses = []
    for _ in range(STEPS):
        images, labels = torch.randn(BATCH, 3, SIZES[name], SIZES[name]), torch.arange(BATCH)
        optimizer.zero_grad()
        loss = loss_of(model(images), labels)
        loss.backward()
        kfac.step()
        optimizer.step()
        losses.append(loss.detach())
    kinds: dict[str, int] = {}
    first_order: dict[str, int] = {}
    for item in kfac.first_order:
        first_order[item.reason] = first_order.get(item.reason, 0) + item.parameters
    saved = kfac.state_dict()["factors"]
    for layer in kfac.layers:
        if saved[f"{layer.name}/A"]["average"] is None:
            reason = "its forward is bypassed (a functional call uses its weight)"
            first_order[reason] = first_order.get(reason, 0) + sum(p.numel() for p in layer.parameters)
        else:
            kinds[layer.kind] = kinds.get(layer.kind, 0) + 1
    finite = all(bool(torch.isfinite(t).all()) for t in (*losses, *model.parameters()))
    kfac.close()
    return Coverage(name, sum(p.numel() for p in model.parameters()), kinds, first_order, finite)


def table_lines(rows: Iterator[Coverage]) -> Iterator[str]:
    """The Markdown table."""
    yield "| model | parameters | preconditioned | layers | plain gradient, and why |"
    yield "| --- | ---: | ---: | --- | --- |"
    for row in rows:
        layers = ", ".join(f"{count} {kind}" for kind, count in row.kinds.items())
        rest = "; ".join(f"{count:,}: {reason}" for reason, count in row.first_order.items())
        yield f"| {row.name} | {row.parameters:,} | {row.share:.2%} | {layers} | {rest} |"


def main() -> None:
    """Write the table into the page, one family after another."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.coverage", description=__doc__)
    parser.add_argument("--families", nargs="*", default=list(SIZES), choices=list(SIZES))
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)  # of layers that are bypassed: they are in the table
    rows = []
    for name in arguments.families:
        rows.append(three_steps(name))
        state = "finite" if rows[-1].finite else "NOT FINITE"
        print(f"{name}: {rows[-1].share:.2%} preconditioned, three steps {state}", flush=True)  # noqa: T201
    if arguments.families == list(SIZES):
        text = PAGE.read_text()
        before, after = text.split(START)[0], text.split(END)[1]
        PAGE.write_text("\n".join([before + START, *table_lines(iter(rows)), END + after]))
        print(f"wrote {PAGE}")  # noqa: T201


if __name__ == "__main__":
    main()
