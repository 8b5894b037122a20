"""Whose call issued which work, against groups whose queues are played out here."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from analysis.gloo import Call, Work, issued_by


@dataclass
class Group:
    """A queue that two threads serve, as torch's gloo groups do."""

    number: int
    threads: int = 2

    def serve(self, draw: random.Random, moments: list[float]) -> list[tuple[float, str]]:
        """Start and thread of what is issued at these moments; some of it takes long, so that more waits."""
        free = {f"{self.number}.{k}": 0.0 for k in range(self.threads)}
        begun = []
        for moment in moments:
            thread = min(free, key=lambda t: (max(free[t], moment), t))
            start = max(free[thread], moment) + draw.random() * 1e-3
            free[thread] = start + draw.choice((0.1, 3.0)) * draw.random()
            begun.append((start, thread))
        return begun


def played(seed: int, groups: int) -> tuple[list[Call], list[Work], list[int]]:
    """Calls, work, and the call of each; the first group's are in ranges."""
    draw = random.Random(seed)
    calls, work, truth = [], [], []
    for group in range(groups):
        moments = sorted(draw.random() * 4 for _ in range(draw.randint(6, 20)))
        for moment, (start, thread) in zip(moments, Group(group).serve(draw, moments), strict=True):
            name = draw.choice(("allreduce", "broadcast"))
            truth.append(len(calls))
            calls.append(Call(name, moment, ours=group == 0))
            work.append(Work(name, start, thread))
    order = list(range(len(work)))
    draw.shuffle(order)
    return calls, [work[k] for k in order], [truth[k] for k in order]


@pytest.mark.parametrize("seed", range(20))
def test_a_group_begins_what_it_is_given_in_order(seed):
    calls, work, truth = played(seed, groups=1)
    assert issued_by(calls, work) == truth


def right(calls, work, found, truth) -> bool:
    """Calls in ranges have their own work; the others' may be taken for one another's, as nothing tells them apart."""
    named = [k if k is not None and calls[k].ours else None for k in found]
    return named == [k if calls[k].ours else None for k in truth] and None not in found


def test_the_calls_in_ranges_are_told_from_those_of_another_group():
    seen = [played(seed, groups=2) for seed in range(50)]
    assert all(right(calls, work, issued_by(calls, work), truth) for calls, work, truth in seen)
    # The control: one queue for all is wrong, and not by a hair.
    mixed = []
    for calls, work, truth in seen:
        alike = [Work(w.name, w.start, "one thread") for w in work]
        mixed.append(right(calls, alike, issued_by(calls, alike), truth))
    assert sum(mixed) < 10


def test_what_was_issued_before_the_trace_begins_has_no_call():
    calls, work, truth = played(3, groups=1)
    early = sorted(range(len(calls)), key=lambda k: calls[k].start)[:2]
    late = [k for k in range(len(calls)) if k not in early]
    found = issued_by([calls[k] for k in late], work)
    assert [None if k is None else late[k] for k in found] == [None if k in early else k for k in truth]


def test_what_has_not_begun_when_the_trace_ends_is_nobodys():
    calls, work, truth = played(4, groups=1)
    last = max(range(len(work)), key=lambda k: work[k].start)
    assert issued_by(calls, [w for k, w in enumerate(work) if k != last]) == [
        t for k, t in enumerate(truth) if k != last
    ]


def test_nothing_and_strangers():
    assert issued_by([], []) == []
    assert issued_by([], [Work("allreduce", 1.0, 5)]) == [None]
    assert issued_by([Call("allreduce", 2.0, True)], [Work("allreduce", 1.0, 5)]) == [None]
    assert issued_by([Call("allreduce", 0.0, True)], [Work("broadcast", 1.0, 5)]) == [None]
    many = [Work("allreduce", k, k) for k in range(20)]
    assert issued_by([Call("allreduce", k - 0.5, k % 2 == 0) for k in range(20)], many) == list(range(20))
