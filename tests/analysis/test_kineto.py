"""Traces of torch.profiler: one really made here, and ones written by hand for what this machine cannot make."""

import gzip
import itertools
import json

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from analysis.kineto import from_kineto, load_trace
from analysis.kineto_labels import parse_rules
from analysis.sources import merged, read_source


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """Two profiled iterations of a small training step whose curvature work is in named ranges."""
    path = tmp_path_factory.mktemp("kineto") / "trace.json"
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = torch.randn(64, 64)
    when = schedule(wait=1, warmup=1, active=2)
    with profile(activities=[ProfilerActivity.CPU], schedule=when) as profiler:
        for _ in range(4):
            optimizer.zero_grad()
            model(data).square().mean().backward()
            with record_function("FactorComp: A of 0"):
                factor = data.T @ data
            with record_function("my inversion"):
                inverse = torch.linalg.inv(factor + torch.eye(64))
            torch.linalg.cholesky(factor + torch.eye(64))
            inverse @ inverse  # after the backward pass and in no range: of no kind
            optimizer.step()
            profiler.step()
    profiler.export_chrome_trace(str(path))
    return path


def events(trace, name):
    return [e for e in json.loads(trace.read_text())["traceEvents"] if e.get("ph") == "X" and e["name"] == name]


def test_a_real_trace_has_an_iteration_per_step(trace):
    found = from_kineto(load_trace(trace)).timelines
    assert list(found) == [2, 3]
    for number, timeline in found.items():
        (step,) = events(trace, f"ProfilerStep#{number}")
        assert timeline.iteration_s == pytest.approx(step["dur"] / 1e6)
        assert sum(timeline.breakdown_s().values()) == pytest.approx(timeline.iteration_s)
        lane = [s for s in timeline.spans if s.lane == "compute"]
        assert all(a.end_s <= b.start_s for a, b in itertools.pairwise(lane))
        kinds = [s.kind for s in lane]
        assert kinds == ["FF", "BP", "FactorComp", "InverseComp", "InverseComp"]


def test_ranges_are_as_long_as_the_profiler_says(trace):
    found = from_kineto(load_trace(trace)).timelines
    for timeline, named in zip(found.values(), events(trace, "FactorComp: A of 0"), strict=True):
        (span,) = [s for s in timeline.spans if s.kind == "FactorComp"]
        assert span.name == "A of 0"
        assert span.duration_s == pytest.approx(named["dur"] / 1e6, abs=2e-9)  # its clock counts nanoseconds


def test_the_forward_pass_holds_its_operators_and_nothing_of_the_backward_pass(trace):
    timeline = from_kineto(load_trace(trace)).timelines[2]
    (step,) = events(trace, "ProfilerStep#2")
    forward, backward = (next(s for s in timeline.spans if s.kind == k) for k in ("FF", "BP"))
    inside = [e for e in events(trace, "aten::addmm") if step["ts"] <= e["ts"] < step["ts"] + step["dur"]]
    assert inside
    for e in inside:
        start = (e["ts"] - step["ts"]) / 1e6
        assert forward.start_s <= start + 1e-9
        assert start + e["dur"] / 1e6 <= forward.end_s + 1e-9
    assert forward.end_s <= backward.start_s


def test_rules_name_what_nothing_else_does(trace):
    plain = from_kineto(load_trace(trace)).timelines[2]
    ruled = from_kineto(load_trace(trace), parse_rules(["^my inversion$=Precondition"])).timelines[2]
    assert plain.busy_s()["Precondition"] == 0
    (named,) = [s for s in ruled.spans if s.kind == "Precondition"]
    assert named.name == "my inversion"


def test_gzip_and_round_trip(trace, tmp_path):
    packed = tmp_path / "t.pt.trace.json.gz"
    packed.write_bytes(gzip.compress(trace.read_bytes()))
    timeline = from_kineto(load_trace(packed)).timelines[3]
    timeline.to_chrome_trace(tmp_path / "ours.json")
    assert type(timeline).from_chrome_trace(tmp_path / "ours.json") == timeline


def event(name, category, start, length, thread=1, correlation=None):
    args = {} if correlation is None else {"correlation": correlation}
    return {"ph": "X", "name": name, "cat": category, "pid": 1, "tid": thread, "ts": start, "dur": length, "args": args}


def kineto(*found, rank=0):
    return {"schemaVersion": 1, "distributedInfo": {"rank": rank, "world_size": 4}, "traceEvents": list(found)}


def spans(timeline):
    return [(s.lane[:7], s.kind, s.name, round(1e6 * s.start_s), round(1e6 * s.end_s)) for s in timeline.spans]


def test_gloo_collectives_are_of_the_kind_of_the_range_that_issued_them():
    trace = kineto(
        event("ProfilerStep#7", "user_annotation", 1000, 100),
        event("aten::mm", "cpu_op", 1000, 20),
        event("autograd::engine::evaluate_function: X", "cpu_op", 1020, 20),
        event("c10d::allreduce_", "cpu_op", 1040, 2),
        event("FactorComm: A message 0", "user_annotation", 1050, 10),
        event("c10d::allreduce_", "cpu_op", 1051, 2),
        event("c10d::broadcast_", "cpu_op", 1062, 1),  # in no range, while others are: not K-FAC's
        # Two threads: the second starts while the first is under way; the channel is one.
        event("gloo:all_reduce", "user_annotation", 1045, 20, thread=8),
        event("gloo:all_reduce", "user_annotation", 1055, 20, thread=9),
        event("gloo:broadcast", "user_annotation", 1080, 10, thread=8),
        rank=3,
    )
    (timeline,) = from_kineto(trace).timelines.values()
    assert timeline.ranks == (3,)
    assert spans(timeline) == [
        ("communi", "GradComm", "all_reduce", 45, 65),
        ("communi", "FactorComm", "A message 0", 65, 75),
        ("compute", "FF", "forward", 0, 20),
        ("compute", "BP", "backward", 20, 40),
    ]


def test_kernels_are_of_the_kind_of_the_moment_that_launched_them():
    trace = kineto(
        event("ProfilerStep#0", "user_annotation", 0, 50),
        event("aten::mm", "cpu_op", 0, 10),
        event("cudaLaunchKernel", "cuda_runtime", 5, 1, correlation=1),
        event("autograd::engine::evaluate_function: X", "cpu_op", 10, 10, thread=2),
        event("cudaLaunchKernel", "cuda_runtime", 15, 1, thread=2, correlation=2),
        event("FactorComm: G message 1", "user_annotation", 22, 5),
        event("cudaLaunchKernelExC", "cuda_runtime", 23, 1, correlation=3),
        event("InverseComp/invert fc", "user_annotation", 30, 5),
        event("cudaLaunchKernel", "cuda_runtime", 31, 1, correlation=4),
        event("gemm", "kernel", 20, 30, thread=7, correlation=1),
        event("gemm_bwd", "kernel", 50, 40, thread=7, correlation=2),
        event("ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", "kernel", 60, 50, thread=9, correlation=3),
        event("potrf", "kernel", 110, 20, thread=7, correlation=4),
        # The next iteration's first kernel waits until the device is free.
        event("ProfilerStep#1", "user_annotation", 50, 50),
        event("aten::mm", "cpu_op", 51, 2),
        event("cudaLaunchKernel", "cuda_runtime", 52, 1, correlation=5),
        event("autograd::engine::evaluate_function: X", "cpu_op", 60, 10, thread=2),
        event("gemm", "kernel", 130, 30, thread=7, correlation=5),
    )
    first, second = from_kineto(trace).timelines.values()
    assert spans(first) == [
        ("communi", "FactorComm", "G message 1", 60, 110),
        ("compute", "FF", "forward", 20, 50),
        ("compute", "BP", "backward", 50, 90),
        ("compute", "InverseComp", "invert fc", 110, 130),
    ]
    assert first.iteration_s == pytest.approx(130e-6)
    assert spans(second) == [("compute", "FF", "forward", 0, 30)]
    assert first.breakdown_s()["FactorComm"] == pytest.approx(20e-6)


def test_a_pass_on_a_thread_of_its_own_ends_the_forward_pass():
    """As on a GPU: hooks run in autograd's thread, which packs and sends; what the step does in no range is nothing."""
    trace = kineto(
        event("ProfilerStep#0", "user_annotation", 0, 100),
        event("aten::mm", "cpu_op", 0, 10),
        event("cudaLaunchKernel", "cuda_runtime", 1, 1, correlation=1),
        event("autograd::engine::evaluate_function: X", "cpu_op", 20, 40, thread=2),
        event("cudaLaunchKernel", "cuda_runtime", 21, 1, thread=2, correlation=2),
        event("FactorComp: G fc", "user_annotation", 25, 5, thread=2),
        event("aten::mm", "cpu_op", 26, 3, thread=2),
        event("cudaLaunchKernel", "cuda_runtime", 27, 1, thread=2, correlation=3),
        event("FactorComm: G message 0", "user_annotation", 30, 10, thread=2),
        event("c10d::allreduce_", "cpu_op", 31, 8, thread=2),
        event("cudaMemcpyAsync", "cuda_runtime", 32, 1, thread=2, correlation=4),
        event("cudaLaunchKernelExC", "cuda_runtime", 34, 1, thread=2, correlation=5),
        event("c10d::allreduce_", "cpu_op", 45, 8, thread=2),  # of someone else, in a hook
        event("cudaLaunchKernelExC", "cuda_runtime", 46, 1, thread=2, correlation=6),
        event("aten::copy_", "cpu_op", 70, 5),  # in the step, in no range
        event("cudaLaunchKernel", "cuda_runtime", 71, 1, correlation=7),
        event("forward", "kernel", 10, 10, thread=7, correlation=1),
        event("backward", "kernel", 30, 5, thread=7, correlation=2),
        event("syrk", "kernel", 35, 5, thread=8, correlation=3),
        event("Memcpy DtoD", "gpu_memcpy", 40, 2, thread=8, correlation=4),
        event("ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", "kernel", 45, 10, thread=9, correlation=5),
        event("ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", "kernel", 60, 10, thread=10, correlation=6),
        event("copy", "kernel", 80, 5, thread=7, correlation=7),
    )
    (timeline,) = from_kineto(trace).timelines.values()
    assert spans(timeline) == [
        ("communi", "FactorComm", "G message 0", 45, 55),
        ("communi", "GradComm", "AllReduce", 60, 70),
        ("compute", "FF", "forward", 10, 20),
        ("compute", "BP", "backward", 30, 35),
        ("compute", "FactorComp", "G fc", 35, 40),
        ("compute", "BP", "backward", 40, 42),  # a copy for the message, in the backward pass
    ]


def test_issuing_a_message_is_work_of_what_is_around_it():
    trace = kineto(
        event("ProfilerStep#0", "user_annotation", 0, 100),
        event("BP: backward", "user_annotation", 0, 40),
        event("autograd::engine::evaluate_function: X", "cpu_op", 1, 35),
        event("FactorComp: pack G", "user_annotation", 5, 5),
        event("FactorComm: G message 0", "user_annotation", 12, 20),  # the thread is taken away while it issues
        event("c10d::allreduce_", "cpu_op", 13, 18),
        event("gloo:all_reduce", "user_annotation", 14, 30, thread=8),
        event("InverseComm: inverse of A", "user_annotation", 50, 10),  # in the step: work of nothing
        event("c10d::broadcast_", "cpu_op", 51, 8),
        event("gloo:broadcast", "user_annotation", 52, 10, thread=8),
    )
    (timeline,) = from_kineto(trace).timelines.values()
    assert spans(timeline) == [
        ("communi", "FactorComm", "G message 0", 14, 44),
        ("communi", "InverseComm", "inverse of A", 52, 62),
        ("compute", "BP", "backward", 0, 5),
        ("compute", "FactorComp", "pack G", 5, 10),
        ("compute", "BP", "backward", 10, 40),
    ]


def test_ranges_of_one_name_are_not_one_while_operators_of_one_kind_are():
    trace = kineto(
        event("ProfilerStep#0", "user_annotation", 0, 200),
        event("enumerate(DataLoader)#X.__next__", "user_annotation", 0, 10),
        event("aten::stack", "cpu_op", 1, 5),
        event("aten::mm", "cpu_op", 20, 5),
        event("aten::mm", "cpu_op", 30, 5),  # Python works for the forward pass in between
        event("autograd::engine::evaluate_function: X", "cpu_op", 40, 10),
        event("FactorComp: running averages", "user_annotation", 60, 10),
        event("FactorComp: running averages", "user_annotation", 100, 10),  # it has waited in between
        event("c10d::barrier", "cpu_op", 150, 1),
        event("gloo:barrier", "user_annotation", 151, 20, thread=8),
    )
    (timeline,) = from_kineto(trace).timelines.values()
    assert spans(timeline) == [
        ("compute", "FF", "forward", 20, 35),
        ("compute", "BP", "backward", 40, 50),
        ("compute", "FactorComp", "running averages", 60, 70),
        ("compute", "FactorComp", "running averages", 100, 110),
    ]


def test_broadcasts_are_of_inverses_where_no_range_tells():
    calls = [event("c10d::broadcast_", "cpu_op", 1, 1), event("gloo:broadcast", "user_annotation", 2, 5, thread=8)]
    compute = event("aten::mm", "cpu_op", 20, 5)
    (plain,) = from_kineto(kineto(compute, *calls)).timelines.values()
    assert [(s.kind, s.name) for s in plain.spans if s.lane == "communication"] == [("InverseComm", "broadcast")]
    (told,) = from_kineto(
        kineto(compute, event("GradComm: gradient", "user_annotation", 50, 1), *calls)
    ).timelines.values()
    assert [s.kind for s in told.spans] == ["FF"]


def test_names_of_nccl_kernels():
    kernels = ("ncclDevKernel_Broadcast_RING_LL(x)", "ncclDevKernel_AllGather_RING_LL(x)", "ncclKernel_AllReduce_RING")
    found = from_kineto(kineto(*(event(name, "kernel", 10 * i, 5) for i, name in enumerate(kernels)))).timelines[0]
    assert [(s.kind, s.name) for s in found.spans] == [
        ("InverseComm", "Broadcast"),
        ("GradComm", "AllGather"),
        ("GradComm", "AllReduce"),
    ]


@pytest.mark.parametrize("data", [[], {}, {"traceEvents": []}, 3, None])
def test_what_is_no_trace_of_the_profiler_is_refused(data):
    with pytest.raises(ValueError, match=r"no trace of torch\.profiler"):
        from_kineto(data)


@pytest.mark.parametrize("change", [{"ts": "x"}, {"dur": -1}, {"dur": float("inf")}, {"ts": float("nan")}])
def test_a_damaged_trace_is_refused(change):
    with pytest.raises(ValueError, match="damaged trace"):
        from_kineto(kineto({**event("aten::mm", "cpu_op", 0, 1), **change}))


def test_a_trace_without_anything_of_ours_says_what_to_do():
    with pytest.raises(ValueError, match=r"ProfilerActivity\.CPU"):
        from_kineto(kineto(event("python", "python_function", 0, 1)))


@pytest.mark.parametrize("text", ["x", "x=Nonsense", "=FF", "(=FF"])
def test_mistaken_rules_are_refused(text):
    with pytest.raises(ValueError, match="--rule"):
        parse_rules([text])


def test_a_file_that_is_no_json(tmp_path):
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(ValueError, match=r"x\.json cannot be read"):
        load_trace(tmp_path / "x.json")


def written(folder, name, *found, rank, **facts):
    path = folder / name
    path.write_text(json.dumps({**kineto(*found, rank=rank), **facts}))
    return read_source(str(path))


def step(start):
    """An iteration of 100 us whose sum has ended 90 us after the first rank's began."""
    return (
        event("ProfilerStep#0", "user_annotation", start, 100),
        event("aten::mm", "cpu_op", start, 10),
        event("c10d::allreduce_", "cpu_op", start + 20, 2),
        event("gloo:all_reduce", "user_annotation", start + 30, 60 - (start - 1000), thread=8),
    )


@pytest.mark.parametrize(
    ("other", "starts_us"),
    [
        ({"host_name": "a", "baseTimeNanoseconds": 10**18}, [0, 30]),
        ({"host_name": "a", "baseTimeNanoseconds": 10**18 + 10_000}, [0, 40]),
        ({"host_name": "b", "baseTimeNanoseconds": 10**18}, [0, 0]),  # another clock
        ({"host_name": "a", "baseTimeNanoseconds": 10**18 + 10**9}, [0, 0]),  # no clock in common: a second apart
        ({}, [0, 0]),
    ],
)
def test_ranks_of_one_machine_keep_their_places_on_its_clock(tmp_path, other, starts_us):
    first = written(tmp_path, "0.json", *step(1000), rank=0, host_name="a", baseTimeNanoseconds=10**18)
    second = written(tmp_path, "1.json", *step(1030), rank=1, **other)
    for order in ([first, second], [second, first]):
        source = merged(order)
        timeline = source.timelines[0]
        begins = [min(s.start_s for s in timeline.spans if s.rank == rank) for rank in (0, 1)]
        assert begins == pytest.approx([1e-6 * start for start in starts_us], abs=1e-9)
        assert timeline.iteration_s == pytest.approx(1e-6 * (100 + max(starts_us)))
        assert source.name == f"{order[0].name} and 1 more"
    if starts_us == [0, 30]:
        ends = {s.end_s for s in timeline.spans if s.lane == "communication"}
        assert max(ends) - min(ends) < 1e-9
        assert max(ends) == pytest.approx(90e-6)


def test_a_lone_timeline_is_whatever_iteration_it_is_compared_with(tmp_path):
    profiled = written(tmp_path, "0.json", *step(1000), rank=0)
    profiled.timelines[0].to_chrome_trace(tmp_path / "ours.json")
    assert read_source(str(tmp_path / "ours.json")).only([7]).typical == profiled.typical
    with pytest.raises(ValueError, match="no timeline of iteration 7; it has: 0"):
        profiled.only([7])
