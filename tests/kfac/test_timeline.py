"""Timelines: exposed time by hand-computed cases, round trips, and what is refused."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace

import pytest

from kfac.timeline import KINDS, Span, Timeline, chrome_trace
from tests.kfac.perfetto import imported


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
    assert not imported(events).errors
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


def with_flows(offset_s: float = 0.0) -> Timeline:
    """Given out of order; two ranks, neighbours without a gap, and a message that two arrows lead to."""
    third = 1 / 3
    spans = (
        span("Precondition", 2 + third + offset_s, 3),
        span("FF", 0, third),
        span("BP", third, 2 * third),
        span("GradComm", 2 * third + offset_s, 2 + third + offset_s, "communication"),
        span("FactorComp", 0, 2 * third, rank=1),
        span("GradComm", 2 * third + offset_s, 2 + third + offset_s, "communication", rank=1),
    )
    return Timeline(spans, {0: 3}, 4.0, "simulated", ((2, 3), (3, 0), (1, 3), (4, 5)))


NAMED = {("BP", "GradComm"), ("FF", "GradComm"), ("GradComm", "Precondition"), ("FactorComp", "GradComm")}


def test_flows_become_those_of_the_spans_in_their_order():
    timeline = with_flows()
    assert list(timeline.flows) == sorted(timeline.flows)
    assert {(timeline.spans[a].kind, timeline.spans[b].kind) for a, b in timeline.flows} == NAMED


@pytest.mark.parametrize("offset_s", [0.0, 1e-3])
def test_flows_are_arrows_between_the_slices_that_they_mean(tmp_path, offset_s):
    timeline = with_flows(offset_s)
    timeline.to_chrome_trace(path := tmp_path / "t.json")
    assert Timeline.from_chrome_trace(path) == timeline
    found = imported(json.loads(path.read_text())["traceEvents"])
    assert not found.errors
    seen = {(a["args"]["start_s"], a["cat"], b["args"]["start_s"], b["cat"], b["pid"] - 1) for a, b in found.flows}
    meant = [(timeline.spans[a], timeline.spans[b]) for a, b in timeline.flows]
    assert seen == {(a.start_s, a.kind, b.start_s, b.kind, b.rank) for a, b in meant}


def test_arrows_of_several_timelines_in_a_file_are_told_apart():
    events = chrome_trace({"one": with_flows(), "other": with_flows(1e-3)})["traceEvents"]
    found = imported(events)
    assert not found.errors
    assert len(found.flows) == 2 * len(NAMED)
    assert all(a["pid"] == b["pid"] for a, b in found.flows)
    assert len({a["pid"] for a, _ in found.flows}) == 4
    again = [{**e, "id": 1} if "id" in e else e for e in events]  # the control
    assert any("begins again" in error for error in imported(again).errors)


def broken(events, how):
    """Arrows as they are easily written, and wrong."""
    ends = {(e["pid"], e["tid"], round((e["ts"] + e["dur"]) * 1e3)) for e in events if e["ph"] == "X"}
    if how == "from where a slice has ended":
        return [
            {**e, "ts": e["ts"] + 1e-3}
            if e["ph"] == "s" and (e["pid"], e["tid"], round(e["ts"] * 1e3) + 1) in ends
            else e
            for e in events
        ]
    if how == "before the slices in the file":
        return sorted(events, key=lambda e: e["ph"] not in ("s", "f"))
    if how == "binding to what follows":
        return [{k: v for k, v in e.items() if k != "bp"} for e in events]
    assert how == "on another thread"
    return [{**e, "tid": 99} if e["ph"] == "f" else e for e in events]


@pytest.mark.parametrize(
    "how",
    ["from where a slice has ended", "before the slices in the file", "binding to what follows", "on another thread"],
)
def test_control_other_arrows_are_found_out(how):
    events = chrome_trace({"one": with_flows()})["traceEvents"]
    found = imported(broken(events, how))
    right = {(a["name"], b["name"]) for a, b in imported(events).flows}
    assert found.errors or {(a["name"], b["name"]) for a, b in found.flows} != right


def test_spans_that_are_shorter_than_a_nanosecond_have_no_arrows_but_keep_their_flows(tmp_path):
    spans = (span("FF", 0, 1), span("BP", 1, 1), span("GradComm", 1, 2, "communication"), span("BP", 2, 2 + 1e-10))
    timeline = Timeline(spans, flows=((0, 2), (1, 2), (2, 3)))
    timeline.to_chrome_trace(path := tmp_path / "t.json")
    found = imported(json.loads(path.read_text())["traceEvents"])
    assert not found.errors
    assert [(a["cat"], b["cat"]) for a, b in found.flows] == [("FF", "GradComm")]
    assert Timeline.from_chrome_trace(path) == timeline


def test_merging_ranks_keeps_their_flows():
    first = Timeline((span("GradComm", 2, 3, "communication"), span("FF", 0, 1)), flows=((1, 0),))
    spans = (span("BP", 0, 1, rank=1), span("GradComm", 2, 3, "communication", rank=1))
    merged = Timeline.merge([first, Timeline(()), Timeline(spans, flows=((0, 1),))])
    assert [(merged.spans[a].kind, merged.spans[b].kind, merged.spans[b].rank) for a, b in merged.flows] == [
        ("FF", "GradComm", 0),
        ("BP", "GradComm", 1),
    ]


@pytest.mark.parametrize(
    ("flow", "match"), [((0, 2), "of 2 spans"), ((-1, 0), "of 2 spans"), ((1, 0), "back in time"), ((0, 0), "back in")]
)
def test_impossible_flows_are_refused(tmp_path, flow, match):
    spans = (span("FF", 0, 1), span("BP", 1, 2))
    with pytest.raises(ValueError, match=match):
        Timeline(spans, flows=(flow,))
    Timeline(spans, flows=((0, 1),)).to_chrome_trace(path := tmp_path / "x.json")
    data = json.loads(path.read_text())
    data["metadata"]["flows"] = [list(flow)]
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r"x\.json is not a timeline"):
        Timeline.from_chrome_trace(path)
