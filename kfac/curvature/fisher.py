r"""Output gradients whose outer products average to the Fisher, for Fisher types that are not the loss's own gradient.

For a loss whose Hessian with respect to one sample's outputs is ``H``, the exact (type-2, generalised Gauss-Newton)
Fisher needs vectors ``s_c`` with ``sum_c s_c s_c^T = H``; the Monte-Carlo one random ``s`` with ``E[s s^T] = H``:

* classification (softmax cross-entropy): ``H = diag(p) - p p^T``; exact ``s_c = sqrt(p_c) (e_c - p)``, Monte-Carlo
  ``s = e_y - p`` with the label y sampled from p.
* regression (``nn.MSELoss``, the mean over outputs): ``H = 2 I / d``; exact ``s_c = sqrt(2 / d) e_c``, Monte-Carlo
  ``s = sqrt(2 / d) z`` with z standard normal.

Martens and Grosse 2015, section 5 (sampled targets); Botev et al. 2017 (type 2).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

LOSS_KINDS = ("classification", "regression")


def fisher_vectors(outputs: Tensor, loss_kind: str, samples: int | None) -> Iterator[Tensor]:
    """Gradients of a mean loss over the rows, one per backward pass to be made.

    Args:
        outputs: logits ``[rows, classes]`` or ``[rows, classes, *positions]``, as cross-entropy takes them, or
            ``[rows, *outputs]`` of a regression.
        loss_kind: one of :data:`LOSS_KINDS`.
        samples: how many Monte-Carlo vectors, or None for the exact ones.

    Yields:
        tensors of the outputs' shape, divided by the number of loss terms and, for Monte-Carlo, by the root of
        ``samples``, so that the sum of the outer products estimates the Fisher of the mean loss.

    Raises:
        ValueError: for an unknown loss kind.
    """
    outputs = outputs.detach()
    if loss_kind == "classification":
        vectors = _classification(outputs, samples)
    elif loss_kind == "regression":
        vectors = _regression(outputs, samples)
    else:
        raise ValueError(f"loss_kind={loss_kind!r} is not one of: {', '.join(LOSS_KINDS)}")
    root = 1.0 if samples is None else math.sqrt(samples)
    for vector in vectors:
        yield vector / root


def _classification(logits: Tensor, samples: int | None) -> Iterator[Tensor]:
    classes = logits.shape[1]
    terms = logits.numel() // classes
    probabilities = logits.softmax(1)
    if samples is None:
        for label in range(classes):
            vector = -probabilities
            vector[:, label] += 1.0
            yield probabilities[:, label : label + 1].sqrt() * vector / terms
        return
    rows = probabilities.movedim(1, -1).reshape(-1, classes)
    for _ in range(samples):
        labels = torch.multinomial(rows, 1).view(probabilities.movedim(1, -1).shape[:-1]).unsqueeze(1)
        yield (torch.zeros_like(probabilities).scatter_(1, labels, 1.0) - probabilities) / terms


def _regression(outputs: Tensor, samples: int | None) -> Iterator[Tensor]:
    rows = outputs.shape[0]
    width = outputs.numel() // rows
    scale = math.sqrt(2.0 / width) / rows
    if samples is not None:
        for _ in range(samples):
            yield torch.randn_like(outputs) * scale
        return
    for index in range(width):
        vector = torch.zeros_like(outputs)
        vector.view(rows, width)[:, index] = scale
        yield vector
