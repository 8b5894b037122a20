"""Tensor fusion of several families of tensors that share one channel, planned by one exact program.

Tensors of one family may travel in one message, tensors of two families may not: A factors, G factors and gradients are
packed and averaged differently. Whatever may be merged is one family.

Why one program is exact. Take any order of messages on the channel, and call the moment at which a message's last
tensor is ready its release. If a message is sent just before one that was released no later, exchanging the two ends
both no later: so messages sorted by release are as good as any order. Then the last message of a state "so many
tensors of each family have been sent" belongs to the family whose last tensor of the state is ready last, and what was
sent before it is a smaller state, whose earliest finish is best whatever follows. So

    F(n) = min over i < n_k of max(F(n with i in place of n_k), ready_k[n_k]) + cost(S_k[n_k] - S_k[i])

with k that family. The groups of one family are consecutive in its ready order, which for a start-up plus seconds per
element loses nothing (:mod:`kfac.planning.fusion`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import prod
from typing import NamedTuple

from kfac.planning.checks import number
from kfac.planning.costs import Cost, checked_cost
from kfac.planning.fusion import check_tensors


class Family(NamedTuple):
    """Tensors that may share a message.

    Args:
        ready_s: seconds at which each one is ready, nondecreasing.
        elements: elements of each one.
    """

    ready_s: Sequence[float]
    elements: Sequence[float]


class Sent(NamedTuple):
    """One message: the index of its family, and the consecutive indices of its tensors in that family."""

    family: int
    group: tuple[int, ...]


def plan_joint_fusion(families: Sequence[Family], all_reduce: Cost, *, start_s: float = 0.0) -> tuple[Sent, ...]:
    """The messages, in the order in which they leave, whose last one arrives earliest.

    Families whose ready times do not overlap are planned one after another, which loses nothing; those that do overlap
    take ``prod(m_k + 1)`` states, each a minimum over at most ``max(m_k)`` predecessors.

    Args:
        families: what may be merged with what.
        all_reduce: seconds of a message as a function of its elements.
        start_s: the channel is busy until then.

    Raises:
        ValueError: as in :func:`~kfac.planning.fusion.plan_fusion`.
    """
    number("start_s", start_s)
    for family in families:
        check_tensors(*family)
    all_reduce = checked_cost("all_reduce", all_reduce)
    sent: list[Sent] = []
    for component in _components(families):
        chosen = [families[k] for k in component]
        start_s, messages = _program(chosen, all_reduce, start_s)
        sent += [Sent(component[message.family], message.group) for message in messages]
    return tuple(sent)


def joint_finish_s(
    sent: Sequence[Sent], families: Sequence[Family], all_reduce: Cost, *, start_s: float = 0.0
) -> float:
    """When the last of these messages has arrived (``start_s`` without any).

    Raises:
        ValueError: if the messages do not carry every tensor once, or as in :func:`plan_joint_fusion`.
    """
    number("start_s", start_s)
    for family in families:
        check_tensors(*family)
    carried = sorted((message.family, i) for message in sent for i in message.group)
    if carried != [(k, i) for k, family in enumerate(families) for i in range(len(family.elements))]:
        raise ValueError("the messages must carry every tensor of every family exactly once")
    all_reduce = checked_cost("all_reduce", all_reduce)
    end = start_s
    for k, group in sent:
        released = max(families[k].ready_s[i] for i in group)
        end = max(end, released) + all_reduce(sum(families[k].elements[i] for i in group))
    return end


def _components(families: Sequence[Family]) -> Iterator[list[int]]:
    """Families whose ready times overlap, earliest first; each component is ready before the next one begins to be."""
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


def _program(families: Sequence[Family], all_reduce: Cost, start_s: float) -> tuple[float, list[Sent]]:
    """The earliest finish and its messages. Of equally early ones the longer last message is taken."""
    import numpy as np  # here, not above: planning starts without NumPy

    counts = [len(family.ready_s) for family in families]
    costs = []
    for family, count in zip(families, counts, strict=True):
        total = [0.0, *accumulate(family.elements)]
        matrix = np.zeros((count + 1, count))
        for n in range(1, count + 1):
            matrix[n, :n] = [all_reduce(total[n] - before) for before in total[:n]]
        costs.append(matrix)
    # Each tensor's place among all by (ready time, family): comparing places is quicker than comparing pairs.
    ordered = sorted((ready, k, n) for k, family in enumerate(families) for n, ready in enumerate(family.ready_s, 1))
    place = [[-1] * (count + 1) for count in counts]
    for position, (_, k, n) in enumerate(ordered):
        place[k][n] = position

    def last_family(state: Sequence[int]) -> int:
        return ordered[max(places[n] for places, n in zip(place, state, strict=True))][1]

    shape = tuple(count + 1 for count in counts)
    strides = [prod(shape[k + 1 :]) for k in range(len(shape))]
    finish = np.zeros(prod(shape))
    finish[0] = start_s
    cut = [0] * prod(shape)
    states = np.ndindex(*shape)
    next(states)  # nothing sent
    for at, state in enumerate(states, start=1):
        k = last_family(state)
        n, stride = state[k], strides[k]
        before = finish[at - n * stride : at : stride]
        ends = np.maximum(before, families[k].ready_s[n - 1])
        ends += costs[k][n, :n]
        first = int(ends.argmin())
        cut[at] = first
        finish[at] = ends[first]
    sent = []
    left = list(counts)
    while any(left):
        k = last_family(left)
        first = cut[sum(n * stride for n, stride in zip(left, strides, strict=True))]
        sent.append(Sent(k, tuple(range(first, left[k]))))
        left[k] = first
    return float(finish[-1]), sent[::-1]
