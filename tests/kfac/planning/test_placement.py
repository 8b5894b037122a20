"""Inverse placement: hand-computed finishes, exhaustive search on small instances, the paper's models."""

import random
from dataclasses import replace
from itertools import permutations, product

import pytest

from benchmarks.planning import placements
from kfac.planning import (
    ExponentialCost,
    LinearCost,
    Placement,
    PolynomialCost,
    placement_finish_s,
    placement_lower_bound_s,
    plan_placement,
)
from kfac.planning.placement import inverse_sequence, sequence_finish_s

MODELS = placements.models()
PAPERS = ("ResNet-50", "ResNet-152", "DenseNet-201", "Inception-v4")
RULES = ("non_dist", "seq_dist", "lbp", "optimized")

# The published broadcast line and inverse fit for the paper's cluster, and cubics like those that real inverses follow.
BROADCAST = LinearCost(2.55e-4, 7.36e-10)
INVERSES = {
    "exponential": ExponentialCost(3.64e-3, 4.77e-4),
    "cubic": PolynomialCost((2.5e-4, 0, 0, 0.54e-3)),
    "quadratic and cubic": PolynomialCost((1e-4, 0, 2e-3, 0.2e-3)),
}


def cluster(world_size, inverse, broadcast=BROADCAST):
    return replace(placements.cluster(inverse, world_size), broadcast=broadcast)


def whole(world_size=2, send=1):
    """Inverting a d-dimensional factor takes d seconds, broadcasting it takes ``send`` per dimension."""
    side = {d * (d + 1) // 2: d for d in range(1, 200)}
    return cluster(world_size, lambda d: d, lambda n: send * side[n])


def brute_finish(owner, orders, invert, send):
    """Every order of broadcasts on the channel is tried."""
    done, ends = {}, []
    for rank, order in enumerate(orders):
        clock = 0
        for i in order:
            clock += invert[i]
            if owner[i] == rank:
                done[i] = clock
        ends.append(clock)

    def channel(sequence):
        clock = 0
        for i in sequence:
            clock = max(clock, done[i]) + send[i]
        return clock

    return max(*ends, min(channel(sequence) for sequence in permutations(done)))


def brute_optimum(invert, send, world_size):
    """All owners and all orders of all ranks."""
    best = float("inf")
    count = len(invert)
    for owner in product((None, *range(world_size)), repeat=count):
        if any(
            o is not None and o > max([-1, *(p for p in owner[:i] if p is not None)]) + 1 for i, o in enumerate(owner)
        ):
            continue  # the same up to the names of the ranks
        mine = [[i for i in range(count) if owner[i] in (None, rank)] for rank in range(world_size)]
        for orders in product(*(permutations(own) for own in mine)):
            best = min(best, brute_finish(owner, orders, invert, send))
    return best


def test_finish_by_hand():
    # Rank 0 inverts 5 then 2, rank 1 inverts 3; both invert the last one. Done at 5, 7 and 3.
    placement = Placement((0, 1, 0, None), ((0, 2, 3), (1, 3)))
    # Channel: 3..6 (factor 1), 6..11 (factor 0, done at 5), 11..13 (factor 2, done at 7). Ranks end at 8 and 4.
    assert placement_finish_s(placement, (5, 3, 2, 1), whole()) == 13
    # With broadcasts that cost nothing the slowest rank counts.
    assert placement_finish_s(placement, (5, 3, 2, 1), whole(send=0)) == 8


def test_a_rank_without_factors_of_its_own_counts_too():
    placement = Placement((0, None, None), ((0, 1, 2), (1, 2), (1, 2)))
    assert placement_finish_s(placement, (1, 4, 5), whole(3)) == 10
    placement = Placement((None, None), ((0, 1), (1, 0)))
    assert placement_finish_s(placement, (4, 5), whole(2)) == 9


def test_finish_takes_the_best_order_of_broadcasts():
    dice = random.Random(1)
    for _ in range(60):
        dims = [dice.randint(1, 9) for _ in range(5)]
        owner = tuple(dice.choice((None, 0, 1, 2)) for _ in dims)
        orders = []
        for rank in range(3):
            order = [i for i in range(5) if owner[i] in (None, rank)]
            dice.shuffle(order)
            orders.append(tuple(order))
        send = dice.randint(0, 3)
        expected = brute_finish(owner, orders, dims, [send * d for d in dims])
        assert placement_finish_s(Placement(owner, tuple(orders)), dims, whole(3, send)) == expected


def test_non_dist_and_seq_dist():
    every = plan_placement((5, 3, 2), 2, whole(), "non_dist")
    assert every.owner == (None, None, None)
    assert every.order == ((0, 1, 2), (0, 1, 2))
    assert placement_finish_s(every, (5, 3, 2), whole()) == 10
    robin = plan_placement((5, 3, 2), 2, whole(), "seq_dist")
    assert robin.owner == (0, 1, 0)
    assert robin.order == ((0, 2), (1,))
    assert placement_finish_s(robin, (5, 3, 2), whole()) == 13


def test_lbp_by_hand():
    # Falling: 9 to rank 0 (9), 7 to rank 1 (7), 6 to rank 1 (13), 4 to rank 0 (13), 3: a tie, the lowest; 2 is small.
    placement = plan_placement((3, 9, 2, 7, 4, 6), 2, whole(), "lbp", lbp_rule=3)
    assert placement.owner == (0, 0, None, 1, 0, 1)
    assert placement.order == ((0, 1, 2, 4), (2, 3, 5))  # inverted in the order of the layers


def test_lbp_cost_rule_compares_inverting_with_broadcasting():
    costs = cluster(2, lambda d: {4: 1.0, 5: 2.0, 6: 2.5}[d], lambda n: {10: 1.5, 15: 2.0, 21: 2.0}[n])
    placement = plan_placement((4, 5, 6), 2, costs, "lbp")
    assert placement.owner == (None, 1, 0)  # 1.0 < 1.5 goes everywhere; 2.0 is not less than 2.0


@pytest.mark.parametrize(
    ("model", "threshold", "broadcast", "everywhere"),
    [
        ("ResNet-50", 1400, 16, 92),
        ("ResNet-50", 1024, 34, 74),
        ("ResNet-152", 1400, 46, 266),
        ("DenseNet-201", 1400, 30, 372),
        ("Inception-v4", 1400, 48, 252),
    ],
)
def test_lbp_splits_the_papers_models_as_its_threshold_does(model, threshold, broadcast, everywhere):
    owner = plan_placement(MODELS[model], 64, cluster(64, INVERSES["cubic"]), "lbp", lbp_rule=threshold).owner
    assert (sum(o is not None for o in owner), owner.count(None)) == (broadcast, everywhere)


def test_lower_bound_is_valid_and_optimized_near_the_optimum_of_exhaustive_search():
    dice = random.Random(2)
    ratios = []
    for number in range(30):
        world_size = 2 + number % 2
        dims = [dice.randint(1, 9) for _ in range(5 if number % 10 == 0 else 4)]
        send = dice.choice((0.3, 0.6, 1, 2))
        costs = whole(world_size, send)
        best = brute_optimum(dims, [send * d for d in dims], world_size)
        bound = placement_lower_bound_s(dims, world_size, costs)
        found = placement_finish_s(plan_placement(dims, world_size, costs, "optimized"), dims, costs)
        assert bound <= best * (1 + 1e-9)
        assert found >= best - 1e-9
        ratios.append(found / best)
    assert sum(ratio < 1 + 1e-9 for ratio in ratios) >= 28
    assert max(ratios) <= 1.05


def test_lower_bound_is_not_empty():
    """A bound of zero is valid too: on real models it must lie near what is reached (see the next test) and above the
    two bounds that need no solver."""
    for model in PAPERS:
        for world_size in (4, 64):
            costs, dims = cluster(world_size, INVERSES["cubic"]), MODELS[model]
            bound = placement_lower_bound_s(dims, world_size, costs)
            work = sum(map(costs.inverse, dims)) / world_size
            assert bound >= max(work, costs.inverse(max(dims))) * (1 - 1e-5)


@pytest.mark.parametrize("model", [*PAPERS, "BERT-large"])
def test_optimized_is_near_the_bound_and_never_worse_than_any_simple_rule(model):
    dims = MODELS[model]
    world_sizes = (4, 64) if model == "DenseNet-201" else (4, 8, 64, 1024)  # its bounds take a second each
    lbp_gaps = []
    for inverse in INVERSES.values():
        for world_size in world_sizes:
            costs = cluster(world_size, inverse)
            placement = plan_placement(dims, world_size, costs, "optimized")
            found = placement_finish_s(placement, dims, costs)
            bound = placement_lower_bound_s(dims, world_size, costs)
            assert bound * (1 - 1e-9) <= found <= 1.10 * bound
            for name, owner in simple_owners(dims, world_size, costs).items():
                other = Placement.from_sequence(owner, range(len(dims)), world_size)
                assert found <= placement_finish_s(other, dims, costs) * (1 + 1e-12), name
            lbp = placement_finish_s(plan_placement(dims, world_size, costs, "lbp"), dims, costs)
            lbp_gaps.append(lbp / bound - 1)
    assert max(lbp_gaps) > 0.2  # so that nearness to the bound says something


def simple_owners(dims, world_size, costs):
    """The rules that any search must beat, written without the planner."""

    def longest_first(common):
        load, owner = [0.0] * world_size, [None] * len(dims)
        for i in sorted(range(len(dims)), key=lambda i: -costs.inverse(dims[i])):
            if not common(i):
                rank = min(range(world_size), key=load.__getitem__)
                load[rank] += costs.inverse(dims[i])
                owner[i] = rank
        return owner

    return {
        "all local": [None] * len(dims),
        "round robin": [i % world_size for i in range(len(dims))],
        "all distributed": longest_first(lambda i: False),
        "longest first, cost rule": longest_first(
            lambda i: costs.inverse(dims[i]) < costs.broadcast(dims[i] * (dims[i] + 1) / 2)
        ),
    }


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_gives_a_sequence_that_every_rank_can_walk(rule):
    dims = MODELS["ResNet-50"]
    for world_size in (2, 5, 64):
        costs = cluster(world_size, INVERSES["cubic"])
        placement = plan_placement(dims, world_size, costs, rule)
        sequence = inverse_sequence(placement, dims, costs)
        assert sorted(sequence) == list(range(len(dims)))
        for rank, order in enumerate(placement.order):
            assert tuple(i for i in sequence if placement.owner[i] in (None, rank)) == order
        walked = sequence_finish_s(placement.owner, sequence, world_size, dims, costs, "as_ready")
        late = sequence_finish_s(placement.owner, sequence, world_size, dims, costs, "after_all")
        finish = placement_finish_s(placement, dims, costs)
        assert finish <= walked * (1 + 1e-12)
        assert walked <= late * (1 + 1e-12)
        if rule != "lbp":  # where common factors come last or do not exist, walking together costs nothing
            assert walked == pytest.approx(finish, rel=1e-12)


def test_sequence_needs_one_order_of_the_common_factors():
    placement = Placement((None, None, 0, 1), ((0, 1, 2), (1, 0, 3)))
    with pytest.raises(ValueError, match="differently"):
        inverse_sequence(placement, (1, 2, 3, 4), whole())


def test_planning_is_deterministic():
    dims, costs = MODELS["ResNet-50"], cluster(7, INVERSES["cubic"])
    assert plan_placement(dims, 7, costs, "optimized") == plan_placement(dims, 7, costs, "optimized")


@pytest.mark.parametrize("rule", RULES)
def test_one_rank_inverts_everything_and_the_argument_overrides_the_profile(rule):
    assert plan_placement((5, 3, 2), 1, whole(8), rule).owner == (None, None, None)
    assert plan_placement((5, 3, 2), 3, whole(8), rule).world_size == 3
    assert placement_lower_bound_s((5, 3, 2), 1, whole(8)) == 10


@pytest.mark.parametrize("rule", RULES)
def test_no_factors(rule):
    placement = plan_placement((), 4, whole(4), rule)
    assert placement.owner == ()
    assert placement_finish_s(placement, (), whole(4)) == 0
    assert placement_lower_bound_s((), 4, whole(4)) == 0


def test_more_ranks_or_dearer_work_move_the_bound_the_right_way():
    dims = MODELS["ResNet-50"]
    bounds = [placement_lower_bound_s(dims, p, cluster(p, INVERSES["cubic"])) for p in (2, 4, 16, 256)]
    assert bounds == sorted(bounds, reverse=True)
    dearer = cluster(16, INVERSES["cubic"], LinearCost(5e-4, 2e-9))
    assert placement_lower_bound_s(dims, 16, dearer) >= bounds[2]


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="non_dist, seq_dist, lbp, optimized"):
        plan_placement((1,), 2, whole(), "best")
    with pytest.raises(ValueError, match="world_size"):
        plan_placement((1,), 0, whole(), "lbp")
    with pytest.raises(ValueError, match="dims"):
        plan_placement((0,), 2, whole(), "lbp")
    with pytest.raises(ValueError, match="rank 1 must invert"):
        Placement((0, None), ((0, 1), (0, 1)))
    with pytest.raises(ValueError, match="not a rank"):
        Placement((2,), ((), ()))
    with pytest.raises(ValueError, match="2 factors, dims has 1"):
        placement_finish_s(Placement((0, 0), ((0, 1),)), (1,), whole(1))


@pytest.mark.parametrize("lbp_rule", ["costs", None, -1, 1.5, float("nan"), True])
@pytest.mark.parametrize("rule", RULES)
def test_lbp_rule_is_cost_or_a_dimension(rule, lbp_rule):
    with pytest.raises(ValueError, match=r"lbp_rule=.* is neither 'cost' nor a dimension"):
        plan_placement((1, 2), 2, whole(), rule, lbp_rule=lbp_rule)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0, None])
def test_costs_that_are_no_seconds_are_named_with_the_size(bad):
    dims = (4, 6)
    for name, size in (("inverse", 6), ("broadcast", 21)):
        good = {"inverse": lambda d: 1.0, "broadcast": lambda n: 1.0}
        costs = cluster(2, **{**good, name: lambda n, size=size: bad if n == size else 1.0})
        for ask in (
            lambda costs=costs: plan_placement(dims, 2, costs, "seq_dist"),
            lambda costs=costs: placement_lower_bound_s(dims, 2, costs),
            lambda costs=costs: placement_finish_s(Placement((0, 1), ((0,), (1,))), dims, costs),
        ):
            with pytest.raises(ValueError, match=rf"cost {name}\({size}\)"):
                ask()


@pytest.mark.parametrize("bad", [0, 2.5, float("nan"), "3", True])
def test_dims_and_world_size_are_whole_numbers(bad):
    with pytest.raises(ValueError, match=r"dims\[1\]"):
        plan_placement((1, bad), 2, whole(), "lbp")
    for ask in (
        lambda: plan_placement((1,), bad, whole(), "lbp"),
        lambda: placement_lower_bound_s((1,), bad, whole()),
    ):
        with pytest.raises(ValueError, match="world_size"):
            ask()
