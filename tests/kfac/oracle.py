"""Curvature by brute force: dense matrices from ``torch.func``, and curvlinops' operators. Nothing here knows kfac.

A layer's matrix has rows and columns in the order of ``[weight.view(out, -1) | bias]`` flattened row by row, in which
K-FAC's approximation is ``G (x) A``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import curvlinops
import torch
import torch.nn.functional as F
from torch import Tensor, nn

D = torch.float64


@dataclass(frozen=True)
class Loss:
    """A loss that is the mean or the sum of its terms; outputs are laid out as torch's own losses take them.

    ``kind``: ``classification``: cross-entropy of ``[N, classes, *positions]``, a term per position; ``regression``:
    squared errors of ``[N, ..., d]``, a term per row of d; ``binary``: binary cross-entropies of logits, likewise.
    """

    kind: str
    reduction: str = "mean"
    ignore_index: int = -100

    def terms(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The terms ``[T]``; those that do not count are zero."""
        if self.kind == "classification":
            return F.cross_entropy(outputs, y, reduction="none", ignore_index=self.ignore_index).flatten()
        function = F.mse_loss if self.kind == "regression" else F.binary_cross_entropy_with_logits
        rows = function(outputs, y, reduction="none").flatten(0, -2)
        return rows.mean(1) if self.reduction == "mean" else rows.sum(1)

    def count(self, y: Tensor) -> int:
        """How many terms count."""
        if self.kind == "classification":
            return int((y != self.ignore_index).sum())
        return y.numel() // y.shape[-1]

    def __call__(self, outputs: Tensor, y: Tensor) -> Tensor:
        total = self.terms(outputs, y).sum()
        return total / self.count(y) if self.reduction == "mean" else total

    def module(self) -> nn.Module:
        """The same as torch's module."""
        if self.kind == "classification":
            return nn.CrossEntropyLoss(reduction=self.reduction)
        return (nn.MSELoss if self.kind == "regression" else nn.BCEWithLogitsLoss)(reduction=self.reduction)


def _jacobian(model: nn.Module, function: Callable[[Tensor], Tensor], x: Tensor) -> dict[str, Tensor]:
    """Per module with parameters the Jacobian ``[K, p]`` of ``function(model(x))`` flattened to K values."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def values(some: Mapping[str, Tensor]) -> Tensor:
        return function(torch.func.functional_call(model, dict(some), (x,))).reshape(-1)

    jacobian = torch.func.jacrev(values)(parameters)
    modules = dict(model.named_modules())
    result = {}
    for name in dict.fromkeys(key.rpartition(".")[0] for key in parameters):
        own = {key: jacobian[f"{name}.{key}".lstrip(".")] for key, _ in modules[name].named_parameters(recurse=False)}
        several = hasattr(modules[name], "normalized_shape")  # whose parameters may have several dimensions
        columns = [j.reshape(len(j), -1, 1) if several else j.reshape(*j.shape[:2], -1) for j in own.values()]
        matrix = torch.cat(columns, 2)  # [K, out, in + 1]
        if isinstance(modules[name], nn.Embedding):
            matrix = matrix.mT  # [K, dim, tokens]: a linear layer on one-hot inputs
        result[name] = matrix.flatten(1)
    return result


def ggn_blocks(model: nn.Module, x: Tensor, y: Tensor, loss: Callable[[Tensor, Tensor], Tensor]) -> dict[str, Tensor]:
    """Per layer ``J^T H J``: J of all outputs of the batch, H the Hessian of the loss with respect to them."""
    outputs = model(x).detach()
    hessian = torch.func.hessian(lambda z: loss(z, y))(outputs).reshape(outputs.numel(), -1)
    return {name: j.T @ hessian @ j for name, j in _jacobian(model, lambda z: z, x).items()}


def empirical_blocks(model: nn.Module, x: Tensor, y: Tensor, loss: Loss) -> dict[str, Tensor]:
    """Per layer the mean (or sum, as the loss's reduction) of the outer products of the terms' gradients."""
    scale = loss.count(y) if loss.reduction == "mean" else 1
    return {name: j.T @ j / scale for name, j in _jacobian(model, lambda z: loss.terms(z, y), x).items()}


def curvlinops_kfac(
    model: nn.Module, x: Tensor, y: Tensor, loss: Loss, fisher: str, *, approximation: str = "expand", corrected=False
) -> dict[str, Tensor]:
    """Per layer the K-FAC (or eigenvalue-corrected) matrix of curvlinops; ``fisher`` is empirical or exact.

    Their empirical Fisher of a mean over d outputs is d times the mean of the terms' outer products (they scale losses
    by the root of d, which is right for sampled targets only): this is taken out again.
    """
    cls = curvlinops.EKFACLinearOperator if corrected else curvlinops.KFACLinearOperator
    operator = cls(
        model,
        loss.module(),
        list(model.parameters()),
        [(x, y)],
        fisher_type={"exact": "type-2", "empirical": "empirical"}[fisher],
        kfac_approx=approximation,
        separate_weight_and_bias=False,
        check_deterministic=False,
    )
    blocks = dense_blocks(operator, model)
    if fisher == "empirical" and loss.reduction == "mean" and loss.kind != "classification":
        blocks = {name: block / y.shape[-1] for name, block in blocks.items()}
    return blocks


def curvlinops_ggn(model: nn.Module, x: Tensor, y: Tensor, loss: Loss) -> dict[str, Tensor]:
    """Per layer the GGN of curvlinops."""
    operator = curvlinops.GGNLinearOperator(
        model, loss.module(), list(model.parameters()), [(x, y)], check_deterministic=False
    )
    return dense_blocks(operator, model)


def dense_blocks(operator: object, model: nn.Module) -> dict[str, Tensor]:
    """The layers' diagonal blocks of an operator on the flat parameters, in this module's order."""
    sizes = [p.numel() for p in model.parameters()]
    dense = operator @ torch.eye(sum(sizes), dtype=D)
    result, start = {}, 0
    for name, module in model.named_modules():
        own = list(module.parameters(recurse=False))
        if not own:
            continue
        parts = []
        for p in own:
            parts.append(torch.arange(start, start + p.numel()).view(len(p), -1))
            start += p.numel()
        order = torch.cat(parts, 1).flatten()
        result[name] = dense[order][:, order]
    return result


def distance(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """The largest relative difference (Frobenius) between the matrices of a layer; none of ``b`` may be zero."""
    assert a.keys() == b.keys()
    for name, block in b.items():
        assert block.norm() > 0, f"the comparison of layer {name!r} would be vacuous"
    return max(((a[name] - b[name]).norm() / b[name].norm()).item() for name in b)


def transposed(block: Tensor, rows: int) -> Tensor:
    """A matrix in row-by-row order of ``rows`` outputs, in column-by-column order."""
    order = torch.arange(len(block)).view(rows, -1).T.flatten()
    return block[order][:, order]
