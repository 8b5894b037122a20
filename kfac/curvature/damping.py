"""Damping: what is added to the factors' diagonals. Plain arithmetic, no torch."""

from __future__ import annotations

import math

DAMPING_METHODS = ("plain", "pi", "exact")


def factor_damping(method: str, damping: float, mean_a: float, mean_g: float) -> tuple[float, float]:
    """What is added to the diagonals of A and of G, given their mean eigenvalues (``tr A / dim A``).

    ``exact`` adds nothing to the factors: the damping is added to the eigenvalues of ``A x G``. ``plain`` adds the
    damping to each factor. ``pi`` splits it (factored Tikhonov damping, Martens and Grosse 2015, section 6.3):
    ``sqrt(damping) pi`` to A and ``sqrt(damping) / pi`` to G, ``pi^2 = (tr A / dim A) / (tr G / dim G)``, so that the
    result does not depend on how a scale is split between A and G. A factor whose mean is not positive (no signal yet)
    or not finite leaves pi at 1.
    """
    if method == "exact":
        return 0.0, 0.0
    if method == "plain":
        return damping, damping
    root = math.sqrt(damping)
    if not (0 < mean_a < math.inf and 0 < mean_g < math.inf):
        return root, root
    pi = math.sqrt(mean_a / mean_g)
    return root * pi, root / pi
