"""The search for a placement against an exact program that shares nothing with it, on instances small enough for one.

The program: of the factors that are broadcast take those first whose broadcast comes first; a rank inverts its own in
that order (exchanging two that it has in another order delays nothing), and common factors come last. So a schedule is
a sequence of (factor, rank), and of two partial schedules of the same factors one may be dropped whose ranks and
channel are all no earlier.
"""

import random
from functools import cache

import pytest

from kfac.planning import ClusterProfile, LinearCost, placement_finish_s, placement_lower_bound_s, plan_placement
from tests.kfac.planning.test_placement import brute_optimum

WEIGHTS = [k / 8 for k in range(1, 8)]


def exact_optimum(invert, send, world_size, at_most=float("inf")):
    """The optimum, or ``at_most`` where nothing is better: what cannot be better is not looked at."""
    jobs = range(len(invert))
    best = min(sum(invert), at_most)
    # A bound on what is left: any mean of "the channel is busy" and "the ranks are busy", each factor's cheaper choice.
    price = [
        [
            (1 - w) * c + min(0.0, w * b - (1 - w) * c * (world_size - 1) / world_size)
            for c, b in zip(invert, send, strict=True)
        ]
        for w in WEIGHTS
    ]

    @cache
    def left_over(mask):
        return [sum(p[j] for j in jobs if not mask >> j & 1) for p in price]

    present = {0: [((0.0,) * world_size, 0.0)]}
    while present:
        following = {}
        for mask, states in present.items():
            left = [j for j in jobs if not mask >> j & 1]
            rest = sum(invert[j] for j in left)
            for loads, channel in states:
                best = min(best, max(channel, loads[-1] + rest))
                for j in left:
                    for rank in range(world_size):
                        done = loads[rank] + invert[j]
                        sent = max(channel, done) + send[j]
                        grown = tuple(sorted((*loads[:rank], done, *loads[rank + 1 :])))
                        bounds = left_over(mask | 1 << j)
                        mean = sum(grown) / world_size
                        if any(
                            w * sent + (1 - w) * mean + b >= best * (1 - 1e-12)
                            for w, b in zip(WEIGHTS, bounds, strict=True)
                        ):
                            continue
                        following.setdefault(mask | 1 << j, set()).add((grown, sent))
        present = {mask: _undominated(states) for mask, states in following.items()}
    return best


def _undominated(states):
    kept = []
    for loads, channel in sorted(states, key=lambda state: (state[1], sum(state[0]))):
        if not any(c <= channel and all(a <= b for a, b in zip(other, loads, strict=True)) for other, c in kept):
            kept.append((loads, channel))
    return kept


def costs_of(invert, send, world_size):
    """Factor i has dimension i + 1, whatever it costs."""
    free = LinearCost(0, 0)
    by_elements = {(i + 1) * (i + 2) // 2: seconds for i, seconds in enumerate(send)}
    return ClusterProfile(
        world_size=world_size,
        all_reduce=free,
        reduce=free,
        broadcast=by_elements.__getitem__,
        inverse=lambda d: invert[d - 1],
    )


def instance(dice, count):
    invert = [dice.uniform(1, 9) for _ in range(count)]
    return invert, [dice.choice((0.2, 0.5, 1)) * dice.uniform(0.5, 1.5) * c for c in invert]


def test_the_program_equals_exhaustive_search():
    dice = random.Random(1)
    for number in range(10):
        world_size = 2 + number % 2
        invert, send = instance(dice, 4)
        assert exact_optimum(invert, send, world_size) == pytest.approx(
            brute_optimum(invert, send, world_size), rel=1e-12
        )


@pytest.mark.parametrize(("count", "instances", "world_sizes"), [(6, 20, (2, 3)), (8, 8, (2, 3)), (10, 2, (2,))])
def test_optimized_is_the_optimum_and_the_bound_below_it(count, instances, world_sizes):
    dice = random.Random(count)
    for number in range(instances):
        world_size = world_sizes[number % len(world_sizes)]
        invert, send = instance(dice, count)
        costs, dims = costs_of(invert, send, world_size), range(1, count + 1)
        found = placement_finish_s(plan_placement(dims, world_size, costs, "optimized"), dims, costs)
        best = exact_optimum(invert, send, world_size, at_most=found)
        assert found == pytest.approx(best, rel=1e-9)
        assert placement_lower_bound_s(dims, world_size, costs) <= best * (1 + 1e-9)
