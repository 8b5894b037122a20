"""The lower bound where there are very many dimensions or very little time."""

import random
import time
from dataclasses import replace

import pytest

from benchmarks.planning import placements
from kfac.planning import (
    LinearCost,
    Placement,
    PolynomialCost,
    placement_bound,
    placement_finish_s,
    placement_lower_bound_s,
)

CUBIC = PolynomialCost((2.5e-4, 0, 0, 0.54e-3))


def cluster(world_size):
    return replace(placements.cluster(CUBIC, world_size), broadcast=LinearCost(2.55e-4, 7.36e-10))


def test_lower_bound_of_a_thousand_dims_keeps_its_time_and_says_something():
    """The limit is of processor time with a wide margin; a program with all levels takes minutes."""
    dice = random.Random(3)
    dims = [dice.randint(20, 8000) for _ in range(1000)]
    costs = cluster(4096)
    start = time.process_time()
    bound = placement_lower_bound_s(dims, 4096, costs, time_limit_s=1.0)
    assert time.process_time() - start < 20
    found = placement_finish_s(Placement.from_sequence([None] * 1000, range(1000), 4096), dims, costs)
    simple = max(costs.inverse(max(dims)), sum(map(costs.inverse, dims)) / 4096)
    assert simple <= bound <= found


def test_fewer_levels_bound_from_below_too(monkeypatch):
    dims, costs = placements.models()["DenseNet-201"], cluster(64)
    full = placement_lower_bound_s(dims, 64, costs)
    monkeypatch.setattr(placement_bound, "_MOST_LEVELS", 6)
    few = placement_lower_bound_s(dims, 64, costs)
    assert 0.5 * full < few <= full * (1 + 1e-3)  # the solver's own gap is 1e-4


def test_lower_bound_without_time_is_the_simple_one():
    dims, costs = placements.models()["ResNet-50"], cluster(4)
    simple = max(costs.inverse(max(dims)), sum(map(costs.inverse, dims)) / 4)
    assert simple <= placement_lower_bound_s(dims, 4, costs, time_limit_s=0.0)
    with pytest.raises(ValueError, match="time_limit_s"):
        placement_lower_bound_s(dims, 4, costs, time_limit_s=float("nan"))
