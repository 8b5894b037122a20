"""Fusion of many families of tensors that share one channel: what each rank alone gets, or alone sends.

The exact program for families (:mod:`kfac.planning.joint_fusion`) has a state for every combination of tensors sent,
too many where every rank is a family of its own. Here each family is planned by itself, and what the others put on the
channel enters as dearer messages; of several such plans the one whose last message arrives first is taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kfac.planning.costs import Cost, checked_cost
from kfac.planning.fusion import Groups, plan_fusion


class OwnFamily(NamedTuple):
    """Tensors that may share a message.

    Args:
        ready_s: seconds at which each one is ready, nondecreasing.
        elements: elements of each one.
        cost: seconds of one of their messages as a function of its elements.
    """

    ready_s: Sequence[float]
    elements: Sequence[float]
    cost: Cost


def fuse_families(families: Sequence[OwnFamily], *, start_s: float = 0.0) -> list[Groups]:
    """Per family its groups, such that the last of all messages arrives early.

    Messages leave in the order in which they are ready (no order is better: see :mod:`kfac.planning.joint_fusion`). The
    plans that are compared: no fusion; all of a family in one message; and each family by the exact program for one, as
    if a message cost as many times more as there are families that overlap with it, or a part of that. So the result is
    never later than without fusion, or with one message per family. Families whose ready times do not overlap with any
    other's of a component are planned after those before them.

    Args:
        families: what may be merged with what.
        start_s: the channel is busy until then.
    """
    families = [family._replace(cost=checked_cost("message", family.cost)) for family in families]
    result: list[Groups] = [() for _ in families]
    for component in _components(families):
        chosen = [families[k] for k in component]
        best = min(_candidates(chosen), key=lambda groups: (families_finish_s(groups, chosen, start_s), _count(groups)))
        start_s = families_finish_s(best, chosen, start_s)
        for k, groups in zip(component, best, strict=True):
            result[k] = groups
    return result


def families_finish_s(groups: Sequence[Groups], families: Sequence[OwnFamily], start_s: float = 0.0) -> float:
    """When the last message has arrived, if they leave in the order in which they are ready."""
    end = start_s
    for ready, k, group in sorted(
        (families[k].ready_s[group[-1]], k, group) for k, of_family in enumerate(groups) for group in of_family
    ):
        end = max(end, ready) + families[k].cost(sum(families[k].elements[i] for i in group))
    return end


def _candidates(families: Sequence[OwnFamily]) -> Iterator[list[Groups]]:
    count = len(families)
    yield [(tuple(range(len(family.elements))),) for family in families]
    yield [tuple((i,) for i in range(len(family.elements))) for family in families]
    for times in sorted({1.0, (1 + count) / 2, float(count)}):
        yield [_planned(family, times) for family in families]


def _planned(family: OwnFamily, times: float) -> Groups:
    return plan_fusion(family.ready_s, family.elements, lambda elements: times * family.cost(elements), "optimal")


def _count(groups: Sequence[Groups]) -> int:
    return sum(map(len, groups))


def _components(families: Sequence[OwnFamily]) -> Iterator[list[int]]:
    """Families whose ready times overlap, earliest first."""
    present = [k for k, family in enumerate(families) if len(family.ready_s)]
    component: list[int] = []
    end = 0.0
    for k in sorted(present, key=lambda k: (families[k].ready_s[0], families[k].ready_s[-1])):
        if component and families[k].ready_s[0] >= end:
            yield component
            component = []
        component.append(k)
        end = max(end, families[k].ready_s[-1])
    if component:
        yield component
