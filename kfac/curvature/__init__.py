"""Curvature: pure functions on tensors (statistics, packing, damping, inverses, preconditioning).

One layout throughout: a gradient is a matrix ``[out, in]`` (``in`` includes a last column for the bias), A is
``[in, in]``, G is ``[out, out]``. For convolutions ``in`` runs over (kernel row, kernel column, channel): patches are
then copied in runs of contiguous memory, and the gradient (``out x in``) is reordered instead of the larger A. Rows of
a statistic's data matrix are (sample, shared position) pairs. Of statistics only the upper triangle is computed.
"""
