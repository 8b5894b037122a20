"""Tensor fusion against brute force, against the paper's rule written out literally, and its order in the inputs."""

import random
from itertools import product

import pytest

from kfac.planning import LinearCost, TableCost, fusion_finish_s, plan_fusion

RULES = ("none", "threshold", "greedy", "optimal")


def all_groupings(m):
    """Every way to cut m tensors into consecutive messages."""
    for cuts in product((False, True), repeat=max(0, m - 1)):
        groups, start = [], 0
        for i, cut in enumerate(cuts, start=1):
            if cut:
                groups.append(tuple(range(start, i)))
                start = i
        yield (*groups, tuple(range(start, m))) if m else ()


def finish(groups, ready, elements, cost, busy=0):
    """The channel, clock in hand: it takes up a message when it is idle and the whole message is there."""
    clock = busy
    for group in groups:
        for i in group:
            clock = max(clock, ready[i])
        clock += cost(sum(elements[i] for i in group))
    return clock


def paper_rule(ready, elements, alpha, beta):
    """The rule as the paper's code keeps its books: sizes moved to the next tensor, all start times recomputed."""
    sizes = list(elements)
    costs = [alpha + beta * p for p in sizes]

    def starts():
        tau = [ready[0]]
        for k in range(1, len(sizes)):
            tau.append(max(tau[k - 1] + costs[k - 1], ready[k]))
        return tau

    tau = starts()
    groups, group = [], [0]
    for k in range(len(sizes) - 1):
        if ready[k + 1] < tau[k] + costs[k] and (tau[k] > ready[k + 1] or ready[k + 1] - tau[k] < alpha):
            sizes[k + 1] += sizes[k]
            sizes[k], costs[k] = 0, 0
            costs[k + 1] = alpha + beta * sizes[k + 1]
            tau = starts()
        else:
            groups.append(tuple(group))
            group = []
        group.append(k + 1)
    return (*groups, tuple(group))


def instances(seed, count, most=9):
    dice = random.Random(seed)
    for number in range(count):
        m = dice.randint(1, most)
        if number % 2:
            ready = sorted(dice.randint(0, 20) for _ in range(m))
            yield ready, [dice.randint(0, 9) for _ in range(m)], LinearCost(dice.randint(0, 5), dice.randint(0, 3))
        else:
            ready = sorted(dice.uniform(0, 20) for _ in range(m))
            sizes = [dice.uniform(0, 9) for _ in range(m)]
            yield ready, sizes, LinearCost(dice.uniform(0, 5), dice.uniform(0, 2))


def test_three_messages_on_which_the_papers_rule_takes_12_and_the_optimum_10():
    ready, elements, cost = (0, 2, 5), (2, 1, 1), LinearCost(3, 1)
    greedy = plan_fusion(ready, elements, cost, "greedy")
    optimal = plan_fusion(ready, elements, cost, "optimal")
    assert greedy == ((0, 1), (2,))
    assert optimal == ((0,), (1, 2))
    assert fusion_finish_s(greedy, ready, elements, cost) == 12
    assert fusion_finish_s(optimal, ready, elements, cost) == 10


def test_optimal_equals_the_best_of_all_groupings():
    for ready, elements, cost in instances(seed=1, count=300):
        plan = plan_fusion(ready, elements, cost, "optimal")
        best = min(finish(groups, ready, elements, cost) for groups in all_groupings(len(ready)))
        assert fusion_finish_s(plan, ready, elements, cost) == pytest.approx(best, rel=1e-12, abs=1e-12)
        assert finish(plan, ready, elements, cost) == pytest.approx(best, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize(
    "cost",
    [
        TableCost((0, 4, 8, 30), (2.0, 2.5, 9.0, 11.0)),
        lambda n: 1 + (7 if n > 5 else 0),  # a step
        lambda n: 3 + 2 * (n % 4),  # not even monotone
    ],
    ids=["table", "step", "sawtooth"],
)
def test_optimal_is_optimal_for_costs_that_are_not_linear(cost):
    for ready, elements, _ in instances(seed=2, count=100, most=8):
        plan = plan_fusion(ready, elements, cost, "optimal")
        best = min(finish(groups, ready, elements, cost) for groups in all_groupings(len(ready)))
        assert fusion_finish_s(plan, ready, elements, cost) == pytest.approx(best, rel=1e-12)


def test_optimal_asks_for_each_possible_message_once():
    """What bounds its time: m (m + 1) / 2 evaluations of the cost."""
    asked = []
    m = 156
    plan_fusion([float(i) for i in range(m)], [1.0] * m, lambda n: asked.append(n) or 1.0 + n, "optimal")
    assert len(asked) == m * (m + 1) // 2


def test_greedy_is_the_rule_of_the_papers_code():
    for ready, elements, cost in instances(seed=3, count=500, most=14):
        expected = paper_rule(ready, elements, cost.alpha_s, cost.beta_s_per_element)
        assert plan_fusion(ready, elements, cost, "greedy") == expected


def test_greedy_is_often_not_optimal_and_never_better():
    worse = 0
    for ready, elements, cost in instances(seed=4, count=300):
        greedy, optimal = (
            fusion_finish_s(plan_fusion(ready, elements, cost, rule), ready, elements, cost)
            for rule in ("greedy", "optimal")
        )
        assert greedy >= optimal - 1e-9
        worse += greedy > optimal * (1 + 1e-9)
    assert 30 <= worse <= 200


def test_none_sends_each_tensor_alone():
    assert plan_fusion((0, 1, 2), (5, 5, 5), LinearCost(1, 1), "none") == ((0,), (1,), (2,))


def test_threshold_collects_until_the_next_would_exceed_it():
    elements = (4, 4, 2, 11, 1, 9, 1)
    plan = plan_fusion([0] * 7, elements, LinearCost(1, 1), "threshold", threshold_bytes=40, bytes_per_element=4)
    assert plan == ((0, 1, 2), (3,), (4, 5), (6,))
    halves = plan_fusion([0] * 7, elements, LinearCost(1, 1), "threshold", threshold_bytes=40, bytes_per_element=2)
    assert halves == ((0, 1, 2), (3, 4), (5, 6))


def test_every_rule_covers_every_tensor_in_order():
    for ready, elements, cost in instances(seed=5, count=100, most=20):
        for rule in RULES:
            groups = plan_fusion(ready, elements, cost, rule, threshold_bytes=40)
            assert [i for group in groups for i in group] == list(range(len(ready)))
            assert all(groups)


def test_later_tensors_dearer_messages_and_larger_tensors_never_finish_earlier():
    dice = random.Random(6)
    for ready, elements, cost in instances(seed=6, count=100):

        def optimum(ready, elements, cost):
            return fusion_finish_s(plan_fusion(ready, elements, cost, "optimal"), ready, elements, cost)

        base = optimum(ready, elements, cost)
        assert optimum([r + 1.5 for r in ready], elements, cost) >= base
        assert optimum(ready, elements, LinearCost(cost.alpha_s + 1, cost.beta_s_per_element)) >= base
        assert optimum(ready, elements, LinearCost(cost.alpha_s, cost.beta_s_per_element + 1)) >= base
        grown = list(elements)
        grown[dice.randrange(len(grown))] += 2
        assert optimum(ready, grown, cost) >= base - 1e-12


def test_a_busy_channel_is_the_same_as_later_tensors():
    """The planner states a channel that is busy at first by raising the ready times."""
    for ready, elements, cost in instances(seed=7, count=100):
        raised = [max(r, 6) for r in ready]
        plan = plan_fusion(raised, elements, cost, "optimal")
        best = min(finish(groups, ready, elements, cost, busy=6) for groups in all_groupings(len(ready)))
        assert finish(plan, ready, elements, cost, busy=6) == pytest.approx(best, rel=1e-12)
        assert fusion_finish_s(plan, raised, elements, cost) == pytest.approx(best, rel=1e-12)


def test_nothing_to_send():
    for rule in RULES:
        assert plan_fusion((), (), LinearCost(1, 1), rule) == ()
    assert fusion_finish_s((), (), (), LinearCost(1, 1)) == 0


@pytest.mark.parametrize(
    ("ready", "elements", "rule", "message"),
    [
        ((1, 0), (1, 1), "optimal", "must not decrease"),
        ((0,), (1, 1), "optimal", "1 ready times for 2"),
        ((0, float("nan")), (1, 1), "none", "finite"),
        ((0, -1), (1, 1), "none", "not negative"),
        ((0, 1), (1, -1), "none", r"elements\[1\] must be finite and not negative, got -1"),
        ((0, 1), (1, float("nan")), "none", r"elements\[1\]"),
        ((0, float("inf")), (1, 1), "threshold", r"ready_s\[1\]"),
        ((0, 1), (1, "2"), "optimal", r"elements\[1\]"),
        ((0, 1), (1, 1), "best", "none, threshold, greedy, optimal"),
    ],
)
def test_mistakes_are_named(ready, elements, rule, message):
    with pytest.raises(ValueError, match=message):
        plan_fusion(ready, elements, LinearCost(1, 1), rule)


@pytest.mark.parametrize("groups", [((0,),), ((0, 1), (1,)), ((1,), (0,)), ((0, 1), ())])
def test_finish_rejects_what_is_no_grouping(groups):
    with pytest.raises(ValueError, match="consecutive runs"):
        fusion_finish_s(groups, (0, 1), (1, 1), LinearCost(1, 1))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["threshold_bytes", "bytes_per_element"])
@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), None])
def test_bytes_must_be_positive_under_every_rule(rule, name, value):
    with pytest.raises(ValueError, match=name):
        plan_fusion((0,), (1,), LinearCost(1, 1), rule, **{name: value})


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0, None, "1"])
def test_a_cost_that_is_no_number_of_seconds_is_named_with_the_size(bad):
    def cost(elements):
        return bad if elements == 7 else 1.0

    with pytest.raises(ValueError, match=r"cost all_reduce\(7\)"):
        fusion_finish_s(((0,), (1,)), (0, 1), (3, 7), cost)
    for rule in ("greedy", "optimal"):
        with pytest.raises(ValueError, match=r"cost all_reduce\(7(\.0)?\)"):
            plan_fusion((0, 0, 1), (7, 1, 1), cost, rule)
