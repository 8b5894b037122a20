"""What the names of a measured iteration's spans tell of who waited for whom, and what they do not."""

from __future__ import annotations

from kfac.named_flows import named_flows
from kfac.timeline import COMMUNICATION_LANE, COMPUTE_LANE, Span, Timeline

KINDS = {"pack": "FactorComp", "running": "FactorComp", "own": "Precondition", "KL": "Precondition"}


def comp(name, start, end, rank=0):
    return Span(rank, COMPUTE_LANE, KINDS.get(name.split()[0], "InverseComp"), name, start, end)


def comm(name, start, end, rank=0, kind="FactorComm"):
    return Span(rank, COMMUNICATION_LANE, kind, name, start, end)


def told(*spans):
    return {(spans[a].name, spans[b].name) for a, b in named_flows(spans)}


SUMS = (
    comp("pack A", 0, 1),
    comp("pack A", 2, 3),
    comp("pack G", 4, 5),
    # The second has left before the first has arrived: it has the lane only then, after all have been packed.
    comm("A message 0 (2 items)", 1, 6),
    comm("A message 1 (1 items)", 6, 8),
    comm("G message 2 (3 items)", 8, 9),
)


def test_sums_come_from_what_packed_them_in_the_order_of_their_numbers():
    pairs = named_flows((comp("running averages", 10, 11), *SUMS[::-1]))
    spans = (comp("running averages", 10, 11), *SUMS[::-1])
    from_packing = {(spans[a].start_s, spans[b].name) for a, b in pairs if spans[a].lane == COMPUTE_LANE}
    assert from_packing == {(0, SUMS[3].name), (2, SUMS[4].name), (4, SUMS[5].name)}
    assert {spans[a].name for a, b in pairs if spans[b].name == "running averages"} == {s.name for s in SUMS[3:]}


def test_where_averages_are_updated_several_times_nothing_is_said_of_which_took_a_sum_up():
    found = told(*SUMS, comp("running averages", 10, 11), comp("running averages", 12, 13))
    assert not any(after == "running averages" for _, after in found)
    assert len(found) == 3


def test_packing_that_cannot_be_counted_off_is_not_guessed():
    assert not told(*SUMS[1:2], *SUMS[3:5])


def test_inverses_come_from_their_packing_and_are_unpacked_elsewhere():
    owner = (comp("pack A of conv", 0, 1), comm("inverse of A of conv", 1, 3, kind="InverseComm"))
    assert told(*owner) == {("pack A of conv", "inverse of A of conv")}
    other = (comm("3 inverses up to G of fc", 1, 3, 1, "InverseComm"), comp("unpack G of fc", 4, 5, 1))
    assert told(*owner, *other) == {
        ("pack A of conv", "inverse of A of conv"),
        ("3 inverses up to G of fc", "unpack G of fc"),
    }


def test_preconditioned_gradients_come_from_their_owner_alone():
    of_rank = [
        (
            comp("own layers (2)", 0, 1, rank),
            comm("2 preconditioned gradients of rank 1", 1, 2, rank, "GradComm"),
            comp("KL clip", 3, 4, rank),
        )
        for rank in (0, 1)
    ]
    spans = (*of_rank[0], *of_rank[1])
    found = [(spans[a].name, spans[b].rank) for a, b in named_flows(spans)]
    assert sorted(found) == [
        ("2 preconditioned gradients of rank 1", 0),
        ("2 preconditioned gradients of rank 1", 1),
        ("own layers (2)", 1),
    ]


def test_the_summary_is_a_message_like_others():
    work = Span(0, COMPUTE_LANE, "FactorComp", "summary", 0, 1)
    assert told(work, comm("summary", 1, 2), comp("running averages", 3, 4)) == {
        ("summary", "summary"),
        ("summary", "running averages"),
    }


def test_what_would_go_back_in_time_is_left_out():
    """A profiler ends a message's range a little after those who wait for it go on."""
    late = (comm("inverse of A of conv", 1, 3, kind="InverseComm"), comp("unpack A of conv", 2.9, 4))
    assert not named_flows(late)
    assert Timeline(late, flows=named_flows(late)).flows == ()


def test_other_names_say_nothing():
    assert not told(comm("gradient message 0 (3 items)", 0, 1, kind="GradComm"), comp("precondition", 2, 3))
    assert named_flows(()) == ()
