"""Tensor fusion: which consecutive tensors share one all-reduce.

The model: tensors become ready in order, one channel carries one message at a time in that order, and a message leaves
when its last tensor is ready and the channel is free. Fewer messages pay the start-up time less often; more messages
start earlier.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

from kfac.planning.checks import number
from kfac.planning.costs import Cost, checked_cost
from kfac.planning.schedule_config import CHOICES

Groups = tuple[tuple[int, ...], ...]
"""Consecutive 0-based indices of tensors, one tuple per message."""


def plan_fusion(
    ready_s: Sequence[float],
    elements: Sequence[float],
    all_reduce: Cost,
    rule: str,
    *,
    threshold_bytes: int = 64 * 2**20,
    bytes_per_element: int = 4,
) -> Groups:
    """Group tensors into messages.

    Args:
        ready_s: seconds at which each tensor is ready, nondecreasing.
        elements: elements of each tensor.
        all_reduce: seconds of a message as a function of its elements.
        rule: ``none``: every tensor travels alone. ``threshold``: tensors are collected until the next one would
            exceed ``threshold_bytes``; a larger tensor travels alone. ``greedy``: the rule in the paper's code, which
            is MG-WFBP's (arXiv 1811.11141). ``optimal``: the grouping with the earliest last arrival.
        threshold_bytes: the most that ``threshold`` puts into one message.
        bytes_per_element: bytes of one element.

    Returns:
        The groups, in the order in which they leave.

    Raises:
        ValueError: for an unknown rule, ready times that decrease or are not finite, sizes that are negative or not
            finite, a threshold or an element of no bytes, or a cost that is no number of seconds.
    """
    check_tensors(ready_s, elements)
    for name, value in (("threshold_bytes", threshold_bytes), ("bytes_per_element", bytes_per_element)):
        if not number(name, value) > 0:
            raise ValueError(f"{name}={value} must be positive")
    all_reduce = checked_cost("all_reduce", all_reduce)
    if rule == "none":
        return tuple((i,) for i in range(len(elements)))
    if rule == "threshold":
        return _threshold(elements, threshold_bytes / bytes_per_element)
    if rule == "greedy":
        return _greedy(ready_s, elements, all_reduce)
    if rule == "optimal":
        return _optimal(ready_s, elements, all_reduce)
    raise ValueError(f"unknown fusion rule {rule!r}; choices: {', '.join(CHOICES['fusion'])}")


def fusion_finish_s(
    groups: Sequence[Sequence[int]], ready_s: Sequence[float], elements: Sequence[float], all_reduce: Cost
) -> float:
    """Seconds from the iteration's start at which the last message has arrived (0 without tensors).

    Raises:
        ValueError: if the groups are not consecutive runs that cover every tensor once, or as in :func:`plan_fusion`.
    """
    check_tensors(ready_s, elements)
    if [i for group in groups for i in group] != list(range(len(elements))) or not all(groups):
        raise ValueError("the groups must be consecutive runs of indices that cover every tensor exactly once")
    all_reduce = checked_cost("all_reduce", all_reduce)
    end = 0.0
    for group in groups:
        end = max(end, ready_s[group[-1]]) + all_reduce(sum(elements[i] for i in group))
    return end


def check_tensors(ready_s: Sequence[float], elements: Sequence[float]) -> None:
    """Refuse ready times and sizes that are none.

    Raises:
        ValueError: naming the first wrong one.
    """
    if len(ready_s) != len(elements):
        raise ValueError(f"{len(ready_s)} ready times for {len(elements)} tensors")
    for name, values in (("ready_s", ready_s), ("elements", elements)):
        for i, value in enumerate(values):
            number(f"{name}[{i}]", value)
    if any(later < earlier for earlier, later in pairwise(ready_s)):
        raise ValueError("ready_s must not decrease: list the tensors in the order in which they become ready")


def _threshold(elements: Sequence[float], limit: float) -> Groups:
    groups: list[list[int]] = []
    held = 0.0
    for i, n in enumerate(elements):
        if not groups or held + n > limit:
            groups.append([])
            held = 0.0
        groups[-1].append(i)
        held += n
    return tuple(tuple(group) for group in groups)


def _greedy(ready_s: Sequence[float], elements: Sequence[float], all_reduce: Cost) -> Groups:
    """Merge a tensor into the next one when that one is ready before the start-up time has passed.

    With ``start`` the moment at which the open group could leave, tensor ``l + 1`` joins iff
    ``ready[l + 1] < start + min(startup, cost(group))``. The paper's code evaluates costs of unmerged tensors on full
    squares; here all sizes are what travels. The start-up time is the cost of an empty message.
    """
    startup = all_reduce(0)
    groups: list[list[int]] = []
    channel_free = start = held = 0.0
    for i, (ready, n) in enumerate(zip(ready_s, elements, strict=True)):
        if groups and ready < start + min(startup, all_reduce(held)):
            groups[-1].append(i)
            held += n
        else:
            if groups:
                channel_free = start + all_reduce(held)
            groups.append([i])
            held = n
        start = max(channel_free, ready)
    return tuple(tuple(group) for group in groups)


def _optimal(ready_s: Sequence[float], elements: Sequence[float], all_reduce: Cost) -> Groups:
    """The exact dynamic program: ``F(j) = min over i < j of max(F(i), ready[j]) + cost(S[j] - S[i])``.

    ``F(j)`` is the earliest finish of the first ``j`` tensors. It is exact for every cost, because a later message is
    never hurt by an earlier finish of the ones before it. O(m^2): 400 tensors take some hundredths of a second. Of
    equally early groupings the one with the longer last message is taken: fewer messages.
    """
    total = [0.0, *accumulate(elements)]
    finish = [0.0]
    cut = [0]
    for j, ready in enumerate(ready_s, start=1):
        size = total[j]
        best, best_i = math.inf, 0
        for i, (before, sent) in enumerate(zip(finish, total, strict=False)):
            candidate = (before if before > ready else ready) + all_reduce(size - sent)
            if candidate < best:
                best, best_i = candidate, i
        finish.append(best)
        cut.append(best_i)
    groups: list[tuple[int, ...]] = []
    end = len(ready_s)
    while end:
        groups.append(tuple(range(cut[end], end)))
        end = cut[end]
    return tuple(reversed(groups))
