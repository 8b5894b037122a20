"""Differences of timelines made by hand, worked out on paper."""

import pytest

from analysis.timeline_diff import ALL, NOTHING, Share, difference
from kfac.timeline import Span, Timeline


def comp(kind, name, start, end, rank=0):
    return Span(rank, "compute", kind, name, start, end)


def comm(kind, name, start, end, rank=0):
    return Span(rank, "communication", kind, name, start, end)


# 12 s: forward 0-2, backward 2-6; all messages after it: 6-8 and 8-9; inversion 9-12.
BULK = Timeline(
    (
        comp("FF", "conv", 0, 2),
        comp("BP", "conv", 2, 6),
        comm("FactorComm", "A message 0", 6, 8),
        comm("GradComm", "gradient", 8, 9),
        comp("InverseComp", "invert A of conv", 9, 12),
    )
)
# 10 s: the factors leave during the backward pass (2-5) in two messages and hide; gradients wait; 7-7.5 is idle.
PIPELINED = Timeline(
    (
        comp("FF", "conv", 0, 2),
        comp("BP", "conv", 2, 6),
        comm("FactorComm", "A message 0", 2, 4),
        comm("FactorComm", "G message 1", 4, 5),
        comm("GradComm", "gradient", 6, 7),
        comp("InverseComp", "invert A of conv", 7.5, 10),
    )
)


def by_kind(diff):
    return {d.kind: (d.exposed_s, d.hidden_s, d.total_s) for d in diff.kinds}


def test_where_the_time_went():
    diff = difference([BULK], [PIPELINED])
    assert (diff.first_s, diff.second_s, diff.longer_s) == (12, 10, -2)
    assert by_kind(diff) == {
        "FF": (0, 0, 0),
        "BP": (0, 0, 0),
        "GradComm": (0, 0, 0),
        "FactorComm": (-2, 3, 1),  # 2 exposed became 3 hidden: 1 more in all
        "InverseComp": (-0.5, 0, -0.5),
        "Other": (0.5, 0, 0.5),
    }
    named = {(d.kind, d.name): d for d in diff.parts}
    assert named["FactorComm", "A message 0"].first == Share(2, 2, 1)
    assert named["FactorComm", "A message 0"].second == Share(0, 2, 1)
    assert named["FactorComm", "G message 1"].first == NOTHING
    assert named["FactorComm", "G message 1"].second.hidden_s == 1
    assert diff.parts[0].name == "A message 0", "the greatest difference comes first"


@pytest.mark.parametrize(("first", "second"), [(BULK, PIPELINED), (PIPELINED, BULK), (BULK, BULK)])
def test_no_second_is_lost_or_counted_twice(first, second):
    diff = difference([first], [second])
    assert sum(d.exposed_s for d in diff.kinds) == pytest.approx(diff.longer_s)
    assert sum(d.exposed_s for d in diff.parts) == pytest.approx(diff.longer_s)
    assert sum(d.total_s for d in diff.kinds) == pytest.approx(sum(d.total_s for d in diff.parts))


def test_turned_round_it_is_the_opposite():
    there, back = difference([BULK], [PIPELINED]), difference([PIPELINED], [BULK])
    assert by_kind(back) == {kind: tuple(-x for x in of) for kind, of in by_kind(there).items()}


def test_ranks_count_as_often_as_they_stand_for():
    # Rank 0 stands for 3 that invert 4 s, rank 1 inverts 8 s: the mean is 5 of 8 s, 3 of them idle.
    uneven = Timeline((comp("InverseComp", "x", 0, 4), comp("InverseComp", "x", 0, 8, rank=1)), {0: 3})
    even = Timeline((comp("InverseComp", "x", 0, 5),))
    diff = difference([uneven], [even])
    (inverse,) = [d for d in diff.kinds if d.kind == "InverseComp"]
    assert inverse.first == Share(5, 5, 1)
    assert inverse.exposed_s == 0
    assert diff.longer_s == by_kind(diff)["Other"][0] == -3


def test_iterations_are_averaged():
    longer = Timeline((comp("FF", "conv", 0, 4),))
    shorter = Timeline((comp("FF", "conv", 0, 2),))
    diff = difference([longer, shorter], [shorter])
    assert (diff.first_s, diff.second_s) == (3, 2)
    assert diff.parts[0].first == Share(3, 3, 1)


def test_computing_that_the_sides_name_differently_is_one_part_and_messages_are_not():
    measured = Timeline((comp("FF", "forward", 0, 3), comm("GradComm", "message 0 (2 items)", 3, 4)))
    simulated = Timeline(
        (comp("FF", "conv", 0, 1), comp("FF", "fc", 1, 2), comm("GradComm", "message 0 (1 items)", 2, 3))
    )
    diff = difference([measured], [simulated])
    assert {(d.name, d.exposed_s) for d in diff.parts} == {
        (ALL, -1),
        ("message 0 (2 items)", -1),
        ("message 0 (1 items)", 1),
    }
    assert {d.name for d in difference([BULK], [measured]).parts if d.kind == "InverseComp"} == {"invert A of conv"}


def test_what_lies_beyond_the_iteration_does_not_count():
    cut = Timeline((comp("FF", "conv", 0, 2), comm("GradComm", "gradient", 1, 9)), total_s=4)
    (message,) = [d for d in difference([cut], [cut]).parts if d.kind == "GradComm"]
    assert message.first == Share(2, 3, 1)


def test_a_side_without_timelines_is_refused():
    with pytest.raises(ValueError, match="at least one timeline"):
        difference([], [BULK])


def test_empty_timelines_differ_by_their_idle_time():
    diff = difference([Timeline((), total_s=1)], [Timeline((), total_s=3)])
    assert by_kind(diff) == {"Other": (2, 0, 2)}


def test_messages_are_numbered_among_those_that_carry_the_same():
    one = Timeline(
        (comm("FactorComm", "A message 0 (2 items)", 0, 1), comm("GradComm", "gradient message 1 (2 items)", 1, 2))
    )
    two = Timeline(
        (
            comm("FactorComm", "A message 0 (1 items)", 0, 1),
            comm("FactorComm", "A message 1 (1 items)", 1, 2),
            comm("GradComm", "gradient message 2 (2 items)", 2, 3),
        )
    )
    assert {(d.name, d.exposed_s) for d in difference([one], [two]).parts} == {
        ("A message #1 (2 items)", -1),
        ("A message #1 (1 items)", 1),
        ("A message #2 (1 items)", 1),
        ("gradient message #1 (2 items)", 0),
    }
