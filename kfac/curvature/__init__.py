"""Curvature: pure functions on tensors (statistics, packing, damping, inverses, preconditioning).

One layout throughout: a gradient is a matrix ``[out, in]`` (``in`` includes a last column for the bias), A is
``[in, in]``, G is ``[out, out]``; convolutions flatten the weight as ``weight.view(out, -1)``, so ``in`` runs over
(channel, kernel row, kernel column). Rows of a statistic's data matrix are (sample, shared position) pairs.
"""
