"""What becomes of a step whose statistics or gradients are not finite."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from kfac.loss_scale import LossScale

logger = logging.getLogger(__name__)


REMEDY = (
    "look for what has exploded there (the learning rate, the loss, that rank's data); "
    "KFACConfig.nonfinite='skip' leaves such steps out"
)


class NonFiniteError(RuntimeError):
    """A factor's statistic or a gradient is NaN or infinite; raised on every rank, the state is as before the step."""


def gradient_fault(
    model: nn.Module, gradients: Mapping[nn.Parameter, Tensor], ranks: Callable[[], str] | None
) -> str | None:
    """What is not finite among gradients that are the same on every rank, or None; waits for the device once.

    Args:
        model: knows the parameters' names.
        gradients: by parameter.
        ranks: names the ranks on which it came up; collective, and called on all of them. None: nobody knows.
    """
    if _all_finite(list(gradients.values())):
        return None
    names = [n for n, p in model.named_parameters() if p in gradients and not _all_finite([gradients[p]])]
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    where = ranks() if ranks else "every rank (they came averaged)"
    return f"the gradients of {shown} are not finite on {where}"


def overflowed(fault: str | None, parameters: Sequence[nn.Parameter], loss_scale: LossScale, scaled: bool) -> bool:
    """Whether a loss scale was too large, so that its scaler must skip the step (and is made to).

    All ranks hold the same gradients and sums, and come to the same end.

    Args:
        fault: what is not finite among the statistics.
        parameters: with their gradients.
        loss_scale: the scale.
        scaled: whether the gradients still have it.
    """
    if not loss_scale.enabled:
        return False
    gradients = [p.grad for p in parameters if p.grad is not None]
    finite = _all_finite(gradients)
    if finite and fault is not None:
        loss_scale.refuse(gradients, scaled)
    return not finite or fault is not None


def refuse(fault: str, nonfinite: str, parameters: Sequence[nn.Parameter]) -> None:
    """End a step with an error, or have the optimizer skip it, on all ranks together.

    Raises:
        NonFiniteError: if ``nonfinite`` is ``raise``.
    """
    if nonfinite == "raise":
        raise NonFiniteError(f"{fault}: {REMEDY}")
    logger.warning("%s; the step is skipped", fault)
    for parameter in parameters:
        parameter.grad = None


def _all_finite(tensors: Sequence[Tensor]) -> bool:
    """Whether all elements are finite; waits for the device once."""
    dense = [tensor._values() if tensor.is_sparse else tensor for tensor in tensors]
    norms = torch._foreach_norm([tensor for tensor in dense if tensor.numel()], ord=float("inf"))
    widest = max((norm.dtype for norm in norms), key=lambda dtype: dtype.itemsize, default=torch.float32)
    return not norms or bool(torch.isfinite(torch.stack([norm.to(widest) for norm in norms])).all())
