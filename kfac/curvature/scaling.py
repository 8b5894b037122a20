r"""How statistics become factors: the scaling conventions, stated once.

With N samples over all ranks and micro-batches, S shared positions per sample, W ranks, and g the gradient that each
rank back-propagates (so that the average over ranks is the gradient of the mean loss; the gradient of one sample's own
loss is then ``g * N / W``):

=========  ==============================  ====================================
scaling    A                               G
=========  ==============================  ====================================
standard   sum x x^T / N                   sum (g N/W)(g N/W)^T / (N S)
spdkfac    sum x x^T / (N S^2)             sum (g N/W)(g N/W)^T S / N
kaisa      sum x x^T / (N S^p)             sum g g^T / (N S^p)
=========  ==============================  ====================================

``standard`` takes the number T of loss terms for the N in G where it is known (a mean over tokens: see
:meth:`kfac.KFAC.curvature`), so that ``A x G`` is ``(T / rows) sum x x^T x sum g g^T`` whatever a sample is; for a loss
that is a sum over its terms (so that gradients carry no ``1 / T``) G is ``sum g g^T / (W S)``: T times that of the mean
loss, as the curvature is.

``standard`` is KFC for convolutions (Grosse and Martens 2016) and K-FAC-expand for sequences (Eschenhagen et al. 2023):
A sums over positions, G averages over them. ``spdkfac`` is the convention of the paper's code, ``kaisa`` that of
kfac-pytorch (p = 3 for convolutions, 1 for linear layers), which is not invariant to how a batch is split. Both exist
so that their hyper-parameters can be used.
"""

from __future__ import annotations

SCALINGS = ("standard", "spdkfac", "kaisa")


def position_weights(scaling: str, positions: int, convolution: bool) -> tuple[float, float]:
    """What the sums over one call's samples and positions are multiplied by, for A and for G."""
    if scaling == "standard":
        return 1.0, 1.0 / positions
    if scaling == "spdkfac":
        return 1.0 / positions**2, float(positions)
    power = 3 if convolution else 1
    return positions**-power, positions**-power


def factor_scale(scaling: str, side: str, count: float, world_size: int, loss_reduction: str = "mean") -> float:
    """What the sum over all ranks is multiplied by to give the factor.

    ``count`` is the global number of samples, or for G of loss terms where it is known.
    """
    if side == "A" or scaling == "kaisa":
        return 1.0 / count
    if loss_reduction == "sum":
        return 1.0 / world_size
    return count / world_size**2
