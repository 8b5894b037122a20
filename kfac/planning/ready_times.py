"""When factors and gradients become ready in one iteration, from a model's profile."""

from __future__ import annotations

from dataclasses import dataclass

from kfac.planning.profiles import ModelProfile


@dataclass(frozen=True)
class ReadyTimes:
    """Seconds from the iteration's start, one per layer in execution order.

    Args:
        a_s, g_s: when the statistics of A (forward pass) and G (backward pass) are there; for layers without factors
            the moment at which they would be.
        gradient_s: when the gradients of the layer are there.
        backward_end_s: when the backward pass has ended.
    """

    a_s: tuple[float, ...]
    g_s: tuple[float, ...]
    gradient_s: tuple[float, ...]
    backward_end_s: float


def ready_times(model: ModelProfile, *, curvature: bool = True) -> ReadyTimes:
    """Ready times of one iteration in which nothing waits: forward with A, the loss, backward with G in front of each
    layer's backward pass; without ``curvature``, or for layers without factors, there are no statistics to compute.
    """
    now = 0.0
    a_s, g_s, gradient_s = [], [], []
    for layer in model.layers:
        now += layer.forward_s
        now += layer.a_statistics_s if curvature and layer.has_factors else 0.0
        a_s.append(now)
    now += model.loss_s
    for layer in reversed(model.layers):
        now += layer.g_statistics_s if curvature and layer.has_factors else 0.0
        g_s.append(now)
        now += layer.backward_s
        gradient_s.append(now)
    return ReadyTimes(tuple(a_s), tuple(reversed(g_s)), tuple(reversed(gradient_s)), now)
