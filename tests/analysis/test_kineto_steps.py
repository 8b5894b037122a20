"""Traces of torch.profiler of real steps, beside what K-FAC's own recorder says of the same iterations."""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from contextlib import nullcontext
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule

import kfac.recording
from analysis.kineto import from_kineto, load_trace
from kfac import KFAC, KFACConfig
from kfac.recording import Recorder
from kfac.timeline import COMMUNICATION_KINDS, COMMUNICATION_LANE, COMPUTE_LANE, KINDS, Span, Timeline
from tests.kfac.perfetto import imported
from tests.kfac.ranks import run_ranks

BEFORE, RECORDED = 3, 3
"""Iterations that the profiler leaves out, the last of them its warm-up, and those that both instruments record."""

SCHEDULES = ("dkfac", "mpdkfac", "spdkfac", "auto")
MORE: dict[str, Any] = {
    "inverses as they are ready": {"name": "spdkfac", "placement": "seq_dist"},
    "owners alone": {
        "name": "spdkfac",
        "placement": "seq_dist",
        "factor_collective": "reduce_to_owner",
        "gradient_worker_fraction": 0.0,
    },
}
CASES: dict[str, dict[str, Any]] = {
    **{name: {"schedule": name} for name in SCHEDULES},
    **{name: {"schedule": switches} for name, switches in MORE.items()},
    "not profiled": {"schedule": "spdkfac", "profiled": False},
    "no ranges": {"schedule": "spdkfac", "ranges": False},  # as the library was before it made any
    "compiled": {"schedule": "spdkfac", "compiled": True},
    "DDP": {"schedule": "spdkfac", "ddp": True},
    "no spans of the user": {"schedule": "spdkfac", "spans": False},
}


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.Flatten(),
        nn.Linear(512, 192),
        nn.ReLU(inplace=True),
        nn.Linear(192, 10),
    )


def train(rank: int, folder: str, name: str) -> tuple[list[Timeline], torch.Tensor]:
    """The recorder's timelines and the parameters afterwards; the profiler's trace goes to the folder."""
    case = {"profiled": True, "ranges": True, "compiled": False, "ddp": False, "spans": True, **CASES[name]}
    usual = kfac.recording.profiler_range
    if not case["ranges"]:
        kfac.recording.profiler_range = lambda *_: nullcontext()
    model = make_model()
    net = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.2) if case["ddp"] else model
    if case["compiled"]:
        model.compile(backend="aot_eager")
    recorder = Recorder(rank=rank)
    preconditioner = KFAC(net, KFACConfig(), case["schedule"], average_gradients=not case["ddp"], recorder=recorder)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    found = []

    def iterate(step: int) -> None:
        generator = torch.Generator().manual_seed(100 * step + rank)
        x, y = torch.randn(32, 3, 8, 8, generator=generator), torch.randint(10, (32,), generator=generator)
        if step >= BEFORE:
            recorder.start()
        with recorder.span("FF", "forward") if case["spans"] else nullcontext():
            loss = nn.functional.cross_entropy(net(x), y)
        with recorder.span("BP", "backward") if case["spans"] else nullcontext():
            loss.backward()
        preconditioner.step()
        optimizer.step()
        optimizer.zero_grad()
        if step >= BEFORE:
            found.append(recorder.stop())

    when = schedule(wait=BEFORE - 1, warmup=1, active=RECORDED)
    profiler = (
        profile(activities=[ProfilerActivity.CPU], schedule=when, record_shapes=True)
        if case["profiled"]
        else nullcontext()
    )
    with profiler:
        for step in range(BEFORE + RECORDED):
            iterate(step)
            if case["profiled"]:
                profiler.step()
    if case["profiled"]:
        profiler.export_chrome_trace(str(Path(folder) / f"{name}.{rank}.json"))
    preconditioner.close()
    kfac.recording.profiler_range = usual
    return found, nn.utils.parameters_to_vector(model.parameters()).detach()


def train_all(rank: int, _: int, folder: str) -> dict[str, Any]:
    return {name: train(rank, folder, name) for name in CASES}


class Steps:
    """What both instruments say of two ranks, by case."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._read: dict[tuple[str, int], tuple[list[dict[str, Any]], list[Timeline]]] = {}
        self.ranks = run_ranks(train_all, 2, str(folder))

    def recorded(self, name: str, rank: int = 0) -> list[Timeline]:
        return self.ranks[rank][name][0]

    def events(self, name: str, rank: int = 0) -> list[dict[str, Any]]:
        return self._trace(name, rank)[0]

    def profiled(self, name: str, rank: int = 0) -> list[Timeline]:
        return self._trace(name, rank)[1]

    def _trace(self, name: str, rank: int) -> tuple[list[dict[str, Any]], list[Timeline]]:
        if (name, rank) not in self._read:
            trace = load_trace(self.folder / f"{name}.{rank}.json")
            told = ("ProfilerStep", "c10d::", "gloo:", *(f"{kind}: " for kind in COMMUNICATION_KINDS))
            events = [e for e in trace["traceEvents"] if e.get("ph") == "X" and e["name"].startswith(told)]
            found = list(from_kineto(trace).timelines.values())
            self._read[name, rank] = sorted(events, key=lambda e: e["ts"]), found
        return self._read[name, rank]


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    return Steps(tmp_path_factory.mktemp("steps"))


def work(timeline: Timeline, without: tuple[str, ...] = ()) -> list[tuple[str, str]]:
    """The compute lane's spans in order, neighbours of one name as one."""
    spans = [s for s in timeline.spans if s.lane == COMPUTE_LANE and s.kind not in without]
    return [key for key, _ in groupby((s.kind, s.name) for s in spans)]


def messages(timeline: Timeline) -> Counter[tuple[str, str]]:
    return Counter((s.kind, s.name) for s in timeline.spans if s.lane == COMMUNICATION_LANE)


def agree(profiled: list[Timeline], recorded: list[Timeline], kind: str) -> bool:
    """Whether the instruments agree on a kind of computing in an iteration.

    Between the moments at which a range and the recorder's span begin lies the other one's own work, some ten
    microseconds, unless the machine has taken the thread away just then: that does not befall every iteration.
    """
    pairs = []
    for a, b in zip(profiled, recorded, strict=True):
        spans = sum(s.kind == kind for s in (*a.spans, *b.spans))
        pairs.append(abs(a.busy_s()[kind] - b.busy_s()[kind]) < 0.02 * b.busy_s()[kind] + spans * 1e-4)
    return any(pairs)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", [*SCHEDULES, *MORE, "compiled"])
def test_the_trace_of_a_step_says_what_the_recorder_says(steps, name, rank):
    profiled, recorded = steps.profiled(name, rank), steps.recorded(name, rank)
    assert len(profiled) == len(recorded) == RECORDED
    for ours, its in zip(recorded, profiled, strict=True):
        assert its.ranks == (rank,)
        assert work(its) == work(ours)
        assert messages(its) == messages(ours)
        assert messages(its).total() >= 2
    for kind in set(KINDS) - set(COMMUNICATION_KINDS):
        assert recorded[0].busy_s()[kind] > 0
        assert agree(profiled, recorded, kind), kind
    assert min(t.breakdown_s()["Other"] / t.iteration_s for t in profiled) < 0.3


def test_every_kind_of_message_is_there(steps):
    found = {name: messages(steps.profiled(name)[0]) for name in ("dkfac", "mpdkfac", *MORE)}
    kinds = {name: {kind for kind, _ in of} for name, of in found.items()}
    assert kinds["dkfac"] == kinds["owners alone"] == {"GradComm", "FactorComm"}
    assert kinds["mpdkfac"] == kinds["inverses as they are ready"] == set(COMMUNICATION_KINDS)
    assert ("FactorComm", "summary") in found["owners alone"]
    assert any("preconditioned" in name for _, name in found["owners alone"])


def elements(event: dict[str, Any]) -> int:
    """What a collective carries; the profiler was asked for shapes."""
    (size,) = re.findall(r"\d+", str(event["args"]["Input Dims"]))
    return int(size)


def sizes(events: list[dict[str, Any]], timelines: list[Timeline]) -> list[tuple[dict[str, int], dict[str, int]]]:
    """Per iteration what the calls in ranges carry, and what the work does that is read as theirs."""
    found = []
    windows = [e for e in events if re.fullmatch(r"ProfilerStep#\d+", e["name"])]
    for its, window in zip(timelines, windows, strict=True):
        inside = [e for e in events if window["ts"] <= e["ts"] < window["ts"] + window["dur"]]
        issued = {}
        for around in (e for e in inside if e["name"].split(":")[0] in COMMUNICATION_KINDS):
            (call,) = [e for e in inside if e["name"].startswith("c10d::") and within(e, around)]
            issued[around["name"]] = elements(call)
        done = [(e["ts"] + e["dur"] - window["ts"], elements(e)) for e in inside if "gloo:" in e["name"]]
        carried = {}
        for span in (s for s in its.spans if s.lane == COMMUNICATION_LANE):
            off, carried[f"{span.kind}: {span.name}"] = min((abs(end - span.end_s * 1e6), size) for end, size in done)
            assert off < 0.01
        found.append((issued, carried))
    return found


@pytest.mark.parametrize("name", [*SCHEDULES, *MORE, "DDP"])
def test_the_work_of_a_message_is_as_large_as_its_call(steps, name):
    """Which of gloo's work is whose call's, by what both carry."""
    for issued, carried in sizes(steps.events(name), steps.profiled(name)):
        others = carried.pop("GradComm: all_reduce", None)
        assert carried == issued
        assert (others is not None) == (name == "DDP")
        assert len(set(issued.values())) > 1


@pytest.mark.parametrize("name", [*SCHEDULES, *MORE, "DDP"])
def test_work_is_told_without_shapes_too(steps, name):
    """Unless both threads of a group begin something at once, which does not befall every iteration."""
    trace = load_trace(steps.folder / f"{name}.0.json")
    for event in trace["traceEvents"]:
        event.get("args", {}).pop("Input Dims", None)
    right = []
    for issued, carried in sizes(steps.events(name), list(from_kineto(trace).timelines.values())):
        assert issued.keys() == carried.keys() - {"GradComm: all_reduce"}
        right.append(issued == {key: size for key, size in carried.items() if key in issued})
    assert any(right)


def within(event: dict[str, Any], around: dict[str, Any]) -> bool:
    start, end = (around["ts"], around["ts"] + around["dur"])
    return event["tid"] == around["tid"] and start <= event["ts"] <= end


@pytest.mark.parametrize("name", ["mpdkfac", *MORE])
def test_both_instruments_know_what_packed_a_message(steps, name, tmp_path):
    for found in (steps.recorded(name), steps.profiled(name)):
        for timeline in found:
            packed = {timeline.spans[b]: timeline.spans[a] for a, b in timeline.flows if is_message(timeline.spans[b])}
            sums = [s for s in timeline.spans if s.kind == "FactorComm" and is_message(s)]
            assert sums
            assert all(s in packed for s in sums)
            assert all(packed[s].end_s <= s.start_s for s in packed)
            timeline.to_chrome_trace(path := tmp_path / "t.json")
            arrows = imported(json.loads(path.read_text())["traceEvents"])
            assert not arrows.errors
            assert len(arrows.flows) == len(timeline.flows)
            assert Timeline.from_chrome_trace(path) == timeline


def is_message(span: Span) -> bool:
    return span.lane == COMMUNICATION_LANE


def test_without_ranges_a_step_is_misread(steps):
    """The control: what the reader makes of a step whose work is in no ranges."""
    blind, recorded = steps.profiled("no ranges"), steps.recorded("no ranges")
    for ours, its in zip(recorded, blind, strict=True):
        assert its.busy_s()["FactorComp"] == its.busy_s()["Precondition"] == 0
        assert work(its) != work(ours)
        assert {name for _, name in messages(its)} == {"all_reduce"}
    for kind in ("FactorComp", "Precondition"):
        assert not agree(blind, recorded, kind)


def test_passes_that_nobody_names_are_told_by_their_operators(steps):
    """A training loop without spans: K-FAC's own ranges stay what they are, the rest is passes or nothing."""
    named, plain = steps.profiled("spdkfac"), steps.profiled("no spans of the user")
    passes = ("FF", "BP")
    for a, b in zip(named, plain, strict=True):
        assert work(a, without=passes) == work(b, without=passes)
        assert messages(a) == messages(b)
        assert {kind for kind, _ in work(b)} == {kind for kind, _ in work(a)}
        first, last = (next(k for k, s in enumerate(order) if s[0] == "BP") for order in (work(b), work(b)[::-1]))
        assert ("FF", "forward") not in work(b)[first : len(work(b)) - last]


def test_collectives_of_others_are_named_as_such(steps):
    """DDP averages gradients in a group and with threads of its own, at the same time."""
    for ours, its in zip(steps.recorded("DDP"), steps.profiled("DDP"), strict=True):
        assert set(messages(its) - messages(ours)) == {("GradComm", "all_reduce")}
        assert not messages(ours) - messages(its)


def test_ranges_change_neither_results_nor_the_order_of_collectives(steps):
    for name in ("spdkfac", "no ranges", "no spans of the user"):
        for rank in (0, 1):
            assert torch.equal(steps.ranks[rank][name][1], steps.ranks[rank]["not profiled"][1])
    order = [
        [e["name"] for e in steps.events(name, rank) if e["name"].startswith("c10d::")]
        for name in ("spdkfac", "no ranges")
        for rank in (0, 1)
    ]
    assert order[0] == order[1] == order[2] == order[3]
    issued = [
        [e["name"] for e in steps.events("spdkfac", rank) if e["name"].split(":")[0] in COMMUNICATION_KINDS]
        for rank in (0, 1)
    ]
    assert issued[0] == issued[1]
    assert len(issued[0]) == len(order[0])


def test_one_process_has_no_messages(tmp_path):
    recorded, _ = train(0, str(tmp_path), "spdkfac")
    profiled = list(from_kineto(load_trace(tmp_path / "spdkfac.0.json")).timelines.values())
    for ours, its in zip(recorded, profiled, strict=True):
        assert work(its) == work(ours)
        assert not messages(its)
        assert not messages(ours)
    for kind in ("FF", "BP", "FactorComp", "InverseComp", "Precondition"):
        assert agree(profiled, recorded, kind), kind


def test_code_that_is_compiled_with_a_span_in_it_is_one_graph_and_warns_of_nothing(caplog):
    torch.compiler.reset()
    recorder = Recorder()

    @torch.compile(backend="eager", fullgraph=True)
    def forward(x):
        with recorder.span("FF", "forward"):
            return torch.relu(x) * 2

    counters = torch._dynamo.utils.counters
    counters.clear()
    forward(torch.ones(3))
    with profile(activities=[ProfilerActivity.CPU]):
        forward(torch.ones(3))
    assert counters["stats"]["unique_graphs"] == 1  # nothing is compiled anew because a profiler runs
    assert not counters["graph_break"]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
