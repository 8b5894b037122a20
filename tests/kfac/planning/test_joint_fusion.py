"""Fusion of several families on one channel: against every order of every set of messages, and against one family."""

import random
from itertools import permutations, product

import pytest

from kfac.planning import LinearCost, TableCost, fusion_finish_s, plan_fusion
from kfac.planning.joint_fusion import Family, Sent, joint_finish_s, plan_joint_fusion
from tests.kfac.planning.test_fusion import all_groupings


def partitions(items):
    """Every way to divide items into sets, consecutive or not."""
    if not items:
        yield []
        return
    first, *rest = items
    for partition in partitions(rest):
        yield [[first], *partition]
        for k in range(len(partition)):
            yield [*partition[:k], [first, *partition[k]], *partition[k + 1 :]]


def clock(messages, cost, busy=0.0):
    """Messages as lists of (ready, elements)."""
    end = busy
    for message in messages:
        end = max(end, *(ready for ready, _ in message)) + cost(sum(n for _, n in message))
    return end


def best_of_all(families, cost, cuts):
    """Every choice of messages by ``cuts`` (all ways to divide one family), in every order."""
    best = float("inf")
    for chosen in product(*(list(cuts(list(range(len(ready))))) for ready, _ in families)):
        messages = [
            [(families[k][0][i], families[k][1][i]) for i in group]
            for k, groups in enumerate(chosen)
            for group in groups
        ]
        best = min(best, *(clock(order, cost) for order in permutations(messages)))
    return best


def families_of(dice, sizes):
    return [
        Family(sorted(dice.randint(0, 15) for _ in range(m)), [dice.randint(0, 6) for _ in range(m)]) for m in sizes
    ]


def test_one_family_is_the_single_program():
    dice = random.Random(1)
    for _ in range(100):
        (family,) = families_of(dice, [dice.randint(1, 12)])
        cost = LinearCost(dice.randint(0, 5), dice.randint(0, 3))
        sent = plan_joint_fusion([family], cost)
        assert tuple(message.group for message in sent) == plan_fusion(*family, cost, "optimal")


@pytest.mark.parametrize("sizes", [(3, 2), (1, 4), (2, 2, 1), (0, 4)])
def test_no_set_of_messages_in_any_order_arrives_earlier(sizes):
    """Consecutive or not, whatever the order: for a start-up plus seconds per element the program is exact."""
    dice = random.Random(2)
    separate_is_worse = 0
    for _ in range(25):
        families = families_of(dice, sizes)
        cost = LinearCost(dice.randint(0, 5), dice.randint(0, 3))
        sent = plan_joint_fusion(families, cost)
        best = best_of_all(families, cost, partitions)
        assert joint_finish_s(sent, families, cost) == pytest.approx(best, rel=1e-12)
        assert clock([[(families[k][0][i], families[k][1][i]) for i in g] for k, g in sent], cost) == best
        alone = [plan_fusion(*family, cost, "optimal") for family in families]
        by_release = sorted(
            (Sent(k, group) for k, groups in enumerate(alone) for group in groups),
            key=lambda message: families[message.family].ready_s[message.group[-1]],
        )
        separate_is_worse += joint_finish_s(by_release, families, cost) > best
    assert separate_is_worse or sizes[0] < 2  # so that planning together says something


@pytest.mark.parametrize(
    "cost",
    [
        lambda n: 1 + n * n / 8,  # convex
        TableCost((0, 4, 8, 30), (2.0, 2.5, 9.0, 11.0)),  # measured: neither convex nor concave
        lambda n: 3 + 2 * (n % 4),
    ],
    ids=["convex", "table", "sawtooth"],
)
def test_any_cost_is_planned_exactly_over_consecutive_groups(cost):
    dice = random.Random(3)
    for _ in range(25):
        families = families_of(dice, dice.choice([(3, 2), (2, 3), (2, 2, 1)]))
        best = best_of_all(families, cost, lambda items: all_groupings(len(items)))
        assert joint_finish_s(plan_joint_fusion(families, cost), families, cost) == pytest.approx(best, rel=1e-12)


def test_merging_two_families_into_one_never_arrives_later():
    """What may be merged is one family: the program then has all messages of before and more."""
    dice = random.Random(4)
    better = 0
    for _ in range(60):
        families = families_of(dice, (5, 4))
        cost = LinearCost(dice.randint(1, 5), dice.randint(0, 2))
        merged = sorted(pair for family in families for pair in zip(*family, strict=True))
        ready, elements = zip(*merged, strict=True)
        apart = joint_finish_s(plan_joint_fusion(families, cost), families, cost)
        together = fusion_finish_s(plan_fusion(ready, elements, cost, "optimal"), ready, elements, cost)
        assert together <= apart + 1e-9
        better += together < apart - 1e-9
    assert better > 20


def test_families_that_do_not_overlap_are_planned_one_after_another_without_loss():
    dice = random.Random(5)
    for _ in range(40):
        first, second, third = families_of(dice, (3, 2, 2))
        second, third = (Family([r + 15 for r in f.ready_s], f.elements) for f in (second, third))
        cost = LinearCost(dice.randint(0, 5), dice.randint(0, 3))
        apart = plan_joint_fusion([second, third, first], cost)
        assert [message.family for message in apart[:1]] == [2]
        start = joint_finish_s([m._replace(family=0) for m in apart if m.family == 2], [first], cost)
        rest = plan_joint_fusion([second, third], cost, start_s=start)
        assert apart == (*(m for m in apart if m.family == 2), *rest)
        assert joint_finish_s(apart, [second, third, first], cost) == joint_finish_s(
            rest, [second, third], cost, start_s=start
        )


def test_a_busy_channel_is_the_same_as_later_tensors():
    dice = random.Random(6)
    for _ in range(40):
        families, cost = families_of(dice, (4, 4)), LinearCost(dice.randint(0, 5), dice.randint(0, 3))
        raised = [Family([max(r, 7) for r in ready], elements) for ready, elements in families]
        busy = joint_finish_s(plan_joint_fusion(families, cost, start_s=7), families, cost, start_s=7)
        assert busy == joint_finish_s(plan_joint_fusion(raised, cost), raised, cost)


def test_nothing_to_send_and_mistakes():
    cost = LinearCost(1, 1)
    assert plan_joint_fusion([], cost) == plan_joint_fusion([Family((), ())], cost) == ()
    assert joint_finish_s((), [Family((), ())], cost, start_s=3.0) == 3
    with pytest.raises(ValueError, match="must not decrease"):
        plan_joint_fusion([Family((1, 0), (1, 1))], cost)
    with pytest.raises(ValueError, match="start_s"):
        plan_joint_fusion([], cost, start_s=-1)
    with pytest.raises(ValueError, match="every tensor of every family"):
        joint_finish_s([Sent(0, (0,))], [Family((0, 1), (1, 1))], cost)
    with pytest.raises(ValueError, match=r"cost all_reduce\(2"):
        plan_joint_fusion([Family((0, 1), (1, 1))], lambda n: -1.0 if n == 2 else 1.0)
