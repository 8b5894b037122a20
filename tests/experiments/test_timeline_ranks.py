"""Which ranks a picture shows: those that differ, with how many each stands for."""

import random

import pytest

from experiments.timeline_ranks import Shown, said_of, shown_ranks, without_repeats
from kfac.planning.shipped_profiles import load_shipped_cluster, load_shipped_model
from kfac.schedules import make_plan
from kfac.simulation import simulate
from kfac.timeline import Span, Timeline


def computing(*seconds, counts=None):
    """Rank r computes for so many seconds."""
    return Timeline(tuple(Span(r, "compute", "FF", "f", 0, s) for r, s in enumerate(seconds)), counts or {})


def test_ranks_that_do_the_same_are_drawn_once():
    timeline = computing(1, 2, 1, 2, 2, counts={4: 5})
    assert shown_ranks(timeline, 8) == (Shown(0, 2), Shown(1, 7))
    assert [one.name for one in shown_ranks(timeline, 8)] == ["rank 0 (of 2 alike)", "rank 1 (of 7 alike)"]
    assert said_of(shown_ranks(timeline, 8), timeline) == ""
    assert without_repeats(timeline).breakdown_s() == pytest.approx(timeline.breakdown_s())
    named = Timeline((Span(0, "compute", "FF", "one", 0, 1), Span(1, "compute", "FF", "other", 0, 1)))
    assert without_repeats(named) is named


def test_of_many_the_extremes_and_then_the_most_different():
    """Rank 4 computes longest, 2 least, 5 ends last though it computes no more than 0; then 3 is the farthest."""
    timeline = computing(10, 10.1, 1, 16, 20, 10.2)
    late = Span(5, "communication", "GradComm", "m", 24, 25)
    timeline = Timeline((*timeline.spans, late))
    roles = {one.rank: one.role for one in shown_ranks(timeline, 3)}
    assert roles == {2: "least busy", 4: "busiest", 5: "last to end"}
    four = shown_ranks(timeline, 4)
    assert [one.rank for one in four] == [2, 3, 4, 5]
    assert four[3] == Shown(5, 3, False, "last to end")  # 0 and 1 are most like it
    assert four[3].name == "rank 5 (last to end, for 3 similar)"
    assert said_of(four, timeline) == "4 of 6 ranks, those that differ most; each stands for those most like it"
    assert [one.rank for one in shown_ranks(timeline, 1)] == [4]


def test_the_choice_ends_where_the_rest_is_similar():
    timeline = computing(*(100 + 0.01 * r for r in range(30)), *(200 + 0.01 * r for r in range(10)))
    assert [one.count for one in shown_ranks(timeline, 8)] == [30, 10]


@pytest.mark.parametrize("most", [1, 2, 5, 8])
def test_every_rank_is_stood_for_once(most):
    draw = random.Random(most)
    for _ in range(20):
        counts = {r: draw.randint(1, 4) for r in range(12)}
        timeline = computing(*(draw.choice((1, 2, 2.01, 5, 9)) + draw.random() for _ in range(12)), counts=counts)
        shown = shown_ranks(timeline, most)
        assert sum(one.count for one in shown) == sum(counts.values())
        assert len(shown) <= most
        assert [one.rank for one in shown] == sorted({one.rank for one in shown})


def test_of_mpdkfac_on_64_gpus_a_rank_with_a_large_inverse_is_shown():
    model, cluster = load_shipped_model("resnet50"), load_shipped_cluster("paper64")
    timeline = simulate(make_plan("mpdkfac", model, cluster), model, cluster)
    inverting = {
        r: sum(s.duration_s for s in timeline.spans if (s.rank, s.kind) == (r, "InverseComp")) for r in range(64)
    }
    shown = {one.role: one for one in shown_ranks(timeline, 8)}
    assert inverting[shown["busiest"].rank] == max(inverting.values())
    assert inverting[shown["least busy"].rank] == min(inverting.values())
    assert max(inverting[r] for r in range(8)) < max(inverting.values())  # the first eight would not show it
    assert sum(one.count for one in shown.values()) == 64


def test_a_picture_shows_at_least_one_rank():
    with pytest.raises(ValueError, match="most=0"):
        shown_ranks(computing(1), 0)
    assert shown_ranks(Timeline(()), 8) == ()
