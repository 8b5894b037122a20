"""Timelines: exposed time by hand-computed cases, round trips, and what is refused."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace

import pytest

from kfac.timeline import KINDS, Span, Timeline, chrome_trace


def span(kind, start, end, lane="compute", rank=0):
    return Span(rank, lane, kind, f"{kind} {start}", start, end)


def test_exposed_time_counts_communication_only_where_computing_idles():
    timeline = Timeline(
        (
            span("FF", 0, 2),
            span("FactorComm", 1, 5, "communication"),
            span("BP", 3, 4),
            span("InverseComp", 6, 7),
            span("InverseComm", 6.5, 9, "communication"),
        ),
        total_s=10.0,
    )
    expected = {"FF": 2, "FactorComm": 1 + 1, "BP": 1, "InverseComp": 1, "InverseComm": 2, "Other": 1 + 1}
    assert {k: v for k, v in timeline.breakdown_s().items() if v} == expected
    assert timeline.busy_s()["FactorComm"] == 4
    assert timeline.hidden_s()["FactorComm"] == 2
    assert sum(timeline.breakdown_s().values()) == timeline.iteration_s == 10.0


def test_ranks_are_averaged_by_how_many_they_stand_for():
    timeline = Timeline((span("FF", 0, 4), span("FF", 0, 1, rank=1)), rank_counts={0: 1, 1: 3})
    assert timeline.breakdown_s()["FF"] == pytest.approx((4 + 3 * 1) / 4)
    assert timeline.breakdown_s()["Other"] == pytest.approx(3 * 3 / 4)


def test_two_messages_in_flight_are_not_counted_twice():
    timeline = Timeline((span("GradComm", 0, 3, "communication"), span("FactorComm", 1, 4, "communication")))
    breakdown = timeline.breakdown_s()
    assert breakdown["GradComm"] == 3
    assert breakdown["FactorComm"] == 1


def test_an_empty_timeline_has_a_breakdown():
    assert sum(Timeline(()).breakdown_s().values()) == 0
    assert Timeline((), total_s=2.0).breakdown_s()["Other"] == 2.0


def test_chrome_trace_round_trip_and_clean_neighbours(tmp_path):
    third = 1 / 3
    last = replace(span("BP", third, 2 * third), critical=True)
    timeline = Timeline((span("FF", 0, third), last), {0: 64}, 1.0, "simulated")
    timeline.to_chrome_trace(path := tmp_path / "trace.json")
    assert Timeline.from_chrome_trace(path) == timeline
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]
    assert all(e["pid"] >= 1 and e["tid"] >= 1 for e in events)
    first, second = sorted(events, key=lambda e: e["ts"])
    assert round((first["ts"] + first["dur"] - second["ts"]) * 1e3) <= 0, "neighbours overlap after rounding"


def test_merging_ranks():
    merged = Timeline.merge(
        [Timeline((span("FF", 0, 1),), total_s=1.5), Timeline((span("FF", 0, 2, rank=1),), total_s=2.5)]
    )
    assert merged.ranks == (0, 1)
    assert merged.iteration_s == 2.5


@pytest.mark.parametrize("text", ["", "{}", '{"traceEvents": [{"ph": "X"}]}', "[]"])
def test_a_file_that_is_no_timeline_is_refused(tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ValueError, match=r"x\.json is not a timeline"):
        Timeline.from_chrome_trace(tmp_path / "x.json")


def test_impossible_spans_are_refused():
    with pytest.raises(ValueError, match="unknown span kind"):
        Span(0, "compute", "Nonsense", "x", 0, 1)
    with pytest.raises(ValueError, match="ends before it starts"):
        Span(0, "compute", KINDS[0], "x", 1, 0)
    nan, inf = float("nan"), float("inf")
    for start, end in ((nan, 1), (0, nan), (0, inf), (-inf, 0), (inf, inf), (-1, 1), (-2, -1)):
        with pytest.raises(ValueError, match="must be finite and not negative"):
            Span(0, "compute", KINDS[0], "x", start, end)


@pytest.mark.parametrize("total", [float("nan"), float("inf"), -1.0])
def test_impossible_totals_and_counts_are_refused(total):
    with pytest.raises(ValueError, match="total_s"):
        Timeline((span("FF", 0, 1),), total_s=total)
    with pytest.raises(ValueError, match="at least one"):
        Timeline((span("FF", 0, 1),), {0: 0})


def test_what_lies_beyond_the_iteration_is_neither_busy_nor_hidden():
    timeline = Timeline(
        (
            span("FF", 0, 3),
            span("FactorComm", 1, 8, "communication"),
            span("GradComm", 9, 12, "communication"),
            span("BP", 5, 7),
        ),
        total_s=6.0,
    )
    assert timeline.busy_s()["FactorComm"] == 5  # 1 to 6
    assert timeline.busy_s()["GradComm"] == 0
    assert timeline.busy_s()["BP"] == 1
    assert timeline.breakdown_s()["FactorComm"] == 2  # 3 to 5
    assert timeline.hidden_s() == {"GradComm": 0, "FactorComm": 3, "InverseComm": 0}


@pytest.mark.parametrize(
    "metadata",
    [3, "x", [1], None, {"rank_counts": 3}, {"rank_counts": {"a": 1}}, {"rank_counts": {"0": "1"}}, {"total_s": "1"}],
)
def test_a_trace_with_other_metadata_is_refused(tmp_path, metadata):
    Timeline((span("FF", 0, 1),)).to_chrome_trace(path := tmp_path / "x.json")
    assert Timeline.from_chrome_trace(path).ranks == (0,)
    path.write_text(json.dumps({**json.loads(path.read_text()), "metadata": metadata}))
    with pytest.raises(ValueError, match=r"x\.json is not a timeline"):
        Timeline.from_chrome_trace(path)


def test_exposed_seconds_of_spans_are_those_of_their_kinds():
    spans = (
        span("FF", 0, 2),
        span("GradComm", 1, 5, "communication"),
        span("FactorComm", 5, 6, "communication"),
        span("FF", 0, 4, rank=1),
    )
    timeline = Timeline(spans, {0: 3}, total_s=8.0)
    exposed = timeline.exposed_s()
    # Rank 0, three quarters of all: 2 FF, 3 GradComm, 1 FactorComm, 2 idle; rank 1: 4 and 4.
    assert exposed == pytest.approx({spans[0]: 1.5, spans[1]: 2.25, spans[2]: 0.75, spans[3]: 1.0, None: 1.5 + 1.0})
    assert sum(exposed.values()) == pytest.approx(timeline.iteration_s)
    assert Timeline((), total_s=2.0).exposed_s() == {None: 2.0}


@pytest.mark.parametrize("views", [1, 2])
def test_traces_follow_the_rules_that_perfetto_imports_by(tmp_path, views):
    """Its importer drops slices that overlap on a thread by a nanosecond, and threads that share a number."""
    draw = random.Random(0)
    timelines = {}
    for view in range(views):
        spans = []
        for rank in (0, 1, 5):
            for lane in ("compute", "communication"):
                end = draw.random()
                for _ in range(200):
                    start, end = end, end + draw.random() * 1e-6
                    spans.append(span("FF" if lane == "compute" else "GradComm", start, end, lane, rank))
        timelines[f"view {view}"] = Timeline(tuple(spans))
    if views == 1:
        timelines["view 0"].to_chrome_trace(tmp_path / "t.json")
        events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    else:
        events = chrome_trace(timelines)["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]
    threads = {(e["pid"], e["tid"]) for e in slices}
    assert len(slices) == views * 3 * 2 * 200
    assert len(threads) == len({tid for _, tid in threads}) == views * 3 * 2
    assert min(min(pair) for pair in threads) >= 1
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert named == threads
    assert {e["pid"] for e in events if e["name"] == "process_name"} == {pid for pid, _ in threads}
    for thread in threads:
        mine = [e for e in slices if (e["pid"], e["tid"]) == thread]
        whole = [(round(e["ts"] * 1e3), round((e["ts"] + e["dur"]) * 1e3)) for e in mine]
        assert all(abs(e["ts"] * 1e3 - a) < 1e-3 for e, (a, _) in zip(mine, whole, strict=True)), "whole nanoseconds"
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(sorted(whole)))
