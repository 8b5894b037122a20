r"""Output gradients whose outer products average to the Fisher, for Fisher types that are not the loss's own gradient.

A loss is the mean (or the sum) of ``T`` terms, each of one row ``z [d]`` of the outputs and its target. With ``H`` the
Hessian of a term with respect to its row, the exact (type-2, generalised Gauss-Newton) Fisher needs vectors ``s_c``
with ``sum_c s_c s_c^T = H``; the Monte-Carlo one random ``s`` with ``E[s s^T] = H``:

* classification, a term is the cross-entropy of the softmax p of z: ``H = diag(p) - p p^T``; exact
  ``s_c = sqrt(p_c) (e_c - p)``, Monte-Carlo ``s = e_y - p`` with the label y sampled from p.
* regression, a term is the mean of the squared errors of z: ``H = 2 I / d``; exact ``s_c = sqrt(2 / d) e_c``,
  Monte-Carlo ``s = sqrt(2 / d) n`` with n standard normal.
* binary, a term is the mean of the binary cross-entropies of the logits z, with probabilities p:
  ``H = diag(p (1 - p)) / d``; exact ``s_c = sqrt(H_cc) e_c``, Monte-Carlo ``s = (b - p) / sqrt(d)`` with bits b
  sampled from p.

These are ``nn.CrossEntropyLoss``, ``nn.MSELoss`` and ``nn.BCEWithLogitsLoss`` with ``reduction="mean"``. With ``sum``
a term is a sum, too: there is no ``1 / d``.

The rows are the last dimension of the outputs, for classification the second one, as these modules take them. The terms
of one sample meet in the layers before: the exact vectors take them one by one, the sampled ones are independent.

Martens and Grosse 2015, section 5 (sampled targets); Botev et al. 2017 (type 2).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor

LOSS_KINDS = ("classification", "regression", "binary")


def check_loss(outputs: Tensor, loss_kind: str, targets: Tensor | None = None) -> None:
    """Whether there is such a loss of these outputs.

    Raises:
        ValueError: if there is not, naming what does not fit.
    """
    if loss_kind not in LOSS_KINDS:
        raise ValueError(f"loss_kind={loss_kind!r} is not one of: {', '.join(LOSS_KINDS)}")
    if outputs.dim() < 1 + (loss_kind == "classification"):
        wanted = "[rows, classes, *positions]" if loss_kind == "classification" else "[rows, ...]"
        raise ValueError(f"outputs of shape {tuple(outputs.shape)} are none of {loss_kind}: they must be {wanted}")
    if targets is None:
        return
    labels = outputs.shape[:1] + outputs.shape[2:]
    probabilities = loss_kind != "classification" or targets.is_floating_point()
    fitting = outputs.shape if probabilities else labels
    if targets.shape == fitting or (loss_kind != "classification" and _reshaped(outputs, targets)):
        return
    remedy = f"pass targets of shape {tuple(fitting)}"
    if loss_kind != "classification":
        remedy += ", to this context and to the loss, which would broadcast them"
    elif targets.shape == labels:
        remedy = "labels must be whole numbers: targets.long()"
    elif targets.shape == outputs.shape:
        remedy = "probabilities must be floating-point numbers: targets.float()"
    elif targets.shape == outputs.shape[:-1]:
        remedy = f"classes must be the second dimension: outputs.movedim(-1, 1), or labels of shape {tuple(labels)}"
    raise ValueError(
        f"targets of shape {tuple(targets.shape)} do not fit outputs of shape {tuple(outputs.shape)}: {remedy}"
    )


def _reshaped(outputs: Tensor, targets: Tensor) -> bool:
    """Whether outputs and targets are the same numbers in shapes that no loss takes as they are (flattened images)."""
    shapes = zip(reversed(outputs.shape), reversed(targets.shape), strict=False)
    return outputs.numel() == targets.numel() and any(a != b and 1 not in (a, b) for a, b in shapes)


def counted_terms(outputs: Tensor, loss_kind: str, targets: Tensor | None, ignore_index: int) -> Tensor | None:
    """Which terms count, ``[rows, *positions]``; None: all of them (always, unless labels of a classification tell)."""
    if loss_kind != "classification" or targets is None or targets.is_floating_point():
        return None
    return targets != ignore_index


def class_weighted_terms(
    outputs: Tensor, loss_kind: str, targets: Tensor | None, ignore_index: int, class_weights: Tensor
) -> Tensor:
    """The weights of the terms, ``[rows, *positions]``: those of their labels' classes, 0 where they do not count.

    Raises:
        ValueError: if they are not of a classification with labels, or not one per class.
    """
    if loss_kind != "classification" or targets is None or targets.is_floating_point():
        raise ValueError("class_weights need a classification with targets=labels, as whole numbers")
    if class_weights.shape != outputs.shape[1:2]:
        raise ValueError(
            f"class_weights of shape {tuple(class_weights.shape)} do not fit outputs of shape {tuple(outputs.shape)}: "
            f"pass one weight for each of the {outputs.shape[1]} classes"
        )
    counted = targets != ignore_index
    return class_weights.to(outputs.device)[targets.where(counted, 0)] * counted


def loss_terms(outputs: Tensor, loss_kind: str, counted: Tensor | None) -> float | Tensor:
    """How many terms count (the sum of their weights); a tensor that nobody has waited for where labels tell."""
    return float(_rows(outputs, loss_kind).shape[:2].numel()) if counted is None else counted.sum()


def fisher_vectors(
    outputs: Tensor,
    loss_kind: str,
    samples: int | None,
    *,
    reduction: str = "mean",
    counted: Tensor | None = None,
    factor: float | Tensor = 1.0,
) -> Iterator[Tensor]:
    """Gradients of a loss, one per backward pass to be made.

    Args:
        outputs: logits ``[rows, classes, *positions]`` of a classification, or ``[rows, *positions, d]``.
        loss_kind: one of :data:`LOSS_KINDS`.
        samples: how many Monte-Carlo vectors, or None for the exact ones: d for every position.
        reduction: ``mean`` or ``sum`` of the terms.
        counted: which terms count, see :func:`counted_terms`; vectors of the others are zero. Or the terms' weights
            in the loss, see :func:`class_weighted_terms`; a mean is divided by their sum.
        factor: what all vectors are multiplied by.

    Yields:
        tensors of the outputs' shape and dtype, for Monte-Carlo divided by the root of ``samples``, so that the sum
        of the outer products estimates the Fisher of the loss (times 1 / T for a mean: gradients carry it twice).
    """
    rows = _rows(outputs.detach(), loss_kind)
    if rows.dtype.itemsize < torch.float32.itemsize:
        rows = rows.float()
    mean = reduction == "mean"
    roots = _ROOTS[loss_kind](rows, mean)
    if mean:
        terms = torch.as_tensor(loss_terms(outputs, loss_kind, counted)).to(rows)
        factor = factor / terms.where(terms > 0, 1.0)
    if counted is not None:
        factor = factor * counted.to(rows).sqrt().reshape(*rows.shape[:2], 1)
    if samples is None:
        vectors = _one_position_each(roots.columns())
    else:
        vectors = (roots.draw() / math.sqrt(samples) for _ in range(samples))
    for vector in vectors:
        yield _like(outputs, (vector * factor).to(outputs.dtype), loss_kind)


def _rows(outputs: Tensor, loss_kind: str) -> Tensor:
    """The terms' rows ``[rows, positions, d]``."""
    if loss_kind == "classification":
        outputs = outputs.movedim(1, -1)
    elif outputs.dim() == 1:
        outputs = outputs.unsqueeze(1)
    return outputs.reshape(outputs.shape[0], math.prod(outputs.shape[1:-1]), outputs.shape[-1])


def _like(outputs: Tensor, rows: Tensor, loss_kind: str) -> Tensor:
    """The inverse of :func:`_rows`."""
    if loss_kind != "classification":
        return rows.reshape(outputs.shape)
    return rows.reshape(outputs.movedim(1, -1).shape).movedim(-1, 1)


def _one_position_each(columns: Iterator[Tensor]) -> Iterator[Tensor]:
    for column in columns:
        for position in range(column.shape[1]):
            vector = torch.zeros_like(column)
            vector[:, position] = column[:, position]
            yield vector


class _Roots(Protocol):
    """Roots of the terms' Hessians, for rows ``[rows, positions, d]``."""

    def columns(self) -> Iterator[Tensor]:
        """The columns of exact ones."""

    def draw(self) -> Tensor:
        """A random column."""


class _Softmax:
    def __init__(self, rows: Tensor, mean: bool) -> None:  # a term is one cross-entropy: no mean is taken of it
        self._p = rows.softmax(2)

    def columns(self) -> Iterator[Tensor]:
        for label in range(self._p.shape[2]):
            vector = -self._p
            vector[..., label] += 1.0
            yield self._p[..., label : label + 1].sqrt() * vector

    def draw(self) -> Tensor:
        # Outputs that are not finite must reach the statistics, where they are dealt with, and not end the sampling.
        labels = torch.multinomial(self._p.flatten(0, 1).nan_to_num(1.0), 1).view(*self._p.shape[:2], 1)
        return torch.zeros_like(self._p).scatter_(2, labels, 1.0) - self._p


class _Squares:
    def __init__(self, rows: Tensor, mean: bool) -> None:
        self._root = torch.full_like(rows, math.sqrt(2.0 / rows.shape[2] if mean else 2.0))

    def columns(self) -> Iterator[Tensor]:
        return _diagonal(self._root)

    def draw(self) -> Tensor:
        return torch.randn_like(self._root) * self._root


class _Bits:
    def __init__(self, rows: Tensor, mean: bool) -> None:
        self._p = rows.sigmoid()
        self._weight = 1.0 / rows.shape[2] if mean else 1.0

    def columns(self) -> Iterator[Tensor]:
        return _diagonal((self._p * (1.0 - self._p) * self._weight).sqrt())

    def draw(self) -> Tensor:
        return (torch.bernoulli(self._p.nan_to_num(0.5)) - self._p) * math.sqrt(self._weight)


_ROOTS: dict[str, Callable[[Tensor, bool], _Roots]] = {
    "classification": _Softmax,
    "regression": _Squares,
    "binary": _Bits,
}


def _diagonal(root: Tensor) -> Iterator[Tensor]:
    """The columns of the diagonal matrices ``root [rows, positions, d]``."""
    for index in range(root.shape[2]):
        vector = torch.zeros_like(root)
        vector[..., index] = root[..., index]
        yield vector
