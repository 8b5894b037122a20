"""The loss scale of automatic mixed precision: what gradients in the backward pass are multiplied by."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from kfac.layers import GradientAccess

logger = logging.getLogger(__name__)


class LossScale:
    """The scale of a ``torch.amp.GradScaler``; 1 without one, or with a disabled one.

    It is the same on every rank: gradients are averaged before the scaler looks at them.

    Args:
        scaler: the training loop's, of any device.

    Raises:
        ValueError: if it is no ``torch.amp.GradScaler``.
    """

    def __init__(self, scaler: torch.amp.GradScaler | None) -> None:
        if not isinstance(scaler, (torch.amp.GradScaler, type(None))):
            raise ValueError(f"grad_scaler must be a torch.amp.GradScaler, not {type(scaler).__name__}")
        self._scaler = scaler
        self._warned = False

    @property
    def enabled(self) -> bool:
        """Whether losses are scaled at all."""
        return self._scaler is not None and self._scaler.is_enabled()

    def inverse(self, device: torch.device) -> Tensor:
        """One over the scale that holds until the scaler's next ``update()``; nobody waits for it."""
        assert self._scaler is not None
        scale = self._scaler._get_scale_async()
        if scale is None:  # before the first scale(loss)
            return torch.tensor(1.0 / self._scaler.get_scale(), device=device)
        return scale.to(device, non_blocking=True).reciprocal()

    def removed_from(self, gradient: Tensor, dtype: torch.dtype) -> Tensor:
        """An output gradient without the scale, in another dtype."""
        wide = gradient.to(dtype)
        if self.enabled:
            return wide * self.inverse(gradient.device)
        if gradient.dtype == torch.float16 and not self._warned:
            self._warned = True
            logger.warning(
                "output gradients are float16 and KFAC knows of no loss scale: small ones are rounded to zero, and "
                "statistics are wrong if the loss is scaled. Use KFAC(..., grad_scaler=scaler), or bfloat16"
            )
        return wide

    def gradients_are_scaled(self, averaged: bool) -> bool:
        """Whether ``.grad`` still holds scaled gradients, in :meth:`kfac.KFAC.step`.

        Args:
            averaged: whether K-FAC averages them over the ranks.

        Raises:
            RuntimeError: if the scaler has been called at a wrong time.
        """
        if self._scaler is None or not self._scaler.is_enabled():
            return False
        if self._scaler._get_scale_async() is None:
            raise RuntimeError(
                "grad_scaler was given to KFAC, but the loss was not scaled: scaler.scale(loss).backward()"
            )
        stages = {state["stage"] for state in self._optimizers()}
        if OptState.STEPPED in stages:
            raise RuntimeError("kfac.step() comes before scaler.step(optimizer), which comes before scaler.update()")
        if OptState.UNSCALED in stages and averaged:
            raise RuntimeError(
                "scaler.unscale_(optimizer) before kfac.step() would look for overflows on this rank only, as "
                "average_gradients=True averages gradients in kfac.step(): call it afterwards"
            )
        return OptState.UNSCALED not in stages

    def refuse(self, gradients: list[Tensor], scaled: bool) -> None:
        """Let the scaler skip its optimizers' next steps, and lower the scale."""
        if scaled:
            for gradient in gradients:
                gradient.fill_(float("inf"))
        for state in self._optimizers():
            for found in state["found_inf_per_device"].values():
                found.fill_(1.0)

    def _optimizers(self) -> list[dict[str, Any]]:
        """The state of each optimizer that the scaler has seen since its last ``update()``."""
        assert self._scaler is not None
        return list(self._scaler._per_optimizer_states.values())


class ScaledGradients:
    """Gradients that are scaled where they are, and not here.

    Args:
        access: where they are.
        inverse: one over their scale.
    """

    def __init__(self, access: GradientAccess, inverse: Tensor) -> None:
        self._access, self._inverse, self._scale = access, inverse, inverse.reciprocal()

    def get(self, parameter: Tensor) -> Tensor | None:
        """The gradient without its scale."""
        gradient = self._access.get(parameter)
        return None if gradient is None else gradient * self._inverse

    def set(self, parameter: Tensor, gradient: Tensor) -> None:
        """Overwrite it, scaled."""
        self._access.set(parameter, gradient * self._scale)
