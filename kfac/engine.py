"""K-FAC inside a DeepSpeed engine: the training loop stays ``engine(x); engine.backward(loss); engine.step()``.

The gradients are preconditioned between the engine's backward pass and its step, at the accumulation boundary, through
DeepSpeed's full-gradient access. That is the one place that is right at ZeRO stages 0, 1 and 2: gradients are averaged
already and not yet clipped or partitioned for good.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from kfac.config import KFACConfig
from kfac.preconditioner import KFAC


class DeepSpeedGradients:
    """Gradients through DeepSpeed's full-gradient access; collective at ZeRO stages 1 and 2."""

    def __init__(self) -> None:
        from deepspeed.utils import safe_get_full_grad, safe_set_full_grad

        self._get, self._set = safe_get_full_grad, safe_set_full_grad

    def get(self, parameter: Tensor) -> Tensor | None:
        """The averaged gradient, in the dtype in which the engine accumulates."""
        gradient: Tensor | None = self._get(parameter)
        return gradient

    def set(self, parameter: Tensor, gradient: Tensor) -> None:
        """Overwrite it."""
        current = self._get(parameter)
        if current is not None:
            self._set(parameter, gradient.to(current.dtype))


def attach(engine: Any, config: KFACConfig | None = None, schedule: str = "spdkfac", **options: Any) -> KFAC:
    """Precondition a DeepSpeed engine's gradients with K-FAC from now on.

    Args:
        engine: what ``deepspeed.initialize`` returned; fp32 or bf16, ZeRO stage 0, 1 or 2. Its gradient clipping (1.0
            unless ``gradient_clipping`` says otherwise) clips what K-FAC has made of the gradients.
        config: hyper-parameters; ``accumulation_steps`` is taken from the engine, and ``lr`` (for the KL clip) from its
            optimizer at each step unless it is a callable.
        schedule, options: as for :class:`kfac.KFAC`.

    Returns:
        the preconditioner. Save its ``state_dict()`` in the ``client_state`` of ``engine.save_checkpoint``.

    Raises:
        ValueError: for an engine whose gradients cannot be preconditioned, naming the setting.
    """
    if engine.fp16_enabled():
        raise ValueError("fp16 scales the loss and skips steps: use bf16 or fp32 with K-FAC")
    if engine.zero_optimization_stage() > 2:
        raise ValueError(f"ZeRO stage {engine.zero_optimization_stage()} partitions the weights: use stage 0, 1 or 2")
    managed = getattr(engine, "managed_gradient_accumulation", None)
    if managed is not None and not managed():
        raise ValueError("managed_gradient_accumulation=false reduces gradients too late for K-FAC: leave it on")
    if config is not None and config.nonfinite == "skip":
        raise ValueError("nonfinite='skip' cannot keep the engine from stepping: use nonfinite='raise'")
    config = replace(config or KFACConfig(), accumulation_steps=engine.gradient_accumulation_steps())
    if not callable(config.lr):
        config = replace(config, lr=lambda _: float(engine.get_lr()[0]))
    preconditioner = KFAC(engine.module, config, schedule, gradients=DeepSpeedGradients(), **options)
    plain_step = engine.step

    def step(*args: Any, **kwargs: Any) -> Any:
        if engine.is_gradient_accumulation_boundary():
            preconditioner.step()
        return plain_step(*args, **kwargs)

    engine.step = step
    return preconditioner
