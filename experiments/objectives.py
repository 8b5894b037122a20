"""What a model's outputs are compared with: labels, or the inputs themselves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from experiments.models import AUTOENCODER


class Objective(Protocol):
    """A loss that is a mean over ``terms(targets)`` equal terms, and a metric for people that is one, too.

    ``raw``: whether it needs images with pixels in [0, 1].
    """

    metric: str
    raw: bool

    def targets(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """What the outputs should be."""

    def loss(self, outputs: Tensor, targets: Tensor, label_smoothing: float = 0.0) -> Tensor:
        """The loss, a scalar with its graph."""

    def measure(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The metric, a scalar."""

    def terms(self, targets: Tensor) -> int:
        """How many terms loss and metric are means over."""

    def as_known_loss(self, outputs: Tensor) -> tuple[Tensor, str, float]:
        """Outputs, kind and weight of the same loss in the form that :meth:`kfac.KFAC.curvature` takes."""


class Classification:
    """Mean cross-entropy over all labels; outputs are logits ``[batch, classes]`` or ``[batch, classes, positions]``.

    Of a text, all positions of all samples count alike.
    """

    metric, raw = "accuracy", False

    def targets(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """The labels."""
        return labels

    def loss(self, outputs: Tensor, targets: Tensor, label_smoothing: float = 0.0) -> Tensor:
        """Cross-entropy, nats per label."""
        return F.cross_entropy(outputs, targets, label_smoothing=label_smoothing)

    def measure(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The share of labels that got the highest logit."""
        return (outputs.argmax(1) == targets).double().mean()

    def terms(self, targets: Tensor) -> int:
        """All labels."""
        return targets.numel()

    def as_known_loss(self, outputs: Tensor) -> tuple[Tensor, str, float]:
        """As it is."""
        return outputs, "classification", 1.0


class Reconstruction:
    """Cross-entropy of pixels in [0, 1] under independent Bernoulli outputs, given as logits of the images' shape.

    Summed over pixels, averaged over images, as for the deep autoencoders of Hinton and Salakhutdinov 2006 (doi
    10.1126/science.1127647) and of Martens 2010; the metric is their squared error, summed and averaged alike.
    """

    metric, raw = "squared_error", True

    def targets(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """The inputs."""
        return inputs

    def loss(self, outputs: Tensor, targets: Tensor, label_smoothing: float = 0.0) -> Tensor:
        """Cross-entropy, nats per image; there are no labels to smooth."""
        return F.binary_cross_entropy_with_logits(outputs, targets, reduction="sum") / len(targets)

    def measure(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The squared error of an image's pixels."""
        return (outputs.sigmoid() - targets).square().sum().double() / len(targets)

    def terms(self, targets: Tensor) -> int:
        """The images."""
        return len(targets)

    def as_known_loss(self, outputs: Tensor) -> tuple[Tensor, str, float]:
        """A binary cross-entropy of the pixels, whose mean is weighted with their number d.

        The vectors that G comes from are multiplied by the root of d: their outer products are the curvature.
        """
        rows = outputs.flatten(1)
        return rows, "binary", math.sqrt(rows.shape[1])


def objective_of(model: str) -> Objective:
    """The objective that the model of a name is trained with."""
    return Reconstruction() if model == AUTOENCODER else Classification()


def summed_terms(model: str, shape: Sequence[int]) -> int:
    """How many terms of one sample the loss of a model adds up, where others take their mean.

    Args:
        model: its name.
        shape: of a sample.
    """
    return math.prod(shape) if model == AUTOENCODER else 1
