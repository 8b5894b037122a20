"""Bootstrap intervals by going through every resample there is: exact, with no random number, for small samples."""

from itertools import product

import numpy as np


def every(values, statistic):
    """The statistic of each of the n to the power of n resamples, all equally likely."""
    return statistic(np.array(list(product(values, repeat=len(values)))), axis=1)


def ends(of_first, of_second=None, combine=None, level=0.95):
    """The interval of a statistic, or of two samples' statistics combined, each with each."""
    (found, weights), *more = (np.unique(of, return_counts=True) for of in (of_first, of_second) if of is not None)
    for other, counts in more:
        found = combine(found[:, None], other[None, :]).ravel()
        weights = np.outer(weights, counts).ravel()
    return tuple(np.quantile(found, [(1 - level) / 2, (1 + level) / 2], method="inverted_cdf", weights=weights))
