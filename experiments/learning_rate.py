"""The learning rate as a pure function of the iteration."""

from __future__ import annotations

import math

from experiments.groups import OptimizerSettings


def learning_rate(settings: OptimizerSettings, iteration: int, iterations_per_epoch: int, iterations: int) -> float:
    """The learning rate of an iteration.

    It rises linearly over ``warmup_epochs``; then ``constant`` stays, ``step`` multiplies it by ``decay_factor`` at
    each of ``decay_epochs``, and ``cosine`` falls to zero along half a cosine over the whole run.

    Args:
        settings: of the optimizer.
        iteration: counted from 0.
        iterations_per_epoch, iterations: of the run.
    """
    epoch = iteration / iterations_per_epoch
    if epoch < settings.warmup_epochs:
        return settings.lr * (iteration + 1) / (settings.warmup_epochs * iterations_per_epoch + 1)
    if settings.schedule == "step":
        return settings.lr * settings.decay_factor ** sum(epoch >= e for e in settings.decay_epochs)
    if settings.schedule == "cosine":
        start = settings.warmup_epochs * iterations_per_epoch
        done = (iteration - start) / max(1.0, iterations - start)
        return settings.lr * 0.5 * (1.0 + math.cos(math.pi * done))
    return settings.lr
