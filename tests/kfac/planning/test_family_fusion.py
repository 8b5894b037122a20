"""Fusion of many families: never later than the simple plans, and close to the exact program where that can be run."""

import itertools
import random

import pytest

from kfac.planning import LinearCost
from kfac.planning.family_fusion import OwnFamily, families_finish_s, fuse_families
from kfac.planning.joint_fusion import Family, joint_finish_s, plan_joint_fusion


def random_families(dice, count, tensors):
    cost = LinearCost(dice.uniform(0, 5), dice.uniform(0, 1))
    families = []
    for _ in range(count):
        size = dice.randint(1, tensors)
        ready = sorted(dice.uniform(0, 20) for _ in range(size))
        families.append(OwnFamily(ready, [dice.randint(1, 9) for _ in range(size)], cost))
    return families


def finish_by_hand(groups, families):
    """Every message by itself on a channel, in the order of its last tensor."""
    messages = [(max(f.ready_s[i] for i in g), k, g) for k, f in enumerate(families) for g in groups[k]]
    channel = 0.0
    for ready, k, group in sorted(messages):
        channel = max(channel, ready)
        channel += families[k].cost(sum(families[k].elements[i] for i in group))
    return channel


def test_never_later_than_no_fusion_or_one_message_per_family_and_at_least_the_exact_optimum():
    dice, ratios = random.Random(0), []
    for _ in range(150):
        families = random_families(dice, dice.randint(1, 3), 5)
        groups = fuse_families(families)
        for family, of_family in zip(families, groups, strict=True):
            assert list(itertools.chain(*of_family)) == list(range(len(family.elements)))
        found = finish_by_hand(groups, families)
        assert found == pytest.approx(families_finish_s(groups, families))
        alone = [tuple((i,) for i in range(len(f.elements))) for f in families]
        together = [(tuple(range(len(f.elements))),) for f in families]
        components_overlap = all(
            a.ready_s[0] < b.ready_s[-1] and b.ready_s[0] < a.ready_s[-1]
            for a, b in itertools.combinations(families, 2)
        )
        if components_overlap:
            assert found <= min(finish_by_hand(alone, families), finish_by_hand(together, families)) + 1e-9
        joint = [Family(f.ready_s, f.elements) for f in families]
        best = joint_finish_s(plan_joint_fusion(joint, families[0].cost), joint, families[0].cost)
        assert found >= best - 1e-9
        ratios.append(found / best)
    assert sorted(ratios)[len(ratios) // 2] <= 1.02
    assert max(ratios) <= 1.4


def test_one_family_is_the_exact_program():
    dice = random.Random(1)
    for _ in range(50):
        (family,) = random_families(dice, 1, 8)
        joint = [Family(family.ready_s, family.elements)]
        best = joint_finish_s(plan_joint_fusion(joint, family.cost), joint, family.cost)
        assert finish_by_hand(fuse_families([family]), [family]) == pytest.approx(best)


def test_an_empty_family_has_no_messages():
    full = OwnFamily([0.0, 1.0], [1, 1], LinearCost(10, 0))
    assert fuse_families([OwnFamily([], [], full.cost), full]) == [(), ((0, 1),)]
