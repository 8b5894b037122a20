"""What the cost benchmark trains. No kfac here: a process that drives another K-FAC imports this module too."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from experiments.models import TEXT_MODELS, build_model


@dataclass(frozen=True)
class Workload:
    """A model and its batches of random numbers.

    Args:
        title: as reports name it.
        model: of :func:`experiments.models.build_model`.
        input_shape: of one sample: an image, or the positions of a text.
        batch_size: samples of a batch.
        classes: labels, or characters of a text.
        options: further arguments of the model.
    """

    title: str
    model: str
    input_shape: tuple[int, ...]
    batch_size: int
    classes: int
    options: dict[str, Any] = field(default_factory=dict)

    def build(self) -> nn.Module:
        """The model, the same in every process."""
        torch.manual_seed(0)
        return build_model(self.model, num_classes=self.classes, input_shape=self.input_shape, **self.options)

    def batches(self, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches without end, each new, so that nothing is learned by heart and gradients keep their size."""
        generator = torch.Generator().manual_seed(seed)
        shape = (self.batch_size, *self.input_shape)
        while True:
            if self.model in TEXT_MODELS:
                inputs = torch.randint(0, self.classes, shape, generator=generator)
                yield inputs, torch.randint(0, self.classes, shape, generator=generator)
            else:
                inputs = torch.randn(shape, generator=generator)
                yield inputs, torch.randint(0, self.classes, shape[:1], generator=generator)


WORKLOADS = {
    "resnet20": Workload("ResNet-20, 32x32 images, batch 32", "resnet20", (3, 32, 32), 32, 10),
    "resnet20_b16": Workload("ResNet-20, 32x32 images, batch 16", "resnet20", (3, 32, 32), 16, 10),
    "resnet18": Workload("ResNet-18, 64x64 images, batch 8", "resnet18", (3, 64, 64), 8, 1000),
    "gpt": Workload(
        "GPT of 4 layers, width 128, 64 characters, batch 16",
        "gpt",
        (64,),
        16,
        63,
        {"depth": 4, "width": 128, "heads": 4},
    ),
    "vit": Workload(
        "ViT of 4 layers, width 192, 32x32 images in patches of 4, batch 16",
        "vit",
        (3, 32, 32),
        16,
        100,
        {"depth": 4, "width": 192, "heads": 3},
    ),
    "tiny": Workload("ResNet-20, 8x8 images, batch 2", "resnet20", (3, 8, 8), 2, 10),
}
"""By name; ``tiny`` takes seconds and is no measurement."""


def common_layers(model: nn.Module) -> list[str]:
    """Names of the modules that every K-FAC compared here preconditions: each Linear and each Conv2d."""
    return [name for name, module in model.named_modules() if isinstance(module, (nn.Linear, nn.Conv2d))]
